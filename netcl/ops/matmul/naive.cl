// Matrix products on any device, without local memory. Operands are addressed by two strides, so either may be transposed.

// One work-item per value of c.
__kernel void gemm_naive(IN_POINTERS, END_POINTERS, const int m, const int n, const int k, const long a_row, const long a_k, const long b_k,
                         const long b_column, const int has_bias, BATCH_NUMBERS, const long total, const REAL scale) {
  const INDEX item = get_global_id(0);
  if (item >= (INDEX)total) return;
  const INDEX batch = item / ((INDEX)m * n);
  const int i = (int)(item / n % m), j = (int)(item % n);
  OFFSETS(batch)
  REAL sum = 0;
  for (int kk = 0; kk < k; ++kk)
    sum += (REAL)A_LOAD(a, i * (INDEX)a_row + kk * (INDEX)a_k) * (REAL)B_LOAD(b, kk * (INDEX)b_k + j * (INDEX)b_column);
  sum = FINISHED(sum, j, (INDEX)i * n + j);
  C_STORE(c, (INDEX)i * n + j, sum);
}

#ifndef SUMS  // values per work-item of add_parts: 4 where rows are multiples of four values long
#define SUMS 1
#endif
#if SUMS == 1
#define PART_T REAL
#else
#define PART_T JOIN(REAL, SUMS)
#endif

// The parts of a product that was split along k, added up in order.
__kernel void add_parts(__global const REAL* restrict parts, END_POINTERS, const int n, const int has_bias, const long size,
                        const int splits, const long total, const REAL scale) {
  const INDEX item = (INDEX)get_global_id(0) * SUMS;
  if (item >= (INDEX)total) return;
  const INDEX batch = item / (INDEX)size, at = item % (INDEX)size;
  const int column = (int)(at % n);
  parts += batch * splits * size + at;
  PART_T sum = 0;
  _Pragma("unroll 4") for (int s = 0; s < splits; ++s) sum += *(__global const PART_T*)(parts + s * size);
#if SUMS == 4
  sum.x = FINISHED(sum.x, column, item);
  sum.y = FINISHED(sum.y, column + 1, item + 1);
  sum.z = FINISHED(sum.z, column + 2, item + 2);
  sum.w = FINISHED(sum.w, column + 3, item + 3);
  *(__global PART_T*)(c + item) = sum;
#else
  sum = FINISHED(sum, column, item);
  C_STORE(c, item, sum);
#endif
}
