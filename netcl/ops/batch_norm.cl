// Batch norm, a whole channel in one go: on a CPU it stays in the cache between the passes. Macros of norm.cl and rows.cl: X_T X_LOAD
// X_VLOAD Z_T Z_LOAD Z_VLOAD W_T B_T M_T M_LOAD M_STORE R_T Y_T Y_STORE Y_VSTORE REAL GROUP SIZED SHARED SHARED_PASS LANE WEIGHT_OF BIAS_OF
// FOR_VECTORS FOR_REST.

SIZED __kernel void batch_norm_channels(__global const X_T* x, __global const W_T* weight, __global const B_T* bias, __global Y_T* y,
                                        __global M_T* means, __global M_T* rstds, __global R_T* running_mean, __global R_T* running_var,
                                        const REAL eps, const REAL momentum, const int images, const int channels, const int span) {
  SHARED
  const int c = get_global_id(0) / GROUP;
  if (c >= channels) return;
  const real count = (real)images * span;
  const pair moments = channel_moments(x, c, channels, span, 0, images SHARED_PASS);
  const real rstd = inverse_root(moments.y / count, eps);
  if (LANE == 0) {
    M_STORE(means, c, moments.x);
    M_STORE(rstds, c, rstd);
    update_running(running_mean, running_var, c, moments.x, moments.y, count, momentum);
  }
  const real w = WEIGHT_OF(c) * rstd, b = BIAS_OF(c);
  for (int image = 0; image < images; ++image) {
    __global const X_T* xc = x + ((long)image * channels + c) * span;
    __global Y_T* yc = y + ((long)image * channels + c) * span;
    FOR_VECTORS(i, span) Y_VSTORE(yc, i, (X_VLOAD(xc, i) - moments.x) * w + b);
    FOR_REST(i, span) Y_STORE(yc, i, (X_LOAD(xc, i) - moments.x) * w + b);
  }
}

SIZED __kernel void batch_norm_grad_channels(__global const X_T* g, __global const Z_T* x, __global const W_T* weight,
                                             __global const M_T* means, __global const M_T* rstds, __global Y_T* y, __global M_T* weight_grad,
                                             __global M_T* bias_grad, const int images, const int channels, const int span) {
  SHARED
  const int c = get_global_id(0) / GROUP;
  if (c >= channels) return;
  const real count = (real)images * span;
  const pair sums = channel_sums(g, x, means, rstds, c, channels, span, 0, images, 0, 1 SHARED_PASS);
  const real mean = M_LOAD(means, c), rstd = M_LOAD(rstds, c), scale = WEIGHT_OF(c) * rstd;
  if (LANE == 0) {
    M_STORE(bias_grad, c, sums.x);
    M_STORE(weight_grad, c, sums.y);
  }
  const real first = sums.x / count, second = sums.y * rstd / count;
  for (int image = 0; image < images; ++image) {
    __global const X_T* gc = g + ((long)image * channels + c) * span;
    __global const Z_T* xc = x + ((long)image * channels + c) * span;
    __global Y_T* yc = y + ((long)image * channels + c) * span;
    FOR_VECTORS(i, span) Y_VSTORE(yc, i, scale * (X_VLOAD(gc, i) - first - (Z_VLOAD(xc, i) - mean) * second));
    FOR_REST(i, span) Y_STORE(yc, i, scale * (X_LOAD(gc, i) - first - (Z_LOAD(xc, i) - mean) * second));
  }
}

