// Convolution on GPUs.
//
// gemm     implicit GEMM: a work-group makes BM filters x BN pixels, BK rows of the unfolded input at a time. The input is
//          gathered straight into local memory; no unfolded matrix exists.
// naive    one work-item per result.
// Operands X W Y and arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#pragma OPENCL FP_CONTRACT ON

#ifndef PART
#define PART 0  // 1: only forward and input gradient, 2: only the weight gradient; a program compiles what it needs
#endif
#ifndef BM
#define BM 32  // filters of a work-group
#define BN 32  // pixels of a work-group (weight gradient: columns)
#define BK 16  // rows of the unfolded input per step (weight gradient: pixels)
#define TM 4  // filters of a work-item
#define TN 4  // pixels of a work-item
#endif
#ifndef LANES
#define LANES 64  // work-items that share one weight of the naive weight gradient; a power of two
#endif
#define TX (BN / TN)
#define ITEMS (TX * (BM / TM))  // of a work-group; a multiple of BN and of BK
// acc += a_tile^T b_tile, one step of BK terms.
#define MULTIPLY                                                                                      \
  UNROLL for (int k = 0; k < BK; ++k) {                                                               \
    REAL a[TM], b[TN];                                                                                \
    UNROLL for (int i = 0; i < TM; ++i) a[i] = a_tile[k * A_PITCH + ty * TM + i];                     \
    UNROLL for (int j = 0; j < TN; ++j) b[j] = b_tile[k * B_PITCH + tx + j * TX];                     \
    UNROLL for (int i = 0; i < TM; ++i) UNROLL for (int j = 0; j < TN; ++j) acc[i][j] += a[i] * b[j]; \
  }
#define A_PITCH (BM + 1)        // one more than a row: neighbours of a column fall into different banks
#define B_PITCH (BN + 1)
#define B_SLOTS (BK * BN / ITEMS)

// ---- forward and input gradient

