// Batch norm of whole channels in one launch, or of channels in parts. Operands X Z K W B M R Y, as in norm.cl.

// ---- a whole channel in one go: on a CPU it stays in the cache between the passes

// There are exactly as many groups as channels: PoCL compiles a return before a barrier into a loop without end.
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

// ---- in parts: moments of (parts, channels), then one work-item per channel, then the result; and the gradient of the input

SIZED __kernel void moment_parts(__global const X_T* x, __global M_T* means, __global M_T* squares, const int chunk, const int parts,
                                 const int images, const int channels, const int span) {
#if !COLUMNS
  SHARED
  const int row = get_global_id(0) / GROUP;
  const int from = row / channels * chunk;
  const pair moments = channel_moments(x, row % channels, channels, span, from, min(from + chunk, images) SHARED_PASS);
  if (LANE == 0) {
    M_STORE(means, row, moments.x);
    M_STORE(squares, row, moments.y);
  }
#else
  const int strips = (channels + VEC * STRIP - 1) / (VEC * STRIP);
  const int part = get_global_id(0) / strips, column = get_global_id(0) % strips * VEC * STRIP;
  if (part >= parts) return;
  const int count = min((channels - column + VEC - 1) / VEC, STRIP), from = part * chunk, to = min(from + chunk, images);
  vec mean[STRIP], square[STRIP];
  for (int s = 0; s < count; ++s) mean[s] = square[s] = 0;
  for (int image = from; image < to; ++image)
    for (int s = 0; s < count; ++s) mean[s] += X_lanes(x, (long)image * channels + column + s * VEC, channels - column - s * VEC);
  for (int s = 0; s < count; ++s) mean[s] /= (real)(to - from);
  for (int image = from; image < to; ++image)
    for (int s = 0; s < count; ++s) {
      const vec d = X_lanes(x, (long)image * channels + column + s * VEC, channels - column - s * VEC) - mean[s];
      square[s] += d * d;
    }
  for (int s = 0; s < count; ++s) {
    const long at = (long)part * channels + column + s * VEC;
    M_store_lanes(means, at, channels - column - s * VEC, mean[s]);
    M_store_lanes(squares, at, channels - column - s * VEC, square[s]);
  }
#endif
}

// Joins the moments of parts: sums of squares about different means (Chan, Golub, LeVeque 1979).
__kernel void join_moments(__global const M_T* part_means, __global const M_T* part_squares, __global M_T* means, __global M_T* rstds,
                           __global R_T* running_mean, __global R_T* running_var, const REAL eps, const REAL momentum, const int chunk,
                           const int parts, const int images, const int channels, const int span) {
  const int c = get_global_id(0);
  if (c >= channels) return;
  real mean = 0, square = 0, count = 0;
  _Pragma("unroll 8") for (int part = 0; part < parts; ++part) {  // loads overlap
    const real more = (real)(min((part + 1) * chunk, images) - part * chunk) * span;
    const real d = M_LOAD(part_means, part * channels + c) - mean;
    count += more;
    mean += d * (more / count);
    square += M_LOAD(part_squares, part * channels + c) + d * d * ((count - more) * more / count);
  }
  M_STORE(means, c, mean);
  M_STORE(rstds, c, inverse_root(square / count, eps));
  update_running(running_mean, running_var, c, mean, square, count, momentum);
}

// The vectors of a row that this work-item takes. On a GPU it loads several of them before it stores one.
#define ROW_FLIGHT (GROUP > 1 ? 4 : 1)
#define FOR_ROW_FLIGHTS(i, n) for (int i = LANE * VEC; i + VEC <= (n); i += ROW_FLIGHT * GROUP * VEC)
#define IN_ROW_FLIGHT(j) UNROLL for (int j = 0; j < ROW_FLIGHT; ++j)
static inline real ended(const real v) { return RELU && v < 0 ? 0 : v; }
static inline vec ended_lanes(const vec v) { return RELU ? (v < 0 ? (vec)(0) : v) : v; }
#define ROW_VECTOR(i, j, n) min((i) + (j) * GROUP * VEC, (n) / VEC * VEC - VEC)

// y = (x - mean) / std * weight + bias; a row is one channel of one image.
SIZED __kernel void norm_apply_rows(__global const X_T* x, __global const W_T* weight, __global const B_T* bias, __global const M_T* means,
                                    __global const M_T* stds, __global Y_T* y, const REAL eps, const int channels, const int rows,
                                    const int n, const int each) {
  FOR_ROWS(row, rows, each) {
    const int c = row % channels;
    const real mean = M_LOAD(means, c), s = M_LOAD(stds, c);
    const real w = WEIGHT_OF(c) * (VARIANCE ? inverse_root(s, eps) : s), b = BIAS_OF(c);
    const long start = (long)row * n;
    FOR_ROW_FLIGHTS(i, n) {
      vec held[ROW_FLIGHT];
      IN_ROW_FLIGHT(j) held[j] = X_VLOAD(x, start + ROW_VECTOR(i, j, n));
      IN_ROW_FLIGHT(j) if (i + j * GROUP * VEC + VEC <= n) Y_VSTORE(y, start + i + j * GROUP * VEC, ended_lanes((held[j] - mean) * w + b));
    }
    FOR_REST(i, n) Y_STORE(y, start + i, ended((X_LOAD(x, start + i) - mean) * w + b));
  }
}

