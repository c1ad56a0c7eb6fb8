// Normalisation: what its kernels share. norm_rows.cl folds rows (layer, RMS, group and instance norm), batch_norm.cl whole channels
// of (images, channels, span) tensors, batch_norm_parts.cl and norm_sums.cl parts of channels, where there are few channels or the span is 1.
// They are files of their own because PoCL compiles every kernel of a program before it gives a binary away.
// Operands: X input or upstream gradient, Z the input in gradients, W weight, B bias, M statistics and sums, R running statistics,
// Y result (X_T X_LOAD X_VLOAD, Z_T Z_LOAD Z_VLOAD, W_T W_LOAD W_VLOAD, B_T B_LOAD B_VLOAD, M_T M_LOAD M_STORE M_VLOAD M_VSTORE,
// R_T R_LOAD R_STORE, Y_T Y_STORE Y_VSTORE); the rest is of rows.cl: REAL VEC GROUP LANE SIZED SHARED SHARED_ARG SHARED_PASS JOIN
// GROUP_SUM SUM_VECTORS LANES_OF STORE_LANES_OF FOR_VECTORS FOR_REST FOR_ROWS.

#ifndef HAS_WEIGHT
#define HAS_WEIGHT 1
#endif
#ifndef HAS_BIAS
#define HAS_BIAS 1
#endif
#ifndef PER_ELEMENT  // 1: weight and bias along the row (layer norm); 0: one of each per channel
#define PER_ELEMENT 1
#endif
#ifndef CENTERED  // 0: RMS norm, no mean is subtracted
#define CENTERED 1
#endif
#ifndef SUMS  // 1: the gradient of the input leaves parts of those of weight and bias, too
#define SUMS 0
#endif
#ifndef VARIANCE  // 1: the second statistic is the variance, 0: one over the standard deviation
#define VARIANCE 0
#endif

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
  const real mean = GROUP_SUM(sum + lanes_sum(sums)) / count;
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
  return (pair)(mean, GROUP_SUM(square + lanes_sum(squares)));
}

// The sums of g and of g xh over a channel's part; the statistics of an element are number image * per_image + c / shared_by.
static inline pair channel_sums(__global const X_T* g, __global const Z_T* x, __global const M_T* means, __global const M_T* rstds,
                                const int c, const int channels, const int span, const int from, const int to, const int per_image,
                                const int shared_by SHARED_ARG) {
  vec firsts = 0, seconds = 0;
  real first = 0, second = 0;
  for (int image = from; image < to; ++image) {
    const int s = image * per_image + c / shared_by;
    const real mean = M_LOAD(means, s), rstd = M_LOAD(rstds, s);
    __global const X_T* gc = g + ((long)image * channels + c) * span;
    __global const Z_T* xc = x + ((long)image * channels + c) * span;
    FOR_VECTORS(i, span) {
      const vec gi = X_VLOAD(gc, i);
      firsts += gi;
      seconds += gi * (Z_VLOAD(xc, i) - mean) * rstd;
    }
    FOR_REST(i, span) {
      const real gi = X_LOAD(gc, i);
      first += gi;
      second += gi * (Z_LOAD(xc, i) - mean) * rstd;
    }
  }
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
