// Small products: many work-items share the depth of a sum, for the result alone would leave a GPU idle. Operands are read in place.
#ifndef BM
#define BM 8  // rows of the block a work-group computes
#define BN 8  // its columns
#define SLICES 64  // work-items that share a 4 x 4 tile of it: a multiple of 16
#endif

#define TILES_X (BN / 4)
#define TILES (BM / 4 * TILES_X)
#define ITEMS (TILES * SLICES)
#define STRIDE (ITEMS + TILES)         // between the values of a tile in local memory: every lane reads another bank
#define VALUES (TILES * 16)
#define PARTS (ITEMS / VALUES)         // work-items that add up one value

// Four rows of an operand at four depths from `from` on: to[row][depth], zero beyond k.
#if WIDTH == 4
#define READ(QUAD, p, ld, turned, rows, to)                                                                             \
  _Pragma("unroll") for (int i = 0; i < 4; ++i) {                                                                       \
    if (turned) {                                                                                                       \
      const float4 v = QUAD(p + (INDEX)rows[i] * ld + from);                                                            \
      to[i][0] = v.x; to[i][1] = v.y; to[i][2] = v.z; to[i][3] = v.w;                                                   \
    } else {                                                                                                            \
      const float4 v = from + i < k ? QUAD(p + (INDEX)(from + i) * ld + rows[0]) : (float4)(0);                         \
      to[0][i] = v.x; to[1][i] = v.y; to[2][i] = v.z; to[3][i] = v.w;                                                   \
    }                                                                                                                   \
  }
#define READ_A READ(A_QUAD, a, lda, !TRANS_A, rows, x)
#define READ_B READ(B_QUAD, b, ldb, TRANS_B, columns, y)
#else
#define READ(LOAD, p, ld, turned, rows, to)                                                                             \
  _Pragma("unroll") for (int i = 0; i < 4; ++i)                                                                         \
    _Pragma("unroll") for (int d = 0; d < 4; ++d)                                                                       \
      to[i][d] = from + d < k ? (REAL)LOAD(p, turned ? (INDEX)rows[i] * ld + from + d : (INDEX)(from + d) * ld + rows[i]) : (REAL)0;
#define READ_A READ(A_LOAD, a, lda, !TRANS_A, rows, x)
#define READ_B READ(B_LOAD, b, ldb, TRANS_B, columns, y)
#endif

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void gemm_slices(IN_POINTERS, END_POINTERS, const int m, const int n, const int k, const int lda, const int ldb, const int has_bias,
                 BATCH_NUMBERS, const REAL scale) {
  __local REAL shelf[16 * STRIDE];
  const int t = get_local_id(0), slice = t / TILES, tile = t % TILES;
  const int across = (n + BN - 1) / BN, blocks = (m + BM - 1) / BM * across;
  const INDEX group = get_group_id(0), batch = group / blocks;
  const int block = (int)(group % blocks), m0 = block / across * BM, n0 = block % across * BN;
  OFFSETS(batch)
  int rows[4], columns[4];  // beyond the edge: the last ones again, what comes of them is not stored
  REAL sum[4][4];
  UNROLL for (int i = 0; i < 4; ++i) {
    rows[i] = min(m0 + tile / TILES_X * 4 + i, TRANS_A * WIDTH == 4 ? m - 4 + i : m - 1);
    columns[i] = min(n0 + tile % TILES_X * 4 + i, !TRANS_B * WIDTH == 4 ? n - 4 + i : n - 1);
    UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = 0;
  }
  _Pragma("unroll 2") for (int from = slice * 4; from < k; from += SLICES * 4) {
    REAL x[4][4], y[4][4];
    READ_A
    READ_B
    UNROLL for (int d = 0; d < 4; ++d)
      UNROLL for (int i = 0; i < 4; ++i)
        UNROLL for (int j = 0; j < 4; ++j) sum[i][j] += x[i][d] * y[j][d];
  }
  UNROLL for (int i = 0; i < 4; ++i)
    UNROLL for (int j = 0; j < 4; ++j) shelf[(i * 4 + j) * STRIDE + t] = sum[i][j];
  barrier(CLK_LOCAL_MEM_FENCE);
  const int value = t % VALUES / TILES, of = t % TILES, part = t / VALUES;
  REAL total = 0;
  for (int s = part; s < SLICES; s += PARTS) total += shelf[value * STRIDE + s * TILES + of];
#if ITEMS > TILES * 16
  barrier(CLK_LOCAL_MEM_FENCE);
  shelf[t] = total;
  barrier(CLK_LOCAL_MEM_FENCE);
  if (part > 0) return;
  total = 0;
  for (int s = 0; s < PARTS; ++s) total += shelf[s * VALUES + t];
#endif
  const int row = m0 + of / TILES_X * 4 + value / 4, column = n0 + of % TILES_X * 4 + value % 4;
  if (row < m && column < n) {
    const INDEX at = (INDEX)row * n + column;
    const REAL v = FINISHED(total, column, at);
    C_STORE(c, at, v);
  }
}
