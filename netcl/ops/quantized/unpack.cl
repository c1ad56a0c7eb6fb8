// Rows of packed weights as values: y[i] = w[rows[i]], or with LISTED 0 the rows from `begin` on. Macros of codes.cl (PLAIN), with V 1, and
// PUT_8(p, a, b), which stores eight values of Y_T; INDEX_T is that of rows. A work-item does 32 columns of one row, and
// neighbors do the rows of a strip.
#pragma OPENCL FP_CONTRACT OFF  // values are those of formats.py, bit for bit

__kernel void unpack_rows(__global const uchar* w, __global const INDEX_T* listed, __global Y_T* y, const int rows, const int columns,
                          const int begin, const int count) {
  const int runs = columns / 32;
  const size_t i = get_global_id(0), near = i % 16 + i / 16 / runs * 16;
  const int run = i / 16 % runs;
  if (near >= count) return;
  const int row = LISTED ? (int)listed[near] : begin + (int)near, first = row & 15;
  __global Y_T* out = y + near * columns + run * 32;
  float f[32];
  if (row < 0 || row >= rows) {  // of a list that the host did not check
    for (int k = 0; k < 32; ++k) f[k] = NAN;
  } else {
    __global const uchar* p = w + ((size_t)(row / 16) * (runs / PER_RECORD) + run / PER_RECORD) * RECORD;
#if PLAIN
    UNROLL for (int k = 0; k < 32; ++k) f[k] = PLAIN_VALUES(p, k, first);
#else
    INTS words[WORDS];
    WORDS_OF(words, p, run % PER_RECORD, first)
    UNROLL for (int j = 0; j < 8; ++j) {
      const int group = (run % PER_RECORD * 32 + 4 * j) / GROUP;
      const float scale = GROUP_SCALE(p, group, first);
      const INTS c = FOUR_CODES(words, j);
      f[4 * j] = scale * UNIT(c, 0), f[4 * j + 1] = scale * UNIT(c, 1);
      f[4 * j + 2] = scale * UNIT(c, 2), f[4 * j + 3] = scale * UNIT(c, 3);
      if (MIN) UNROLL for (int i = 0; i < 4; ++i) f[4 * j + i] += GROUP_MIN(p, group, first);
    }
#endif
  }
  UNROLL for (int k = 0; k < 32; k += 8)
    PUT_8(out + k, (float4)(f[k], f[k + 1], f[k + 2], f[k + 3]), (float4)(f[k + 4], f[k + 5], f[k + 6], f[k + 7]));
}
