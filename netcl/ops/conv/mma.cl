// Convolution of 16-bit values on NVIDIA's matrix units, after a pass that puts the channels of a pixel side by side. It builds on
// matmul/ptx.cl: LOCAL_AT, COPY_16, COPY_16_NEAR, COPIES_COMMIT, COPIES_WAIT, FRAGMENTS, FRAGMENTS_TURNED, MMA_FLOAT16 and MMA_BFLOAT16.
//
// Channels last, with zeros up to a multiple of eight, every tap of every pixel is whole chunks of 16 bytes: they go straight into
// local memory beside the work, STAGES - 1 steps ahead, and what lies outside the image arrives as zeros. A chunk has its place in a row
// of local memory exclusive-ored with bits of the row, so that eight rows of a fragment fall into different banks. Sums are float32.
//
// C8: chunks of a pixel of one group. CB: chunks of one tap that follow each other, before the other taps of the same channels: what
// neighbouring taps share is then still in the cache.
// Operands X W Y and arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.

#ifndef BM
#define BM 128  // filters of a work-group
#define BN 128  // pixels of a work-group (weight gradient: columns)
#define WM 64  // of a warp; a multiple of 16
#define WN 64  // of a warp; a multiple of 32
#define STAGES 3
#define STEP 4  // chunks along k of one step, 4 or 8
#define MMA MMA_BFLOAT16
#endif
#define ITEMS ((BM / WM) * (BN / WN) * 32)
#define MI (WM / 16)
#define NI (WN / 8)
#ifndef EVEN
#define EVEN 0  // 1: CB is STEP, so that a step has one tap
#define Y_EIGHT 1  // 1: eight results are stored as 16 bytes
#endif
#define A_BYTES (BM * STEP * 16)
#define STAGE_BYTES ((BM + BN) * STEP * 16)
#define A_COPIES (BM * STEP / ITEMS)
#define B_COPIES (BN * STEP / ITEMS)

// By how much the chunk of a row is moved: eight rows of a fragment differ in it, or in which half of 128 bytes they have.
#if STEP == 8
#define MOVED(row) ((row) & 7)
#define MOVED_PIXEL(row) (((row) >> 3 & 3) << 1 | ((row) & 1))
#else
#define MOVED(row) ((row) >> 1 & 3)
#define MOVED_PIXEL(row) ((row) >> 3 & 3)
#endif

// Where a warp's part of the tile begins, and which rows and chunks a work-item copies of those that lie along k.
#define WARP                                                                                       \
  const int t = get_local_id(0), lane = t & 31, warp = t >> 5;                                     \
  const int wm = warp % (BM / WM) * WM, wn = warp / (BM / WM) * WN, chunk = t % STEP, row = t / STEP;

// The fragments of a, 16 rows each, for two chunks along k.
#define LOAD_A(a, stage, k)                                                                        \
  _Pragma("unroll") for (int i = 0; i < MI; ++i) FRAGMENTS(a[i][0], a[i][1], a[i][2], a[i][3],     \
      (stage) + a_from + (((k) + (lane >> 4)) ^ MOVED(lane & 15)) * 16 + i * (16 * STEP * 16));

#define MULTIPLY(acc, a, b)                                                                        \
  UNROLL for (int i = 0; i < MI; ++i) UNROLL for (int j = 0; j < NI; ++j) MMA(acc[i][j], a[i], b[j][0], b[j][1]);

