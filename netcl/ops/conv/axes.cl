// What forward and input gradient have in common: an output pixel is a sum over taps of one input, along each axis
//   out[out_first + i * out_step] += weight[w_first + t * w_step] * in[i * in_step + first + t * step]   for t < taps, 0 <= index < size.
// Forward has one such class of pixels. The input gradient has one per remainder of the pixel modulo the stride: within
// a class the same taps reach every pixel, so nothing is multiplied by inserted zeros.
// N, C, H, W, M, OH and OW are arguments of the kernels, X and Y operands: see ends.cl.

#ifndef INPUT_GRAD
#define INPUT_GRAD 0  // 1: the input is a gradient of the output, the output the gradient of the input
#endif
#define CLASSES (INPUT_GRAD ? stride_h * stride_w : 1)  // of pixels

typedef struct {
  int in_step, first, step, taps;
  int w_first, w_step;
  int out_first, out_step, outs;
} Axis;

static inline Axis axis_of(int out_size, int kernel_size, int stride, int pad, int dilation, int remainder) {
  Axis a;
#if INPUT_GRAD
  int tap = 0, period = 1;
  while (tap < kernel_size && (remainder + pad - tap * dilation) % stride != 0) ++tap;
  while ((period * dilation) % stride != 0) ++period;
  a.in_step = 1;
  a.taps = tap < kernel_size ? (kernel_size - tap + period - 1) / period : 0;
  a.first = (remainder + pad - tap * dilation) / stride;
  a.step = -(period * dilation / stride);
  a.w_first = tap;
  a.w_step = period;
  a.out_first = remainder;
  a.out_step = stride;
  a.outs = (out_size - remainder + stride - 1) / stride;
#else
  a.in_step = stride;
  a.taps = kernel_size;
  a.first = -pad;
  a.step = dilation;
  a.w_first = 0;
  a.w_step = 1;
  a.out_first = 0;
  a.out_step = 1;
  a.outs = out_size;
#endif
  return a;
}

// h and v: the axes of a class of pixels.
#define AXES_OF(id)                                                              \
  const int class = id;                                                          \
  const Axis h = axis_of(OH, KH, stride_h, pad_h, dilation_h, class / stride_w); \
  const Axis v = axis_of(OW, KW, stride_w, pad_w, dilation_w, class % stride_w);
// The same for number `id` of groups times classes, and its group.
#define GROUP_AND_AXES(id)                            \
  const int classes = CLASSES, group = id / classes;  \
  AXES_OF(id - group * classes)

// Of n outputs whose inputs lie at from, from + in_step, .., the first and the number of those inside [0, size).
static inline int first_inside(int from, int in_step, int n) {
  const int lo = from >= 0 ? 0 : (in_step == 1 ? -from : (in_step - 1 - from) / in_step);
  return lo < n ? lo : n;
}

static inline int end_inside(int from, int in_step, int size, int n) {
  const int left = size - from;
  const int hi = left <= 0 ? 0 : (in_step == 1 ? left : (left + in_step - 1) / in_step);
  return hi < n ? hi : n;
}

// x / d by multiplication, exact for 0 <= x < 2^31: integer division costs tens of instructions on a GPU.
typedef struct {
  uint factor;
  int shift;
} Divisor;

static inline Divisor divisor(int d) {
  Divisor by;
  by.shift = 31;
  while ((1L << (by.shift - 31)) < d) ++by.shift;
  by.factor = (uint)((1UL << by.shift) / (uint)d + 1);
  return by;
}

static inline int over(int x, Divisor by) { return (int)(((ulong)(uint)x * by.factor) >> by.shift); }

// The tile of a work-group: from pixel n0 of a class and filter m0 of a group on.
#define TILE_OF_GROUP(id)                                                                                     \
  GROUP_AND_AXES(id)                                                                                          \
  const int plane = h.outs * v.outs, pixels = N * plane, n0 = get_group_id(0) * BN, m0 = get_group_id(1) * BM; \
  if (n0 >= pixels) return;

// The pixel that work-item t fetches, its column of the tile, where its window begins, and the planes it lies in.
#define PIXEL_OF_ITEM                                                                                           \
  const int column = t % BN, pixel = min(n0 + column, pixels - 1);                                              \
  const int image = pixel / plane, row = (pixel - image * plane) / v.outs;                                      \
  const int y0 = row * h.in_step + h.first, x0 = (pixel - image * plane - row * v.outs) * v.in_step + v.first;  \
  __global const X_T* planes = x + ((size_t)image * groups + group) * C * H * W;

// The sums acc[TM][columns] of a work-item, before the first term.
#define CLEAR_TILE(columns) UNROLL for (int i = 0; i < TM; ++i) UNROLL for (int j = 0; j < columns; ++j) acc[i][j] = 0;
// Ends and stores them: acc[i][j] is of `filter` (in i) from m0 on and of `pixel` (in j) from n0 on.
#define STORE_TILE(columns, pixel, filter)                                                                \
  UNROLL for (int j = 0; j < columns; ++j) {                                                              \
    const int p = n0 + pixel;                                                                             \
    if (p >= pixels) continue;                                                                            \
    const int n = p / plane, line = (p - n * plane) / v.outs, place = p - n * plane - line * v.outs;      \
    const size_t row = (size_t)(h.out_first + line * h.out_step) * OW + v.out_first + place * v.out_step; \
    const size_t to = ((size_t)n * groups + group) * M * OH * OW + row;                                   \
    UNROLL for (int i = 0; i < TM; ++i) {                                                                 \
      const int m = m0 + filter;                                                                          \
      const size_t at = to + (size_t)m * OH * OW;                                                         \
      if (m < M) Y_STORE(y, at, FINISHED(acc[i][j], group * M + m, at));                                  \
    }                                                                                                     \
  }
