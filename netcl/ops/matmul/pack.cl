// op(a) into panels of MR rows for the products of cpu.cl: [m / MR][k][MR] in the type sums are kept in, zeros beyond the edge.
#ifndef MR  // rows of a panel
#define MR 6
#endif

// A work-item packs `depth` of k for `side` panels, `step` of k at a time for one panel after another: a transposed A is then read in `step`
// streams along its rows, and every panel gets whole lines. (One of k at a time touches a page of A each.)
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_a(__global const A_T* restrict a, __global REAL* restrict packed, const int m, const int k, const long a_row, const long a_k,
            const int batch1, const long a0_stride, const long a1_stride, const int depth, const int side, const int step) {
  const int panels = (m + MR - 1) / MR, blocks = (panels + side - 1) / side, parts = (k + depth - 1) / depth;
  INDEX group = get_group_id(0);
  const int begin = (int)(group % parts) * depth, end = min(begin + depth, k);
  group /= parts;
  const int first = (int)(group % blocks) * side, last = min(first + side, panels);
  const INDEX batch = group / blocks;
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride;
  packed += batch * panels * k * MR;
  for (int k0 = begin; k0 < end; k0 += step) {
    const int k1 = min(k0 + step, end);
    for (int p = first; p < last; ++p) {
      __global REAL* d = packed + ((INDEX)p * k + k0) * MR;
      __global const A_T* s = a + p * MR * (INDEX)a_row + k0 * (INDEX)a_k;
      const int rows = min(MR, m - p * MR);
      if (rows == MR && a_row == 1) {
        for (int kk = k0; kk < k1; ++kk, d += MR, s += (INDEX)a_k) {
          UNROLL for (int i = 0; i < MR; ++i) d[i] = (REAL)A_LOAD(s, i);
        }
      } else {
        for (int kk = k0; kk < k1; ++kk, d += MR, s += (INDEX)a_k)
          for (int i = 0; i < MR; ++i) d[i] = i < rows ? (REAL)A_LOAD(s, i * (INDEX)a_row) : (REAL)0;
      }
    }
  }
}
