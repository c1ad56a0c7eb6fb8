// y = x w' + bias for up to 8 * SETS columns of activations on the matrix units of NVIDIA GPUs, with ptx.cl and codes.cl (V 2) before it.
//   WARPS  of a work-group, which share the columns of MT strips      SPAN  runs of 32 columns that a warp copies at a time: whole records
//   RING  such copies of a warp in local memory: the next ones are on their way while one is multiplied
//   WHOLE  1: the columns are a multiple of 32 * SPAN      X_HALVES  1: x is float16 and aligned to 16 bytes
//   SPLIT  1: x is float32; a token takes two columns of a fragment, x rounded to half and 2048 times the rest, so nothing is lost
// Rows g and g + 8 of a fragment are rows 2g and 2g + 1 of a strip, and a lane multiplies fours QUAD_OF(0) and QUAD_OF(1) of the columns of
// a run: the order of columns in a product is free if both operands agree. Codes become halves exactly; scales are applied to sums in
// float32. From codes.cl: PLAIN LOW HIGH; from ptx.cl: MMA_FLOAT16; from the launch: X_T X_QUAD(p), BIAS_T BIAS_LOAD, Y_T Y_STORE.
#define QUAD_OF(part) (PER_RUN == 2 ? t + 4 * (part) : 2 * t + (part))  // a scale covers both, or one each
#define NIBBLES (LOW == 4 && !HIGH && PER_RUN == 1)  // a word has both fours of a lane
#define TINY (NIBBLES && MIN)  // codes are halves as they are: code * 2^-24
#define LOWS (LOW == 4 && PER_RUN == 1 ? 1 : 2)
#define LANE_AT (PLAIN ? t * 256 + g * 4 : QUAD_OF(0) / EIGHTHS * 64 + g * 8)  // of its first word in the codes of a run
#define LANE_WORDS (PLAIN ? 8 : LOWS + HIGH)
#define SPAN_BYTES (SPAN / PER_RECORD * RECORD)  // contiguous: a strip is record after record
#define MAGIC 0x4b000000u  // 2^23: a byte under it is an exact float

typedef struct { uint2 words[LANE_WORDS]; uint scale, minimum; } held;

// What a lane needs of a run: its words (low ones from `codes`, high ones from `high` on), and scale and minimum from `record` on.
static inline void hold(held* h, __local const uchar* record, __local const uchar* codes, __local const uchar* high) {
#if PLAIN
  UNROLL for (int i = 0; i < 8; ++i) h->words[i].x = *(__local const uint*)(codes + i * 32);
#else
  UNROLL for (int i = 0; i < LOWS; ++i) h->words[i] = *(__local const uint2*)(codes + i * (PER_RUN == 2 ? 4 / EIGHTHS : 1) * 64);
  UNROLL for (int i = 0; i < HIGH; ++i) h->words[LOWS + i] = *(__local const uint2*)(high + i * 64);
  if (!SCALES) h->scale = *(__local const uint*)record;
  if (!SCALES && MIN) h->minimum = *(__local const uint*)(record + 32);
#endif
}

