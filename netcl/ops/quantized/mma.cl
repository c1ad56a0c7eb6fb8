// y = x w' + bias for up to 8 * SETS columns of activations on the matrix units of NVIDIA GPUs, with ptx.cl and codes.cl (V 2) before it.
//   WARPS  of a work-group, which share the columns of MT strips      DEEP  runs of 32 columns that a warp loads before it multiplies
//   WHOLE  1: the columns are a multiple of 32 * DEEP      X_HALVES  1: x is float16 and aligned to 16 bytes
//   SPLIT  1: x is float32; a token takes two columns of a fragment, x rounded to half and 2048 times the rest, so nothing is lost
//   RANGED  1: x is not float16 and not normed: each token is multiplied by a power of two, so that halves can hold it
// Rows g and g + 8 of a fragment are rows 2g and 2g + 1 of a strip, and a lane multiplies fours QUAD_OF(0) and QUAD_OF(1) of the columns of
// a run: the order of columns in a product is free if both operands agree. So a lane reads 8 bytes of codes, and 8 or 16 of x, straight
// into registers. Codes become halves exactly; scales are applied to sums in float32.
// GATED  1: MT is 2, and the strips of a work-group are the same one of the gate and of w.
// STAGED  runs whose activations a work-group converts at a time and keeps in local memory, a multiple of WARPS * SPAN; 0: every warp
//         converts what it multiplies, and a work-group has MT strips. Staged, it takes strips until none is left.
//   SEVERAL  1: staged, x is float16, and MT is 1: a work-group has neighboring strips, and each of its warps an equal part of their runs, in
//            order. The warp that begins a strip stores it, so warps wait for each other once, not after every strip.
// CHUNKED  1: there are more than STAGED runs      KINDS  columns of a fragment that differ, a power of two: those of the tokens
// From codes.cl: PLAIN LOW HIGH OFFSET SCALES MIN NIBBLES GROUPS, and what decode.cl defines (NORM: X_HALVES is 0); from ptx.cl: IN_REGISTER MMA_FLOAT16 MMA_FRESH STREAM_8 STREAM_4 FETCH_4 BYTES_OF
// SUB_HALVES FMA_HALVES FROM_LANE PREFETCH; from the launch: X_T X_QUAD(p), BIAS_T BIAS_LOAD, Y_T Y_STORE.
#define SPREAD (PER_RUN == 2 || (IN_LOCAL && LOW == 8))  // local memory has 32 banks: lanes then read lines that lie apart
#define QUAD_OF(part) (SPREAD ? t + 4 * (part) : 2 * t + (part))  // a scale covers both, or one each
#define TINY (NIBBLES && MIN)  // codes are halves as they are: code * 2^-24
#define LOWS (LOW == 4 && PER_RUN == 1 ? 1 : 2)
#define LANE_AT (PLAIN ? t * 256 + g * 4 : QUAD_OF(0) / EIGHTHS * 64 + g * 8)  // of its first word in the codes of a run
#define LANE_WORDS (PLAIN ? 8 : LOWS + HIGH)
#define SPAN (SCALES ? 8 : DEEP)  // runs that a warp takes at a time: a record, where groups have scales
#define SUMMED (MIN && GROUPS == 8 && STAGED)  // minimums meet the sums of groups in one product per record
#if STAGED && !SEVERAL
#define STRIPS for (int begin = first; begin < strips; begin += get_num_groups(0) * taken)
#else
#define STRIPS const int begin = first;
#endif
#if CHUNKED
#define CHUNKS for (int base = 0; base < runs; base += STAGED)
#else
#define CHUNKS const int base = 0;
#endif
#if SEVERAL
#define SPANS for (int i = from, run = from % spans * SPAN; i < to; ++i, run = run + SPAN < runs ? run + SPAN : 0)
#else
#define SPANS for (int run = base + warp * SPAN; run < base + count; run += WARPS * SPAN)
#endif
#define MAGIC 0x4b000000u  // 2^23: a byte under it is an exact float
#ifndef IN_LOCAL  // 1: weights are in local memory (chain.cl)
#define IN_LOCAL 0
#endif
#if IN_LOCAL
#define WHERE __local
#define LOAD_8(v, p) (v) = *(__local const uint2*)(p)
#define LOAD_4(v, p) (v) = *(__local const uint*)(p)
#else
#define WHERE __global
#define LOAD_8 STREAM_8
#define LOAD_4 STREAM_4
#endif

