// Softmax and log-softmax over rows and over columns, and their gradients.
// Operands: X input or upstream gradient, P the softmax in gradients, Y result.

#ifndef LOGARITHM
#define LOGARITHM 0  // 1: the logarithm of softmax
#define KEEPS_EXP 1  // 1: y holds exp(x - max) for a while (it must not round), so it need not be computed twice; without LOGARITHM only
#endif

LANES_OF(X)
LANES_OF(P)
STORE_LANES_OF(Y)

// An element of the result; m: the largest of its row.
#if LOGARITHM
#define SCALE_OF(sum) log(sum)
#define RESULT(x) ((x) - m - scale)
#else
#define SCALE_OF(sum) (1 / (sum))
#define RESULT(x) (EXP_BELOW((x) - m) * scale)
#endif

// A NaN anywhere in a row reaches the sum, and through it every element; so does the NaN of inf - inf.
SIZED __kernel void softmax_rows(__global const X_T* x, __global Y_T* y, const int rows, const int n, const int each) {
  SHARED
  FOR_ROWS(row, rows, each) {
    __global const X_T* xr = x + (long)row * n;
    __global Y_T* yr = y + (long)row * n;
#if HELD
    vec kept[HELD], most = LOWEST, sums = 0;
    FOR_HELD(k, i, n) {
      kept[k] = X_VLOAD(xr, i);
      most = LARGER(most, kept[k]);
    }
    const real m = GROUP_MAX(lanes_max(most));
    FOR_HELD(k, i, n) {
      const vec e = EXP_BELOW(kept[k] - m);
      sums += e;
      kept[k] = LOGARITHM ? kept[k] - m : e;
    }
    const real scale = SCALE_OF(GROUP_SUM(lanes_sum(sums)));
    FOR_HELD(k, i, n) Y_VSTORE(yr, i, LOGARITHM ? kept[k] - scale : kept[k] * scale);
#else
    vec most = LOWEST;
    FOR_VECTORS(i, n) {
      const vec v = X_VLOAD(xr, i);
      most = LARGER(most, v);
    }
    real m = lanes_max(most);
    FOR_REST(i, n) m = fmax(m, X_LOAD(xr, i));
    m = GROUP_MAX(m);
    vec sums = 0;
    FOR_VECTORS(i, n) {
      const vec e = EXP_BELOW(X_VLOAD(xr, i) - m);
      sums += e;
#if KEEPS_EXP
      Y_VSTORE(yr, i, e);
#endif
    }
    real sum = lanes_sum(sums);
    FOR_REST(i, n) {
      const real e = exp(X_LOAD(xr, i) - m);
      sum += e;
#if KEEPS_EXP
      Y_STORE(yr, i, e);
#endif
    }
    const real scale = SCALE_OF(GROUP_SUM(sum));
#if KEEPS_EXP
    FOR_VECTORS(i, n) Y_VSTORE(yr, i, Y_VLOAD(yr, i) * scale);
    FOR_REST(i, n) Y_STORE(yr, i, Y_LOAD(yr, i) * scale);
#else
    FOR_VECTORS(i, n) Y_VSTORE(yr, i, RESULT(X_VLOAD(xr, i)));
    FOR_REST(i, n) Y_STORE(yr, i, RESULT(X_LOAD(xr, i)));
#endif
#endif
  }
}

SIZED __kernel void softmax_columns(__global const X_T* x, __global Y_T* y, const int outer, const int n, const int inner) {
  const int blocks = (inner + VEC - 1) / VEC;
  const int block = get_global_id(0);
  if (block / blocks >= outer) return;
  const int column = block % blocks * VEC, left = inner - column;
  const long start = (long)(block / blocks) * n * inner + column, end = start + (long)n * inner;
  vec m = LOWEST, sum = 0;
  for (long i = start; i < end; i += inner) {
    const vec v = X_lanes(x, i, left);
    m = LARGER(m, v);
  }
  for (long i = start; i < end; i += inner) sum += EXP_BELOW(X_lanes(x, i, left) - m);
  const vec scale = SCALE_OF(sum);
  for (long i = start; i < end; i += inner) Y_store_lanes(y, i, left, RESULT(X_lanes(x, i, left)));
}

// x is the gradient here, p the softmax (or its logarithm), y the gradient of the input.
#if LOGARITHM
#define WEIGHT(g, p) (g)
#define INPUT_GRADIENT(g, p, sum) ((g) - EXP_BELOW(p) * (sum))
#else
#define WEIGHT(g, p) ((g) * (p))
#define INPUT_GRADIENT(g, p, sum) (((g) - (sum)) * (p))
#endif

SIZED __kernel void softmax_grad_rows(__global const X_T* g, __global const P_T* p, __global Y_T* y, const int rows, const int n,
                                      const int each) {
  SHARED
  FOR_ROWS(row, rows, each) {
    __global const X_T* gr = g + (long)row * n;
    __global const P_T* pr = p + (long)row * n;
    __global Y_T* yr = y + (long)row * n;
#define PRODUCT(i) WEIGHT(X_VLOAD(gr, i), P_VLOAD(pr, i))
    SUM_VECTORS(sums, n, PRODUCT)
    real sum = lanes_sum(sums);
    FOR_REST(i, n) sum += WEIGHT(X_LOAD(gr, i), P_LOAD(pr, i));
    sum = GROUP_SUM(sum);
    FOR_VECTORS(i, n) Y_VSTORE(yr, i, INPUT_GRADIENT(X_VLOAD(gr, i), P_VLOAD(pr, i), sum));
    FOR_REST(i, n) Y_STORE(yr, i, INPUT_GRADIENT(X_LOAD(gr, i), P_LOAD(pr, i), sum));
  }
}

SIZED __kernel void softmax_grad_columns(__global const X_T* g, __global const P_T* p, __global Y_T* y, const int outer, const int n,
                                         const int inner) {
  const int blocks = (inner + VEC - 1) / VEC;
  const int block = get_global_id(0);
  if (block / blocks >= outer) return;
  const int column = block % blocks * VEC, left = inner - column;
  const long start = (long)(block / blocks) * n * inner + column, end = start + (long)n * inner;
  vec sum = 0;
  for (long i = start; i < end; i += inner) sum += WEIGHT(X_lanes(g, i, left), P_lanes(p, i, left));
  for (long i = start; i < end; i += inner) {
    const vec gi = X_lanes(g, i, left), pi = P_lanes(p, i, left);
    Y_store_lanes(y, i, left, INPUT_GRADIENT(gi, pi, sum));
  }
}
