// Convolution on GPUs as one matrix product per tap of the kernel, for channels enough to fill a tile.
//
// A work-group makes BM x BN results, BK terms at a time; a work-item makes TM x TN of them, in blocks of 4 x 4 that neighbours
// interleave. All terms of a step belong to one tap, so whether a pixel lies inside the image is asked once per step and not
// once per term. While one step is multiplied out of local memory, the next is on its way into registers.
// Operands X W Y and arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#pragma OPENCL FP_CONTRACT ON

#ifndef REAL4
#define REAL4 float4  // four of what sums are kept in
#define BM 64  // filters of a work-group; a multiple of 4 * TM
#define BN 128  // pixels (weight gradient: channels) of a work-group; a multiple of 8 * TN
#define BK 16  // channels (weight gradient: pixels) per step
#define TM 8
#define TN 8
#endif

#define ITEMS ((BM / TM) * (BN / TN))
#define ACROSS (BN / (8 * TN))  // blocks of 32 work-items side by side

// Where a work-item's results lie in the tile: rows at DOWN + 16 i, columns at RIGHT + 32 j, four each.
#define PLACE                                                                                                \
  const int t = get_local_id(0), lane = t & 31, block = t >> 5;                                              \
  const int down = block / ACROSS * (4 * TM) + (lane >> 3) * 4, right = block % ACROSS * (8 * TN) + (lane & 7) * 4;

// acc += a_tile^T b_tile, one step of BK terms.
#define MULTIPLY(acc, a_tile, b_tile)                                                                         \
  _Pragma("unroll") for (int k = 0; k < BK; ++k) {                                                            \
    REAL4 a[TM / 4], b[TN / 4];                                                                               \
    _Pragma("unroll") for (int i = 0; i < TM / 4; ++i) a[i] = *(__local const REAL4*)&a_tile[k][down + 16 * i];  \
    _Pragma("unroll") for (int j = 0; j < TN / 4; ++j) b[j] = *(__local const REAL4*)&b_tile[k][right + 32 * j]; \
    _Pragma("unroll") for (int i = 0; i < TM / 4; ++i) _Pragma("unroll") for (int j = 0; j < TN / 4; ++j) {   \
      ROW(acc[4 * i + 0], a[i].x, b[j], j)                                                                    \
      ROW(acc[4 * i + 1], a[i].y, b[j], j)                                                                    \
      ROW(acc[4 * i + 2], a[i].z, b[j], j)                                                                    \
      ROW(acc[4 * i + 3], a[i].w, b[j], j)                                                                    \
    }                                                                                                         \
  }
#define ROW(row, u, v, j)   \
  row[4 * j + 0] += u * v.x; \
  row[4 * j + 1] += u * v.y; \
  row[4 * j + 2] += u * v.z; \
  row[4 * j + 3] += u * v.w;

#if PART == 1
// packed[group][tap][channel][filter], with zeros up to whole tiles: what conv_taps reads without asking where it ends.
__kernel void pack_taps(__global const X_T* restrict w, __global Y_T* restrict packed, int C, int M, int taps, int deep, int wide, int n) {
  const int i = get_global_id(0);
  if (i >= n) return;
  const int m = i % wide, c = i / wide % deep, tap = i / wide / deep % taps, group = i / wide / deep / taps;
  const size_t of = INPUT_GRAD ? ((size_t)group * C + c) * M + m : ((size_t)group * M + m) * C + c;
  Y_STORE(packed, i, c < C && m < M ? X_LOAD(w, of * taps + tap) : (REAL)0);
}
#endif

#if PART == 2
#define SLOTS (BK * BN / ITEMS)       // values of the input a work-item fetches per step
#define FOURS (BK * BM / 4 / ITEMS)  // of the weights, four at once

