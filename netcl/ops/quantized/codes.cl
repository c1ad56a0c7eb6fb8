// Packed weights in strips (layout.py), as every kernel reads them. A vector holds the same column of V rows of a strip of 16.
//   PLAIN  0: codes and scales, 1: float16, 2: bfloat16       BLOCK, GROUP  columns of a block, and of a scale
//   LOW, HIGH  bits of a code in low and high words; LOW 8: codes are signed      OFFSET  subtracted from codes
//   SCALES  of groups: 0 none, 1 unsigned, 2 signed bytes      MIN  1: groups have a minimum      CODEBOOK  1: codes are indices of BOOK
//   BIAS_LOAD, Y_STORE, ADDED, ADDED_LOAD  from the launch      V  rows of a vector
//   CLANG  1: the compiler has clang's conversions of vectors, 2: and its vload_half may call a function per element
//   ASM  instructions written as assembly (plans.py asks who has them): 0 none, 1 AVX-512 with VNNI, 2 NEON with dot products
#if V == 1
#define OF(type) type
#else
#define OF(type) JOIN(type, V)
#endif
#if V == 1
#define TO(type, x) ((type)(x))
#elif CLANG
#define TO(type, x) __builtin_convertvector(x, OF(type))
#else
#define TO(type, x) JOIN(convert_, OF(type))(x)
#endif
#define TO_FLOAT(x) TO(float, x)
#define FLOATS OF(float)
#define INTS OF(int)
#define WORDS (LOW + HIGH)  // words of 32 codes of a row
#define GROUPS (BLOCK / GROUP)
#define AT_SCALES (32 + 32 * MIN)
#define AT_LOWER (AT_SCALES + 16 * GROUPS * (SCALES > 0))
#define AT_CODES (AT_LOWER + 16 * GROUPS * (SCALES > 0 && MIN))
#define RECORD (PLAIN ? 1024 : AT_CODES + BLOCK / 32 * WORDS * 64)
#define PER_RECORD (PLAIN ? 1 : BLOCK / 32)  // runs of 32 columns in it
#if V == 16  // records are multiples of 32 bytes, vectors of 64
typedef struct __attribute__((packed)) { INTS v; } loose_int;
typedef struct __attribute__((packed)) { ushort16 v; } loose_ushort;
#define GET_INTS(p) (((__global const loose_int*)(p))->v)
#define GET_HALFWORDS(p) (((__global const loose_ushort*)(p))->v)
#else
#define GET_INTS(p) (*(__global const INTS*)(p))
#define GET_HALFWORDS(p) (*(__global const OF(ushort)*)(p))
#endif
#define GET_BYTES(type, p) (*(__global const OF(type)*)(p))
// V halves as floats; load_float16_V comes with the launch, with CLANG 2.
#if V == 1
#define HALVES(p) vload_half(0, (__global const half*)(p))
#elif V == 2  // mma.cl, which has of_half
#define HALVES(p) (float2)(of_half(*(__global const uint*)(p)), of_half(*(__global const uint*)(p) >> 16))
#elif ASM == 2
static inline float4 four_halves(__global const uchar* p) {
  const ushort4 h = *(__global const ushort4*)p;
  float4 f;
  __asm__("fcvtl %0.4s, %1.4h" : "=w"(f) : "w"(h));
  return f;
}
#if V == 4
#define HALVES(p) four_halves(p)
#else
static inline float8 eight_halves(__global const uchar* p) {
  const ushort8 h = *(__global const ushort8*)p;
  float4 low, high;
  __asm__("fcvtl %0.4s, %2.4h\n\tfcvtl2 %1.4s, %2.8h" : "=&w"(low), "=w"(high) : "w"(h));
  return (float8)(low, high);
}
#define HALVES(p) (float16)(eight_halves(p), eight_halves((p) + 16))
#endif
#elif CLANG == 2
#define HALVES(p) JOIN(load_float16_, V)(p)
#else
#define HALVES(p) JOIN(vload_half, V)(0, (__global const half*)(p))
#endif
#define BOOK ((float16)(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))

