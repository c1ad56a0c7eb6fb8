// What surrounds a product of a few rows (decode.py) in the kernels of products: gemv.cl, strips.cl and mma.cl.
//   NORM  of the rows before the product: 0 none, 1 RMS norm, 2 layer norm       NORM_SHIFTED  1: the norm has a bias      EPS  of the norm
//   GATED  1: there is a second product, with the weights `gate`, and the result is activation(gate) * product
//   GATE_BIASED  1: the gate has a bias      GROUP_ITEMS  work-items of a work-group
// Every work-group computes the statistics of all rows: they are a few KB from the second cache, and a launch costs more.
// From the launch: ROW_T ROW_QUAD(p), NORM_T NORM_QUAD(p), WEIGHT_T, ADDED_T, GATE_BIAS_T GATE_BIAS_LOAD; epilogue() is generated.
#define EXTRA_POINTERS __global const WEIGHT_T *gate, __global const GATE_BIAS_T *gate_bias, __global const NORM_T *norm_weight, \
  __global const NORM_T *norm_bias,
#define GATE gate
#define ADDED_POINTERS __global const ADDED_T *restrict added,
#define GATED_VALUE(first, second, column) \
  (epilogue(first, 1.0f, GATE_BIASED, GATE_BIASED ? GATE_BIAS_LOAD(gate_bias, column) : 0.0f, 0.0f) * (second))
#if NORM
#define SUMMERS (GROUP_ITEMS < 32 ? GROUP_ITEMS : 32)
// Four values of a row whose mean and inverse deviation are s, from a column on.
#define NORM_SCALED(f, s, column) (NORM == 2 ? (f) - (s).x : (f)) * (s).y * NORM_QUAD(norm_weight + (column))
#define NORMED(f, s, column) (NORM_SCALED(f, s, column) + (NORM_SHIFTED ? NORM_QUAD(norm_bias + (column)) : (float4)(0.0f)))

// The sum over the work-items of a group, which all get.
static inline float group_sum(float sum, __local float* part, const int item) {
  part[item] = sum;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = item + SUMMERS; i < GROUP_ITEMS && item < SUMMERS; i += SUMMERS) part[item] += part[i];
  barrier(CLK_LOCAL_MEM_FENCE);
  sum = 0.0f;
  for (int i = 0; i < SUMMERS; ++i) sum += part[i];
  barrier(CLK_LOCAL_MEM_FENCE);
  return sum;
}

// The mean (0 for RMS norms) and the inverse deviation of rows of x; `part` has room for GROUP_ITEMS values.
static inline void row_statistics(__global const ROW_T* x, int rows, int columns, int item, __local float* part, __local float2* stats) {
  for (int row = 0; row < rows; ++row, x += columns) {
    float mean = 0.0f, total = 0.0f;
    for (int pass = NORM == 1; pass < 2; ++pass) {  // the mean, then the squares around it
      mean = total, total = 0.0f;
      for (int i = item * 4; i < columns; i += GROUP_ITEMS * 4) {
        const float4 f = ROW_QUAD(x + i) - mean;
        total += pass ? dot(f, f) : f.x + f.y + f.z + f.w;
      }
      total = group_sum(total, part, item) / columns;
    }
    if (item == 0) stats[row] = (float2)(mean, 1.0f / sqrt(total + EPS));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
}
#else
#define NORMED(f, s, column) (f)
#endif