// The same where a row is one image: n channels of span 1.
SIZED __kernel void norm_apply_columns(__global const X_T* x, __global const W_T* weight, __global const B_T* bias,
                                       __global const M_T* means, __global const M_T* stds, __global Y_T* y, const REAL eps,
                                       const int rows, const int n, const int each) {
  const real w = 1, b = 0;
  FOR_ROWS(row, rows, each) {
    __global const X_T* xr = x + (long)row * n;
    __global Y_T* yr = y + (long)row * n;
    FOR_VECTORS(i, n) {
      const vec s = M_VLOAD(stds, i);
      const vec scale = WEIGHT_LANES(i) * (VARIANCE ? 1 / sqrt(s + eps) : s);
      Y_VSTORE(yr, i, ended_lanes((X_VLOAD(xr, i) - M_VLOAD(means, i)) * scale + BIAS_LANES(i)));
    }
    FOR_REST(i, n) {
      const real s = M_LOAD(stds, i);
      const real scale = WEIGHT_AT(i) * (VARIANCE ? inverse_root(s, eps) : s);
      Y_STORE(yr, i, ended((X_LOAD(xr, i) - M_LOAD(means, i)) * scale + BIAS_AT(i)));
    }
  }
}

SIZED __kernel void batch_norm_grad_rows(__global const X_T* g, __global const K_T* kept, __global const Z_T* x, __global const W_T* weight,
                                         __global const M_T* means, __global const M_T* rstds, __global const M_T* weight_grad,
                                         __global const M_T* bias_grad, __global Y_T* y, const REAL count, const int channels,
                                         const int rows, const int n, const int each) {
  FOR_ROWS(row, rows, each) {
    const int c = row % channels;
    const real mean = M_LOAD(means, c), rstd = M_LOAD(rstds, c), scale = WEIGHT_OF(c) * rstd;
    const real first = M_LOAD(bias_grad, c) / count, second = M_LOAD(weight_grad, c) * rstd / count;
    const long start = (long)row * n;
    FOR_ROW_FLIGHTS(i, n) {
      vec gs[ROW_FLIGHT], xs[ROW_FLIGHT];
      IN_ROW_FLIGHT(j) {
        gs[j] = UPSTREAM_LANES(start + ROW_VECTOR(i, j, n));
        xs[j] = Z_VLOAD(x, start + ROW_VECTOR(i, j, n));
      }
      IN_ROW_FLIGHT(j) if (i + j * GROUP * VEC + VEC <= n)
        Y_VSTORE(y, start + i + j * GROUP * VEC, scale * (gs[j] - first - (xs[j] - mean) * second));
    }
    FOR_REST(i, n) Y_STORE(y, start + i, scale * (UPSTREAM_AT(start + i) - first - (Z_LOAD(x, start + i) - mean) * second));
  }
}

SIZED __kernel void batch_norm_grad_columns(__global const X_T* g, __global const Z_T* x, __global const W_T* weight,
                                            __global const M_T* means, __global const M_T* rstds, __global const M_T* weight_grad,
                                            __global const M_T* bias_grad, __global Y_T* y, const REAL count, const int rows, const int n,
                                            const int each) {
  const real w = 1;
  FOR_ROWS(row, rows, each) {
    __global const X_T* gr = g + (long)row * n;
    __global const Z_T* xr = x + (long)row * n;
    __global Y_T* yr = y + (long)row * n;
    FOR_VECTORS(i, n) {
      const vec rstd = M_VLOAD(rstds, i), xh = (Z_VLOAD(xr, i) - M_VLOAD(means, i)) * rstd;
      const vec inner = X_VLOAD(gr, i) - M_VLOAD(bias_grad, i) / count - xh * M_VLOAD(weight_grad, i) / count;
      Y_VSTORE(yr, i, rstd * WEIGHT_LANES(i) * inner);
    }
    FOR_REST(i, n) {
      const real rstd = M_LOAD(rstds, i), xh = (Z_LOAD(xr, i) - M_LOAD(means, i)) * rstd;
      const real inner = X_LOAD(gr, i) - M_LOAD(bias_grad, i) / count - xh * M_LOAD(weight_grad, i) / count;
      Y_STORE(yr, i, rstd * WEIGHT_AT(i) * inner);
    }
  }
}
