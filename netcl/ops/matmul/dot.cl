// a as it is times b transposed, on CPUs: both are walked along k, so nothing is packed. For few rows.
#define ZERO(i, j) V d##i##j = (V)(0);
#define MULTIPLY_ADD(i, j) d##i##j += x##i * y##j;
#define KEEP(i, j) sums[i][j] = sum_of(d##i##j);
#define TILE_ROW(F, i) F(i, 0) F(i, 1) F(i, 2) F(i, 3)
#define TILE(F) TILE_ROW(F, 0) TILE_ROW(F, 1) TILE_ROW(F, 2) TILE_ROW(F, 3)

static inline REAL sum_of(const V v) {
#if VW == 16
  const JOIN(REAL, 8) eight = v.lo + v.hi;
  const QUAD four = eight.lo + eight.hi;
#elif VW == 8
  const QUAD four = v.lo + v.hi;
#elif VW == 4
  const QUAD four = v;
#endif
#if VW == 2
  return v.x + v.y;
#else
  return (four.x + four.y) + (four.z + four.w);
#endif
}

// A group does `block` columns, in tiles of 4 x 4 dot products.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void gemm_dot(__global const REAL* restrict a, __global const REAL* restrict b, __global const BIAS_T* restrict bias,
              __global const ADDED_T* restrict added, __global C_T* c, const int m, const int n, const int k, const int has_bias,
              const int block, const int batch1,
              const long a0_stride, const long a1_stride, const long b0_stride, const long b1_stride, const REAL scale) {
  const int blocks = (n + block - 1) / block, whole = k / VW * VW;
  const INDEX group = get_group_id(0), batch = group / blocks;
  const int n_begin = (int)(group % blocks) * block, n_end = min(n, n_begin + block);
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride;
  b += batch / batch1 * b0_stride + batch % batch1 * b1_stride;
  added += batch * m * n;
  c += batch * m * n;
  REAL sums[4][4];
  for (int n0 = n_begin; n0 < n_end; n0 += 4) {
    __global const REAL* q = b + (INDEX)n0 * k;
    const int last_n = n - 1 - n0;
    const INDEX q1 = (INDEX)min(1, last_n) * k, q2 = (INDEX)min(2, last_n) * k, q3 = (INDEX)min(3, last_n) * k;
    for (int m0 = 0; m0 < m; m0 += 4) {
      __global const REAL* p = a + (INDEX)m0 * k;
      const int last_m = m - 1 - m0;
      const INDEX p1 = (INDEX)min(1, last_m) * k, p2 = (INDEX)min(2, last_m) * k, p3 = (INDEX)min(3, last_m) * k;
      TILE(ZERO)
      for (int kk = 0; kk < whole; kk += VW) {
        const V x0 = G_LOAD(p + kk), x1 = G_LOAD(p + p1 + kk), x2 = G_LOAD(p + p2 + kk), x3 = G_LOAD(p + p3 + kk);
        const V y0 = G_LOAD(q + kk), y1 = G_LOAD(q + q1 + kk), y2 = G_LOAD(q + q2 + kk), y3 = G_LOAD(q + q3 + kk);
        TILE(MULTIPLY_ADD)
      }
      TILE(KEEP)
      for (int i = 0; i < 4 && m0 + i < m; ++i)
        for (int j = 0; j < 4 && n0 + j < n_end; ++j) {
          REAL sum = sums[i][j];
          for (int kk = whole; kk < k; ++kk) sum += p[(INDEX)i * k + kk] * q[(INDEX)j * k + kk];
          const INDEX at = (INDEX)(m0 + i) * n + n0 + j;
          sum = FINISHED(sum, n0 + j, at);
          C_STORE(c, at, sum);
        }
    }
  }
}
