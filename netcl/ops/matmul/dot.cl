// a as it is times b transposed, on CPUs: both are walked along k, so nothing is packed. For few rows.
#ifndef TM
#define TM 3  // rows of a tile
#define TN 8  // columns of a tile, a multiple of 4: b's stay in the first cache, a is read from the second once for all of them
#endif
#define EACH(i, count) UNROLL for (int i = 0; i < count; ++i)

// The sum of the lanes of four vectors.
static inline QUAD sums_of(const V a, const V b, const V c, const V d) {
#if VW == 16
  const JOIN(REAL, 8) e = a.lo + a.hi, f = b.lo + b.hi, g = c.lo + c.hi, h = d.lo + d.hi;
  const QUAD p = e.lo + e.hi, q = f.lo + f.hi, r = g.lo + g.hi, s = h.lo + h.hi;
#elif VW == 8
  const QUAD p = a.lo + a.hi, q = b.lo + b.hi, r = c.lo + c.hi, s = d.lo + d.hi;
#elif VW == 4
  const QUAD p = a, q = b, r = c, s = d;
#endif
#if VW == 2
  return (QUAD)(a.x + a.y, b.x + b.y, c.x + c.y, d.x + d.y);
#else
  return ((QUAD)(p.x, q.x, r.x, s.x) + (QUAD)(p.y, q.y, r.y, s.y)) + ((QUAD)(p.z, q.z, r.z, s.z) + (QUAD)(p.w, q.w, r.w, s.w));
#endif
}

// A group does `block` columns, in tiles of TM x TN dot products.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void gemm_dot(__global const REAL* restrict a, __global const REAL* restrict b, __global const BIAS_T* restrict bias,
              __global const ADDED_T* restrict added, __global C_T* c, const int m, const int n, const int k, const int has_bias,
              const int block, BATCH_NUMBERS, const REAL scale) {
  const int blocks = (n + block - 1) / block, whole = k / VW * VW;
  const INDEX group = get_group_id(0), batch = group / blocks;
  const int n_begin = (int)(group % blocks) * block, n_end = min(n, n_begin + block);
  OFFSETS(batch)
  for (int n0 = n_begin; n0 < n_end; n0 += TN) {
    const int columns = min(TN, n_end - n0);
    for (int m0 = 0; m0 < m; m0 += TM) {
      const int rows = min(TM, m - m0);
      __global const REAL *p[TM], *q[TN];
      EACH(i, TM) p[i] = a + (INDEX)(m0 + min(i, rows - 1)) * k;
      EACH(j, TN) q[j] = b + (INDEX)(n0 + min(j, columns - 1)) * k;
      V d[TM][TN];
      EACH(i, TM) EACH(j, TN) d[i][j] = (V)(0);
      for (int kk = 0; kk < whole; kk += VW) {
        V x[TM];
        EACH(i, TM) x[i] = G_LOAD(p[i] + kk);
        EACH(j, TN) {
          const V y = G_LOAD(q[j] + kk);
          EACH(i, TM) d[i][j] += x[i] * y;
        }
      }
      REAL sums[TM][TN] __attribute__((aligned(64)));
      EACH(i, TM) EACH(j, TN / 4)
        *(QUAD*)(sums[i] + 4 * j) = sums_of(d[i][4 * j], d[i][4 * j + 1], d[i][4 * j + 2], d[i][4 * j + 3]);
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) {
          REAL sum = sums[i][j];
          for (int kk = whole; kk < k; ++kk) sum += a[(INDEX)(m0 + i) * k + kk] * b[(INDEX)(n0 + j) * k + kk];
          const INDEX at = (INDEX)(m0 + i) * n + n0 + j;
          sum = FINISHED(sum, n0 + j, at);
          C_STORE(c, at, sum);
        }
    }
  }
}
