// op(a) into panels of MR rows for the products of cpu.cl: [m / MR][k][MR] in the type sums are kept in, zeros beyond the edge.
#ifndef MR  // rows of a panel
#define MR 6
#endif
#ifndef PANELS  // that a work-item packs side by side
#define PANELS 8
#endif

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_a(__global const A_T* restrict a, __global REAL* restrict packed, const int m, const int k, const long a_row, const long a_k,
            const int batch1, const long a0_stride, const long a1_stride) {
  const int panels = (m + MR - 1) / MR, blocks = (panels + PANELS - 1) / PANELS;
  const INDEX group = get_group_id(0), batch = group / blocks;
  const int first = (int)(group % blocks) * PANELS, count = min(PANELS, panels - first);
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride + first * MR * (INDEX)a_row;
  packed += (batch * panels + first) * k * MR;
  const int rows = m - first * MR;
  for (int kk = 0; kk < k; ++kk) {
    __global const A_T* s = a + kk * (INDEX)a_k;
    for (int p = 0; p < count; ++p) {
      __global REAL* d = packed + ((INDEX)p * k + kk) * MR;
      if ((p + 1) * MR <= rows && a_row == 1) {
        for (int i = 0; i < MR; ++i) d[i] = (REAL)A_LOAD(s, p * MR + i);
      } else {
        for (int i = 0; i < MR; ++i) d[i] = p * MR + i < rows ? (REAL)A_LOAD(s, (p * MR + i) * (INDEX)a_row) : (REAL)0;
      }
    }
  }
}
