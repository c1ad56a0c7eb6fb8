// Max pooling on CPUs, a plane per work-item, while it is in the first cache. Operand X: values, which do not round when stored.

typedef struct __attribute__((packed)) { float4 v; } Loose4;
typedef struct __attribute__((packed)) { float8 v; } Loose8;
typedef struct __attribute__((packed)) { float16 v; } Loose16;
typedef struct __attribute__((packed)) { int4 v; } LooseInt4;
typedef struct __attribute__((packed)) { int8 v; } LooseInt8;

// Of the windows, which are not dilated. A vector holds two pixels of each window if STRIDE is 2: nothing behind the last window is read.
#ifndef STRIDE
#define KH 2
#define KW 2
#define STRIDE 2
#endif
#if STRIDE == 2
#define PIXELS(N, N2, x, c) ((c) ? ((__global const Loose##N2*)((x) + (c) - 1))->v.odd : ((__global const Loose##N2*)(x))->v.even)
#else
#define PIXELS(N, N2, x, c) ((__global const Loose##N*)((x) + (c)))->v
#endif

// The first of equals wins, and NaN before all.
#define BETTER(value, best) (((value) > (best)) | ((value) != (value))) & ((best) == (best))
// N windows side by side, over some lines of the image; `place` is the first pixel of each.
#define WINDOWS(N, N2)                                                                                                              \
  static inline void windows##N(__global const float* x, int W, int lines, __global float* y, __global int* places, int##N place) { \
    float##N best = PIXELS(N, N2, x, 0);                                                                                            \
    int##N line = place;                                                                                                            \
    for (int r = 0; r < lines; ++r, x += W, line += W)                                                                              \
      for (int c = 0; c < KW; ++c) {                                                                                                \
        const float##N value = PIXELS(N, N2, x, c);                                                                                 \
        const int##N better = BETTER(value, best);                                                                                  \
        best = better ? value : best;                                                                                               \
        place = better ? line + c : place;                                                                                          \
      }                                                                                                                             \
    ((__global Loose##N*)y)->v = best;                                                                                              \
    ((__global LooseInt##N*)places)->v = place;                                                                                     \
  }
WINDOWS(8, 16)
WINDOWS(4, 8)

// One window, over the columns from `first` on that lie in the image.
static inline void one_window(__global const float* x, int W, int line, int lines, int first, __global float* y, __global int* places) {
  const int begin = first > 0 ? first : 0, end = first + KW < W ? first + KW : W;
  int place = line * W + begin;
  float best = x[place];
  for (int r = line; r < line + lines; ++r)
    for (int c = begin; c < end; ++c) {
      const float value = x[r * W + c];
      const int better = BETTER(value, best);
      best = better ? value : best;
      place = better ? r * W + c : place;
    }
  *y = best;
  *places = place;
}

// Largest value of each window and its place. The last vector of a line overlaps the one before; windows that reach into the padding are
// computed one by one.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pool_max_planes(__global const float* restrict x, __global float* restrict y,
                                                                             __global int* restrict places, int H, int W, int OH, int OW,
                                                                             int stride_h, int pad_h, int pad_w) {
  const int plane = get_group_id(0), ends = (W - KW + pad_w) / STRIDE + 1;
  const int inner = (pad_w + STRIDE - 1) / STRIDE, outer = W < KW ? inner : ends < OW ? ends : OW;  // windows that lie inside a line
  x += (size_t)plane * H * W;
  for (int row = 0; row < OH; ++row) {
    const int first = row * stride_h - pad_h, line = first > 0 ? first : 0, lines = (first + KH < H ? first + KH : H) - line;
    const size_t to = ((size_t)plane * OH + row) * OW;
    const int wide = outer - inner < 4 ? 1 : outer - inner < 8 ? 4 : 8;
    for (int o = 0; o < OW;) {
      if (wide == 1 || o < inner || o >= outer) {
        one_window(x, W, line, lines, o * STRIDE - pad_w, y + to + o, places + to + o);
        ++o;
        continue;
      }
      const int n = o + wide <= outer ? o : outer - wide, at = line * W + n * STRIDE - pad_w;
      if (wide == 8) windows8(x + at, W, lines, y + to + n, places + to + n, at + STRIDE * (int8)(0, 1, 2, 3, 4, 5, 6, 7));
      else windows4(x + at, W, lines, y + to + n, places + to + n, at + STRIDE * (int4)(0, 1, 2, 3));
      o = n + wide;
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