#if PART != 2
// Work-groups: tiles of pixels, tiles of filters, groups times classes of pixels.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_gemm(
    __global const X_T* restrict x, __global const W_T* restrict w, END_POINTERS, CONV_NUMBERS, const REAL scale) {
  __local REAL a_tile[BK * A_PITCH], b_tile[BK * B_PITCH];
  TILE_OF_GROUP(get_group_id(2))
  const int taps = h.taps * v.taps, depth = C * taps, t = get_local_id(0), tx = t % TX, ty = t / TX;
  const Divisor by_taps = divisor(max(taps, 1)), by_width = divisor(max(v.taps, 1));

  PIXEL_OF_ITEM

  REAL acc[TM][TN];
  CLEAR_TILE(TN)

  for (int k0 = 0; k0 < depth; k0 += BK) {
    for (int e = t; e < BK * BM; e += ITEMS) {
      const int k = k0 + e % BK, m = m0 + e / BK;
      REAL value = 0;
      if (k < depth && m < M) {
#if INPUT_GRAD
        const int c = over(k, by_taps), tap = k - c * taps, r = over(tap, by_width), s = tap - r * v.taps;
        const int at = (h.w_first + r * h.w_step) * KW + v.w_first + s * v.w_step;
        value = W_LOAD(w, (((size_t)group * C + c) * M + m) * KH * KW + at);
#else
        value = W_LOAD(w, ((size_t)group * M + m) * depth + k);
#endif
      }
      a_tile[e % BK * A_PITCH + e / BK] = value;
    }
    UNROLL for (int i = 0; i < B_SLOTS; ++i) {
      const int slot = t / BN + i * (ITEMS / BN), k = k0 + slot;
      const int c = over(k, by_taps), tap = k - c * taps, r = over(tap, by_width), s = tap - r * v.taps;
      const int py = y0 + r * h.step, px = x0 + s * v.step;
      REAL value = 0;
      if (k < depth && py >= 0 && py < H && px >= 0 && px < W) value = X_LOAD(planes, (c * H + py) * W + px);
      b_tile[slot * B_PITCH + column] = value;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    MULTIPLY
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  STORE_TILE(TN, tx + j * TX, ty * TM + i)
}

__kernel void conv_naive(__global const X_T* restrict x, __global const W_T* restrict w, END_POINTERS, CONV_NUMBERS, const REAL scale) {
  const int i = get_global_id(0);
  if (i >= N * groups * M * OH * OW) return;
  const int px = i % OW, py = i / OW % OH, filter = i / OW / OH % (groups * M), image = i / OW / OH / (groups * M), group = filter / M;
  const Axis h = axis_of(OH, KH, stride_h, pad_h, dilation_h, py % stride_h), v = axis_of(OW, KW, stride_w, pad_w, dilation_w, px % stride_w);
  const int y0 = (py - h.out_first) / h.out_step * h.in_step + h.first, x0 = (px - v.out_first) / v.out_step * v.in_step + v.first;
  __global const X_T* planes = x + ((size_t)image * groups + group) * C * H * W;
  REAL sum = 0;
  for (int c = 0; c < C; ++c) {
    const size_t of = (INPUT_GRAD ? ((size_t)group * C + c) * M + filter - group * M : (size_t)filter * C + c) * KH * KW;
    for (int r = 0; r < h.taps; ++r)
      for (int s = 0; s < v.taps; ++s) {
        const int line = y0 + r * h.step, place = x0 + s * v.step;
        if (line >= 0 && line < H && place >= 0 && place < W)
          sum += W_LOAD(w, of + (h.w_first + r * h.w_step) * KW + v.w_first + s * v.w_step) * X_LOAD(planes, (c * H + line) * W + place);
      }
  }
  Y_STORE(y, i, FINISHED(sum, filter, i));
}
#endif

// ---- weight gradient

#if PART != 1
// Columns are the weights of a filter. Work-groups: tiles of columns, tiles of filters, groups times splits; each split sums
// its own range of pixels into its own copy of the result.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_gemm_weights(
    __global const X_T* restrict x, __global const W_T* restrict dy, __global Y_T* restrict dw, CONV_NUMBERS, int splits) {
  __local REAL a_tile[BK * A_PITCH], b_tile[BK * B_PITCH];
  const int group = get_group_id(2) / splits, split = get_group_id(2) - group * splits;
  const int taps = KH * KW, columns = C * taps, plane = OH * OW, all = N * plane, n0 = get_group_id(0) * BN, m0 = get_group_id(1) * BM;
  const int share = ((all + splits - 1) / splits + BK - 1) / BK * BK, begin = min(all, split * share), end = min(all, begin + share);
  const int t = get_local_id(0), tx = t % TX, ty = t / TX, lane = t % BK;
  const Divisor by_plane = divisor(max(plane, 1)), by_width = divisor(max(OW, 1));

  int at_y[B_SLOTS], at_x[B_SLOTS], at[B_SLOTS];
  UNROLL for (int i = 0; i < B_SLOTS; ++i) {
    const int k = min(n0 + t / BK + i * (ITEMS / BK), columns - 1), c = k / taps, tap = k - c * taps;
    at_y[i] = tap / KW * dilation_h - pad_h;
    at_x[i] = tap % KW * dilation_w - pad_w;
    at[i] = (c * H + at_y[i]) * W + at_x[i];
  }
  REAL acc[TM][TN];
  CLEAR_TILE(TN)

  for (int p0 = begin; p0 < end; p0 += BK) {
    const int p = min(p0 + lane, all - 1), ok = p0 + lane < end;
    const int image = over(p, by_plane), pixel = p - image * plane, row = over(pixel, by_width), place = pixel - row * OW;
    __global const W_T* dy_image = dy + ((size_t)image * groups + group) * M * plane;
    __global const X_T* x_image = x + ((size_t)image * groups + group) * C * H * W;
    for (int i = t / BK; i < BM; i += ITEMS / BK)
      a_tile[lane * A_PITCH + i] = ok && m0 + i < M ? W_LOAD(dy_image, (m0 + i) * plane + pixel) : (REAL)0;
    UNROLL for (int i = 0; i < B_SLOTS; ++i) {
      const int py = row * stride_h + at_y[i], px = place * stride_w + at_x[i];
      REAL value = 0;
      if (ok && py >= 0 && py < H && px >= 0 && px < W) value = X_LOAD(x_image, at[i] + row * stride_h * W + place * stride_w);
      b_tile[lane * B_PITCH + t / BK + i * (ITEMS / BK)] = value;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    MULTIPLY
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  __global Y_T* result = dw + (size_t)split * groups * M * columns;
  UNROLL for (int i = 0; i < TM; ++i) {
    const int m = m0 + ty * TM + i;
    UNROLL for (int j = 0; j < TN; ++j) {
      const int k = n0 + tx + j * TX;
      if (m < M && k < columns) Y_STORE(result, ((size_t)group * M + m) * columns + k, acc[i][j]);
    }
  }
}

// Work-group = one weight and one of `splits` parts of the pixels: its work-items share them, then fold their sums pairwise.
__kernel __attribute__((reqd_work_group_size(LANES, 1, 1))) void conv_naive_weights(
    __global const X_T* restrict x, __global const W_T* restrict dy, __global Y_T* restrict dw, CONV_NUMBERS, int splits) {
  __local REAL sums[LANES];
  const int weight = get_group_id(0), lane = get_local_id(0), plane = OH * OW;
  const int share = (N * plane + splits - 1) / splits, begin = get_group_id(1) * share, end = min(N * plane, begin + share);
  const int s = weight % KW, r = weight / KW % KH, c = weight / (KW * KH) % C, filter = weight / (KW * KH * C), group = filter / M;
  REAL sum = 0;
  for (int p = begin + lane; p < end; p += LANES) {
    const int image = p / plane, pixel = p - image * plane;
    const int py = pixel / OW * stride_h + r * dilation_h - pad_h, px = pixel % OW * stride_w + s * dilation_w - pad_w;
    if (py >= 0 && py < H && px >= 0 && px < W)
      sum += W_LOAD(dy, ((size_t)image * groups * M + filter) * plane + pixel) *
             X_LOAD(x, ((((size_t)image * groups + group) * C + c) * H + py) * W + px);
  }
  sums[lane] = sum;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int half_of = LANES / 2; half_of > 0; half_of /= 2) {
    if (lane < half_of) sums[lane] += sums[lane + half_of];
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  if (lane == 0) Y_STORE(dw, (size_t)get_group_id(1) * get_num_groups(0) + weight, sums[0]);
}
#endif
