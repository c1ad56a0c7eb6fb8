// Normalisation of rows: layer, RMS, group and instance norm. Macros of norm.cl and rows.cl: X_T X_LOAD X_VLOAD Z_T Z_LOAD Z_VLOAD W_T B_T
// M_T M_LOAD M_STORE Y_T Y_STORE Y_VSTORE REAL SIZED SHARED LANE GROUP_SUM CENTERED WEIGHT_OF WEIGHT_LANES WEIGHT_AT BIAS_OF BIAS_LANES
// BIAS_AT FOR_VECTORS FOR_REST FOR_ROWS SUM_VECTORS HELD FOR_HELD.

// Row r holds `channels` channels of its group, r % groups. Two passes, since sums of squares lose what a large mean swamps.
SIZED __kernel void norm_rows(__global const X_T* x, __global const W_T* weight, __global const B_T* bias, __global Y_T* y,
                              __global M_T* means, __global M_T* rstds, const int groups, const int channels, const REAL eps,
                              const int rows, const int n, const int each) {
  SHARED
  const int span = n / channels;
  FOR_ROWS(row, rows, each) {
    __global const X_T* xr = x + (long)row * n;
    real mean = 0;
    const real shift = CENTERED ? X_LOAD(xr, 0) : (real)0;  // a sum of differences is small where the mean is large
#if HELD
    vec kept[HELD], sums = 0, squares = 0;
    FOR_HELD(k, i, n) {
      kept[k] = X_VLOAD(xr, i);
      sums += kept[k] - shift;
    }
    if (CENTERED) mean = shift + GROUP_SUM(lanes_sum(sums)) / n;
    FOR_HELD(k, i, n) squares += (kept[k] - mean) * (kept[k] - mean);
    real square = lanes_sum(squares);
#else
#define VALUE(i) (X_VLOAD(xr, i) - shift)
#define SQUARE(i) ((X_VLOAD(xr, i) - mean) * (X_VLOAD(xr, i) - mean))
#if CENTERED
    SUM_VECTORS(sums, n, VALUE)
    mean = lanes_sum(sums);
    FOR_REST(i, n) mean += X_LOAD(xr, i) - shift;
    mean = shift + GROUP_SUM(mean) / n;
#endif
    SUM_VECTORS(squares, n, SQUARE)
    real square = lanes_sum(squares);
    FOR_REST(i, n) {
      const real d = X_LOAD(xr, i) - mean;
      square += d * d;
    }
#endif
    const real rstd = inverse_root(GROUP_SUM(square) / n, eps);
    if (LANE == 0) {
      M_STORE(means, row, mean);
      M_STORE(rstds, row, rstd);
    }
#if HELD
    const real w = WEIGHT_OF(row % groups), b = BIAS_OF(row % groups);
    __global Y_T* yr = y + (long)row * n;
    FOR_HELD(k, i, n) Y_VSTORE(yr, i, (kept[k] - mean) * rstd * WEIGHT_LANES(i) + BIAS_LANES(i));
#else
    for (int k = 0; k < channels; ++k) {
      const int c = row % groups * channels + k;
      const real w = WEIGHT_OF(c), b = BIAS_OF(c);
      __global const X_T* xc = xr + k * span;
      __global Y_T* yc = y + (long)row * n + k * span;
      FOR_VECTORS(i, span) Y_VSTORE(yc, i, (X_VLOAD(xc, i) - mean) * rstd * WEIGHT_LANES(i) + BIAS_LANES(i));
      FOR_REST(i, span) Y_STORE(yc, i, (X_LOAD(xc, i) - mean) * rstd * WEIGHT_AT(i) + BIAS_AT(i));
    }
#endif
  }
}

#define HOLD_BOTH (HELD > 0 && HELD <= 8)  // gradient and input: registers for twice a row

// The gradient of the input: rstd (gw - mean(gw) - xh mean(gw xh)), gw the upstream gradient times the weight.
SIZED __kernel void norm_grad_rows(__global const X_T* g, __global const Z_T* x, __global const W_T* weight, __global const M_T* means,
                                   __global const M_T* rstds, __global Y_T* y, const int groups, const int channels, const int rows,
                                   const int n, const int each) {
  SHARED
  const int span = n / channels;
  FOR_ROWS(row, rows, each) {
    const real mean = M_LOAD(means, row), rstd = M_LOAD(rstds, row);
    real first = 0, second = 0;
    vec firsts = 0, seconds = 0;
#if HOLD_BOTH
    const real w = WEIGHT_OF(row % groups);
    vec gws[HELD], ds[HELD];
    FOR_HELD(k, i, n) {
      gws[k] = X_VLOAD(g + (long)row * n, i) * WEIGHT_LANES(i);
      ds[k] = Z_VLOAD(x + (long)row * n, i) - mean;
      firsts += gws[k];
      seconds += gws[k] * ds[k];
    }
#else
    for (int k = 0; k < channels; ++k) {
      const real w = WEIGHT_OF(row % groups * channels + k);
      __global const X_T* gc = g + (long)row * n + k * span;
      __global const Z_T* xc = x + (long)row * n + k * span;
      FOR_VECTORS(i, span) {
        const vec gw = X_VLOAD(gc, i) * WEIGHT_LANES(i);
        firsts += gw;
        seconds += gw * (Z_VLOAD(xc, i) - mean);
      }
      FOR_REST(i, span) {
        const real gw = X_LOAD(gc, i) * WEIGHT_AT(i);
        first += gw;
        second += gw * (Z_LOAD(xc, i) - mean);
      }
    }
#endif
#if CENTERED
    first = GROUP_SUM(first + lanes_sum(firsts)) / n;
#else
    first = 0;
#endif
    second = GROUP_SUM(second + lanes_sum(seconds)) * rstd * rstd / n;
#if HOLD_BOTH
    FOR_HELD(k, i, n) Y_VSTORE(y + (long)row * n, i, rstd * (gws[k] - first - ds[k] * second));
#else
    for (int k = 0; k < channels; ++k) {
      const real w = WEIGHT_OF(row % groups * channels + k);
      __global const X_T* gc = g + (long)row * n + k * span;
      __global const Z_T* xc = x + (long)row * n + k * span;
      __global Y_T* yc = y + (long)row * n + k * span;
      FOR_VECTORS(i, span) Y_VSTORE(yc, i, rstd * (X_VLOAD(gc, i) * WEIGHT_LANES(i) - first - (Z_VLOAD(xc, i) - mean) * second));
      FOR_REST(i, span) Y_STORE(yc, i, rstd * (X_LOAD(gc, i) * WEIGHT_AT(i) - first - (Z_LOAD(xc, i) - mean) * second));
    }
#endif
  }
}

