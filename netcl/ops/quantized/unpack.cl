// Rows of packed weights as values: y[i] = w[rows[i]], or with LISTED 0 the rows from `begin` on. Macros of codes.cl (PLAIN), with V 2
// (LISTED 0) or 1, and PUT_8(p, a, b), which stores eight values of Y_T; INDEX_T is that of rows. A work-item does EACH (8 or 32) columns of
// V rows. Neighbors do the other columns of a run of 32, then the rows of a strip; the second number of a work-item is that of 16 rows.
#pragma OPENCL FP_CONTRACT OFF  // values are those of formats.py, bit for bit
#define SHARERS (32 / EACH)  // of a run

__kernel void unpack_rows(__global const uchar* w, __global const INDEX_T* listed, __global Y_T* y, const int rows, const int columns,
                          const int begin, const int count) {
  const int runs = columns / 32, i = get_global_id(0), run = i / (PARTS * SHARERS), from = i % SHARERS * EACH;
  const int near = get_global_id(1) * 16 + i / SHARERS % PARTS * V;
  if (near >= count || run >= runs) return;
  const int row = LISTED ? (int)listed[near] : begin + near, first = row & 15;
  __global Y_T* out = y + (size_t)near * columns + run * 32 + from;
  FLOATS f[EACH];
  if (row < 0 || row >= rows) {  // of a list that the host did not check
    for (int k = 0; k < EACH; ++k) f[k] = NAN;
  } else {
    __global const uchar* p = w + ((size_t)(row / 16) * (runs / PER_RECORD) + run / PER_RECORD) * RECORD;
#if PLAIN
    UNROLL for (int k = 0; k < EACH; ++k) f[k] = PLAIN_VALUES(p, from + k, first);
#else
    UNROLL for (int k = 0; k < EACH; k += 4) {
      const int j = (from + k) / 4, group = (run % PER_RECORD * 32 + 4 * j) / GROUP;
      const FLOATS scale = GROUP_SCALE(p, group, first);
      const INTS c = FOUR_CODES_AT(p, run % PER_RECORD, j, first);
      f[k] = scale * UNIT(c, 0), f[k + 1] = scale * UNIT(c, 1), f[k + 2] = scale * UNIT(c, 2), f[k + 3] = scale * UNIT(c, 3);
      if (MIN) UNROLL for (int i = 0; i < 4; ++i) f[k + i] += GROUP_MIN(p, group, first);
    }
#endif
  }
#define ROW(i) ((const float*)(f + (i)))[r]
  UNROLL for (int r = 0; r < V; ++r)
    UNROLL for (int k = 0; k < EACH; k += 8)
      if (r == 0 || near + r < count)
        PUT_8(out + (size_t)r * columns + k, (float4)(ROW(k), ROW(k + 1), ROW(k + 2), ROW(k + 3)),
              (float4)(ROW(k + 4), ROW(k + 5), ROW(k + 6), ROW(k + 7)));
}

// Rows of weights as floats, from strip `begin` on. A work-item does 32 columns of a strip, four rows and columns at a time.
__kernel void unpack_halves(__global const uchar* w, __global float* y, const int columns, const int begin, const int count) {
  const int runs = columns / 32, strip = get_global_id(0) / runs, run = get_global_id(0) % runs;
  __global const uchar* record = w + ((size_t)(begin + strip) * runs + run) * RECORD;
  for (int r = 0; r < min(16, count - strip * 16); r += 4)
    UNROLL for (int i = 0; i < 32; i += 4) {
      const float4 a = HALVES(record + i * 32 + r * 2), b = HALVES(record + i * 32 + 32 + r * 2);
      const float4 c = HALVES(record + i * 32 + 64 + r * 2), d = HALVES(record + i * 32 + 96 + r * 2);
      const float4 rows[4] = {(float4)(a.x, b.x, c.x, d.x), (float4)(a.y, b.y, c.y, d.y), (float4)(a.z, b.z, c.z, d.z), (float4)(a.w, b.w, c.w, d.w)};
      UNROLL for (int k = 0; k < 4; ++k)
        if (strip * 16 + r + k < count) *(__global float4*)(y + (size_t)(strip * 16 + r + k) * columns + run * 32 + i) = rows[k];
    }
}