typedef struct { uint2 words[LANE_WORDS]; uint scale, minimum; } held;
typedef struct { float2 d, m; uint groups[GROUPS / 4 + 1]; } head;

// What a lane needs of a run: its words (low ones from `codes`, high ones from `high` on), and scale and minimum from `record` on.
static inline void hold(held* h, WHERE const uchar* record, WHERE const uchar* codes, WHERE const uchar* high) {
#if PLAIN
  UNROLL for (int i = 0; i < 8; ++i) FETCH_4(h->words[i].x, codes + i * 32);
#else
  UNROLL for (int i = 0; i < LOWS; ++i) LOAD_8(h->words[i], codes + i * (SPREAD ? 4 / EIGHTHS : 1) * 64);
  UNROLL for (int i = 0; i < HIGH; ++i) LOAD_8(h->words[LOWS + i], high + i * 64);
#if !SCALES
  LOAD_4(h->scale, record);
  if (MIN) LOAD_4(h->minimum, record + 32);
#endif
#endif
}

#if SCALES
// What a lane needs of the groups of a record, which begins 4 * g bytes before p: its fourth of their scales, which lanes then exchange.
static inline void hold_head(head* h, WHERE const uchar* p, const int g, const int t) {
  uint d, m = 0;
  LOAD_4(d, p);
  if (MIN) LOAD_4(m, p + 32);
  UNROLL for (int i = 0; i < GROUPS / 4; ++i) {
    h->groups[i] = *(WHERE const ushort*)(p + AT_SCALES + (4 * i + t) * 16 - g * 2);
    if (MIN) h->groups[i] |= (uint)*(WHERE const ushort*)(p + AT_LOWER + (4 * i + t) * 16 - g * 2) << 16;
    if (SCALES == 2) h->groups[i] ^= 0x8080u;
  }
  h->d = of_halves(d) * (TINY ? 16777216.0f : 1.0f);
  h->m = -of_halves(m) * (SUMMED ? 32.0f : 1.0f);
}
#endif

