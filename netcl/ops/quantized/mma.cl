// y = x w' + bias for up to 8 * SETS columns of activations on the matrix units of NVIDIA GPUs, with ptx.cl and codes.cl (V 2) before it.
//   WARPS  of a work-group, which share the columns of MT strips      DEEP  runs of 32 columns that a warp loads before it multiplies
//   SPLIT  1: x is float32; a token takes two columns of a fragment, x rounded to half and 2048 times the rest, so nothing is lost
//   X_HALVES  1: x is float16
// Rows g and g + 8 of a fragment are rows 2g and 2g + 1 of a strip, and lane t of a row holds columns 4t to 4t + 3 and 16 + 4t to 19 + 4t
// of a run: the order of columns in a product is free if both operands agree. So a lane reads 8 bytes of codes, and 8 or 16 of x, straight
// into registers. Codes become halves exactly (1024 + code, less 1024 + OFFSET); scales are applied to sums in float32.
// From codes.cl: PLAIN LOW HIGH; from ptx.cl: MMA_FLOAT16; from the launch: X_T X_QUAD(p), BIAS_T BIAS_LOAD, Y_T Y_STORE.
#define LANE_WORDS (PLAIN ? 8 : (LOW == 4 ? 1 : 2) + HIGH)

static inline float of_half(const uint bits) {
  const ushort low = bits; float f;
  __asm__("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(low));
  return f;
}

typedef struct { INTS words[LANE_WORDS]; FLOATS scale[PER_RUN], minimum[PER_RUN]; } held;

// What a lane needs of a run of a strip.
static inline void hold(held* h, __global const uchar* strip, const int run, const int first, const int t) {
  __global const uchar* p = strip + (size_t)(run / PER_RECORD) * RECORD;
#if PLAIN
  UNROLL for (int i = 0; i < 8; ++i) h->words[i].x = *(__global const int*)(p + ((i & 3) + 4 * t + (i & 4) * 4) * 32 + first * 2);
#else
  __global const uchar* codes = p + AT_CODES + run % PER_RECORD * WORDS * 64 + first * 4;
#if LOW == 2
  h->words[0] = GET_INTS(codes), h->words[1] = GET_INTS(codes + 64);
#else
  h->words[0] = GET_INTS(codes + t * 64);
#if LOW == 8
  h->words[1] = GET_INTS(codes + (t + 4) * 64);
#endif
#endif
  UNROLL for (int i = 0; i < HIGH; ++i) h->words[LANE_WORDS - HIGH + i] = GET_INTS(codes + (LOW + i) * 64);
  UNROLL for (int i = 0; i < PER_RUN; ++i) {
    h->scale[i] = GROUP_SCALE(p, run % PER_RECORD * PER_RUN + i, first);
#if MIN
    h->minimum[i] = GROUP_MIN(p, run % PER_RECORD * PER_RUN + i, first);
#endif
  }
#endif
}

// Bytes 0, 1 (or 2, 3) of a word of codes as two halves, less what was added to them.
static inline uint two_halves(const uint codes, const int upper) {
  uint pair, exact;
  if (upper) __asm__("prmt.b32 %0, %1, %2, 0x4342;" : "=r"(pair) : "r"(codes), "r"(0x64646464u));
  else __asm__("prmt.b32 %0, %1, %2, 0x4140;" : "=r"(pair) : "r"(codes), "r"(0x64646464u));
  const uint off = (0x6400u + (LOW == 8 ? 128 : OFFSET)) * 0x10001u;
  __asm__("sub.rn.f16x2 %0, %1, %2;" : "=r"(exact) : "r"(pair), "r"(off));
  return exact;
}

// The fragment of columns 16 * part to 16 * part + 15 of a run: rows 2g, 2g + 1, then both four slots on.
static inline void weights_of(uint* a, const held* h, const int part, const int t) {
#if PLAIN
  UNROLL for (int i = 0; i < 2; ++i) {
    const uint even = h->words[part * 4 + 2 * i].x, odd = h->words[part * 4 + 2 * i + 1].x;  // two rows of neighboring columns
    __asm__("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(a[2 * i]) : "r"(even), "r"(odd));
    __asm__("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(a[2 * i + 1]) : "r"(even), "r"(odd));
  }
#else
#if LOW == 8
  INTS c = h->words[part] ^ (int)0x80808080;
#elif LOW == 4
  INTS c = (h->words[0] >> 4 * part) & 0x0f0f0f0f;
#else
  INTS c = (h->words[part] >> 2 * t) & 0x03030303;
#endif
#if HIGH == 1
  c |= ((h->words[LANE_WORDS - 1] >> (t + 4 * part)) & 0x01010101) << LOW;
#elif HIGH == 2
  c |= ((h->words[LANE_WORDS - 2 + part] >> 2 * t) & 0x03030303) << LOW;
#endif
  a[0] = two_halves(c.x, 0), a[1] = two_halves(c.y, 0), a[2] = two_halves(c.x, 1), a[3] = two_halves(c.y, 1);
#endif
}

// Four activations as halves, or 2048 times what that leaves of them.
static inline uint2 activations_of(__global const X_T* x, const int rest) {
#if X_HALVES
  return *(__global const uint2*)x;
#else
  float4 f = X_QUAD(x);
  const uint2 b = (uint2)(pair_float16(f.x, f.y), pair_float16(f.z, f.w));
  f = (f - (float4)(of_half(b.x), of_half(b.x >> 16), of_half(b.y), of_half(b.y >> 16))) * 2048.0f;
  return rest ? (uint2)(pair_float16(f.x, f.y), pair_float16(f.z, f.w)) : b;
#endif
}

__kernel __attribute__((reqd_work_group_size(WARPS * 32, 1, 1)))
void strips_mma(__global const uchar* w, __global const X_T* x, __global const BIAS_T* bias, __global Y_T* y, const int rows,
                const int columns, const int tokens, const int biased) {
  __local float sums[WARPS * MT * 16 * SETS * 8];
  const int item = get_local_id(0), lane = item % 32, warp = item / 32, g = lane / 4, t = lane % 4, runs = columns / 32;
  const int strips = (rows + 15) / 16, begin = get_group_id(0) * MT;
  float acc[MT][SETS][4] = {{{0.0f}}};
  for (int run = warp * DEEP; run < runs; run += WARPS * DEEP) {
    held h[DEEP][MT];
    UNROLL for (int u = 0; u < DEEP; ++u)
      UNROLL for (int m = 0; m < MT; ++m)
        if (run + u < runs) hold(&h[u][m], w + (size_t)min(begin + m, strips - 1) * (runs / PER_RECORD) * RECORD, run + u, 2 * g, t);
    UNROLL for (int u = 0; u < DEEP; ++u)
      if (run + u < runs)
        UNROLL for (int s = 0; s < SETS; ++s) {
          const int column = s * 8 + g, token = SPLIT ? column / 2 : column;
          float c[MT][4], total[4];
          UNROLL for (int part = 0; part < 2; ++part) {
            const int fresh = part == 0 || PER_RUN == 2, whole = part == 1 || PER_RUN == 2, group = part * PER_RUN / 2;
            uint2 b = (uint2)(0);
            if (token < tokens) b = activations_of(x + (size_t)token * columns + (run + u) * 32 + part * 16 + 4 * t, SPLIT && column % 2);
            if (MIN) {
              const uint ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
              if (fresh) total[0] = total[1] = total[2] = total[3] = 0.0f;
              MMA_FLOAT16(total, ones, b.x, b.y);
            }
            UNROLL for (int m = 0; m < MT; ++m) {
              uint a[4];
              weights_of(a, &h[u][m], part, t);
              if (fresh) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0.0f;
              MMA_FLOAT16(c[m], a, b.x, b.y);
              if (!whole) continue;
              const FLOATS by = PLAIN ? (FLOATS)(1.0f) : h[u][m].scale[group], low = MIN ? h[u][m].minimum[group] : (FLOATS)(0.0f);
              UNROLL for (int i = 0; i < 4; ++i)
                acc[m][s][i] += (i < 2 ? by.x : by.y) * c[m][i] + (MIN ? (i < 2 ? low.x : low.y) * total[i] : 0.0f);
            }
          }
        }
  }
  UNROLL for (int m = 0; m < MT; ++m)
    UNROLL for (int s = 0; s < SETS; ++s)
      UNROLL for (int i = 0; i < 4; ++i) sums[(((warp * MT + m) * SETS + s) * 8 + 2 * t + i % 2) * 16 + 2 * g + i / 2] = acc[m][s][i];
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = item; i < MT * 16 * tokens; i += WARPS * 32) {
    const int m = i / 16 / tokens, token = i / 16 % tokens, row = (begin + m) * 16 + i % 16;
    float sum = 0.0f, rest = 0.0f;
    for (int j = 0; j < WARPS; ++j) {
      __local const float* from = sums + ((j * MT + m) * SETS * 8 + (SPLIT ? 2 * token : token)) * 16 + i % 16;
      sum += from[0];
      if (SPLIT) rest += from[16];
    }
    if (row < rows) Y_STORE(y, (size_t)token * rows + row, sum + rest * (1.0f / 2048) + (biased ? BIAS_LOAD(bias, row) : 0.0f));
  }
}
