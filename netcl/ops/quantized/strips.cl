// y = x w' + bias for a few rows of x (tokens) at a time; macros of codes.cl, and
//   NB  tokens at once      SLICES  work-items that share the columns of a vector's rows; 1: a work-group is one work-item, of V rows
//   DOTS, AHEAD, LEVEL  as in runs.cl; with DOTS x is int8, from round_activations
// With SLICES a work-group does one strip: 16 / V items for its rows times SLICES. Lanes are rows, so nothing is added across lanes.
// PLAIN LOW OFFSET, and what decode.cl defines (with SLICES above 1 only), as in codes.cl. From the launch: X_T X_QUAD(p), BIAS_T BIAS_LOAD,
// Y_T Y_STORE.
#define QUAD_AT(n, j) NORMED(X_QUAD(x + (at[n] + run) * 32 + 4 * (j)), stats[min(t0 + n, tokens - 1)], run * 32 + 4 * (j))
#define CODES_AT(n) (x + (at[n] + run) * 32)
#define SCALE_AT(n) scales[at[n] + run]
#define COUNT_AT(n, i) sums[2 * (at[n] + run) + (i)]
// Activations as int8: q, the scale of each 32, the sum of each 16. A work-item does up to 8 runs of 32 columns of a token.
__kernel void round_activations(__global const X_T* x, __global char* q, __global float* scales, __global int* sums, const int columns) {
  const int runs = columns / 32, share = (runs + 7) / 8, token = get_global_id(0) / share, begin = get_global_id(0) % share * 8;
  for (int run = begin; run < min(begin + 8, runs); ++run) {
    const size_t at = (size_t)token * runs + run;
    float4 f[8];
    UNROLL for (int j = 0; j < 8; ++j) f[j] = X_QUAD(x + at * 32 + 4 * j);
    scales[at] = put_codes(f, q + at * 32, sums + 2 * at);
  }
}

__kernel void strips_product(__global const uchar* w, __global const X_T* x, __global const float* scales, __global const int* sums,
                             EXTRA_POINTERS ADDED_POINTERS __global const BIAS_T* bias, __global Y_T* y, const int rows, const int columns,
                             const int tokens, const int biased) {
  const int item = SLICES > 1 ? get_local_id(0) : get_group_id(0) % PARTS;
  const int strip = SLICES > 1 ? get_group_id(0) : get_group_id(0) / PARTS;
  const int first = item % PARTS * V, slice = SLICES > 1 ? item / PARTS : 0, runs = columns / 32;
#if SLICES > 1
  __local float shared[SLICES * 16 * NB] __attribute__((aligned(16)));
  __local float gates[GATED ? 16 * NB : 1];
#endif
#if NORM
  __local float2 stats[8];
  row_statistics(x, tokens, columns, item, shared, stats);
#endif
  for (int pass = 0; pass < tokens * (1 + GATED); pass += NB) {  // GATED: all tokens by one pass with the gate, then by one with w
    const int t0 = GATED ? 0 : pass;
    __global const uchar* begin = (GATED && !pass ? GATE : w) + (size_t)strip * (runs / PER_RECORD) * RECORD;
    FLOATS acc[NB];
    size_t at[NB];
    UNROLL for (int n = 0; n < NB; ++n) acc[n] = (FLOATS)(0.0f), at[n] = (size_t)min(t0 + n, tokens - 1) * runs;
    for (int run = slice; run < runs; run += SLICES) {
      __global const uchar* p = begin + (size_t)(run / PER_RECORD) * RECORD;
      FETCH_AHEAD(p, run)
      ADD_RUN(acc, p, run, first)
    }
#if SLICES > 1
    UNROLL for (int n = 0; n < NB; ++n) *(__local FLOATS*)(shared + (slice * NB + n) * 16 + first) = acc[n];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < 16 * NB; i += PARTS * SLICES) {
      float sum = 0.0f;
      for (int s = 0; s < SLICES; ++s) sum += shared[s * 16 * NB + i];
      const int row = strip * 16 + i % 16, token = t0 + i / 16;
      if (row >= rows || token >= tokens) continue;
      const size_t place = (size_t)token * rows + row;
      if (!GATED) Y_STORE(y, place, FINISHED(sum, row, place));
      else if (!pass) gates[i] = GATED_VALUE(sum, 1.0f, row);
      else Y_STORE(y, place, gates[i] * (sum + (biased ? BIAS_LOAD(bias, row) : 0.0f)));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#else
    UNROLL for (int n = 0; n < NB; ++n) STORE_ROWS(acc[n], t0 + n)
#endif
  }
}
