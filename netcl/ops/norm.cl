// Normalisation: what its kernels share. norm_rows.cl folds rows (layer, RMS, group and instance norm), batch_norm.cl channels of (images,
// channels, span) tensors or, where there are few channels or the span is 1, parts of them, as norm_sums.cl does for the gradients.
// Operands: X input or upstream gradient, Z the input in gradients, K the result of a ReLU behind the norm, W weight, B bias, M statistics
// and sums, R running statistics, Y result.

#ifndef HAS_WEIGHT
#define HAS_WEIGHT 1
#define HAS_BIAS 1
#define PER_ELEMENT 1  // 1: weight and bias along the row (layer norm); 0: one of each per channel
#define CENTERED 1  // 0: RMS norm, no mean is subtracted
#define SUMS 0  // 1: the gradient of the input leaves parts of those of weight and bias, too
#define MASKED 0  // 1: the gradient comes through a ReLU, whose result K is kept
#define COLUMNS 0  // 1: the span is 1 and neighbouring channels make a vector
#define VARIANCE 0  // 1: the second statistic is the variance, 0: one over the standard deviation
#define APPLIES 1  // 0: batch norm only computes its statistics
#define RELU 0  // 1: results of batch norm below 0 become 0
#endif
#define STRIP (VEC > 1 ? 16 : 1)  // vectors of channels that a work-item takes, so that it reads long runs of each image

LANES_OF(X)
LANES_OF(Z)
LANES_OF(M)
STORE_LANES_OF(M)

// The weight and bias of channel c as scalars, of element i as vectors.
#if !HAS_WEIGHT
#define WEIGHT_OF(c) ((real)1)
#define WEIGHT_LANES(i) ((vec)(1))
#define WEIGHT_AT(i) ((real)1)
#else
#define WEIGHT_OF(c) (PER_ELEMENT ? (real)1 : (real)W_LOAD(weight, c))
#define WEIGHT_LANES(i) (PER_ELEMENT ? W_VLOAD(weight, i) : (vec)(w))
#define WEIGHT_AT(i) (PER_ELEMENT ? (real)W_LOAD(weight, i) : w)
#endif
#if !HAS_BIAS
#define BIAS_OF(c) ((real)0)
#define BIAS_LANES(i) ((vec)(0))
#define BIAS_AT(i) ((real)0)
#else
#define BIAS_OF(c) (PER_ELEMENT ? (real)0 : (real)B_LOAD(bias, c))
#define BIAS_LANES(i) (PER_ELEMENT ? B_VLOAD(bias, i) : (vec)(b))
#define BIAS_AT(i) (PER_ELEMENT ? (real)B_LOAD(bias, i) : b)
#endif

static inline real inverse_root(const real variance, const real eps) { return 1 / sqrt(variance + eps); }

// The gradient that comes from above, of element i; behind a ReLU whose result is `kept`, it is 0 where that is.
#if MASKED
#define UPSTREAM_LANES(i) (K_VLOAD(kept, i) <= (real)0 ? (vec)(0) : X_VLOAD(g, i))
#define UPSTREAM_AT(i) (K_LOAD(kept, i) <= (real)0 ? (real)0 : (real)X_LOAD(g, i))
#else
#define K_T X_T
#define UPSTREAM_LANES(i) X_VLOAD(g, i)
#define UPSTREAM_AT(i) ((real)X_LOAD(g, i))
#endif

#if GROUP > 1
// The work-items of a group take the vectors of a part of a channel as if it were one run, `flight` of them at a time: nobody waits for a
// load alone, and none is stored before all are there. The span is a multiple of VEC; what lies beyond the end is the last vector again.
#define FLIGHT 4
#define LONG_FLIGHT 8  // where one tensor is read
#define FOR_FLIGHTS(k, total, flight) for (int k = LANE; k < (total); k += (flight) * GROUP)
#define IN_FLIGHT(j, flight) UNROLL for (int j = 0; j < (flight); ++j)
#define RUNS ((uint)span / VEC)
#define VECTOR_AT(k) vector_at(min((int)(k), total - 1), RUNS, c, channels, span, from)

static inline long vector_at(const uint k, const uint runs, const int c, const int channels, const int span, const int from) {
  const uint image = k / runs;
  return ((long)(from + image) * channels + c) * span + (k - image * runs) * VEC;
}

