// Rows of packed weights as values: y[i] = w[rows[i]], or with LISTED 0 the rows from `begin` on. Macros of codes.cl, with V 1; TILES 1 reads
// the layout of mma.cl, without its instructions. A work-item does 32 columns of one row; the rows of a strip are neighbors.
#ifndef LISTED
#define LISTED 0
#define TILES 0
#endif
#pragma OPENCL FP_CONTRACT OFF  // values are those of formats.py, bit for bit
#define HALF_AT(p) vload_half(0, (__global const half*)(p))

#if TILES && !PLAIN
// Code of a column of a run of 32, and the scale and minimum of the run. `across` is columns / 64.
static inline float2 tile_factors(__global const uchar* w, const int tiles, const int across, const int row, const int run) {
  const size_t tile = (size_t)(row / 16) * across + run / 2;
  const int high = row % 16 / 8, g = row % 8, half_tile = run % 2;
  __global const uchar* scales = w + (size_t)tiles * across * 128 * LOW;
#if SCALES
  __global const uchar* bytes = scales + (tile * 8 + g) * 8 + high * 4 + half_tile * 2;
  __global const uchar* d = scales + (size_t)tiles * across * 64 + (((size_t)(row / 16) * (across / 4) + run / 8) * 8 + g) * 8 + high * 4;
  return (float2)(HALF_AT(d) * (float)bytes[0], -(HALF_AT(d + 2) * (float)bytes[1]));
#else
  return (float2)(HALF_AT(scales + (tile * 8 + g) * 8 + half_tile * 4 + high * 2), 0.0f);
#endif
}
static inline float tile_unit(__global const uchar* w, const int across, const int row, const int run, const int k) {
  const size_t tile = (size_t)(row / 16) * across + run / 2;
  const int high = row % 16 / 8, lane = row % 8 * 4 + k / 8;
#if LOW == 8
  return (float)(char)w[((tile * 2 + run % 2) * 32 + lane) * 16 + high * 8 + k % 8];
#else
  const int place = (k % 8) / 2 + (k % 2) * 4;  // of the nibble in its word
  return (float)((w[(tile * 32 + lane) * 16 + (run % 2 * 2 + high) * 4 + place / 2] >> place % 2 * 4) & 15) - (float)OFFSET;
#endif
}
#endif

__kernel void unpack_rows(__global const uchar* w, __global const INDEX_T* listed, __global Y_T* y, const int rows, const int columns,
                          const int begin, const int count) {
  const int runs = columns / 32;
  const size_t i = get_global_id(0), near = i % 16 + i / 16 / runs * 16;
  const int run = i / 16 % runs;
  if (near >= count) return;
  const int row = LISTED ? (int)listed[near] : begin + (int)near;
  __global Y_T* out = y + near * columns + run * 32;
  if (row < 0 || row >= rows) {  // of a list that the host did not check
    for (int k = 0; k < 32; ++k) Y_STORE(out, k, NAN);
    return;
  }
#if TILES && PLAIN
  for (int k = 0; k < 32; ++k) Y_STORE(out, k, HALF_AT(w + ((size_t)row * columns + run * 32 + k) * 2));
#elif TILES
  const float2 factors = tile_factors(w, (rows + 15) / 16, columns / 64, row, run);
  for (int k = 0; k < 32; ++k) Y_STORE(out, k, factors.x * tile_unit(w, columns / 64, row, run, k) + factors.y);
#else
  __global const uchar* p = w + ((size_t)(row / 16) * (runs / PER_RECORD) + run / PER_RECORD) * RECORD;
  const int first = row % 16;
#if PLAIN
  for (int k = 0; k < 32; ++k) Y_STORE(out, k, PLAIN_VALUES(p, k, first));
#else
  INTS words[WORDS];
  WORDS_OF(words, p, run % PER_RECORD, first)
  float scale = 0.0f, minimum = 0.0f;
  #pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int group = (run % PER_RECORD * 32 + 4 * j) / GROUP;
    if (4 * j % GROUP == 0) scale = GROUP_SCALE(p, group, first);
#if MIN
    if (4 * j % GROUP == 0) minimum = GROUP_MIN(p, group, first);
#endif
    const INTS c = FOUR_CODES(words, j);
    Y_STORE(out, 4 * j, scale * UNIT(c, 0) + minimum);
    Y_STORE(out, 4 * j + 1, scale * UNIT(c, 1) + minimum);
    Y_STORE(out, 4 * j + 2, scale * UNIT(c, 2) + minimum);
    Y_STORE(out, 4 * j + 3, scale * UNIT(c, 3) + minimum);
  }
#endif
#endif
}
