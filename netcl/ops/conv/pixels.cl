// Convolution on CPU devices with pixels in the lanes of vectors and weights by scalar broadcast: for filters too few to fill a vector.
// Nothing is unfolded: a tap is an offset into lines copied with their rim. FEW filters times NV vectors of pixels are one tile of registers.
// Arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#ifndef FEW
#define FEW 2  // filters of a tile
#define ROOM 8192  // elements of the lines a work-group copies
#endif

// Stride 1. Work-groups: blocks of `lines` lines of an image, groups.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_pixels(
    __global const REAL* restrict x, __global const REAL* restrict w, END_POINTERS, CONV_NUMBERS, int lines, REAL scale) {
  __local REAL seen[ROOM] __attribute__((aligned(64)));
  const int pieces = (OH + lines - 1) / lines, image = get_group_id(0) / pieces, group = get_group_id(1);
  const int first = (get_group_id(0) - image * pieces) * lines, count = least(lines, OH - first), taps = KH * KW;
  const Axis h = axis_of(OH, KH, 1, pad_h, dilation_h, 0), v = axis_of(OW, KW, 1, pad_w, dilation_w, 0);
  const int reach_y = (KH - 1) * h.step, reach_x = (KW - 1) * v.step, low_y = least(0, reach_y), low_x = least(0, reach_x);
  const int high = count + (KH - 1) * dilation_h, wide = most(OW, VW) + (KW - 1) * dilation_w, plane = OH * OW;
  for (int c = 0; c < C; ++c)
    copy_window(seen + c * high * wide, x + (((size_t)image * groups + group) * C + c) * H * W, H, W, first + h.first + low_y, high,
                v.first + low_x, wide);

  const int chunks = (OW + VW - 1) / VW, all = count * chunks, n = least(VW, OW);
  const size_t filter_step = (size_t)taps * (INPUT_GRAD ? 1 : C), channel_step = (size_t)taps * (INPUT_GRAD ? M : 1);
  for (int m = 0; m < M; m += FEW) {
    __global const REAL* weights = w + (INPUT_GRAD ? (size_t)group * C * M + m : ((size_t)group * M + m) * C) * taps;
    const size_t to = (((size_t)image * groups + group) * M + m) * plane + (size_t)first * OW;
    for (int t = 0; t < all; t += NV) {
      __local const REAL* from[NV];
      int place[NV];
      V acc[FEW][NV];
      UNROLL for (int j = 0; j < NV; ++j) {
        const int at = least(t + j, all - 1), row = at / chunks;                        // the last tile repeats its last vector,
        const int column = least((at - row * chunks) * VW, most(0, OW - VW));           // the last vector of a line overlaps the one before
        from[j] = seen + (row - low_y) * wide + column - low_x;
        place[j] = row * OW + column;
      }
      EACH_SUM(FEW) acc[i][j] = ZERO;
      for (int c = 0; c < C; ++c)
        for (int r = 0; r < KH; ++r) {
          __global const REAL* a = weights + c * channel_step + r * KW;
          int at = c * high * wide + r * h.step * wide;
          for (int s = 0; s < KW; ++s, at += v.step, ++a)
            ADD_PRODUCTS(FEW, a[least(i, M - 1 - m) * filter_step], VECTOR(__local const, from[j] + at))
        }
      EACH_SUM(FEW)
        if (m + i < M) store_first(added, y, to + (size_t)i * plane + place[j], acc[i][j], n, BIAS_OF(group * M + m + i), scale);
    }
  }
}