// All steps: copies run STAGES - 1 of them ahead, fragments two chunks.
#define PRODUCT(acc, steps, COPY, LOAD_B)                                                          \
  {                                                                                                \
    uint a[2][MI][4], b[2][NI][2], from = 0, to = (STAGES - 1) * STAGE_BYTES;                      \
    _Pragma("unroll") for (int stage = 0; stage < STAGES - 1; ++stage) {                           \
      COPY(stage * STAGE_BYTES)                                                                    \
      COPIES_COMMIT();                                                                             \
    }                                                                                              \
    COPIES_WAIT(STAGES - 2);                                                                       \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                  \
    LOAD_A(a[0], 0, 0)                                                                             \
    LOAD_B(b[0], 0, 0)                                                                             \
    for (int step = 0; step < (steps); ++step) {                                                   \
      _Pragma("unroll") for (int k = 0; k < STEP / 2; ++k) {                                       \
        if (k == STEP / 2 - 1) {                                                                   \
          COPIES_WAIT(STAGES - 2);                                                                 \
          barrier(CLK_LOCAL_MEM_FENCE);                                                            \
          from = from == (STAGES - 1) * STAGE_BYTES ? 0 : from + STAGE_BYTES;                      \
        }                                                                                          \
        LOAD_A(a[(k + 1) & 1], from, (2 * k + 2) % STEP)                                           \
        LOAD_B(b[(k + 1) & 1], from, (2 * k + 2) % STEP)                                           \
        if (k == 0) {                                                                              \
          COPY(to)                                                                                 \
          COPIES_COMMIT();                                                                         \
          to = to == (STAGES - 1) * STAGE_BYTES ? 0 : to + STAGE_BYTES;                            \
        }                                                                                          \
        MULTIPLY(acc, a[k & 1], b[k & 1])                                                          \
      }                                                                                            \
    }                                                                                              \
  }

#define CLEAR(acc)                                                                                 \
  _Pragma("unroll") for (int i = 0; i < MI; ++i) _Pragma("unroll") for (int j = 0; j < NI; ++j)    \
      UNROLL for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;

#if PART == 1
#define TURN_PIXELS 16  // chunks of a tile
#define TURN_CHANNELS 32

