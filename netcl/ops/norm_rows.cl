// Normalisation of rows: layer, RMS, group and instance norm. Operands X Z W B M Y, as in norm.cl.

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
// The next row is fetched while this one is in the cache: memory would wait through two passes.
#define SQUARE(i) (FETCH_AHEAD(xr + n + (i)), (X_VLOAD(xr, i) - mean) * (X_VLOAD(xr, i) - mean))
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
    FOR_HELD(k, i, n) Y_VSTREAM(yr, i, (kept[k] - mean) * rstd * WEIGHT_LANES(i) + BIAS_LANES(i));
#else
    for (int k = 0; k < channels; ++k) {
      const int c = row % groups * channels + k;
      const real w = WEIGHT_OF(c), b = BIAS_OF(c);
      __global const X_T* xc = xr + k * span;
      __global Y_T* yc = y + (long)row * n + k * span;
      FOR_VECTORS(i, span) Y_VSTREAM(yc, i, (X_VLOAD(xc, i) - mean) * rstd * WEIGHT_LANES(i) + BIAS_LANES(i));
      FOR_REST(i, span) Y_STORE(yc, i, (X_LOAD(xc, i) - mean) * rstd * WEIGHT_AT(i) + BIAS_AT(i));
    }
#endif
  }
}

#define HOLD_BOTH (HELD > 0 && HELD <= (SUMS ? 4 : 8))  // gradient and input, and their sums: registers for so many times a row

#if SUMS
#define SUM_AT(p, i, x) M_STORE(p, i, (row == first_row ? (real)0 : (real)M_LOAD(p, i)) + (x))
#define SUM_LANES(p, i, x) M_VSTORE(p, i, (row == first_row ? (vec)(0) : M_VLOAD(p, i)) + (x))
#else
#define SUM_AT(p, i, x)
#define SUM_LANES(p, i, x)
#endif

// The gradient of the input: rstd (gw - mean(gw) - xh mean(gw xh)), gw the upstream gradient times the weight. With SUMS, every work-group
// leaves the sums of g and of g xh over its rows, which are the gradients of bias and weight, in a row of its own; its work-items keep to
// their columns.
SIZED __kernel void norm_grad_rows(__global const X_T* g, __global const Z_T* x, __global const W_T* weight, __global const M_T* means,
                                   __global const M_T* rstds, __global Y_T* y, __global M_T* part_firsts, __global M_T* part_seconds,
                                   const int groups, const int channels, const int rows, const int n, const int each) {
  SHARED
  const int span = n / channels;
#if SUMS
  part_firsts += (long)(get_global_id(0) / GROUP) * n;
  part_seconds += (long)(get_global_id(0) / GROUP) * n;
#if HOLD_BOTH
  vec g_sums[HELD], gx_sums[HELD];
  FOR_HELD(k, i, n) g_sums[k] = gx_sums[k] = 0;
#endif
#endif
  FOR_ROWS(row, rows, each) {
    const real mean = M_LOAD(means, row), rstd = M_LOAD(rstds, row);
    pair sums = 0;
#if HOLD_BOTH
    vec firsts = 0, seconds = 0;
    const real w = WEIGHT_OF(row % groups);
    vec gws[HELD], ds[HELD];
    FOR_HELD(k, i, n) {
      const vec gi = X_VLOAD(g + (long)row * n, i);
      gws[k] = gi * WEIGHT_LANES(i);
      ds[k] = Z_VLOAD(x + (long)row * n, i) - mean;
#if SUMS
      g_sums[k] += gi;
      gx_sums[k] += gi * ds[k] * rstd;
#endif
      firsts += gws[k];
      seconds += gws[k] * ds[k];
    }
    sums += (pair)(lanes_sum(firsts), lanes_sum(seconds));
#else
    for (int k = 0; k < channels; ++k) {
      const real w = WEIGHT_OF(row % groups * channels + k);
      __global const X_T* gc = g + (long)row * n + k * span;
      __global const Z_T* xc = x + (long)row * n + k * span;
      vec firsts[CHAINS], seconds[CHAINS];
      UNROLL for (int c = 0; c < CHAINS; ++c) firsts[c] = seconds[c] = 0;
      FOR_CHAINS(c, i, span) {
        const vec gw = X_VLOAD(gc, i) * WEIGHT_LANES(i);
        firsts[c] += gw;
        seconds[c] += gw * (Z_VLOAD(xc, i) - mean);
      }
      FOR_REST(i, span) {
        const real gw = X_LOAD(gc, i) * WEIGHT_AT(i);
        sums += (pair)(gw, gw * (Z_LOAD(xc, i) - mean));
      }
      sums += (pair)(lanes_sum((firsts[0] + firsts[1]) + (firsts[2] + firsts[3])),
                     lanes_sum((seconds[0] + seconds[1]) + (seconds[2] + seconds[3])));
    }
#endif
    sums = GROUP_SUMS(sums) / (real)n;
    const real first = CENTERED ? sums.x : (real)0, second = sums.y * rstd * rstd;
#if HOLD_BOTH
    FOR_HELD(k, i, n) Y_VSTREAM(y + (long)row * n, i, rstd * (gws[k] - first - ds[k] * second));
#else
    for (int k = 0; k < channels; ++k) {
      const real w = WEIGHT_OF(row % groups * channels + k);
      __global const X_T* gc = g + (long)row * n + k * span;
      __global const Z_T* xc = x + (long)row * n + k * span;
      __global Y_T* yc = y + (long)row * n + k * span;
      FOR_VECTORS(i, span) {
        FETCH_AHEAD(gc + n + i);
        FETCH_AHEAD(xc + n + i);
        const vec gi = X_VLOAD(gc, i), d = Z_VLOAD(xc, i) - mean;
        SUM_LANES(part_firsts, i, gi);
        SUM_LANES(part_seconds, i, gi * d * rstd);
        Y_VSTREAM(yc, i, rstd * (gi * WEIGHT_LANES(i) - first - d * second));
      }
      FOR_REST(i, span) {
        const real gi = X_LOAD(gc, i), d = Z_LOAD(xc, i) - mean;
        SUM_AT(part_firsts, i, gi);
        SUM_AT(part_seconds, i, gi * d * rstd);
        Y_STORE(yc, i, rstd * (gi * WEIGHT_AT(i) - first - d * second));
      }
    }
#endif
  }
#if SUMS && HOLD_BOTH
  FOR_HELD(k, i, n) {
    M_VSTORE(part_firsts, i, g_sums[k]);
    M_VSTORE(part_seconds, i, gx_sums[k]);
  }
#endif
}
