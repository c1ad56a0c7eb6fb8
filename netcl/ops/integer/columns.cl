// The windows of images of bytes as rows: x is (images, C, H, W), y (images, OH, OW, C, KH, KW). A work-item copies the taps of a channel.
// Outside of the image a tap is *zero if ZERO is 1, else 0. X is char or uchar.
__kernel void integer_columns(__global const X* restrict x, __global const X* restrict zero, __global X* restrict y, const int C, const int H,
                              const int W, const int KH, const int KW, const int OH, const int OW, const int SH, const int SW, const int PH,
                              const int PW, const int DH, const int DW) {
  const long at = get_global_id(0), pixel = at / C;
  const int top = pixel / OW % OH * SH - PH, side = pixel % OW * SW - PW;
  const X fill = ZERO ? *zero : 0;
  x += (pixel / OW / OH * C + at % C) * H * W;
  y += at * KH * KW;
  for (int i = 0; i < KH; ++i)
    for (int j = 0; j < KW; ++j) {
      const int row = top + i * DH, column = side + j * DW;
      y[i * KW + j] = row >= 0 && row < H && column >= 0 && column < W ? x[(long)row * W + column] : fill;
    }
}