// last[group][pixel of all images][channel], with zeros up to whole chunks, and packed[group][filter][tap][channel] likewise.
// Work-groups: tiles of pixels times tiles of channels times groups; then those that pack weights, a chunk per work-item.
__kernel __attribute__((reqd_work_group_size(256, 1, 1))) void mma_prepare(
    __global const X_T* restrict x, __global const X_T* restrict w, __global ushort* restrict last, __global ushort* restrict packed,
    int N, int C, int plane, int M, int taps, int groups, int C8, int tiles, int whole) {
  __local uint4 tile[TURN_CHANNELS * TURN_PIXELS];
  __global const ushort* values = (__global const ushort*)x;
  const int t = get_local_id(0), c_tiles = (C8 + 3) / 4, pixels = N * plane;
  if (get_group_id(0) >= tiles) {
    const int i = (get_group_id(0) - tiles) * 256 + t;
    if (i >= groups * M * taps * C8) return;
    // Neighbours read neighbours: taps, then what follows in the weights as they are.
    const int tap = i % taps, which = i / taps, m = INPUT_GRAD ? which % M : which / C8 % M;
    const int c0 = (INPUT_GRAD ? which / M % C8 : which % C8) * 8, group = which / (M * C8);
    ushort chunk[8];
    UNROLL for (int e = 0; e < 8; ++e) {
      const int c = c0 + e;
      const size_t of = INPUT_GRAD ? ((size_t)group * C + c) * M + m : ((size_t)group * M + m) * C + c;
      chunk[e] = c < C ? ((__global const ushort*)w)[of * taps + tap] : 0;
    }
    *(__global uint4*)(packed + ((((size_t)group * M + m) * taps + tap) * C8) * 8 + c0) = (uint4)(chunk[0] | (uint)chunk[1] << 16, chunk[2] | (uint)chunk[3] << 16,
                                                          chunk[4] | (uint)chunk[5] << 16, chunk[6] | (uint)chunk[7] << 16);
    return;
  }
  const int c0 = get_group_id(0) % c_tiles * TURN_CHANNELS, rest = get_group_id(0) / c_tiles;
  const int group = rest % groups, p0 = rest / groups * (TURN_PIXELS * 8);
  const int chunk = t % TURN_PIXELS, p = p0 + chunk * 8;
  UNROLL for (int i = 0; i < TURN_CHANNELS * TURN_PIXELS / 256; ++i) {
    const int row = t / TURN_PIXELS + i * (256 / TURN_PIXELS), c = c0 + row;
    uint4 found = (uint4)(0);
    if (c < C && p < pixels) {
      if (whole) {
        const int image = p / plane;
        found = *(__global const uint4*)(values + ((size_t)(image * groups + group) * C + c) * plane + (p - image * plane));
      } else {
        uint eight[8];
        UNROLL for (int e = 0; e < 8; ++e) {
          const int image = (p + e) / plane;
          eight[e] = p + e < pixels ? values[((size_t)(image * groups + group) * C + c) * plane + (p + e - image * plane)] : 0;
        }
        found = (uint4)(eight[0] | eight[1] << 16, eight[2] | eight[3] << 16, eight[4] | eight[5] << 16, eight[6] | eight[7] << 16);
      }
    }
    tile[row * TURN_PIXELS + (chunk ^ ((row >> 3 & 3) << 1 | (row & 1)))] = found;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  // The eight rows of a fragment are chosen so that a lane gets eight channels in a row of one pixel.
  const int lane = t & 31, i = lane & 7, turned = (i >> 1) * 8 + (lane >> 3) * 2 + (i & 1), c = c0 + (lane & 3) * 8;
  UNROLL for (int k = t >> 5; k < TURN_PIXELS; k += 8) {
    uint4 got;
    FRAGMENTS_TURNED(got.x, got.y, got.z, got.w, LOCAL_AT(tile) + (turned * TURN_PIXELS + (k ^ i)) * 16);
    const int pixel = p0 + k * 8 + (lane >> 2);
    if (pixel < pixels && c < C8 * 8) *(__global uint4*)(last + ((size_t)group * pixels + pixel) * (C8 * 8) + c) = got;
  }
}

// y[plane of an image and channel][chunk of pixels], with zeros up to whole chunks.
__kernel void mma_pad(__global const X_T* restrict x, __global ushort* restrict y, int planes, int plane, int padded) {
  const int i = get_global_id(0);
  if (i >= planes * padded) return;
  const int p = i % padded, which = i / padded;
  y[i] = p < plane ? ((__global const ushort*)x)[(size_t)which * plane + p] : 0;
}
#endif

#if PART == 2
#ifndef Y_PAIR
#define Y_PAIR(low, high) pair_bfloat16(low, high)
#endif

// Rows are filters, columns pixels.
// Work-groups: tiles of filters times tiles of pixels, groups times classes of pixels.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_mma(
    __global const ushort* restrict x, __global const ushort* restrict packed, END_POINTERS, CONV_NUMBERS, int C8, int CB,
    const REAL scale) {
  __local uint4 stages[STAGES * STAGE_BYTES / 16];
  GROUP_AND_AXES(get_group_id(1))
  const int plane = h.outs * v.outs, pixels = N * plane, row_tiles = (M + BM - 1) / BM;
  const int n0 = get_group_id(0) / row_tiles * BN, m0 = get_group_id(0) % row_tiles * BM;
  if (n0 >= pixels) return;
  WARP

  const uint base = LOCAL_AT(stages);
  const int of_weights = KH * KW * C8, rows = M - m0 - row;
  const int weights_at = (group * M + m0 + row) * of_weights;
  // Of each pixel where its window begins, and bits of the taps that lie inside the image: lines below, columns above.
  int window[B_COPIES], inside[B_COPIES];
  UNROLL for (int i = 0; i < B_COPIES; ++i) {
    const int p = n0 + row + i * (ITEMS / STEP), image = p / plane, line = (p - image * plane) / v.outs;
    const int y0 = line * h.in_step + h.first, x0 = (p - image * plane - line * v.outs) * v.in_step + v.first;
    window[i] = ((group * N + image) * H * W + y0 * W + x0) * C8;
    inside[i] = 0;
    for (int r = 0; r < h.taps; ++r) inside[i] |= (p < pixels && (uint)(y0 + r * h.step) < (uint)H) << r;
    for (int s = 0; s < v.taps; ++s) inside[i] |= ((uint)(x0 + s * v.step) < (uint)W) << (16 + s);
  }
  const uint a_to = base + (row * STEP + (chunk ^ MOVED(row))) * 16, b_to = base + A_BYTES + row * STEP * 16;
  int r = 0, s = 0, c_first = h.taps * v.taps > 0 ? 0 : C8, c_in = chunk;
#if EVEN
#define NEXT_TAPS                                                                                          \
  c_in -= CB, ++s;                                                                                         \
  r += s == v.taps, s = s == v.taps ? 0 : s;                                                               \
  c_first += r == h.taps ? CB : 0, r = r == h.taps ? 0 : r;
#else
#define NEXT_TAPS                                                                                          \
  while (c_in >= CB && c_first < C8) {                                                                     \
    c_in -= CB;                                                                                            \
    if (++s == v.taps) {                                                                                   \
      s = 0;                                                                                               \
      if (++r == h.taps) r = 0, c_first += CB;                                                             \
    }                                                                                                      \
  }
  NEXT_TAPS
#endif
  // Beyond the last tap copies are of no bytes.
#define COPY(stage)                                                                                        \
  {                                                                                                        \
    const int c = c_first + c_in, live = c_first < C8;                                                     \
    const int tap = (h.w_first + r * h.w_step) * KW + v.w_first + s * v.w_step;                            \
    const int at = (r * h.step * W + s * v.step) * C8 + c;                                                 \
    _Pragma("unroll") for (int i = 0; i < A_COPIES; ++i)                                                   \
        COPY_16_NEAR((stage) + a_to + i * (ITEMS * 16), packed + (long)(weights_at + i * (ITEMS / STEP) * of_weights + tap * C8 + c) * 8, \
               live && i * (ITEMS / STEP) < rows ? 16 : 0);                                                \
    _Pragma("unroll") for (int i = 0; i < B_COPIES; ++i)                                                   \
        COPY_16_NEAR((stage) + b_to + (chunk ^ MOVED_PIXEL(row + i * (ITEMS / STEP))) * 16 + i * (ITEMS * 16), x + (long)(window[i] + at) * 8, \
                     (inside[i] >> r & inside[i] >> (16 + s) & live) << 4);                                \
    c_in += STEP;                                                                                          \
    NEXT_TAPS                                                                                              \
  }

  // Columns of fragments are pixels in such an order that a lane ends with eight pixels in a row.
  const int i8 = lane & 7, side = lane >> 3, pixel = (i8 >> 1) * 8 + (i8 & 1) + (side >> 1) * 2;
  const uint a_from = base + (wm + (lane & 15)) * STEP * 16, b_from = base + A_BYTES + (wn + pixel) * STEP * 16;
#define LOAD_PIXELS(b, stage, k)                                                                           \
  _Pragma("unroll") for (int j = 0; j < NI; j += 2) FRAGMENTS(b[j][0], b[j][1], b[j + 1][0], b[j + 1][1],  \
      (stage) + b_from + (((k) + (side & 1)) ^ MOVED_PIXEL(pixel)) * 16 + (j / 4 * 32 + j % 4 * 2) * (STEP * 16));
  float acc[MI][NI][4];
  CLEAR(acc)
  PRODUCT(acc, (h.taps * v.taps * C8 + STEP - 1) / STEP, COPY, LOAD_PIXELS)

#define RESULT(i, j, e) acc[(i) >> 1][(j) * 4 + ((e) >> 1)][((i) & 1) * 2 + ((e) & 1)]
#if Y_EIGHT
  if (plane % 8 == 0 && h.out_step == 1 && v.out_step == 1) {
    UNROLL for (int j = 0; j < WN / 32; ++j) {
      const int p = n0 + wn + j * 32 + (lane & 3) * 8, n = p / plane;
      const size_t image = ((size_t)n * groups + group) * M * plane + (p - n * plane);
      UNROLL for (int i = 0; i < 2 * MI; ++i) {
        const int m = m0 + wm + (lane >> 2) + i * 8, filter = group * M + m;
        const size_t at = image + (size_t)m * plane;
        if (p < pixels && m < M) {
          uint pairs[4];
          UNROLL for (int e = 0; e < 4; ++e)
            pairs[e] = Y_PAIR(FINISHED(RESULT(i, j, 2 * e), filter, at + 2 * e), FINISHED(RESULT(i, j, 2 * e + 1), filter, at + 2 * e + 1));
          *(__global uint4*)(y + at) = (uint4)(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
    return;
  }
#endif
  // Pixels of a class lie apart, or a plane ends within eight: through local memory, so that neighbouring lanes store neighbours.
  __local float* slab = (__local float*)stages + warp * (16 * (WN + 1));
  COPIES_WAIT(0);
  UNROLL for (int i = 0; i < 2 * MI; i += 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int side = 0; side < 2; ++side)
      UNROLL for (int e = 0; e < WN / 4; ++e)
        slab[((lane >> 2) + side * 8) * (WN + 1) + e / 8 * 32 + (lane & 3) * 8 + e % 8] = RESULT(i + side, e / 8, e % 8);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int j = 0; j < WN / 32; ++j) {
      const int p = n0 + wn + j * 32 + lane, n = p / plane, line = (p - n * plane) / v.outs, place = p - n * plane - line * v.outs;
      const size_t image = ((size_t)n * groups + group) * M * OH * OW + (size_t)(h.out_first + line * h.out_step) * OW + v.out_first + place * v.out_step;
      for (int k = 0; k < 16; ++k) {
        const int m = m0 + wm + i * 8 + k;
        const size_t at = image + (size_t)m * OH * OW;
        if (p < pixels && m < M) Y_STORE(y, at, FINISHED(slab[k * (WN + 1) + j * 32 + lane], group * M + m, at));
      }
    }
  }
}
#endif

#if PART == 3
#define B_ROW (BN / 8)  // chunks of a row of b, which is a pixel

// Rows are filters, columns the weights of one in the order of CB, k runs over pixels: dy as it is, its planes padded to whole chunks.
// Work-groups: tiles of filters times tiles of columns times splits, groups; each split sums its own range of chunks.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_mma_weights(
    __global const ushort* restrict x, __global const ushort* restrict dy, __global float* restrict parts, CONV_NUMBERS, int C8, int CB,
    int splits) {
  __local uint4 stages[STAGES * STAGE_BYTES / 16];
  const int taps = KH * KW, columns = taps * C8, plane = OH * OW, per_image = (plane + 7) / 8, all = N * per_image;
  const int row_tiles = (M + BM - 1) / BM, tiles = row_tiles * ((columns + B_ROW - 1) / B_ROW), group = get_group_id(1);
  const int split = get_group_id(0) / tiles, tile = get_group_id(0) - split * tiles;
  const int m0 = tile % row_tiles * BM, n0 = tile / row_tiles * B_ROW;
  const int share = ((all + splits - 1) / splits + STEP - 1) / STEP * STEP, begin = min(all, split * share), end = min(all, begin + share);
  const Divisor by_image = divisor(per_image), by_width = divisor(OW);
  WARP

  const uint base = LOCAL_AT(stages);
  // The column a work-item copies: one tap of eight channels.
  const int mine = n0 + t % B_ROW, block = mine / (CB * taps), of_block = mine - block * (CB * taps), tap = of_block / CB;
  const int c = block * CB + of_block - tap * CB, at_y = tap / KW * dilation_h - pad_h, at_x = tap % KW * dilation_w - pad_w;
  const int b_row = t / B_ROW;
  const uint a_to = base + (row * STEP + (chunk ^ MOVED(row))) * 16;
  int k0 = begin;
#define COPY_TERMS(stage)                                                                                  \
  {                                                                                                        \
    const int of_dy = k0 + chunk, image = over(of_dy, by_image);                                           \
    const long from_dy = ((long)(image * groups + group) * M + m0 + row) * per_image + (of_dy - image * per_image); \
    _Pragma("unroll") for (int i = 0; i < A_COPIES; ++i)                                                   \
        COPY_16((stage) + a_to + i * (ITEMS * 16), dy + (from_dy + (long)i * (ITEMS / STEP) * per_image) * 8, \
                of_dy < end && m0 + row + i * (ITEMS / STEP) < M ? 16 : 0);                                \
    _Pragma("unroll") for (int i = 0; i < B_COPIES; ++i) {                                                 \
      const int k = b_row + i * (ITEMS / B_ROW), part = k0 + (k >> 3), n = over(part, by_image);           \
      const int p = (part - n * per_image) * 8 + (k & 7), line = over(p, by_width);                        \
      const int py = line * stride_h + at_y, px = (p - line * OW) * stride_w + at_x;                       \
      const int inside = (part < end) & (p < plane) & (mine < columns) & ((uint)py < (uint)H) & ((uint)px < (uint)W); \
      COPY_16_NEAR((stage) + base + A_BYTES + (k * B_ROW + ((t % B_ROW) ^ (k & 7))) * 16,                  \
                   x + ((long)((group * N + n) * H * W + py * W + px) * C8 + c) * 8, inside << 4);         \
    }                                                                                                      \
    k0 += STEP;                                                                                            \
  }

  const int k_row = (lane >> 3 & 1) * 8 + (lane & 7);
  const uint a_from = base + (wm + (lane & 15)) * STEP * 16, b_from = base + A_BYTES + k_row * B_ROW * 16;
#define LOAD_COLUMNS(b, stage, k)                                                                          \
  _Pragma("unroll") for (int j = 0; j < NI; j += 2) FRAGMENTS_TURNED(b[j][0], b[j][1], b[j + 1][0], b[j + 1][1], \
      (stage) + b_from + ((k) * 8 * B_ROW + ((wn / 8 + j + (lane >> 4)) ^ (lane & 7))) * 16);
  float acc[MI][NI][4];
  CLEAR(acc)
  PRODUCT(acc, (end - begin + STEP - 1) / STEP, COPY_TERMS, LOAD_COLUMNS)

  const int width = columns * 8;
  __global float* sums = parts + ((size_t)split * groups + group) * M * width;
  UNROLL for (int i = 0; i < 2 * MI; ++i) {
    const int m = m0 + wm + (lane >> 2) + i * 8;
    UNROLL for (int j = 0; j < NI; ++j) {
      const int column = n0 * 8 + wn + j * 8 + (lane & 3) * 2;
      if (m < M && column < width)
        *(__global float2*)(sums + (size_t)m * width + column) = (float2)(acc[i >> 1][j][(i & 1) * 2], acc[i >> 1][j][(i & 1) * 2 + 1]);
    }
  }
}
#endif

#if PART == 4
// dw[filter][channel][tap] = the sum of its parts. One work-item per weight.
__kernel void mma_collect(__global const float* restrict parts, __global Y_T* restrict dw, int filters, int C, int taps, int C8, int CB,
                          int splits) {
  const int width = taps * C8 * 8, i = get_global_id(0);
  if (i >= filters * C * taps) return;
  const int tap = i % taps, c = i / taps % C, filter = i / taps / C, block = c / (CB * 8);
  const size_t from = (size_t)filter * width + (block * taps + tap) * (CB * 8) + (c - block * (CB * 8)), step = (size_t)filters * width;
  float sum = parts[from];
  for (int s = 1; s < splits; ++s) sum += parts[s * step + from];
  Y_STORE(dw, i, sum);
}
#endif
