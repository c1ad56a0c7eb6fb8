// Batch norm, a whole channel in one go: on a CPU it stays in the cache between the passes. Macros of norm.cl and rows.cl: K_T X_T X_LOAD
// X_VLOAD Z_T Z_LOAD Z_VLOAD W_T B_T M_T M_LOAD M_STORE R_T Y_T Y_STORE Y_VSTORE REAL VEC GROUP SIZED SHARED SHARED_PASS LANE WEIGHT_OF
// BIAS_OF UPSTREAM_LANES UPSTREAM_AT FLIGHT LONG_FLIGHT FOR_FLIGHTS IN_FLIGHT RUNS VECTOR_AT FOR_VECTORS FOR_REST.
// There are exactly as many groups as channels: PoCL compiles a return before a barrier into a loop without end.

#ifndef APPLIES  // 0: the statistics only
#define APPLIES 1
#endif

#if !MASKED
SIZED __kernel void batch_norm_channels(__global const X_T* x, __global const W_T* weight, __global const B_T* bias, __global Y_T* y,
                                        __global M_T* means, __global M_T* rstds, __global R_T* running_mean, __global R_T* running_var,
                                        const REAL eps, const REAL momentum, const int images, const int channels, const int span) {
  SHARED
  const int c = get_global_id(0) / GROUP, from = 0;
  const real count = (real)images * span;
  const pair moments = channel_moments(x, c, channels, span, from, images SHARED_PASS);
  const real rstd = inverse_root(moments.y / count, eps);
  if (LANE == 0) {
    M_STORE(means, c, moments.x);
    M_STORE(rstds, c, rstd);
    update_running(running_mean, running_var, c, moments.x, moments.y, count, momentum);
  }
#if APPLIES
  const real w = WEIGHT_OF(c) * rstd, b = BIAS_OF(c);
#if GROUP > 1
  const int total = images * RUNS;
  FOR_FLIGHTS(k, total, LONG_FLIGHT) {
    vec held[LONG_FLIGHT];
    IN_FLIGHT(j, LONG_FLIGHT) held[j] = X_VLOAD(x, VECTOR_AT(k + j * GROUP));
    IN_FLIGHT(j, LONG_FLIGHT) if (k + j * GROUP < total) Y_VSTORE(y, VECTOR_AT(k + j * GROUP), (held[j] - moments.x) * w + b);
  }
#else
  for (int image = 0; image < images; ++image) {
    __global const X_T* xc = x + ((long)image * channels + c) * span;
    __global Y_T* yc = y + ((long)image * channels + c) * span;
    FOR_VECTORS(i, span) Y_VSTORE(yc, i, (X_VLOAD(xc, i) - moments.x) * w + b);
    FOR_REST(i, span) Y_STORE(yc, i, (X_LOAD(xc, i) - moments.x) * w + b);
  }
#endif
#endif
}
#endif

#if APPLIES
SIZED __kernel void batch_norm_grad_channels(__global const X_T* g, __global const K_T* kept, __global const Z_T* x,
                                             __global const W_T* weight, __global const M_T* means, __global const M_T* rstds,
                                             __global Y_T* y, __global M_T* weight_grad, __global M_T* bias_grad, const int images,
                                             const int channels, const int span) {
  SHARED
  const int c = get_global_id(0) / GROUP, from = 0;
  const real count = (real)images * span;
  const pair sums = channel_sums(g, kept, x, means, rstds, c, channels, span, from, images, 0, 1 SHARED_PASS);
  const real mean = M_LOAD(means, c), rstd = M_LOAD(rstds, c), scale = WEIGHT_OF(c) * rstd;
  if (LANE == 0) {
    M_STORE(bias_grad, c, sums.x);
    M_STORE(weight_grad, c, sums.y);
  }
  const real first = sums.x / count, second = sums.y * rstd / count;
#if GROUP > 1
  const int total = images * RUNS;
  FOR_FLIGHTS(k, total, FLIGHT) {
    vec gs[FLIGHT], xs[FLIGHT];
    IN_FLIGHT(j, FLIGHT) {
      const long at = VECTOR_AT(k + j * GROUP);
      gs[j] = UPSTREAM_LANES(at);
      xs[j] = Z_VLOAD(x, at);
    }
    IN_FLIGHT(j, FLIGHT) if (k + j * GROUP < total)
      Y_VSTORE(y, VECTOR_AT(k + j * GROUP), scale * (gs[j] - first - (xs[j] - mean) * second));
  }
#else
  for (int image = 0; image < images; ++image) {
    const long start = ((long)image * channels + c) * span;
    FOR_VECTORS(i, span) Y_VSTORE(y, start + i, scale * (UPSTREAM_LANES(start + i) - first - (Z_VLOAD(x, start + i) - mean) * second));
    FOR_REST(i, span) Y_STORE(y, start + i, scale * (UPSTREAM_AT(start + i) - first - (Z_LOAD(x, start + i) - mean) * second));
  }
#endif
}
#endif
