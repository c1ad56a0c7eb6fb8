// Activations rounded to int8, with a scale for each run of 32 columns. Macros of codes.cl (LOW OFFSET ASM CLANG).
#define FLIPPED (LOW == 8 && ASM == 1)  // signed codes as unsigned ones
#define SUBTRACTED (FLIPPED ? 128 : LOW == 8 ? 0 : OFFSET)
#define MAGIC 0x4b400000  // the bits of 1.5 * 2^23: what is added to them is added to the float, up to 22 bits
#define MAGIC_FLOAT 12582912.0f
#if CLANG
#define CODES_AS_CHARS(codes) __builtin_convertvector(NIBBLES ? (codes).s0213 : (codes), char4)
#else
#define CODES_AS_CHARS(codes) convert_char4(NIBBLES ? (codes).s0213 : (codes))
#endif
// Rounds 32 activations to codes, to the nearest, ties to even; returns their scale. A scale is NaN or infinite if an activation is.
static inline float round_run(const float4* f, int4* codes) {
  int4 most = (int4)(0);  // bits of magnitudes, which order as integers do, NaN last
  UNROLL for (int j = 0; j < 8; ++j) {
    const int4 size = as_int4(f[j]) & 0x7fffffff;
    most = size > most ? size : most;
  }
  const float largest = as_float(max(max(most.x, most.y), max(most.z, most.w))), inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  UNROLL for (int j = 0; j < 8; ++j) {
    const float4 scaled = f[j] * inverse;  // rounded by itself, as in plans.py
    codes[j] = as_int4(scaled + MAGIC_FLOAT) - MAGIC;
  }
  return largest / 127.0f;
}

// Stores 32 activations as codes, and the sums of their halves; returns their scale.
static inline float put_codes(const float4* f, __global char* to, __global int* sums) {
  int4 codes[8], total[2] = {(int4)(0), (int4)(0)};
  const float scale = round_run(f, codes);
  UNROLL for (int j = 0; j < 8; ++j) {
    ((__global char4*)to)[j] = CODES_AS_CHARS(codes[j]);
    total[j / 4] += codes[j];
  }
  UNROLL for (int i = 0; i < 2; ++i) sums[i] = total[i].x + total[i].y + total[i].z + total[i].w;
  return scale;
}
