// Windows of images unfolded into columns and back, and the sum of partial weight gradients.
//
// Column `window` of image n begins at n * image + window; `row` values further comes the next tap, after its taps the next channel.
// A work-item takes one place in many channels, so that it divides for its place once.

#ifndef REAL
#define REAL float  // what sums are kept in
#endif
#ifndef X_T  // what is read
#define X_T float
#define X_LOAD(p, i) ((p)[i])
#endif
#ifndef Y_T  // what is written
#define Y_T float
#define Y_STORE(p, i, x) ((p)[i] = (x))
#endif
#ifndef KH
#define KH 1
#define KW 1
#endif

// n, py, px: image, row and column of place i in images of wide x high.
#define PLACE(high, wide)                                                 \
  const int i = get_global_id(0), n = i / ((high) * (wide));              \
  if (n >= N) return;                                                     \
  const int p = i - n * ((high) * (wide)), py = p / (wide), px = p - py * (wide);
#define CHANNELS(c, C) for (int c = get_global_id(1); c < (C); c += get_global_size(1))

// Where the taps along an axis begin, negative for those outside: from a window in an image, and from a pixel in the windows.
static inline void taps_of_window(int* at, int taps, int first, int dilation, int size, int step) {
#pragma unroll
  for (int t = 0; t < taps; ++t) {
    const int place = first + t * dilation;
    at[t] = place >= 0 && place < size ? place * step : -1;
  }
}

static inline void taps_of_pixel(int* at, int taps, int first, int dilation, int stride, int size, int step) {
#pragma unroll
  for (int t = 0; t < taps; ++t) {
    const int place = first - t * dilation, window = place / stride;
    at[t] = place >= 0 && window * stride == place && window < size ? window * step : -1;
  }
}

// y[column] = x under the taps of the column's window, zero outside the image. Work-items: windows of all images, channels.
__kernel void im2col(__global const X_T* restrict x, __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int stride_h,
                     int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, long row, long image) {
  PLACE(OH, OW)
  int lines[KH], places[KW];
  taps_of_window(lines, KH, py * stride_h - pad_h, dilation_h, H, W);
  taps_of_window(places, KW, px * stride_w - pad_w, dilation_w, W, 1);
  CHANNELS(c, C) {
    __global const X_T* plane = x + ((size_t)n * C + c) * H * W;
    __global Y_T* column = y + (n * image + c * (KH * KW) * row + p);
#pragma unroll
    for (int r = 0; r < KH; ++r)
#pragma unroll
      for (int s = 0; s < KW; ++s)
        Y_STORE(column, (r * KW + s) * row, (lines[r] | places[s]) >= 0 ? X_LOAD(plane, lines[r] + places[s]) : (REAL)0);
  }
}

// The sum over the windows that hold a pixel.
static inline REAL folded(__global const X_T* columns, const int* lines, const int* places, const long row) {
  REAL sum = 0;
#pragma unroll
  for (int r = 0; r < KH; ++r)
#pragma unroll
    for (int s = 0; s < KW; ++s)
      sum += (lines[r] | places[s]) >= 0 ? X_LOAD(columns, (r * KW + s) * row + lines[r] + places[s]) : (REAL)0;
  return sum;
}

// y[image][channel][pixel] = the sum over the windows that hold the pixel. Work-items: pixels of all images, channels.
#define FOLD(END)                                                          \
  PLACE(H, W)                                                              \
  int lines[KH], places[KW];                                               \
  taps_of_pixel(lines, KH, py + pad_h, dilation_h, stride_h, OH, OW);      \
  taps_of_pixel(places, KW, px + pad_w, dilation_w, stride_w, OW, 1);      \
  CHANNELS(c, C) {                                                         \
    const size_t at = ((size_t)n * C + c) * H * W + p;                     \
    const REAL sum = folded(x + (n * image + c * (KH * KW) * row), lines, places, row); \
    Y_STORE(y, at, END);                                                   \
  }

__kernel void col2im(__global const X_T* restrict x, __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int stride_h,
                     int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, long row, long image) {
  FOLD(sum)
}

#ifdef ENDS
__kernel void folded_outputs(__global const X_T* restrict x, __global const B_T* restrict bias, __global const ADDED_T* restrict added,
                             __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int stride_h, int stride_w, int pad_h,
                             int pad_w, int dilation_h, int dilation_w, long row, long image, REAL scale) {
  FOLD(FINISHED(sum, c, at))
}

// y[image][filter][pixel] from sums[filter][image, pixel]. Work-items: pixels of all images, filters.
__kernel void unfolded_outputs(__global const X_T* restrict x, __global const B_T* restrict bias, __global const ADDED_T* restrict added,
                               __global Y_T* restrict y, int N, int M, int pixels, REAL scale) {
  PLACE(1, pixels)
  CHANNELS(m, M) {
    const size_t at = ((size_t)n * M + m) * pixels + p;
    Y_STORE(y, at, FINISHED(X_LOAD(x, (size_t)m * N * pixels + i), m, at));
  }
}
#endif

// y[i] = x[0][i] + x[1][i] + ..
__kernel void sum_splits(__global const X_T* restrict x, __global Y_T* restrict y, int n, int splits) {
  const int i = get_global_id(0);
  if (i >= n) return;
  REAL sum = X_LOAD(x, i);
  for (int s = 1; s < splits; ++s) sum += X_LOAD(x, (size_t)s * n + i);
  Y_STORE(y, i, sum);
}
