// Products on CPUs with NEON (ASM 2 of codes.cl): tiles of registers in assembly, for one token or many. Kinds: F16, and those with one
// scale per 32 columns and no minimum. A work-item does 32 rows. Macros of codes.cl and round.cl (PLAIN LOW OFFSET), and
//   TOKENS  of a tile: 1 or 8      SHARE  tokens of a work-item, with 8
//   AHEAD  bytes to prefetch ahead, with 1 token
// Activations are records of TOKENS tokens and 32 columns: codes [8 fours of columns][TOKENS][4], the starts of sums [TOKENS][4], a scale of
// each token. A sum starts at MAGIC, minus what codes are offset by: its bits are then MAGIC_FLOAT plus the sum as a float, exactly. The
// subtraction takes one slot of either vector unit of a Neoverse N1, where a conversion takes two of the first unit.
// Instructions beyond ARMv8.0 are numbers: PoCL 3 compiles for ARMv8.0 and drops an instruction that this lacks without an error.
// From the launch: X_T X_QUAD(p), BIAS_T BIAS_LOAD, Y_T Y_STORE, PUT_QUADS (1: y is float).
#define STARTS (32 * TOKENS)
#define FACTORS (48 * TOKENS)
#if PLAIN
#define X_RECORD 80  // 32 halves, and four times the power of two that they are to be multiplied by
#else
#define X_RECORD (TOKENS == 1 ? 64 : 416)
#endif
#define CHUNK 32  // runs: their records and a strip's weights stay in the first cache
#define LINE(text) text "\n\t"
#define STR_(x) #x
#define STR(x) STR_(x)
#define EVERY_REGISTER                                                                                                                   \
  "memory", "cc", "x9", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16",       \
      "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"
