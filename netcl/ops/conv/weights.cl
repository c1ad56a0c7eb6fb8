// The weight gradient on CPU devices as matrix products that unfold nothing. With the channels of a pixel side by side, the KW taps of
// a kernel row are KW * C neighbours in memory: for each row of the kernel
//   parts[row][filter][s * C + c] = sum over pixels p of dy[filter][p] * t[p shifted by the row][s * C + c],
// dy read in place by scalar broadcast, t in vectors. Three kernels: x into t, the products, and parts into the weights' order. Operand Y: dw.
#ifndef KB
#define KB 256  // pixels of a block: what a sweep over the filters reads of t again and again stays in the second-level cache
#endif

static inline void zero(__global REAL* to, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = 0;
}

// t[group][image][line][place][channel] of x, zero beyond its edges; only every step-th line and place. Work-groups: lines, images * groups.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void channels_last(
    __global const REAL* restrict x, __global REAL* restrict t, int N, int C, int H, int W, int high, int wide, int pad_h, int pad_w,
    int step_h, int step_w, int groups, int slack) {
  const int line = get_group_id(0), image = get_group_id(1) % N, group = get_group_id(1) / N;
  __global REAL* row = t + ((size_t)get_group_id(1) * high + line) * wide * C;
  // Tiles at the edge read a little beyond the last pixel.
  if (line == high - 1 && image == N - 1 && group == groups - 1) zero(row + (size_t)wide * C, slack);
  const int py = line * step_h - pad_h;
  if (py < 0 || py >= H) {
    zero(row, (size_t)wide * C);
    return;
  }
  const int lo = least(wide, (pad_w + step_w - 1) / step_w), hi = most(lo, least(wide, (W + pad_w + step_w - 1) / step_w));
  zero(row, (size_t)lo * C);
  zero(row + (size_t)hi * C, (size_t)(wide - hi) * C);
  const size_t plane = (size_t)H * W;
  __global const REAL* from = x + ((size_t)image * groups + group) * C * plane + (size_t)py * W - pad_w;
  int c = 0;
  if (step_w == 1)
    for (; c + 4 <= C; c += 4) {
      __global const REAL* s = from + c * plane;
      __global REAL* d = row + c;
      int p = lo;
      for (; p + 4 <= hi; p += 4) {
        const Q r0 = QUAD(__global const, s + p), r1 = QUAD(__global const, s + plane + p), r2 = QUAD(__global const, s + 2 * plane + p),
                r3 = QUAD(__global const, s + 3 * plane + p);
        PUT_TURNED(__global, d + (size_t)p * C, C, r0, r1, r2, r3)
      }
      for (; p < hi; ++p)
        for (int e = 0; e < 4; ++e) d[(size_t)p * C + e] = s[e * plane + p];
    }
  for (; c < C; ++c)
    for (int p = lo; p < hi; ++p) row[(size_t)p * C + c] = from[c * plane + (size_t)p * step_w];
}

// span: neighbours of a tap, KW * C, or C where dilation parts the taps of a row, and then `apart` is KW, else 1. Rows and columns of
// parts are padded to whole tiles. Work-groups: strips of columns, taps * blocks of filters, groups * splits of the pixels.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_weights(
    __global const REAL* restrict t, __global const REAL* restrict dy, __global REAL* restrict parts, int N, int C, int M, int OH, int OW,
    int high, int wide, int KH, int apart, int stride_h, int stride_w, int dilation_h, int dilation_w, int groups, int rows, int splits) {
  int from[KB], of[KB];  // where a pixel of the block lies in t, and in dy
  const int taps = KH * apart, tap = get_group_id(1) % taps, group = get_group_id(2) / splits, split = get_group_id(2) - group * splits;
  const int row_first = get_group_id(1) / taps * rows, row_end = least(M, row_first + rows);
  const int plane = OH * OW, all = N * plane, share = (all + splits - 1) / splits, begin = least(all, split * share);
  const int end = least(all, begin + share), column = get_group_id(0) * STRIP, width = get_num_groups(0) * STRIP;
  const size_t picture = (size_t)high * wide * C, filters = (size_t)groups * M * plane;
  const int padded = (M + MR - 1) / MR * MR;
  t += group * N * picture + ((size_t)(tap / apart) * dilation_h * wide + tap % apart * dilation_w) * C + column;
  dy += (size_t)group * M * plane;
  parts += (((size_t)(split * groups + group) * taps + tap) * padded) * width + column;

  for (int p0 = begin; p0 == begin || p0 < end; p0 += KB) {
    const int depth = most(0, least(KB, end - p0)), first = p0 / plane;
    int image = 0, y = (p0 - first * plane) / OW, place = p0 - first * plane - y * OW;
    for (int k = 0; k < depth; ++k) {
      from[k] = image * (int)picture + (y * stride_h * wide + place * stride_w) * C;
      of[k] = image * (int)filters + y * OW + place;
      if (++place == OW) {
        place = 0;
        if (++y == OH) y = 0, ++image;
      }
    }
    for (int tile = 0; tile < NT; ++tile)
      for (int m = row_first; m < row_end; m += MR) {
        __global const REAL* a[MR];
        V acc[MR][NV];
        __global REAL* to = parts + (size_t)m * width + tile * NR;
        __global const REAL* b_rows = t + first * picture + tile * NR;
        UNROLL for (int i = 0; i < MR; ++i) a[i] = dy + first * filters + (size_t)least(m + i, M - 1) * plane;
        EACH_SUM(MR) acc[i][j] = ZERO;
        for (int k = 0; k < depth; ++k) ADD_PRODUCTS(MR, a[i][of[k]], VECTOR(__global const, b_rows + from[k] + j * VW))
        if (p0 == begin) EACH_SUM(MR) VECTOR(__global, to + (size_t)i * width + j * VW) = acc[i][j];
        else EACH_SUM(MR) VECTOR(__global, to + (size_t)i * width + j * VW) += acc[i][j];
      }
  }
}

// dw[filter][channel][tap] from parts, summed over the splits. Work-groups: filters.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void collect_weights(
    __global const REAL* restrict parts, __global Y_T* restrict dw, int C, int M, int KH, int KW, int apart, int groups, int width, int splits) {
  const int filter = get_group_id(0), group = filter / M, m = filter - group * M, rows = (M + MR - 1) / MR * MR;
  const size_t tap_step = (size_t)rows * width, step = (size_t)groups * KH * apart * tap_step;
  __global const REAL* from = parts + (size_t)group * KH * apart * tap_step + (size_t)m * width;
  const size_t row_step = apart * tap_step, tap = apart > 1 ? tap_step : C;
  __global Y_T* to = dw + (size_t)filter * C * KH * KW;
  if (splits == 1 && KH == 3 && KW == 3) {  // the common case, unrolled
    __global const REAL *r0 = from, *r1 = from + row_step, *r2 = from + 2 * row_step;
    for (int c = 0; c < C; ++c) {
      const REAL values[9] = {r0[c], r0[tap + c], r0[2 * tap + c], r1[c], r1[tap + c], r1[2 * tap + c], r2[c], r2[tap + c], r2[2 * tap + c]};
      UNROLL for (int t = 0; t < 9; ++t) Y_STORE(to, c * 9 + t, values[t]);
    }
    return;
  }
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < KH; ++r)
      for (int s = 0; s < KW; ++s) {
        __global const REAL* p = from + r * row_step + s * tap + c;
        REAL sum = p[0];
        for (int i = 1; i < splits; ++i) sum += p[i * step];
        Y_STORE(to, (c * KH + r) * KW + s, sum);
      }
}
