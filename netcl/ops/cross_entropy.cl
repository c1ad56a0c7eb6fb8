// Cross entropy of logits (or of log-probabilities) with class labels or with probabilities; its reduction; its gradient.
// Operands: X logits, L labels or probabilities, W class weights, M logarithms and sums, G upstream gradient, Y result.

#pragma OPENCL FP_CONTRACT OFF  // 16-bit logits then give the loss of their float32 copy, bit for bit

#ifndef PROBABILITIES
#define PROBABILITIES 0  // 1: targets are probabilities, 0: class labels
#define LOG_PROBS 0  // 1: x holds log-probabilities already
#define HAS_WEIGHT 0  // 1: classes have weights
#define SMOOTHED 0  // 1: label smoothing
#define STRIDED 0  // 1: classes lie `inner` apart, (N, C, inner); VEC is 1 then
#define REDUCED 1  // 1: the upstream gradient is one number, 0: one per row
#define WHOLE 0  // 1: one work-group has all rows, and also computes the total
#endif

#if STRIDED
#define ROW_START ((long)(row / inner) * n * inner + row % inner)
#define AT(i) ((long)(i) * inner)
#else
#define ROW_START ((long)row * n)
#define AT(i) (i)
#endif
#if HAS_WEIGHT
#define CLASS_WEIGHT(c) ((real)W_LOAD(weight, c))
#define CLASS_WEIGHTS(c) W_VLOAD(weight, c)
#else
#define CLASS_WEIGHT(c) ((real)1)
#define CLASS_WEIGHTS(c) ((vec)(1))
#endif
// The even part of a smoothed target, or the whole of a target of probabilities, times the weight of the class.
#if PROBABILITIES
#define TARGET_ROW __global const L_T* tr = target + ROW_START;
#define EVENLY(i) (CLASS_WEIGHTS(i) * (L_VLOAD(tr, AT(i)) * (1 - smoothing) + smoothing / n))
#define REST_EVENLY(i) (CLASS_WEIGHT(i) * (L_LOAD(tr, AT(i)) * (1 - smoothing) + smoothing / n))
#else
#define TARGET_ROW
#if SMOOTHED
#define EVENLY(i) (CLASS_WEIGHTS(i) * (smoothing / n))
#define REST_EVENLY(i) (CLASS_WEIGHT(i) * (smoothing / n))
#else
#define EVENLY(i) ((vec)(0))
#define REST_EVENLY(i) ((real)0)
#endif
#endif

// ---- labels

#define IGNORED (-1)
#define BAD (-2)

// The class of a row, IGNORED, or BAD: not a whole number, or none of the n classes.
static inline int class_of(__global const L_T* labels, const int row, const long ignore, const int n) {
  const L_REAL given = L_LOAD(labels, row);
  const long label = (long)given;  // of NaN: anything, and not equal to it
  if (label == ignore && (L_REAL)label == given) return IGNORED;
  return (ulong)label < (ulong)n && (L_REAL)label == given ? (int)label : BAD;
}

// ---- forward: losses, logarithms of the sums of exponentials, and what each row counts for in the mean

// Of a work-group: the loss, and one over what the mean divides by. `sums` and `weights` have LOCAL elements each.
static inline void add_up(__global const M_T* losses, __global const M_T* counts, __global Y_T* total, __global M_T* scale, const int mean,
                          const int rows, __local real* sums, __local real* weights) {
  const int lane = get_local_id(0);
  real sum = 0, count = 0;
  for (int block = lane; block < rows; block += 256 * LOCAL) {  // sums of sums lose less than one long sum
    real part = 0, part_count = 0;
#pragma unroll 8
    for (int row = block; row < min(block + 256 * LOCAL, rows); row += LOCAL) {
      part += M_LOAD(losses, row);
      part_count += M_LOAD(counts, row);
    }
    sum += part;
    count += part_count;
  }
  sums[lane] = sum;
  weights[lane] = count;
  for (int step = LOCAL / 2; step > 0; step /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < step) {
      sums[lane] += sums[lane + step];
      weights[lane] += weights[lane + step];
    }
  }
  if (lane == 0) {
    Y_STORE(total, 0, mean ? sums[0] / weights[0] : sums[0]);
    M_STORE(scale, 0, mean ? 1 / weights[0] : (real)1);
  }
}