// deep, wide: C and M up to whole tiles.
// Work-groups: tiles of pixels, tiles of filters, groups times classes of pixels.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_taps(
    __global const X_T* restrict x, __global const REAL* restrict packed, END_POINTERS, CONV_NUMBERS, int deep, int wide,
    const REAL scale) {
  __local REAL a_tile[2][BK][BM] __attribute__((aligned(16))), b_tile[2][BK][BN] __attribute__((aligned(16)));
  TILE_OF_GROUP(get_group_id(2))
  PLACE

  // Fetching: one pixel for every work-item, channels SLOTS apart; four filters of FOURS channels.
  const int first = t / BN, a_row = t / (BM / 4), a_column = t % (BM / 4) * 4;
  PIXEL_OF_ITEM
  __global const REAL* weights = packed + (size_t)group * KH * KW * deep * wide + m0;
  const int per_tap = deep / BK, steps = h.taps * v.taps * per_tap;

  REAL acc[TM][TN], from_x[SLOTS];
  REAL4 from_w[FOURS];
  CLEAR_TILE(TN)
  int r = 0, s = 0, c0 = 0, at = 0, inside = 0;
  __global const REAL* tap_weights = weights;
#define ENTER_TAP                                                                                          \
  {                                                                                                        \
    const int py = y0 + r * h.step, px = x0 + s * v.step;                                                  \
    inside = py >= 0 && py < H && px >= 0 && px < W;                                                       \
    at = py * W + px;                                                                                      \
    tap_weights = weights + (size_t)((h.w_first + r * h.w_step) * KW + v.w_first + s * v.w_step) * deep * wide; \
  }
#define FETCH                                                                                              \
  _Pragma("unroll") for (int i = 0; i < SLOTS; ++i) {                                                      \
    const int c = c0 + first + i * (ITEMS / BN);                                                           \
    from_x[i] = inside && c < C ? X_LOAD(planes, c * H * W + at) : (REAL)0;                                \
  }                                                                                                        \
  _Pragma("unroll") for (int i = 0; i < FOURS; ++i) from_w[i] =                                            \
      *(__global const REAL4*)&tap_weights[(size_t)(c0 + a_row + i * (4 * ITEMS / BM)) * wide + a_column];
#define KEEP(side)                                                                                         \
  _Pragma("unroll") for (int i = 0; i < SLOTS; ++i) b_tile[side][first + i * (ITEMS / BN)][column] = from_x[i]; \
  UNROLL for (int i = 0; i < FOURS; ++i) * (__local REAL4*)&a_tile[side][a_row + i * (4 * ITEMS / BM)][a_column] = from_w[i];

  if (steps > 0) {
    ENTER_TAP
    FETCH
    KEEP(0)
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int step = 0; step < steps; ++step) {
    const int more = step + 1 < steps;
    if (more) {
      c0 += BK;
      if (c0 == deep) {
        c0 = 0;
        if (++s == v.taps) s = 0, ++r;
        ENTER_TAP
      }
      FETCH
    }
    MULTIPLY(acc, a_tile[step & 1], b_tile[step & 1])
    if (more) {
      KEEP((step + 1) & 1)
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  STORE_TILE(TN, right + j / 4 * 32 + j % 4, down + i / 4 * 16 + i % 4)
}
#endif

#if PART == 3
#define A_ROWS (BM * BK / ITEMS)
#define B_ROWS (BN * BK / ITEMS)

// Work-groups: tiles of channels times taps, tiles of filters, groups times splits; each split sums its own range of pixels into its
// own copy of the result.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_taps_weights(
    __global const X_T* restrict x, __global const W_T* restrict dy, __global Y_T* restrict dw, CONV_NUMBERS, int splits) {
  // Four more than a row: values that arrive pixel by pixel fall into different banks.
  __local REAL a_tile[2][BK][BM + 4] __attribute__((aligned(16))), b_tile[2][BK][BN + 4] __attribute__((aligned(16)));
  const int group = get_group_id(2) / splits, split = get_group_id(2) - group * splits;
  const int taps = KH * KW, tap = get_group_id(0) % taps, c0 = get_group_id(0) / taps * BN, m0 = get_group_id(1) * BM;
  const int plane = OH * OW, all = N * plane;
  const int share = ((all + splits - 1) / splits + BK - 1) / BK * BK, begin = min(all, split * share), end = min(all, begin + share);
  PLACE
  const int term = t % BK, first = t / BK, at_y = tap / KW * dilation_h - pad_h, at_x = tap % KW * dilation_w - pad_w;
  const int columns = min(BN, C - c0), rows = min(BM, M - m0);

  REAL acc[TM][TN], from_dy[A_ROWS], from_x[B_ROWS];
  CLEAR_TILE(TN)
  int p = begin + term, image = p / plane, row = (p - image * plane) / OW, place = p - image * plane - row * OW;
#define FETCH_TERMS                                                                                        \
  {                                                                                                        \
    const int py = row * stride_h + at_y, px = place * stride_w + at_x, here = p < end;                    \
    const int inside = here && py >= 0 && py < H && px >= 0 && px < W;                                     \
    __global const W_T* of_dy = dy + (((size_t)image * groups + group) * M + m0) * plane + row * OW + place; \
    __global const X_T* of_x = x + (((size_t)image * groups + group) * C + c0) * H * W + (py * W + px);    \
    _Pragma("unroll") for (int i = 0; i < A_ROWS; ++i) {                                                   \
      const int m = first + i * (ITEMS / BK);                                                              \
      from_dy[i] = here && m < rows ? W_LOAD(of_dy, m * plane) : (REAL)0;                                  \
    }                                                                                                      \
    _Pragma("unroll") for (int i = 0; i < B_ROWS; ++i) {                                                   \
      const int c = first + i * (ITEMS / BK);                                                              \
      from_x[i] = inside && c < columns ? X_LOAD(of_x, c * H * W) : (REAL)0;                               \
    }                                                                                                      \
  }
#define KEEP_TERMS(side)                                                                                   \
  _Pragma("unroll") for (int i = 0; i < A_ROWS; ++i) a_tile[side][term][first + i * (ITEMS / BK)] = from_dy[i]; \
  UNROLL for (int i = 0; i < B_ROWS; ++i) b_tile[side][term][first + i * (ITEMS / BK)] = from_x[i];

  if (begin < end) {
    FETCH_TERMS
    KEEP_TERMS(0)
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  int side = 0;
  for (int p0 = begin; p0 < end; p0 += BK) {
    const int more = p0 + BK < end;
    if (more) {
      p += BK;
      place += BK;
      while (place >= OW) place -= OW, ++row;
      while (row >= OH) row -= OH, ++image;
      FETCH_TERMS
    }
    MULTIPLY(acc, a_tile[side], b_tile[side])
    side ^= 1;
    if (more) {
      KEEP_TERMS(side)
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  __global Y_T* result = dw + (size_t)split * groups * M * C * taps + (size_t)group * M * C * taps;
  UNROLL for (int i = 0; i < TM; ++i) {
    const int m = down + i / 4 * 16 + i % 4;
    UNROLL for (int j = 0; j < TN; ++j) {
      const int c = right + j / 4 * 32 + j % 4;
      if (m < rows && c < columns) Y_STORE(result, ((size_t)(m0 + m) * C + c0 + c) * taps + tap, acc[i][j]);
    }
  }
}
#endif