// The fragment of part 0 or 1 of a run: rows 2g, 2g + 1, then both four slots on.
static inline void weights_of(uint* a, const held* h, const int part, const int t) {
#if PLAIN
  UNROLL for (int i = 0; i < 2; ++i) {
    const uint even = h->words[part * 4 + 2 * i].x, odd = h->words[part * 4 + 2 * i + 1].x;  // two rows of neighboring columns
    BYTES_OF(a[2 * i], even, odd, 0x5410);
    BYTES_OF(a[2 * i + 1], even, odd, 0x7632);
  }
#elif NIBBLES  // a word has both fours of a lane; bytes 0 and 2 are a pair of columns
  uint high;
  IN_REGISTER(high, 0x64006400u);
  UNROLL for (int i = 0; i < 4; ++i) {
    const uint w = (i % 2 ? h->words[0].y : h->words[0].x) >> 8 * (i / 2);
#if TINY
    a[i] = (w >> 4 * part) & 0x000f000fu;
#else
    const uint wide = (w & (part ? 0x00f000f0u : 0x000f000fu)) | high;  // 1024 + code, or 1024 + 16 * code
    const uint off = (part ? 0xd400u + 16 * OFFSET : 0x6400u + OFFSET) * 0x10001u;
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
#if IN_LOCAL || LOW != 8
  uint high;
  IN_REGISTER(high, 0x64646464u);
#else
  const uint high = 0x64646464u;  // in a register it would be the 33rd: fewer warps would be resident
#endif
  UNROLL for (int i = 0; i < 4; ++i) {
    uint pair;
    if (i / 2) BYTES_OF(pair, i % 2 ? c.y : c.x, high, 0x4342);
    else BYTES_OF(pair, i % 2 ? c.y : c.x, high, 0x4140);
    SUB_HALVES(a[i], pair, off);
  }
#endif
}

// Four activations as halves, or 2048 times what that leaves of them.
#define APART (SPREAD ? 16 : 4)  // columns between both fours of a lane
#if X_HALVES
#define ACTIVATIONS(p, s, column, power, rest) (*(__global const uint2*)(p))
#else
#define ACTIVATIONS(p, s, column, power, rest) halves_of(NORMED(X_QUAD(p), s, column) * (power), rest)
static inline uint2 halves_of(float4 f, const int rest) {
  const uint2 b = (uint2)(pair_float16(f.x, f.y), pair_float16(f.z, f.w));
  f = (f - (float4)(of_half(b.x), of_half(b.x >> 16), of_half(b.y), of_half(b.y >> 16))) * 2048.0f;
  return rest ? (uint2)(pair_float16(f.x, f.y), pair_float16(f.z, f.w)) : b;
}
#endif

#ifndef RANGED
#define RANGED 0
#endif
#if RANGED
#define POWER(token) powers[token]
// Powers of two that bring the largest activation of each token to 2^14 .. 2^15. A token of zeros, infinities or NaN keeps its values.
static inline void find_powers(__global const X_T* x, const int tokens, const int columns, const int warp, const int lane, __local float* powers) {
  for (int token = warp; token < tokens; token += WARPS) {
    float most = 0.0f;
    for (int column = lane * 4; column < columns; column += 128) {
      const float4 f = fabs(X_QUAD(x + (size_t)token * columns + column));
      most = fmax(most, fmax(fmax(f.x, f.y), fmax(f.z, f.w)));
    }
    UNROLL for (int apart = 16; apart; apart /= 2) {
      uint other;
      FROM_LANE(other, as_uint(most), lane ^ apart);
      most = fmax(most, as_float(other));
    }
    if (lane == 0) powers[token] = most > 0.0f && most < INFINITY ? ldexp(1.0f, clamp(14 - ilogb(most), -126, 126)) : 1.0f;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
}
#else
#define POWER(token) 1.0f
#endif

#if SUMMED
// A fragment of sums of groups: of groups t and t + 4 of a record, whose activations begin at `group`, and 2048 times what halves leave of
// them. A 32nd of the sums, which halves can hold if they hold the activations.
static inline void sum_groups(__local uint2* to, __local const uint4* group) {
  float sums[2] = {0.0f, 0.0f};
  UNROLL for (int i = 0; i < 8; ++i) {
    const uint4 b = group[i / 4 * 4 * KINDS * 4 + i % 4];
    const float2 four = of_halves(b.x) + of_halves(b.y) + of_halves(b.z) + of_halves(b.w);
    sums[i / 4] += four.x + four.y;
  }
  const float one = sums[0] * 0.03125f, other = sums[1] * 0.03125f;
  const uint halves = pair_float16(one, other);
  const float2 left = ((float2)(one, other) - of_halves(halves)) * 2048.0f;
  *to = (uint2)(halves, pair_float16(left.x, left.y));
}

// Add the (negative) minimums of a record's groups times their sums.
static inline void add_minimums(float* acc, const head* h, const uint2 sums) {
  uint a[4];
  float c[4];
  UNROLL for (int row = 0; row < 2; ++row) {
    uint both;
    if (row) BYTES_OF(both, h->groups[0], h->groups[1], 0x0703);
    else BYTES_OF(both, h->groups[0], h->groups[1], 0x0602);
    SUB_HALVES(a[row], (both & 0x00ff00ffu) | 0x64006400u, 0x64006400u);
    FMA_HALVES(a[2 + row], a[row], 0x10001000u, 0u);  // a 2048th
  }
  MMA_FRESH(c, a, sums.x, sums.y);
  UNROLL for (int i = 0; i < 4; ++i) acc[i] = fma(i < 2 ? h->m.x : h->m.y, c[i], acc[i]);
}
#endif

// A sum over all warps: of a row of strip m of the work-group, for a token.
static inline float joined_sum(__local const float* sums, const int m, const int token, const int row) {
  float sum = 0.0f, rest = 0.0f;
  for (int j = 0; j < WARPS; ++j) {
    __local const float* from = sums + ((j * MT + m) * SETS * 8 + (SPLIT ? 2 * token : token)) * 16 + row;
    sum += from[0];
    if (SPLIT) rest += from[16];
  }
  return sum + rest * (1.0f / 2048);
}

// Scale and minimum of both rows for group `group` of a record.
#if PLAIN
#define FACTORS(by, low, h, hd, group) const float2 by = (float2)(1.0f), low = (float2)(0.0f);
#elif !SCALES
#define FACTORS(by, low, h, hd, group)                                                                        \
  const float2 by = of_halves((h).scale) * (TINY ? 16777216.0f : 1.0f), low = MIN ? of_halves((h).minimum) : (float2)(0.0f);
#else
#define FACTORS(by, low, h, hd, group)                                                                        \
  float2 by, low = (float2)(0.0f);                                                                            \
  {                                                                                                           \
    uint four_, s0_, s1_, l0_, l1_, magic_;                                                                   \
    IN_REGISTER(magic_, MAGIC);                                                                               \
    FROM_LANE(four_, (hd).groups[(group) / 4], (lane & 28) | (group) % 4);                                    \
    BYTES_OF(s0_, four_, magic_, 0x7440);                                                                      \
    BYTES_OF(s1_, four_, magic_, 0x7441);                                                                      \
    by = (float2)(as_float(s0_), as_float(s1_));                                                              \
    by = SCALES == 2 ? (by - 8388736.0f) * (hd).d : fma(by, (hd).d, -8388608.0f * (hd).d);                    \
    if (MIN && !SUMMED) {                                                                                     \
      BYTES_OF(l0_, four_, magic_, 0x7442);                                                                    \
      BYTES_OF(l1_, four_, magic_, 0x7443);                                                                    \
      low = fma((float2)(as_float(l0_), as_float(l1_)), (hd).m, -8388608.0f * (hd).m);                        \
    }                                                                                                         \
  }
#endif

// Adds the products of a run (held_) with activations four_ to sums; group: of its record, its first. `total` has the sums of activations.
#define PLUS(sum, scale, c) PLAIN ? sum + c : fma(scale, c, sum)
#define ADD_PRODUCTS(sums, held_, head_, four_, group, part)                                                               \
  uint a[2][4];                                                                                                            \
  weights_of(a[0], &held_, 0, t);                                                                                          \
  weights_of(a[1], &held_, 1, t);                                                                                          \
  float c[4];                                                                                                              \
  MMA_FRESH(c, a[0], four_.x, four_.y);                                                                                    \
  if (PER_RUN == 1) MMA_FLOAT16(c, a[1], four_.z, four_.w);                                                                \
  UNROLL for (int part = 0; part < PER_RUN; ++part) {                                                                      \
    if (part) MMA_FRESH(c, a[1], four_.z, four_.w);                                                                        \
    FACTORS(by, low, held_, head_, group + part)                                                                           \
    UNROLL for (int i = 0; i < 4; ++i) {                                                                                   \
      sums[i] = PLUS(sums[i], i < 2 ? by.x : by.y, c[i]);                                                                  \
      if (MIN && !SUMMED) sums[i] = fma(i < 2 ? low.x : low.y, total[part][i], sums[i]);                                   \
    }                                                                                                                      \
  }

#define PARTIAL(warp, i) sums[(warp) * 128 + (i) * 32 + lane]  // of a strip that another warp begins
#define STORE_STRIP                                                                        \
  UNROLL for (int k = 0; k < 4; ++k) {                                                     \
    const int row = strip * 16 + 2 * g + k / 2, token = 2 * t + k % 2;                     \
    const size_t at = (size_t)token * rows + row;                                          \
    if (row < rows && token < tokens) Y_STORE(y, at, FINISHED(acc[0][0][k], row, at));     \
  }

__kernel __attribute__((reqd_work_group_size(WARPS * 32, 1, 1)))
void strips_mma(__global const uchar* w, __global const X_T* x, EXTRA_POINTERS ADDED_POINTERS __global const BIAS_T* bias,
                __global Y_T* y, const int rows, const int columns, const int tokens, const int biased) {
  __local float sums[WARPS * MT * 16 * SETS * 8];
  const int item = get_local_id(0), lane = item % 32, warp = item / 32, g = lane / 4, t = lane % 4, runs = columns / 32;
  const int strips = (rows + 15) / 16, taken = GATED ? 1 : MT;
#if SEVERAL
  const int group = get_group_id(0), each = strips / (int)get_num_groups(0), more = strips % (int)get_num_groups(0);
  const int first = group * each + min(group, more), spans = runs / SPAN, all = (each + (group < more)) * spans;
  const int from = all * warp / WARPS, to = all * (warp + 1) / WARPS;
#else
  const int first = get_group_id(0) * taken, from = warp;
#endif
  const uint ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  const size_t step = (SEVERAL ? 1 : WARPS) * (SPAN / PER_RECORD) * RECORD;
#if NORM
  __local float2 shared_stats[8];
#endif
#if RANGED
  __local float powers[SETS * 8 / (1 + SPLIT)];
  find_powers(x, tokens, columns, warp, lane, powers);
#endif
#if STAGED
  __local uint4 staged[STAGED][KINDS][4];
#endif
#if SUMMED
  __local uint2 summed[STAGED / 8][KINDS][4];
#endif
  STRIPS {
    float acc[MT][SETS][4] = {{{0.0f}}};
    __global const uchar* p[MT];
    UNROLL for (int m = 0; m < MT; ++m) {
      p[m] = (GATED && !m ? GATE : w) + (size_t)min(begin + (GATED ? 0 : m), strips - 1) * (runs / PER_RECORD) * RECORD;
#if SEVERAL  // the memory works while x is converted
      for (int i = lane * 128; i < min(to - from, 4) * RECORD; i += 32 * 128) PREFETCH(p[m] + (size_t)from * RECORD + i);
#elif STAGED
      for (int i = item * 128; i < min(runs, 4 * WARPS * SPAN) / PER_RECORD * RECORD; i += WARPS * 32 * 128) PREFETCH(p[m] + i);
#endif
      p[m] += g * 4 + (size_t)from * (SPAN / PER_RECORD) * RECORD;
    }
#if NORM
    if (!STAGED || begin == first) row_statistics(x, tokens, columns, item, sums, shared_stats);
#endif
#if !STAGED
    __global const X_T* xs[SETS];
    float2 stats[SETS];
    float power[SETS];
    UNROLL for (int s = 0; s < SETS; ++s) {  // columns beyond the tokens repeat the last: they are not stored
      const int token = min(SPLIT ? (s * 8 + g) / 2 : s * 8 + g, tokens - 1);
      xs[s] = x + (size_t)token * columns + warp * SPAN * 32 + QUAD_OF(0) * 4;
      power[s] = POWER(token);
#if NORM
      stats[s] = shared_stats[token];
#endif
    }
#endif
    CHUNKS {
      const int count = CHUNKED ? min(runs - base, STAGED) : runs;
#if STAGED
      if (base) barrier(CLK_LOCAL_MEM_FENCE);
      for (int i = item; i < (CHUNKED || begin == first ? count : 0) * 4 * tokens; i += WARPS * 32) {
        const int t = i % 4, run = i / 4 % count, token = i / 4 / count, column = (base + run) * 32 + QUAD_OF(0) * 4;
        __global const X_T* from = x + (size_t)token * columns + column;
        const float4 one = NORMED(X_QUAD(from), shared_stats[token], column) * POWER(token);
        const float4 other = NORMED(X_QUAD(from + APART), shared_stats[token], column + APART) * POWER(token);
        UNROLL for (int rest = 0; rest <= SPLIT; ++rest)
          staged[run][token * (1 + SPLIT) + rest][t] = (uint4)(halves_of(one, rest), halves_of(other, rest));
      }
      barrier(CLK_LOCAL_MEM_FENCE);
#if SUMMED
      for (int i = item; i < (CHUNKED || begin == first ? count / 8 : 0) * 4 * KINDS; i += WARPS * 32)
        sum_groups(&summed[i / 4 / KINDS][i / 4 % KINDS][i % 4], &staged[i / 4 / KINDS * 8 + i % 4][i / 4 % KINDS][0]);
      barrier(CLK_LOCAL_MEM_FENCE);
#endif
#endif
#if SEVERAL
      int strip = first + from / spans;
      UNROLL for (int k = 0; k < 4; ++k) PARTIAL(warp, k) = 0.0f;
#endif
      SPANS {
        head hd[MT];
#if SCALES
        UNROLL for (int m = 0; m < MT; ++m) hold_head(&hd[m], p[m], g, t);
#endif
#if SUMMED
        const uint2 sums_of_groups = summed[(run - base) / 8][g % KINDS][t];
        UNROLL for (int m = 0; m < MT; ++m) add_minimums(acc[m][0], &hd[m], sums_of_groups);
#endif
        UNROLL for (int from = 0; from < SPAN; from += DEEP) {
          held h[DEEP][MT];
          UNROLL for (int u = 0; u < DEEP; ++u)
            UNROLL for (int m = 0; m < MT; ++m)
              if (WHOLE || run + u < runs) {
                __global const uchar* codes = p[m] + (PLAIN ? 0 : AT_CODES) + (SCALES ? (from + u) * WORDS * 64 : u * RECORD);
                hold(&h[u][m], p[m] + u * RECORD, codes + (LANE_AT - g * 4), codes + LOW * 64 + g * 4);
              }
          UNROLL for (int u = 0; u < DEEP; ++u)
            if (WHOLE || run + u < runs)
              UNROLL for (int s = 0; s < SETS; ++s) {
#if STAGED
                const uint4 b = staged[run - base + from + u][g % KINDS][t];
#elif X_HALVES && PER_RUN == 1
                const uint4 b = *(__global const uint4*)(xs[s] + (from + u) * 32);
#else
                __global const X_T* near = xs[s] + (from + u) * 32;
                const int column = (run + from + u) * 32 + QUAD_OF(0) * 4, rest = SPLIT && g % 2;
                const uint4 b = (uint4)(ACTIVATIONS(near, stats[s], column, power[s], rest),
                                        ACTIVATIONS(near + APART, stats[s], column + APART, power[s], rest));
#endif
                float total[2][4];
                if (MIN && !SUMMED) {
                  MMA_FRESH(total[0], ones, b.x, b.y);
                  if (PER_RUN == 2) MMA_FRESH(total[1], ones, b.z, b.w);
                  else MMA_FLOAT16(total[0], ones, b.z, b.w);
                }
                UNROLL for (int m = 0; m < MT; ++m) { ADD_PRODUCTS(acc[m][s], h[u][m], hd[m], b, (from + u) * PER_RUN, part) }
              }
        }
        UNROLL for (int m = 0; m < MT; ++m) p[m] += step;
#if !STAGED
        UNROLL for (int s = 0; s < SETS; ++s) xs[s] += WARPS * SPAN * 32;
#endif
#if SEVERAL
        const int begins = i - run / SPAN >= from, ends = run + SPAN == runs;
        if (begins && ends) STORE_STRIP
        if (!begins && (ends || i + 1 == to)) UNROLL for (int k = 0; k < 4; ++k) PARTIAL(warp, k) = acc[0][0][k];
        if (ends) {
          ++strip;
          UNROLL for (int k = 0; k < 4; ++k) acc[0][0][k] = 0.0f;
        }
#endif
      }
#if SEVERAL
      const int end = (strip - first + 1) * spans;
      barrier(CLK_LOCAL_MEM_FENCE);
      if (to % spans && end - spans >= from) {  // other warps end the last strip
        for (int j = warp + 1; j < WARPS && all * j / WARPS < end; ++j)
          UNROLL for (int k = 0; k < 4; ++k) acc[0][0][k] += PARTIAL(j, k);
        STORE_STRIP
      }
#endif
    }
#if !SEVERAL
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int s = 0; s < SETS; ++s)
        UNROLL for (int i = 0; i < 4; ++i) sums[(((warp * MT + m) * SETS + s) * 8 + 2 * t + i % 2) * 16 + 2 * g + i / 2] = acc[m][s][i];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < taken * 16 * tokens; i += WARPS * 32) {
      const int m = i / 16 / tokens, token = i / 16 % tokens, row = (begin + m) * 16 + i % 16;
      if (row >= rows) continue;
      const size_t at = (size_t)token * rows + row;
#if GATED
      const float second = joined_sum(sums, 1, token, i % 16) / POWER(token) + (biased ? BIAS_LOAD(bias, row) : 0.0f);
      Y_STORE(y, at, GATED_VALUE(joined_sum(sums, 0, token, i % 16) / POWER(token), second, row));
#else
      Y_STORE(y, at, FINISHED(joined_sum(sums, m, token, i % 16) / POWER(token), row, at));
#endif
    }
    if (STAGED) barrier(CLK_LOCAL_MEM_FENCE);
#endif
  }
}
