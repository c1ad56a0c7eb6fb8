// Negative log-likelihood by class number.
// X: log-probabilities seen as (outer, classes, inner); T: one class number, of any dtype, per (outer, inner); W: one weight per class.
// A class that is neither legal nor to be ignored gives NaN: the host has refused it already if it could.
#ifndef WEIGHTED
#define WEIGHTED 0   // 1: w holds weights; 0: w is not read
#endif
#define IGNORED -1
#define ILLEGAL -2

static inline int class_of(__global const T_T* t, int i, int ignore, int classes) {
  const long c = (long)T_LOAD(t, i);
  return c == ignore ? IGNORED : c < 0 || c >= classes ? ILLEGAL : (int)c;
}

static inline X_REAL weight_of(__global const W_T* w, int c) {
#if WEIGHTED
  return (X_REAL)W_LOAD(w, c);
#else
  return 1;
#endif
}

// y[i] = -w[t[i]] * x[i, t[i]]
__kernel void nll_rows(__global const X_T* x, __global const T_T* t, __global const W_T* w, __global X_T* y,
                       int ignore, int classes, int inner, int n) {
  const int i = get_global_id(0);
  if (i >= n) return;
  const int c = class_of(t, i, ignore, classes);
  X_REAL loss = 0;
  if (c == ILLEGAL) loss = NAN;
  if (c >= 0) loss = -weight_of(w, c) * X_LOAD(x, ((i / inner) * classes + c) * inner + i % inner);
  X_STORE(y, i, loss);
}

// dx[i, c] = -w[c] * g[i] where c is the target, else 0
__kernel void nll_rows_grad(__global const X_T* g, __global const T_T* t, __global const W_T* w, __global X_T* dx,
                            int ignore, int classes, int inner, int n) {
  const int e = get_global_id(0);
  if (e >= n) return;
  const int row = e / inner, i = row / classes * inner + e % inner;
  const int c = class_of(t, i, ignore, classes);
  X_REAL d = 0;
  if (c == ILLEGAL) d = NAN;
  if (c == row % classes) d = -weight_of(w, c) * X_LOAD(g, i);
  X_STORE(dx, e, d);
}

// y[i] = w[t[i]], 0 where ignored
__kernel void label_weights(__global const T_T* t, __global const W_T* w, __global X_T* y, int ignore, int classes, int n) {
  const int i = get_global_id(0);
  if (i >= n) return;
  const int c = class_of(t, i, ignore, classes);
  X_REAL weight = 0;
  if (c == ILLEGAL) weight = NAN;
  if (c >= 0) weight = weight_of(w, c);
  X_STORE(y, i, weight);
}
