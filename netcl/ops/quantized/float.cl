// y = x w' + bias with floating-point activations, a few rows of x at a time; macros of codes.cl, and
//   NB  rows of x (tokens) at once      SLICES  work-items that share the columns of a vector's rows; 1: a work-group is one work-item
// A work-group does one strip of 16 rows of w (SLICES > 1: 16 / V items for its rows times SLICES), or a vector of it.
#ifndef NB
#define NB 1
#define SLICES 16
#endif
#define PER_RUN (32 / (PLAIN ? 32 : GROUP))  // groups in a run of 32 columns

__kernel void strips_float(__global const uchar* w, __global const X_T* x, __global const BIAS_T* bias, __global Y_T* y, const int rows,
                           const int columns, const int tokens, const int biased) {
  const int item = SLICES > 1 ? get_local_id(0) : get_group_id(0) % PARTS;
  const int strip = SLICES > 1 ? get_group_id(0) : get_group_id(0) / PARTS;
  const int first = item % PARTS * V, slice = SLICES > 1 ? item / PARTS : 0, runs = columns / 32;
  __global const uchar* begin = w + (size_t)strip * (runs / PER_RECORD) * RECORD;
#if SLICES > 1
  __local float sums[SLICES * 16 * NB];
#endif
  for (int t0 = 0; t0 < tokens; t0 += NB) {
    FLOATS acc[NB];
    __global const X_T* at[NB];
    #pragma unroll
    for (int n = 0; n < NB; ++n) {
      acc[n] = (FLOATS)(0.0f);
      at[n] = x + (size_t)min(t0 + n, tokens - 1) * columns;
    }
    for (int run = slice; run < runs; run += SLICES) {
      __global const uchar* p = begin + (size_t)(run / PER_RECORD) * RECORD;
#if PLAIN
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        FLOATS f[4];
        #pragma unroll
        for (int i = 0; i < 4; ++i) f[i] = PLAIN_VALUES(p, 4 * j + i, first);
        #pragma unroll
        for (int n = 0; n < NB; ++n) {
          const float4 four = X_QUAD(at[n] + run * 32 + 4 * j);
          acc[n] += f[0] * four.x + f[1] * four.y + f[2] * four.z + f[3] * four.w;
        }
      }
#else
      INTS words[WORDS];
      WORDS_OF(words, p, run % PER_RECORD, first)
      #pragma unroll
      for (int g = 0; g < PER_RUN; ++g) {
        FLOATS part[NB];
        float total[NB];
        #pragma unroll
        for (int n = 0; n < NB; ++n) {
          part[n] = (FLOATS)(0.0f);
          total[n] = 0.0f;
        }
        #pragma unroll
        for (int j = g * (8 / PER_RUN); j < (g + 1) * (8 / PER_RUN); ++j) {
          const INTS c = FOUR_CODES(words, j);
          const FLOATS f0 = UNIT(c, 0), f1 = UNIT(c, 1), f2 = UNIT(c, 2), f3 = UNIT(c, 3);
          #pragma unroll
          for (int n = 0; n < NB; ++n) {
            const float4 four = X_QUAD(at[n] + run * 32 + 4 * j);
            part[n] += f0 * four.x + f1 * four.y + f2 * four.z + f3 * four.w;
            if (MIN) total[n] += four.x + four.y + four.z + four.w;
          }
        }
        const int group = run % PER_RECORD * PER_RUN + g;
        const FLOATS scale = GROUP_SCALE(p, group, first);
        #pragma unroll
        for (int n = 0; n < NB; ++n) acc[n] += scale * part[n];
#if MIN
        const FLOATS minimum = GROUP_MIN(p, group, first);
        #pragma unroll
        for (int n = 0; n < NB; ++n) acc[n] += minimum * total[n];
#endif
      }
#endif
    }
#if SLICES > 1
    #pragma unroll
    for (int n = 0; n < NB; ++n)
      *(__local FLOATS*)(sums + (slice * NB + n) * 16 + first) = acc[n];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < 16 * NB; i += PARTS * SLICES) {
      float sum = 0.0f;
      for (int s = 0; s < SLICES; ++s) sum += sums[s * 16 * NB + i];
      const int row = strip * 16 + i % 16, token = t0 + i / 16;
      if (row < rows && token < tokens) Y_STORE(y, (size_t)token * rows + row, sum + (biased ? BIAS_LOAD(bias, row) : 0.0f));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#else
    #pragma unroll
    for (int n = 0; n < NB; ++n) STORE_ROWS(acc[n], t0 + n)
#endif
  }
}
