// Windows of an image unfolded into columns and back, and the sum of partial weight gradients. One work-item per result.

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

// y[image][channel][tap][pixel] = x under the tap of the pixel's window, zero outside the image.
__kernel void im2col(__global const X_T* restrict x, __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int KH, int KW,
                     int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w) {
  const int i = get_global_id(0);
  if (i >= N * C * KH * KW * OH * OW) return;
  const int px = i % OW, py = i / OW % OH, rest = i / OW / OH, s = rest % KW, r = rest / KW % KH, plane = rest / KW / KH;
  const int line = py * stride_h + r * dilation_h - pad_h, place = px * stride_w + s * dilation_w - pad_w;
  const int inside = line >= 0 && line < H && place >= 0 && place < W;
  Y_STORE(y, i, inside ? X_LOAD(x, ((size_t)plane * H + line) * W + place) : (REAL)0);
}

// y[image][channel][pixel] = the sum over the windows that hold the pixel.
__kernel void col2im(__global const X_T* restrict x, __global Y_T* restrict y, int N, int C, int H, int W, int OH, int OW, int KH, int KW,
                     int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w) {
  const int i = get_global_id(0);
  if (i >= N * C * H * W) return;
  const int px = i % W, py = i / W % H, plane = i / W / H;
  REAL sum = 0;
  for (int r = 0; r < KH; ++r) {
    const int line = py + pad_h - r * dilation_h, row = line / stride_h;
    if (line < 0 || row * stride_h != line || row >= OH) continue;
    for (int s = 0; s < KW; ++s) {
      const int place = px + pad_w - s * dilation_w, column = place / stride_w;
      if (place < 0 || column * stride_w != place || column >= OW) continue;
      sum += X_LOAD(x, ((((size_t)plane * KH + r) * KW + s) * OH + row) * OW + column);
    }
  }
  Y_STORE(y, i, sum);
}

// y[i] = x[0][i] + x[1][i] + ..
__kernel void sum_splits(__global const X_T* restrict x, __global Y_T* restrict y, int n, int splits) {
  const int i = get_global_id(0);
  if (i >= n) return;
  REAL sum = X_LOAD(x, i);
  for (int s = 1; s < splits; ++s) sum += X_LOAD(x, (size_t)s * n + i);
  Y_STORE(y, i, sum);
}
