// Windows of images unfolded into columns and back, and the sum of the parts of a result.
//
// Column `window` of image n begins at n * image + window; `row` values further comes the next tap, after its taps the next channel.
// A work-item takes one place in EACH channels: it divides for its place once, and has the loads of all channels under way together.
// Operands: X what is read (X_T X_LOAD), Y what is written (Y_T Y_STORE).

#ifndef KH  // the window
#define KH 1
#define KW 1
#define STRIDE_H 1
#define STRIDE_W 1
#define PERIOD_H 1  // taps from one that reaches a pixel to the next that may
#define PERIOD_W 1
#endif
#ifndef EACH  // divides the channels
#define EACH 1
#endif
#define REACH_H ((KH + PERIOD_H - 1) / PERIOD_H)
#define REACH_W ((KW + PERIOD_W - 1) / PERIOD_W)
#ifndef QUADS
#define QUADS 0  // 1: the pixels of an image are whole float4
#endif

// n, py, px: image, row and column of place i in images of high x wide.
#define PLACE(high, wide)                                      \
  const int i = get_global_id(0), n = i / ((high) * (wide));   \
  if (n >= N) return;                                          \
  const int p = i - n * ((high) * (wide)), py = p / (wide), px = p - py * (wide);
#define CHANNEL(c) const int c = get_global_id(1) * EACH + e;

// A value, or zero if it is not there: always a load, so that those of all taps are on their way together.
static inline REAL load_or_zero(__global const X_T* from, const int there, const long at) {
  const REAL value = X_LOAD(from, there ? at : 0);
  return there ? value : (REAL)0;
}

// Where the taps of a window lie along an axis of an image; negative outside.
static inline void taps_of_window(int* at, const int taps, const int first, const int dilation, const int size, const int step) {
  UNROLL for (int t = 0; t < taps; ++t) {
    const int place = first + t * dilation;
    at[t] = place >= 0 && place < size ? place * step : -1;
  }
}

// Where a pixel lies along an axis of the columns: the taps that reach it, `period` apart, each of a window `step` from the next;
// negative for those that do not. Sums of two are negative if either is.
#define NOWHERE (-(1L << 62))
static inline void windows_of_pixel(long* at, const int reach, const int period, const int taps, const int first, const int dilation,
                                    const int stride, const int size, const int step, const long row) {
  int tap = 0;
  while (tap < period && (first - tap * dilation) % stride != 0) ++tap;
  UNROLL for (int k = 0; k < reach; ++k, tap += period) {
    const int place = first - tap * dilation, window = place / stride;
    at[k] = tap < taps && place >= 0 && window * stride == place && window < size ? tap * row + window * step : NOWHERE;
  }
}

// y[column] = x under the taps of the column's window, zero outside the image. Work-items: windows of all images, channels.
__kernel void im2col(__global const X_T* restrict x, __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int pad_h,
                     int pad_w, int dilation_h, int dilation_w, long row, long image) {
  PLACE(OH, OW)
  int lines[KH], places[KW];
  taps_of_window(lines, KH, py * STRIDE_H - pad_h, dilation_h, H, W);
  taps_of_window(places, KW, px * STRIDE_W - pad_w, dilation_w, W, 1);
  UNROLL for (int e = 0; e < EACH; ++e) {
    CHANNEL(c)
    __global const X_T* plane = x + ((size_t)n * C + c) * H * W;
    __global Y_T* column = y + (n * image + c * (KH * KW) * row + p);
    UNROLL for (int r = 0; r < KH; ++r)
      UNROLL for (int s = 0; s < KW; ++s) {
        const int at = (lines[r] | places[s]) < 0 ? -1 : lines[r] + places[s];
        Y_STORE(column, (r * KW + s) * row, load_or_zero(plane, at >= 0, at));
      }
  }
}

static inline REAL folded(__global const X_T* columns, const long* lines, const long* places) {
  REAL sum = 0;
  UNROLL for (int r = 0; r < REACH_H; ++r)
    UNROLL for (int s = 0; s < REACH_W; ++s) {
      const long at = lines[r] + places[s];
      sum += load_or_zero(columns, at >= 0, at);
    }
  return sum;
}

// y[image][channel][pixel] = `ended`, of the sum over the windows that hold the pixel. Work-items: pixels of all images, channels.
#define FOLD(ended)                                                                                   \
  PLACE(H, W)                                                                                         \
  long lines[REACH_H], places[REACH_W];                                                               \
  windows_of_pixel(lines, REACH_H, PERIOD_H, KH, py + pad_h, dilation_h, STRIDE_H, OH, OW, KW * row); \
  windows_of_pixel(places, REACH_W, PERIOD_W, KW, px + pad_w, dilation_w, STRIDE_W, OW, 1, row);      \
  _Pragma("unroll") for (int e = 0; e < EACH; ++e) {                                                  \
    CHANNEL(c)                                                                                        \
    const size_t at = ((size_t)n * C + c) * H * W + p;                                                \
    const REAL sum = folded(x + (n * image + c * (KH * KW) * row), lines, places);                    \
    Y_STORE(y, at, ended);                                                                            \
  }

__kernel void col2im(__global const X_T* restrict x, __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int pad_h,
                     int pad_w, int dilation_h, int dilation_w, long row, long image) {
  FOLD(sum)
}

#ifdef ENDS
__kernel void folded_outputs(__global const X_T* restrict x, END_POINTERS, int N, int C, int H, int W, int OH, int OW, int pad_h, int pad_w,
                             int dilation_h, int dilation_w, long row, long image, REAL scale) {
  FOLD(FINISHED(sum, c, at))
}

// y[image][filter][pixel] from sums[filter][image, pixel]. Work-items: pixels of all images, or quads of them; filters.
__kernel void unfolded_outputs(__global const X_T* restrict x, END_POINTERS, int N, int M, int pixels, REAL scale) {
#if QUADS
  PLACE(1, pixels / 4)
  UNROLL for (int e = 0; e < EACH; ++e) {
    CHANNEL(m)
    const size_t at = ((size_t)n * M + m) * pixels + 4 * p;
    float4 four = *(__global const float4*)(x + ((size_t)m * N * pixels + 4 * i));
    four.x = FINISHED(four.x, m, at), four.y = FINISHED(four.y, m, at + 1);
    four.z = FINISHED(four.z, m, at + 2), four.w = FINISHED(four.w, m, at + 3);
    *(__global float4*)(y + at) = four;
  }
#else
  PLACE(1, pixels)
  UNROLL for (int e = 0; e < EACH; ++e) {
    CHANNEL(m)
    const size_t at = ((size_t)n * M + m) * pixels + p;
    Y_STORE(y, at, FINISHED(X_LOAD(x, (size_t)m * N * pixels + i), m, at));
  }
#endif
}

// y of n values, `plane` per filter, from the sum x[0] + x[1] + .. of `splits` parts.
__kernel void sum_splits(__global const X_T* restrict x, END_POINTERS, int n, int plane, int filters, int splits, REAL scale) {
  const int i = get_global_id(0);
  if (i >= n) return;
  REAL sum = X_LOAD(x, i);
  _Pragma("unroll 8") for (int s = 1; s < splits; ++s) sum += X_LOAD(x, (size_t)s * n + i);  // loads overlap
  Y_STORE(y, i, FINISHED(sum, i / plane % filters, i));
}
#endif