// The mean and the sum of squares about it. A work-item has both of every flight, and joins them with those before (Chan, Golub, LeVeque).
static inline pair channel_moments(__global const X_T* x, const int c, const int channels, const int span, const int from,
                                   const int to SHARED_ARG) {
  const int total = (to - from) * RUNS;
  real mean = 0, square = 0, seen = 0;
  FOR_FLIGHTS(k, total, LONG_FLIGHT) {
    vec held[LONG_FLIGHT], sums = 0, squares = 0;
    IN_FLIGHT(j, LONG_FLIGHT) held[j] = X_VLOAD(x, VECTOR_AT(k + j * GROUP));
    IN_FLIGHT(j, LONG_FLIGHT) if (k + j * GROUP < total) sums += held[j];
    const real more = (real)(min((total - k + GROUP - 1) / GROUP, LONG_FLIGHT) * VEC), here = lanes_sum(sums) / more, d = here - mean;
    IN_FLIGHT(j, LONG_FLIGHT) if (k + j * GROUP < total) squares += (held[j] - here) * (held[j] - here);
    seen += more;
    mean += d * (more / seen);
    square += lanes_sum(squares) + d * d * ((seen - more) * more / seen);
  }
  const real all = GROUP_SUM(mean * seen) / ((real)(to - from) * span), off = mean - all;
  return (pair)(all, GROUP_SUM(square + seen * off * off));
}
#else
static inline pair channel_moments(__global const X_T* x, const int c, const int channels, const int span, const int from,
                                   const int to SHARED_ARG) {
  const real count = (real)(to - from) * span;
  vec sums = 0;
  real sum = 0;
#define VALUE_OF_RUN(i) X_VLOAD(xc, i)
#define SQUARE_OF_RUN(i) ((X_VLOAD(xc, i) - mean) * (X_VLOAD(xc, i) - mean))
  for (int image = from; image < to; ++image) {
    __global const X_T* xc = x + ((long)image * channels + c) * span;
    SUM_VECTORS(more, span, VALUE_OF_RUN)
    sums += more;
    FOR_REST(i, span) sum += X_LOAD(xc, i);
  }
  const real mean = (sum + lanes_sum(sums)) / count;
  vec squares = 0;
  real square = 0;
  for (int image = from; image < to; ++image) {
    __global const X_T* xc = x + ((long)image * channels + c) * span;
    SUM_VECTORS(more, span, SQUARE_OF_RUN)
    squares += more;
    FOR_REST(i, span) {
      const real d = X_LOAD(xc, i) - mean;
      square += d * d;
    }
  }
  return (pair)(mean, square + lanes_sum(squares));
}
#endif

// The sums of g and of g xh over a channel's part; the statistics of an element are number image * per_image + c / shared_by.
static inline pair channel_sums(__global const X_T* g, __global const K_T* kept, __global const Z_T* x, __global const M_T* means,
                                __global const M_T* rstds, const int c, const int channels, const int span, const int from, const int to,
                                const int per_image, const int shared_by SHARED_ARG) {
  vec firsts = 0, seconds = 0;
  real first = 0, second = 0;
#if GROUP > 1
  const int total = (to - from) * RUNS;
  real mean = M_LOAD(means, c / shared_by), rstd = M_LOAD(rstds, c / shared_by);
  FOR_FLIGHTS(k, total, FLIGHT) {
    vec gs[FLIGHT], xs[FLIGHT];
    IN_FLIGHT(j, FLIGHT) {
      const long at = VECTOR_AT(k + j * GROUP);
      gs[j] = UPSTREAM_LANES(at);
      xs[j] = Z_VLOAD(x, at);
    }
    IN_FLIGHT(j, FLIGHT) {
      if (per_image) {
        const int s = (from + (uint)min(k + j * GROUP, total - 1) / RUNS) * per_image + c / shared_by;
        mean = M_LOAD(means, s);
        rstd = M_LOAD(rstds, s);
      }
      const vec gi = k + j * GROUP < total ? gs[j] : (vec)(0);  // a branch around it all would take the loads with it
      firsts += gi;
      seconds += gi * (xs[j] - mean) * rstd;
    }
  }
#else
  for (int image = from; image < to; ++image) {
    const int s = image * per_image + c / shared_by;
    const real mean = M_LOAD(means, s), rstd = M_LOAD(rstds, s);
    const long start = ((long)image * channels + c) * span;
    FOR_VECTORS(i, span) {
      const vec gi = UPSTREAM_LANES(start + i);
      firsts += gi;
      seconds += gi * (Z_VLOAD(x, start + i) - mean) * rstd;
    }
    FOR_REST(i, span) {
      const real gi = UPSTREAM_AT(start + i);
      first += gi;
      second += gi * (Z_LOAD(x, start + i) - mean) * rstd;
    }
  }
#endif
  return GROUP_SUMS((pair)(first + lanes_sum(firsts), second + lanes_sum(seconds)));
}

// A negative momentum says that there are no running statistics.
static inline void update_running(__global R_T* running_mean, __global R_T* running_var, const int c, const real mean, const real square,
                                  const real count, const real momentum) {
  if (momentum < 0) return;
  const real old = 1 - momentum;
  R_STORE(running_mean, c, old * R_LOAD(running_mean, c) + momentum * mean);
  R_STORE(running_var, c, old * R_LOAD(running_var, c) + momentum * square / (count - 1));
}