// sdot sum.4s, u.16b, x.4b[lane]
#define SDOT(sum, u, x, lane) \
  LINE(".word 0x4f80e000 | " #x " << 16 | " #u " << 5 | " #sum " | (" #lane " & 1) << 21 | (" #lane " >> 1) << 11")

#if PLAIN
// Activations are halves times a power of two for each run, the largest of them in [1, 2): the rounding of a product is then at most that of
// a weight times the largest activation. Four products are added as halves, their sums as floats: conversions of every weight would take
// twice the time of the memory.
static inline void put_record(__global char* record, const float4* f, const int t) {
  int4 most = (int4)(1 << 23);
  UNROLL for (int j = 0; j < 8; ++j) {
    const int4 size = as_int4(f[j]) & 0x7fffffff;
    most = size > most ? size : most;
  }
  const int exponent = min(max(max(most.x, most.y), max(most.z, most.w)) >> 23, 253);
  UNROLL for (int j = 0; j < 8; ++j) {
    const float4 scaled = f[j] * as_float((254 - exponent) << 23);
    ushort4 rounded;
    __asm__("fcvtn %0.4h, %1.4s" : "=w"(rounded) : "w"(scaled));
    *(__global ushort4*)(record + 8 * j) = rounded;
  }
  *(__global float4*)(record + 64) = (float4)(as_float(exponent << 23));
}
#else
static inline void put_record(__global char* record, const float4* f, const int t) {
  int4 codes[8], total = (int4)(0);
  const float scale = round_run(f, codes);
  UNROLL for (int j = 0; j < 8; ++j) {
    *(__global char4*)(record + (j * TOKENS + t) * 4) = CODES_AS_CHARS(codes[j]);
    total += codes[j];
  }
  *(__global int4*)(record + STARTS + t * 16) = (int4)(MAGIC - SUBTRACTED * (total.x + total.y + total.z + total.w));
  ((__global float*)(record + FACTORS))[t] = scale;
}
#endif

__kernel void make_records(__global const X_T* x, __global char* records, const int columns, const int tokens) {
  const int runs = columns / 32, tile = get_global_id(0) / runs, run = get_global_id(0) % runs;
  for (int t = 0; t < TOKENS; ++t) {
    const int token = tile * TOKENS + t;
    float4 f[8];
    UNROLL for (int j = 0; j < 8; ++j) f[j] = token < tokens ? X_QUAD(x + ((size_t)token * runs + run) * 32 + 4 * j) : (float4)(0.0f);
    put_record(records + (size_t)get_global_id(0) * X_RECORD, f, t);
  }
}

#if TOKENS == 8
// Codes in registers 8 to 15, each with four columns of four rows. Codes of 8 bits are loaded where they are used.
#if LOW == 8
#define TILE_CODES
#define TILE_LOAD(u, at) "ldr q" #u ", [%1, #2 * " #at "]\n\t"
#else
#define TILE_WORD(u, next, at) \
  "ldr q" #u ", [%1, #" #at "]\n\tushr v" #next ".16b, v" #u ".16b, #4\n\tand v" #u ".16b, v" #u ".16b, v30.16b\n\t"
#define TILE_CODES TILE_WORD(8, 9, 0) TILE_WORD(10, 11, 64) TILE_WORD(12, 13, 128) TILE_WORD(14, 15, 192)
#define TILE_LOAD(u, at)
#endif
// Adds the products of four columns, in register u, with the activations of 8 tokens from byte `at` on.
#define TILE_DOTS(u, at)                                                                                     \
  TILE_LOAD(u, at) "ldr q25, [%2, #" #at "]\n\tldr q26, [%2, #" #at " + 16]\n\t"                                              \
  SDOT(0, u, 25, 0) SDOT(1, u, 25, 1) SDOT(2, u, 25, 2) SDOT(3, u, 25, 3)                    \
  SDOT(4, u, 26, 0) SDOT(5, u, 26, 1) SDOT(6, u, 26, 2) SDOT(7, u, 26, 3)
#define EACH_TOKEN(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define TILE_START(t) "ldr q" #t ", [%2, #256 + 16 * " #t "]\n\t"
#define TILE_UNMAGIC(t) "fsub v" #t ".4s, v" #t ".4s, v31.4s\n\t"
#define TILE_SCALE(t) "fmul v" #t ".4s, v" #t ".4s, v24.4s\n\t"
#define TILE_ADD(t, sum, scales, lane) "fmla v" #sum ".4s, v" #t ".4s, v" #scales ".s[" #lane "]\n\t"

// Adds the products of `runs` runs to sums[8 tokens][4 rows]. `w`: the codes of the first of four rows in the first record.
static inline void add_tile(__global const uchar* w, __global const uchar* scales, __global const char* x, float* sums, long runs) {
  __asm__ volatile(
      "ldp q16, q17, [%4]\n\tldp q18, q19, [%4, #32]\n\tldp q20, q21, [%4, #64]\n\tldp q22, q23, [%4, #96]\n\t"
      "mov w9, #0x4b400000\n\tdup v31.4s, w9\n\tmovi v30.16b, #15\n"
      "1:\n\t"
      EACH_TOKEN(TILE_START)
      "ldr d24, [%3]\n\tldr q28, [%2, #384]\n\tldr q29, [%2, #400]\n\tfcvtl v24.4s, v24.4h\n\t"
      TILE_CODES
      TILE_DOTS(8, 0) TILE_DOTS(9, 32) TILE_DOTS(10, 64) TILE_DOTS(11, 96)
      TILE_DOTS(12, 128) TILE_DOTS(13, 160) TILE_DOTS(14, 192) TILE_DOTS(15, 224)
      EACH_TOKEN(TILE_UNMAGIC) EACH_TOKEN(TILE_SCALE)
      TILE_ADD(0, 16, 28, 0) TILE_ADD(1, 17, 28, 1) TILE_ADD(2, 18, 28, 2) TILE_ADD(3, 19, 28, 3)
      TILE_ADD(4, 20, 29, 0) TILE_ADD(5, 21, 29, 1) TILE_ADD(6, 22, 29, 2) TILE_ADD(7, 23, 29, 3)
      "add %1, %1, %5\n\tadd %3, %3, %5\n\tadd %2, %2, #416\n\tsubs %0, %0, #1\n\tb.ne 1b\n\t"
      "stp q16, q17, [%4]\n\tstp q18, q19, [%4, #32]\n\tstp q20, q21, [%4, #64]\n\tstp q22, q23, [%4, #96]"
      : "+r"(runs), "+r"(w), "+r"(x), "+r"(scales)
      : "r"(sums), "r"((long)(RECORD))
      : EVERY_REGISTER);
}

// A work-item does 32 rows and SHARE tokens; neighbors have the same rows, which stay in the second cache.
__kernel void strips_tiles(__global const uchar* w, __global const char* tiles, __global const BIAS_T* bias, __global Y_T* y,
                           const int rows, const int columns, const int tokens, const int biased) {
  const int row0 = get_global_id(1) * 32, runs = columns / 32, parts = min(8, (rows - row0 + 3) / 4), begin = get_global_id(0) * SHARE;
  for (int t0 = begin; t0 < min(tokens, begin + SHARE); t0 += 8) {
    float4 sums[8][8];
    UNROLL for (int i = 0; i < 64; ++i) sums[i / 8][i % 8] = (float4)(0.0f);
    for (int run = 0; run < runs; run += CHUNK)
      for (int part = 0; part < parts; ++part) {
        __global const uchar* p = w + ((size_t)(row0 / 16 + part / 4) * runs + run) * RECORD;
        add_tile(p + AT_CODES + part % 4 * 16, p + part % 4 * 8, tiles + ((size_t)(t0 / 8) * runs + run) * X_RECORD,
                 (float*)sums[part], min(CHUNK, runs - run));
      }
    for (int t = 0; t < min(8, tokens - t0); ++t)
      for (int part = 0; part < parts; ++part) {
        const int row = row0 + part * 4;
        const size_t at = (size_t)(t0 + t) * rows + row;
        const float4 four = sums[part][t];
        if (PUT_QUADS && rows % 4 == 0 && !biased) {
          *(__global float4*)(y + at) = four;
          continue;
        }
        for (int r = 0; r < min(4, rows - row); ++r) Y_STORE(y, at + r, ((const float*)&four)[r] + (biased ? BIAS_LOAD(bias, row + r) : 0.0f));
      }
  }
}
#else  // one token

#define AHEAD_OF(at) LINE("prfm pldl1keep, [%1, #" STR(AHEAD) " + " #at "]")
#if PLAIN
// fmul (0x4f009000) or fmla (0x4f001000) sum.8h, u.8h, x.h[lane]
#define HALF_PRODUCT(code, sum, u, x, lane) \
  LINE(".word " #code " | " #x " << 16 | " #u " << 5 | " #sum " | ((" #lane ") & 1) << 20 | ((" #lane ") >> 1 & 1) << 21 | ((" #lane ") >> 2) << 11")
// A column of 16 rows, from byte `at` on, times an activation.
#define HALF_COLUMN(code, at, low, high, x, lane)                                                                                    \
  LINE("ldr q4, [%1, #" #at "]") LINE("ldr q5, [%1, #" #at " + 16]") HALF_PRODUCT(code, low, 4, x, lane) HALF_PRODUCT(code, high, 5, x, lane)
#define HALF_ADD(sum, next, chain)                                                                                                   \
  LINE("fcvtl v6.4s, v" #chain ".4h") LINE("fcvtl2 v7.4s, v" #chain ".8h")                                                           \
  LINE("fadd v" #sum ".4s, v" #sum ".4s, v6.4s") LINE("fadd v" #next ".4s, v" #next ".4s, v7.4s")
// Four columns, from byte `at` on, times the activations of x from `lane` on.
#define HALF_COLUMNS(at, low, high, x, lane)                                                                                         \
  AHEAD_OF(at) AHEAD_OF(at + 64) HALF_COLUMN(0x4f009000, at, low, high, x, lane) HALF_COLUMN(0x4f001000, at + 32, low, high, x, lane + 1)  \
  HALF_COLUMN(0x4f001000, at + 64, low, high, x, lane + 2) HALF_COLUMN(0x4f001000, at + 96, low, high, x, lane + 3)                  \
  HALF_ADD(20, 21, low) HALF_ADD(22, 23, high)
#define HALF_EIGHT(at, x) HALF_COLUMNS(at, 8, 9, x, 0) HALF_COLUMNS(at + 128, 10, 11, x, 4)
#define ROWS_RUN                                                                                                                     \
  LINE("ldp q0, q1, [%2]") LINE("ldp q2, q3, [%2, #32]") LINE("ldr q24, [%2, #64]")                                                  \
  LINE("movi v20.4s, #0") LINE("movi v21.4s, #0") LINE("movi v22.4s, #0") LINE("movi v23.4s, #0")                                    \
  HALF_EIGHT(0, 0) HALF_EIGHT(256, 1) HALF_EIGHT(512, 2) HALF_EIGHT(768, 3)                                                          \
  LINE("fmla v16.4s, v20.4s, v24.4s") LINE("fmla v17.4s, v21.4s, v24.4s")                                                            \
  LINE("fmla v18.4s, v22.4s, v24.4s") LINE("fmla v19.4s, v23.4s, v24.4s")
#define ROWS_BEGIN
#else
#define ROWS_DOTS(a, b, c, d, x, lane) SDOT(0, a, x, lane) SDOT(1, b, x, lane) SDOT(2, c, x, lane) SDOT(3, d, x, lane)
#define ROWS_LOAD(a, b, c, d, at) \
  LINE("ldr q" #a ", [%1, #" #at "]") LINE("ldr q" #b ", [%1, #" #at " + 16]") LINE("ldr q" #c ", [%1, #" #at " + 32]") LINE("ldr q" #d ", [%1, #" #at " + 48]")
#if LOW == 8
#define ROWS_WORDS(at, x, lane) AHEAD_OF(at) ROWS_LOAD(4, 5, 6, 7, at) ROWS_DOTS(4, 5, 6, 7, x, lane)
#define ROWS_CODES                                                                                                                   \
  ROWS_WORDS(32, 24, 0) ROWS_WORDS(96, 24, 1) ROWS_WORDS(160, 24, 2) ROWS_WORDS(224, 24, 3)                                          \
  ROWS_WORDS(288, 25, 0) ROWS_WORDS(352, 25, 1) ROWS_WORDS(416, 25, 2) ROWS_WORDS(480, 25, 3)
#else
#define ROWS_HIGH(u, h) LINE("ushr v" #h ".16b, v" #u ".16b, #4") LINE("and v" #u ".16b, v" #u ".16b, v30.16b")
#define ROWS_WORDS(at, x, lane, next)                                                                                                \
  AHEAD_OF(at) ROWS_LOAD(4, 5, 6, 7, at) ROWS_HIGH(4, 8) ROWS_HIGH(5, 9) ROWS_HIGH(6, 10) ROWS_HIGH(7, 11)                           \
  ROWS_DOTS(4, 5, 6, 7, x, lane) ROWS_DOTS(8, 9, 10, 11, x, next)
#define ROWS_CODES ROWS_WORDS(32, 24, 0, 1) ROWS_WORDS(96, 24, 2, 3) ROWS_WORDS(160, 25, 0, 1) ROWS_WORDS(224, 25, 2, 3)
#endif
#define ROWS_END(sum, total, scale)                                                                                                  \
  LINE("fsub v" #sum ".4s, v" #sum ".4s, v31.4s") LINE("fmul v" #sum ".4s, v" #sum ".4s, v" #scale ".4s")                            \
  LINE("fmla v" #total ".4s, v" #sum ".4s, v26.s[0]")
#define ROWS_RUN                                                                                                                     \
  LINE("ldr q0, [%2, #32]") LINE("ldr q1, [%2, #32]") LINE("ldr q2, [%2, #32]") LINE("ldr q3, [%2, #32]")                            \
  LINE("ldr q24, [%2]") LINE("ldr q25, [%2, #16]") LINE("ldr q26, [%2, #48]") LINE("ldr q27, [%1]") LINE("ldr q28, [%1, #16]")       \
  LINE("fcvtl v20.4s, v27.4h") LINE("fcvtl2 v21.4s, v27.8h") LINE("fcvtl v22.4s, v28.4h") LINE("fcvtl2 v23.4s, v28.8h")              \
  ROWS_CODES ROWS_END(0, 16, 20) ROWS_END(1, 17, 21) ROWS_END(2, 18, 22) ROWS_END(3, 19, 23)
#define ROWS_BEGIN LINE("mov w9, #0x4b400000") LINE("dup v31.4s, w9") LINE("movi v30.16b, #15")
#endif

// Stores the products of a strip with a token in sums.
static inline void strip_sums(__global const uchar* w, __global const char* x, float* sums, long runs) {
  __asm__ volatile(
      LINE("movi v16.4s, #0") LINE("movi v17.4s, #0") LINE("movi v18.4s, #0") LINE("movi v19.4s, #0") ROWS_BEGIN
      "1:\n\t" ROWS_RUN LINE("add %1, %1, %4") LINE("add %2, %2, %5") LINE("subs %0, %0, #1") LINE("b.ne 1b")
      LINE("stp q16, q17, [%3]") LINE("stp q18, q19, [%3, #32]")
      : "+r"(runs), "+r"(w), "+r"(x) : "r"(sums), "r"((long)(RECORD)), "r"((long)(X_RECORD)) : EVERY_REGISTER);
}

// The products of 32 rows with a token. A sum of halves that is not finite is computed again with floats.
static inline void row_sums(__global const uchar* w, __global const char* x, const int row0, const int rows, const int runs, float4* f) {
  for (int strip = 0; strip < 2 && row0 + 16 * strip < rows; ++strip) {
    __global const uchar* own = w + (size_t)(row0 / 16 + strip) * runs * RECORD;
    float* sums = (float*)(f + 4 * strip);
    strip_sums(own, x, sums, runs);
#if PLAIN
    for (int r = 0; r < 16; ++r) {
      if ((as_uint(sums[r]) & 0x7f800000) != 0x7f800000) continue;
      sums[r] = 0.0f;
      for (int i = 0; i < 32 * runs; ++i) {
        __global const char* record = x + (size_t)(i / 32) * X_RECORD;
        const float factor = *(__global const float*)(record + 64);
        sums[r] += vload_half((size_t)i * 16 + r, (__global const half*)own) * (vload_half(i % 32, (__global const half*)record) * factor);
      }
    }
#endif
  }
}

__kernel void strips_rows(__global const uchar* w, __global const char* x, __global const BIAS_T* bias, __global Y_T* y, const int rows,
                          const int columns, const int biased) {
  const int row0 = get_global_id(0) * 32;
  float4 f[8];
  row_sums(w, x, row0, rows, columns / 32, f);
  for (int r = 0; r < min(32, rows - row0); ++r)
    Y_STORE(y, row0 + r, ((const float*)f)[r] + (biased ? BIAS_LOAD(bias, row0 + r) : 0.0f));
}
#endif
