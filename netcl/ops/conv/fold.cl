// The second half of an input gradient, or of a transposed convolution, on CPU devices: adds up the taps that fall on the same pixel.
//
// x[image, window][channel][KH][KW]: what a window adds to the pixels under its taps. y[image][channel][H][W]: the result.
// A work-group is one work-item and computes `lines` lines of `each` channels of an image. It goes along a line from window to window: each
// completes STRIDE_W pixels, and the sums of the pixels after them stay in registers.
// KH, KW, STRIDE_H, STRIDE_W: the window, without dilation. ROOM: most pixels of a line with its padding. FETCHES: as in macros.cl.

#define REACH ((KH + STRIDE_H - 1) / STRIDE_H)  // most lines of windows over a pixel
#define SPAN (KW > STRIDE_W ? KW : STRIDE_W)

// Work-groups: blocks of lines, blocks of channels, images.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void fold_taps(
    __global const REAL* restrict x, END_POINTERS, int C, int H, int W, int OH, int OW, int pad_h, int pad_w, int lines, int each,
    const REAL scale) {
  __local REAL line[ROOM] __attribute__((aligned(64)));
  const int image = get_group_id(2), first = get_group_id(1) * each, end = least(C, first + each);
  const int top = get_group_id(0) * lines, bottom = least(H, top + lines);
  const long step = (long)C * KH * KW, up = STRIDE_H * KW - OW * step;  // to the next window, and to the same pixel's tap in the one above
  x += (long)image * OH * OW * step;
  for (int row = top; row < bottom; ++row) {
    // The windows over this line: the lowest one, by which of its taps, and how many there are from there on upwards.
    const int lowest = least(OH - 1, (row + pad_h) / STRIDE_H), tap = row + pad_h - lowest * STRIDE_H;
    const int rows = tap < KH ? least(lowest, (KH - 1 - tap) / STRIDE_H) + 1 : 0;
    for (int c = first; c < end; ++c) {
      __global const REAL* from = x + lowest * OW * step + ((long)c * KH + tap) * KW;
      __local REAL* to = line;  // not in a function: PoCL 3.1 loses what a function writes to local memory if it is not inlined
      REAL sums[SPAN];
      UNROLL for (int t = 0; t < SPAN; ++t) sums[t] = 0;
      for (int i = 0; i < OW; ++i, from += step, to += STRIDE_W) {
        FETCH_AHEAD(from + OW * step);  // the next line of windows, which lie too far apart for the hardware to foresee
        UNROLL for (int k = 0; k < REACH; ++k)
          if (k < rows) {
            UNROLL for (int t = 0; t < KW; ++t) sums[t] += from[k * up + t];
          }
        UNROLL for (int t = 0; t < STRIDE_W; ++t) to[t] = sums[t];
        UNROLL for (int t = 0; t < SPAN; ++t) sums[t] = t + STRIDE_W < SPAN ? sums[t + STRIDE_W] : 0;
      }
      UNROLL for (int t = 0; t < SPAN; ++t) to[t] = sums[t];
      store_line(added, y, (((size_t)image * C + c) * H + row) * W, line + pad_w, W, BIAS_OF(c), scale);
    }
  }
}