// The fragment of part 0 or 1 of a run: rows 2g, 2g + 1, then both four slots on.
static inline void weights_of(uint* a, const held* h, const int part, const int t) {
#if PLAIN
  UNROLL for (int i = 0; i < 2; ++i) {
    const uint even = h->words[part * 4 + 2 * i].x, odd = h->words[part * 4 + 2 * i + 1].x;  // two rows of neighboring columns
    BYTES_OF(a[2 * i], even, odd, 0x5410);
    BYTES_OF(a[2 * i + 1], even, odd, 0x7632);
  }
#elif NIBBLES  // columns 0 and 2 of four, then 1 and 3: activations are in that order too
  UNROLL for (int i = 0; i < 4; ++i) {
    const uint w = (i % 2 ? h->words[0].y : h->words[0].x) >> 8 * (i / 2);
#if TINY
    a[i] = (w >> 4 * part) & 0x000f000fu;
#else
    const uint wide = (w & (part ? 0x00f000f0u : 0x000f000fu)) | 0x64006400u, off = (part ? 0xd400u + 16 * OFFSET : 0x6400u + OFFSET) * 0x10001u;
    if (part) FMA_HALVES(a[i], wide, 0x2c002c00u, off);
    else SUB_HALVES(a[i], wide, off);
#endif
  }
#else
#if LOW == 8
  const uint2 c = h->words[part] ^ 0x80808080u;
#else
  uint2 c = LOW_CODES(h->words[LOWS == 2 ? part : 0], QUAD_OF(part));
#if HIGH
  c |= HIGH_CODES(h->words[LOWS + (HIGH == 2 ? part : 0)], QUAD_OF(part));
#endif
#endif
  const uint off = (0x6400u + (LOW == 8 ? 128 : OFFSET)) * 0x10001u;
  UNROLL for (int i = 0; i < 4; ++i) {
    uint pair;
    if (i / 2) BYTES_OF(pair, i % 2 ? c.y : c.x, 0x64646464u, 0x4342);
    else BYTES_OF(pair, i % 2 ? c.y : c.x, 0x64646464u, 0x4140);
    SUB_HALVES(a[i], pair, off);
  }
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

// Scale and minimum of both rows of a group of a record, of which a lane sees `record` on: 4 * g bytes are behind it.
#if PLAIN
#define FACTORS(by, low, h, record, group) const float2 by = (float2)(1.0f), low = (float2)(0.0f);
#elif !SCALES
#define FACTORS(by, low, h, record, group)                                                                    \
  const float2 by = of_halves((h).scale) * (TINY ? 16777216.0f : 1.0f), low = MIN ? of_halves((h).minimum) : (float2)(0.0f);
#else
#define SMALL_PAIR(f, record, at, group, sign)                                                                \
  {                                                                                                           \
    const uint two_ = *(__local const ushort*)((record) + (at) + (group) * 16 - g * 2) ^ (sign);              \
    uint low_, high_;                                                                                         \
    BYTES_OF(low_, two_, MAGIC, 0x7440);                                                                      \
    BYTES_OF(high_, two_, MAGIC, 0x7441);                                                                     \
    f = (float2)(as_float(low_), as_float(high_));                                                            \
  }
#define FACTORS(by, low, h, record, group)                                                                    \
  float2 by, low = (float2)(0.0f);                                                                            \
  SMALL_PAIR(by, record, AT_SCALES, group, SCALES == 2 ? 0x8080u : 0)                                         \
  by = SCALES == 2 ? (by - 8388736.0f) * d[m] : fma(by, d[m], -8388608.0f * d[m]);                            \
  if (MIN) {                                                                                                  \
    SMALL_PAIR(low, record, AT_LOWER, group, 0)                                                               \
    low = fma(low, lower[m], -8388608.0f * lower[m]);                                                         \
  }
#endif

__kernel __attribute__((reqd_work_group_size(WARPS * 32, 1, 1)))
void strips_mma(__global const uchar* w, __global const X_T* x, __global const BIAS_T* bias, __global Y_T* y, const int rows,
                const int columns, const int tokens, const int biased) {
  __local uint4 ring[WARPS * MT * (RING * SPAN_BYTES > SETS * 512 ? RING * SPAN_BYTES : SETS * 512) / 16];
  __local float* sums = (__local float*)ring;
  const int item = get_local_id(0), lane = item % 32, warp = item / 32, g = lane / 4, t = lane % 4, runs = columns / 32;
  const int strips = (rows + 15) / 16, begin = get_group_id(0) * MT;
  const uint ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  float acc[MT][SETS][4] = {{{0.0f}}};
  __global const uchar* p[MT];
  __global const X_T* xs[SETS];
  __local uchar* mine = (__local uchar*)ring + warp * RING * MT * SPAN_BYTES;
  UNROLL for (int m = 0; m < MT; ++m)
    p[m] = w + ((size_t)min(begin + m, strips - 1) * (runs / PER_RECORD) + warp * (SPAN / PER_RECORD)) * RECORD + lane * 16;
  UNROLL for (int s = 0; s < SETS; ++s)  // columns beyond the tokens repeat the last: they are not stored
    xs[s] = x + (size_t)min(SPLIT ? (s * 8 + g) / 2 : s * 8 + g, tokens - 1) * columns + warp * SPAN * 32 + QUAD_OF(0) * 4;
  int coming = warp * SPAN;  // the run at which the next copy begins
#define COPY_SPAN(slot)                                                                                        \
  {                                                                                                            \
    const int left_ = WHOLE ? SPAN_BYTES : min(SPAN, runs - coming) * (RECORD / PER_RECORD);                   \
    UNROLL for (int m = 0; m < MT; ++m) {                                                                      \
      if (coming < runs)                                                                                       \
        UNROLL for (int n_ = 0; n_ < SPAN_BYTES; n_ += 512)                                                    \
          if (n_ + 512 <= SPAN_BYTES || lane * 16 < SPAN_BYTES - n_)                                           \
            COPY_16(LOCAL_AT(mine + ((slot) * MT + m) * SPAN_BYTES + n_ + lane * 16), p[m] + n_, n_ + lane * 16 < left_ ? 16 : 0); \
      p[m] += WARPS * SPAN_BYTES;                                                                              \
    }                                                                                                          \
    coming += WARPS * SPAN;                                                                                    \
    COPIES_COMMIT();                                                                                           \
  }
  UNROLL for (int i = 0; i < RING - 1; ++i) COPY_SPAN(i)
  int slot = 0;
  for (int run = warp * SPAN; run < runs; run += WARPS * SPAN) {
    COPIES_WAIT(RING - 2);
    WARP_SYNC();
    COPY_SPAN(slot ? slot - 1 : RING - 1)
    __local const uchar* at[MT];
    UNROLL for (int m = 0; m < MT; ++m) at[m] = mine + (slot * MT + m) * SPAN_BYTES + g * 4;
    slot = slot == RING - 1 ? 0 : slot + 1;
    UNROLL for (int from = 0; from < SPAN; from += PER_RECORD) {
#if SCALES
      float2 d[MT], lower[MT];
      UNROLL for (int m = 0; m < MT; ++m) {
        d[m] = of_halves(*(__local const uint*)(at[m] + from / PER_RECORD * RECORD)) * (TINY ? 16777216.0f : 1.0f);
        lower[m] = MIN ? -of_halves(*(__local const uint*)(at[m] + from / PER_RECORD * RECORD + 32)) : (float2)(0.0f);
      }
#endif
      UNROLL for (int u = 0; u < PER_RECORD; ++u)
        if (WHOLE || run + from + u < runs)
          UNROLL for (int s = 0; s < SETS; ++s) {
#if X_HALVES && PER_RUN == 1
            uint4 b = *(__global const uint4*)(xs[s] + (from + u) * 32);
#else
            __global const X_T* near = xs[s] + (from + u) * 32;
            uint4 b = (uint4)(activations_of(near, SPLIT && g % 2), activations_of(near + (PER_RUN == 2 ? 16 : 4), SPLIT && g % 2));
#endif
            if (NIBBLES) {
              uint4 o = b;
              BYTES_OF(b.x, o.x, o.y, 0x5410);
              BYTES_OF(b.y, o.x, o.y, 0x7632);
              BYTES_OF(b.z, o.z, o.w, 0x5410);
              BYTES_OF(b.w, o.z, o.w, 0x7632);
            }
            float total[2][4];
            if (MIN) {
              MMA_FRESH(total[0], ones, b.x, b.y);
              if (PER_RUN == 2) MMA_FRESH(total[1], ones, b.z, b.w);
              else MMA_FLOAT16(total[0], ones, b.z, b.w);
            }
            UNROLL for (int m = 0; m < MT; ++m) {
              uint a[2][4];
              held h;
              __local const uchar* record = at[m] + from / PER_RECORD * RECORD;
              __local const uchar* codes = record + (PLAIN ? 0 : AT_CODES + u * WORDS * 64);
              hold(&h, record, codes + (LANE_AT - g * 4), codes + LOW * 64 + g * 4);
              weights_of(a[0], &h, 0, t);
              weights_of(a[1], &h, 1, t);
              float c[4];
              MMA_FRESH(c, a[0], b.x, b.y);
              if (PER_RUN == 1) MMA_FLOAT16(c, a[1], b.z, b.w);
              UNROLL for (int part = 0; part < PER_RUN; ++part) {
                if (part) MMA_FRESH(c, a[1], b.z, b.w);
                FACTORS(by, low, h, record, u * PER_RUN + part)
                UNROLL for (int i = 0; i < 4; ++i) {
                  acc[m][s][i] = PLAIN ? acc[m][s][i] + c[i] : fma(i < 2 ? by.x : by.y, c[i], acc[m][s][i]);
                  if (MIN) acc[m][s][i] = fma(i < 2 ? low.x : low.y, total[part][i], acc[m][s][i]);
                }
              }
            }
          }
    }
    UNROLL for (int s = 0; s < SETS; ++s) xs[s] += WARPS * SPAN * 32;
  }
  COPIES_WAIT(0);
  barrier(CLK_LOCAL_MEM_FENCE);  // sums take the place of the copies
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
