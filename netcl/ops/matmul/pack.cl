// op(a) into panels of MR rows for the products of cpu.cl: [m / MR][k][MR] in the type sums are kept in, zeros beyond the edge.
// A_QUAD(p), where it is defined: four values of a; rows that lie along k are then turned in registers, four at a time.
#ifndef MR  // rows of a panel
#define MR 6
#endif
#ifndef PANELS  // that a work-item packs side by side
#define PANELS 8
#endif

#if defined(A_QUAD) && MR % 2 == 0
typedef struct __attribute__((packed)) { JOIN(REAL, 2) v; } packed_pair;
#define PUT_QUAD(d, e) ((__global packed_quad*)(d))->v = (QUAD)(r0.e, r1.e, r2.e, r3.e)
#define PUT_PAIR(d, e) ((__global packed_pair*)(d))->v = (JOIN(REAL, 2))(r0.e, r1.e)

// Four columns of a whole panel.
static inline void turn(__global const A_T* s, __global REAL* d, const INDEX a_row) {
#pragma unroll
  for (int i = 0; i + 4 <= MR; i += 4) {
    const QUAD r0 = A_QUAD(s + i * a_row), r1 = A_QUAD(s + (i + 1) * a_row), r2 = A_QUAD(s + (i + 2) * a_row),
               r3 = A_QUAD(s + (i + 3) * a_row);
    PUT_QUAD(d + i, x);
    PUT_QUAD(d + i + MR, y);
    PUT_QUAD(d + i + 2 * MR, z);
    PUT_QUAD(d + i + 3 * MR, w);
  }
#if MR % 4
  const QUAD r0 = A_QUAD(s + (MR - 2) * a_row), r1 = A_QUAD(s + (MR - 1) * a_row);
  PUT_PAIR(d + MR - 2, x);
  PUT_PAIR(d + 2 * MR - 2, y);
  PUT_PAIR(d + 3 * MR - 2, z);
  PUT_PAIR(d + 4 * MR - 2, w);
#endif
}
#define TURNS 1
#else
#define TURNS 0
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
  int turned = 0;  // panels
#if TURNS
  if (a_k == 1)
    for (; (turned + 1) * MR <= rows && turned < count; ++turned) {
      __global const A_T* s = a + turned * MR * (INDEX)a_row;
      __global REAL* d = packed + (INDEX)turned * k * MR;
      int kk = 0;
      for (; kk + 4 <= k; kk += 4) turn(s + kk, d + (INDEX)kk * MR, (INDEX)a_row);
      for (; kk < k; ++kk)
        for (int i = 0; i < MR; ++i) d[(INDEX)kk * MR + i] = (REAL)A_LOAD(s, i * (INDEX)a_row + kk);
    }
  if (turned == count) return;
#endif
  for (int kk = 0; kk < k; ++kk) {
    __global const A_T* s = a + kk * (INDEX)a_k;
    for (int p = turned; p < count; ++p) {
      __global REAL* d = packed + ((INDEX)p * k + kk) * MR;
      if ((p + 1) * MR <= rows && a_row == 1) {
        for (int i = 0; i < MR; ++i) d[i] = (REAL)A_LOAD(s, p * MR + i);
      } else {
        for (int i = 0; i < MR; ++i) d[i] = p * MR + i < rows ? (REAL)A_LOAD(s, (p * MR + i) * (INDEX)a_row) : (REAL)0;
      }
    }
  }
}