// `total` and `scale` are written only if WHOLE.
SIZED __kernel void cross_entropy(__global const X_T* x, __global const L_T* target, __global const W_T* weight, __global M_T* losses,
                                  __global M_T* logarithms, __global M_T* counts, __global Y_T* total, __global M_T* scale, const int mean,
                                  const REAL smoothing, const long ignore, const int inner, const int rows, const int n, const int each) {
  SHARED
  FOR_ROWS(row, rows, each) {
    __global const X_T* xr = x + ROW_START;
    real logarithm = 0;
#if !LOG_PROBS
    vec most = LOWEST;
    FOR_VECTORS(i, n) {
      const vec v = X_VLOAD(xr, AT(i));
      most = LARGER(most, v);
    }
    real m = lanes_max(most);
    FOR_REST(i, n) m = fmax(m, X_LOAD(xr, AT(i)));
    m = GROUP_MAX(m);
    vec sums = 0;
    FOR_VECTORS(i, n) sums += EXP_BELOW(X_VLOAD(xr, AT(i)) - m);
    real sum = lanes_sum(sums);
    FOR_REST(i, n) sum += exp(X_LOAD(xr, AT(i)) - m);
    logarithm = m + log(GROUP_SUM(sum));
#endif
    real loss = 0, count = 1, even = 0;
#if PROBABILITIES || SMOOTHED
    TARGET_ROW
    vec evens = 0;
    FOR_VECTORS(i, n) evens += EVENLY(i) * (logarithm - X_VLOAD(xr, AT(i)));
    even = lanes_sum(evens);
    FOR_REST(i, n) even += REST_EVENLY(i) * (logarithm - X_LOAD(xr, AT(i)));
    even = GROUP_SUM(even);
#endif
#if PROBABILITIES
    loss = even;
#else
    const int label = class_of(target, row, ignore, n);
    count = label == BAD ? (real)NAN : label == IGNORED ? (real)0 : CLASS_WEIGHT(label);
    loss = label == BAD ? (real)NAN : label == IGNORED ? (real)0 : even + (1 - smoothing) * count * (logarithm - X_LOAD(xr, AT(label)));
#endif
    if (LANE == 0) {
      M_STORE(losses, row, loss);
      M_STORE(logarithms, row, logarithm);
      M_STORE(counts, row, count);
    }
  }
#if WHOLE
  __local real total_sums[LOCAL], total_weights[LOCAL];
  barrier(CLK_GLOBAL_MEM_FENCE);
  add_up(losses, counts, total, scale, mean, rows, total_sums, total_weights);
#endif
}

// One work-group.
SIZED __kernel void cross_entropy_total(__global const M_T* losses, __global const M_T* counts, __global Y_T* total, __global M_T* scale,
                                        const int mean, const int rows) {
  __local real sums[LOCAL], weights[LOCAL];
  add_up(losses, counts, total, scale, mean, rows, sums, weights);
}

// ---- backward: upstream * scale * (softmax * total - target), the targets with weights and smoothing

SIZED __kernel void cross_entropy_grad(__global const G_T* g, __global const X_T* x, __global const L_T* target, __global const W_T* weight,
                                       __global const M_T* logarithms, __global const M_T* scale, __global Y_T* y, const REAL smoothing,
                                       const long ignore, const int inner, const int rows, const int n, const int each) {
  SHARED
  FOR_ROWS(row, rows, each) {
    __global const X_T* xr = x + ROW_START;
    __global Y_T* yr = y + ROW_START;
    const real logarithm = M_LOAD(logarithms, row);
    real factor = G_LOAD(g, REDUCED ? 0 : row) * M_LOAD(scale, 0), total = 0;
    int label = IGNORED;
#if !PROBABILITIES
    label = class_of(target, row, ignore, n);
    factor = label == BAD ? (real)NAN : label == IGNORED ? (real)0 : factor;
    const real chosen = label < 0 ? (real)0 : (1 - smoothing) * CLASS_WEIGHT(label);
#endif
#if PROBABILITIES || SMOOTHED
    TARGET_ROW
    vec totals = 0;
    FOR_VECTORS(i, n) totals += EVENLY(i);
    total = lanes_sum(totals);
    FOR_REST(i, n) total += REST_EVENLY(i);
    total = GROUP_SUM(total);
#endif
#if !PROBABILITIES
    total += chosen;
#endif
#if LOG_PROBS
#define SHARE(v) ((real)0)  // also where a logarithm is infinite
#else
#define SHARE(v) (EXP_BELOW((v) - logarithm) * total)
#endif
    FOR_VECTORS(i, n) Y_VSTORE(yr, AT(i), factor * (SHARE(X_VLOAD(xr, AT(i))) - EVENLY(i)));
    FOR_REST(i, n) Y_STORE(yr, AT(i), factor * (SHARE(X_LOAD(xr, AT(i))) - REST_EVENLY(i)));
#if !PROBABILITIES
#if GROUP > 1
    barrier(CLK_GLOBAL_MEM_FENCE);
#endif
    if (LANE == 0 && label >= 0) Y_STORE(yr, AT(label), factor * (SHARE(X_LOAD(xr, AT(label))) - REST_EVENLY(label) - chosen));
#endif
  }
}
