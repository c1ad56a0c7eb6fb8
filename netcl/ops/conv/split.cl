// Convolution on GPUs whose results are too few to occupy all compute units: work-groups divide the sum over channels and taps.
//
// A work-group makes BM filters x BN pixels over one of `splits` parts of the sum, BK terms at a time; a work-item makes TM x 4 of them.
// With several parts, sums go to `y` part after part, and sum_splits of columns.cl adds them in their order and ends the convolution. Weights are
// read where they are. While one step is multiplied out of local memory, the next is on its way into registers.
// Operands X W Y and arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#pragma OPENCL FP_CONTRACT ON

#ifndef BM
#define BM 64  // filters of a work-group; a multiple of 4 * TM
#define BN 64  // pixels of a work-group; a multiple of 32
#define BK 16  // terms per step
#define TM 4  // filters of a work-item, a multiple of 4
#define POINT 0  // 1: a 1 x 1 kernel without padding, not an input gradient: every tap is inside
#define W_QUADS 0  // 1: weights of a filter are loaded four at a time
#endif
#define ITEMS (BM / TM * (BN / 4))
#define APART (BM / TM * 4)  // from four filters of a work-item to the next four
#define A_PITCH (BM + 4)  // values that arrive term by term fall into different banks
#define SLOTS (BK * BN / ITEMS)
#if INPUT_GRAD  // neighbours load neighbouring filters, else neighbouring terms of a filter
#define EACH 1
#define TERM(i) (t / BM + (i) * (ITEMS / BM))
#define ROW(i) (t % BM)
#else
#define EACH (W_QUADS ? 4 : 1)
#define TERM(i) (t % (BK / EACH) * EACH)
#define ROW(i) (t / (BK / EACH) + (i) * (ITEMS * EACH / BK))
#endif
#define LOADS ((BK * BM / EACH + ITEMS - 1) / ITEMS)
#define LOADED(i) (BK * BM / EACH % ITEMS == 0 || ROW(i) < BM)

// Work-groups: tiles of pixels, tiles of filters, groups times classes of pixels times splits.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void conv_split(
    __global const X_T* restrict x, __global const W_T* restrict w, END_POINTERS, CONV_NUMBERS, int splits, const REAL scale) {
  __local REAL a_tile[2][BK * A_PITCH] __attribute__((aligned(16))), b_tile[2][BK * BN] __attribute__((aligned(16)));
  const int which = get_group_id(2) / splits, split = get_group_id(2) - which * splits;
  TILE_OF_GROUP(which)
  const int taps = h.taps * v.taps, depth = C * taps, share = ((depth + splits - 1) / splits + BK - 1) / BK * BK;
  const int begin = min(depth, split * share), end = min(depth, begin + share);
  // Eight work-items across and four down read the fewest words. Neighbours read the same pixels, and those two apart the same filters:
  // half a wave's vectors come out of local memory at once.
  const int t = get_local_id(0), lane = t % 32, wave = t / 32;
  const int right = (wave % (BN / 32) * 8 + lane / 2 % 8) * 4, down = (wave / (BN / 32) * 4 + lane % 2 + lane / 16 * 2) * 4;

  PIXEL_OF_ITEM
#if POINT
  planes += y0 * W + x0;
#else
  const Divisor by_taps = divisor(max(taps, 1)), by_width = divisor(max(v.taps, 1));
#endif
#define TAP_OF(k) const int c = over(k, by_taps), tap = (k)-c * taps, r = over(tap, by_width), s = tap - r * v.taps;

  REAL acc[TM][4], from_x[SLOTS], from_w[LOADS * EACH];
  UNROLL for (int i = 0; i < TM * 4; ++i) acc[i / 4][i % 4] = 0;
  for (int k0 = begin - BK; k0 < end; k0 += BK) {
    const int next = k0 + BK, now = (k0 - begin) / BK & 1;
    if (next < end) {
      UNROLL for (int i = 0; i < LOADS; ++i) {
        const int k = next + TERM(i), m = min(m0 + ROW(i), M - 1);
#if INPUT_GRAD
        TAP_OF(k)
        const int at = (h.w_first + r * h.w_step) * KW + v.w_first + s * v.w_step;
        from_w[i] = k < end ? W_LOAD(w, (((size_t)group * C + c) * M + m) * KH * KW + at) : (REAL)0;
#elif W_QUADS
        const float4 four = k < end && LOADED(i) ? *(__global const float4*)(w + ((size_t)group * M + m) * depth + k) : (float4)(0);
        from_w[4 * i] = four.x, from_w[4 * i + 1] = four.y, from_w[4 * i + 2] = four.z, from_w[4 * i + 3] = four.w;
#else
        from_w[i] = k < end && LOADED(i) ? W_LOAD(w, ((size_t)group * M + m) * depth + k) : (REAL)0;
#endif
      }
      UNROLL for (int i = 0; i < SLOTS; ++i) {
        const int k = next + t / BN + i * (ITEMS / BN);
#if POINT
        from_x[i] = k < end ? X_LOAD(planes, k * H * W) : (REAL)0;
#else
        TAP_OF(k)
        const int py = y0 + r * h.step, px = x0 + s * v.step;
        from_x[i] = k < end && py >= 0 && py < H && px >= 0 && px < W ? X_LOAD(planes, (c * H + py) * W + px) : (REAL)0;
#endif
      }
    }
    if (k0 >= begin) {
      UNROLL for (int k = 0; k < BK; ++k) {
        const float4 b = *(__local const float4*)&b_tile[now][k * BN + right];
        const REAL z[4] = {b.x, b.y, b.z, b.w};
        UNROLL for (int q = 0; q < TM / 4; ++q) {
          const float4 a = *(__local const float4*)&a_tile[now][k * A_PITCH + down + q * APART];
          const REAL u[4] = {a.x, a.y, a.z, a.w};
          UNROLL for (int i = 0; i < 16; ++i) acc[4 * q + i / 4][i % 4] += u[i / 4] * z[i % 4];
        }
      }
    }
    if (next < end) {
      UNROLL for (int i = 0; i < LOADS * EACH; ++i)
        if (LOADED(i / EACH)) a_tile[now ^ 1][(TERM(i / EACH) + i % EACH) * A_PITCH + ROW(i / EACH)] = from_w[i];
      UNROLL for (int i = 0; i < SLOTS; ++i) b_tile[now ^ 1][(t / BN + i * (ITEMS / BN)) * BN + column] = from_x[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  y += (size_t)split * N * groups * M * OH * OW;
  STORE_TILE(4, right + j, down + i / 4 * APART + i % 4)
}