// The words of run `run` (of 32 columns) of a record, and four codes of each row out of them: columns 4j to 4j + 3.
#define WORD_AT(record, run, i, first) GET_INTS((record) + AT_CODES + ((run) * WORDS + (i)) * 64 + (first) * 4)
#define WORDS_OF(w, record, run, first) UNROLL for (int i_ = 0; i_ < WORDS; ++i_) w[i_] = WORD_AT(record, run, i_, first);
#define EIGHTHS (LOW > 8 ? 1 : 8 / LOW)  // fours of codes in a low word
#define LOW_MASK (0x01010101 * ((1 << LOW % 8) - 1))
#define LOW_CODES(word, j) (LOW == 8 ? (word) : ((word) >> LOW * ((j) % EIGHTHS)) & LOW_MASK)
#if HIGH
#define HIGH_CODES(word, j) ((((word) >> HIGH * ((j) % (8 / HIGH))) & (0x01010101 * ((1 << HIGH) - 1))) << LOW)
#define FOUR_CODES(w, j) (LOW_CODES(w[(j) / EIGHTHS], j) | HIGH_CODES(w[LOW + (j) * HIGH / 8], j))
#define FOUR_CODES_AT(record, run, j, first) \
  (LOW_CODES(WORD_AT(record, run, (j) / EIGHTHS, first), j) | HIGH_CODES(WORD_AT(record, run, LOW + (j) * HIGH / 8, first), j))
#else
#define FOUR_CODES(w, j) LOW_CODES(w[(j) / EIGHTHS], j)
#define FOUR_CODES_AT(record, run, j, first) LOW_CODES(WORD_AT(record, run, (j) / EIGHTHS, first), j)
#endif
// What the scale multiplies, of code i of four; PLACE(i) is its byte.
#define NIBBLES (LOW == 4 && !HIGH)
#define PLACE(i) (NIBBLES ? ((i) & 1) * 2 + (i) / 2 : (i))
#if CODEBOOK && V == 1
#define UNIT(c, i) shuffle(BOOK, (uint2)((((c) >> 8 * PLACE(i)) & 15))).x
#elif CODEBOOK
#define UNIT(c, i) shuffle(BOOK, JOIN(as_, OF(uint))(((c) >> 8 * PLACE(i)) & 15))
#elif LOW == 8
#define UNIT(c, i) TO_FLOAT(((c) << (24 - 8 * (i))) >> 24)
#else
#define UNIT(c, i) (TO_FLOAT(((c) >> 8 * PLACE(i)) & 255) - (float)OFFSET)
#endif
// Scale and minimum of a group of a record.
#define SMALL(type, record, at, group, first) TO_FLOAT(GET_BYTES(type, (record) + (at) + (group) * 16 + (first)))
#if SCALES == 2
#define GROUP_SCALE(record, group, first) (HALVES((record) + (first) * 2) * SMALL(char, record, AT_SCALES, group, first))
#elif SCALES
#define GROUP_SCALE(record, group, first) (HALVES((record) + (first) * 2) * SMALL(uchar, record, AT_SCALES, group, first))
#else
#define GROUP_SCALE(record, group, first) HALVES((record) + (first) * 2)
#endif
#if SCALES
#define GROUP_MIN(record, group, first) (-(HALVES((record) + 32 + (first) * 2) * SMALL(uchar, record, AT_LOWER, group, first)))
#else
#define GROUP_MIN(record, group, first) HALVES((record) + 32 + (first) * 2)
#endif
// Column i of a record of a plain kind.
#if PLAIN == 2
#define PLAIN_VALUES(record, i, first) JOIN(as_, FLOATS)(TO(uint, GET_HALFWORDS((record) + (i) * 32 + (first) * 2)) << 16)
#else
#define PLAIN_VALUES(record, i, first) HALVES((record) + (i) * 32 + (first) * 2)
#endif
#define PARTS (16 / V)
#define PER_RUN (32 / (PLAIN ? 32 : GROUP))  // groups in a run of 32 columns
// V sums of a token, from row strip * 16 + first on, as results.
#define STORE_ROWS(acc, token)                                                                                              \
  {                                                                                                                         \
    float line_[V] __attribute__((aligned(64)));                                                                            \
    *(FLOATS*)line_ = acc;                                                                                                  \
    for (int r_ = 0, row_ = strip * 16 + first; r_ < V && row_ < rows && (token) < tokens; ++r_, ++row_)                    \
      Y_STORE(y, (size_t)(token) * rows + row_, line_[r_] + (biased ? BIAS_LOAD(bias, row_) : 0.0f));                       \
  }
// Without decode.cl before it.
#ifndef EXTRA_POINTERS
#define EXTRA_POINTERS
#define ADDED_POINTERS
#define NORM 0
#define NORMED(f, s, column) (f)
#define GATED 0
#define GATE w
#define GATED_VALUE(first, second, row) (first)
#define FINISHED(sum, row, at) ((sum) + (biased ? BIAS_LOAD(bias, row) : 0.0f))
#else
#define FINISHED(sum, row, at) epilogue(sum, 1.0f, biased, biased ? BIAS_LOAD(bias, row) : 0.0f, ADDED ? ADDED_LOAD(added, at) : 0.0f)
#endif
