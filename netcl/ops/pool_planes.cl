// Max pooling on CPUs, a plane per work-item, while it is in the first cache. Operand X: values, which do not round when stored.

typedef struct __attribute__((packed)) { float4 v; } Loose4;
typedef struct __attribute__((packed)) { float8 v; } Loose8;
typedef struct __attribute__((packed)) { float16 v; } Loose16;
typedef struct __attribute__((packed)) { int4 v; } LooseInt4;
typedef struct __attribute__((packed)) { int8 v; } LooseInt8;

// The first of equals wins, and NaN before all.
#define BETTER(value, best) (((value) > (best)) | ((value) != (value))) & ((best) == (best))
#define TRY(candidate, at)                          \
  {                                                 \
    const int_n better = BETTER(candidate, best);   \
    best = better ? candidate : best;               \
    place = better ? first + (at) : place;          \
  }
// N windows of 2 x 2 side by side, over two lines of the image; `at` is the place of the first pixel.
#define WINDOWS(N, N2)                                                                                                                    \
  static inline void windows##N(__global const float* x, int W, int at, __global float* y, __global int* places, int##N steps) {        \
    typedef int##N int_n;                                                                                                                 \
    const float##N2 above = ((__global const Loose##N2*)(x + at))->v, below = ((__global const Loose##N2*)(x + at + W))->v;               \
    const int_n first = steps + at;                                                                                                       \
    float##N best = above.even;                                                                                                           \
    int_n place = first;                                                                                                                  \
    TRY(above.odd, 1)                                                                                                                     \
    TRY(below.even, W)                                                                                                                    \
    TRY(below.odd, W + 1)                                                                                                                 \
    ((__global Loose##N*)y)->v = best;                                                                                                    \
    ((__global LooseInt##N*)places)->v = place;                                                                                           \
  }
WINDOWS(8, 16)
WINDOWS(4, 8)

// Largest value and its place of windows of 2 x 2 pixels that do not overlap; OW is at least 4. The last vector overlaps the one before.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pool_max_pairs(__global const float* restrict x, __global float* restrict y,
                                                                            __global int* restrict places, int H, int W, int OH, int OW) {
  const int plane = get_group_id(0);
  x += (size_t)plane * H * W;
  for (int row = 0; row < OH; ++row) {
    const size_t to = ((size_t)plane * OH + row) * OW;
    if (OW < 8) {
      windows4(x, W, 2 * row * W, y + to, places + to, (int4)(0, 2, 4, 6));
      windows4(x, W, 2 * (row * W + OW - 4), y + to + OW - 4, places + to + OW - 4, (int4)(0, 2, 4, 6));
      continue;
    }
    for (int column = 0; column < OW; column += 8) {
      const int o = column + 8 <= OW ? column : OW - 8;
      windows8(x, W, 2 * (row * W + o), y + to + o, places + to + o, (int8)(0, 2, 4, 6, 8, 10, 12, 14));
    }
  }
}

// The gradient of any max pooling, from the places of the maxima.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pool_max_scatter(__global const X_T* restrict dy, __global const int* restrict places,
                                                                              __global X_T* restrict dx, int pixels, int outs) {
  const int plane = get_group_id(0);
  __global X_T* pixel = dx + (size_t)plane * pixels;
  for (int p = 0; p < pixels; ++p) pixel[p] = 0;
  for (int o = 0; o < outs; ++o) {
    const int place = places[(size_t)plane * outs + o];
    if (place >= 0 && place < pixels) pixel[place] += dy[(size_t)plane * outs + o];
  }
}
