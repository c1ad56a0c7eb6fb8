// c = op(a) op(b) for at most ROWS rows of a, as fast as memory gives b: LANES work-items share the depth of COLUMNS columns, in quads, and
// every work-item has DEPTH loads in flight. Work-groups have ITEMS work-items; k, and n where TRANS_B is 0, are multiples of four.
//   TRANS_B 1: b is n x k and a quad lies along k.  0: b is k x n, a quad is four columns, and COLUMNS is 4.
// decode.cl may come before, which gives GATED_VALUE; TRANS_B is then 1, and COLUMNS 2 if GATED.
#ifndef EXTRA_POINTERS
#define EXTRA_POINTERS
#define NORM 0
#define NORMED(f, s, column) (f)
#define GATED 0
#define GATE b
#endif
#define SPREAD (GATED ? 1 : COLUMNS)  // columns of the result of a team
#define TEAMS (ITEMS / LANES)
#define VALUES (ROWS * COLUMNS)

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void gemv(IN_POINTERS, EXTRA_POINTERS END_POINTERS, const int m, const int n, const int k, const int has_bias, const REAL scale) {
  __local REAL shelf[VALUES][ITEMS];
#if NORM
  __local float2 stats[ROWS];
  row_statistics(a, m, k, get_local_id(0), (__local float*)shelf, stats);
#endif
  const int t = get_local_id(0), team = TRANS_B ? t / LANES : t % TEAMS, lane = TRANS_B ? t % LANES : t / TEAMS;
  const int first = (get_group_id(0) * TEAMS + team) * SPREAD;
  REAL sum[ROWS][COLUMNS];
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int j = 0; j < COLUMNS; ++j) sum[i][j] = 0;
#if TRANS_B
  __global const B_T* lines[COLUMNS];
  UNROLL for (int j = 0; j < COLUMNS; ++j)  // what is not stored, again
    lines[j] = (GATED && !j ? GATE : b) + (INDEX)min(GATED ? first : first + j, n - 1) * k;
  for (int begin = lane * 4; begin < k; begin += DEPTH * LANES * 4) {
    float4 y[DEPTH][COLUMNS];
    UNROLL for (int u = 0; u < DEPTH; ++u)
      UNROLL for (int j = 0; j < COLUMNS; ++j) y[u][j] = begin + u * LANES * 4 < k ? B_QUAD(lines[j] + begin + u * LANES * 4) : (float4)(0);
    UNROLL for (int u = 0; u < DEPTH; ++u)
      UNROLL for (int i = 0; i < ROWS; ++i) {
        // Zero beyond k, as y is: infinity times zero would be NaN.
        const int at = begin + u * LANES * 4;
        const float4 x = at < k ? NORMED(A_QUAD(a + (INDEX)min(i, m - 1) * k + at), stats[min(i, m - 1)], at) : (float4)(0);
        UNROLL for (int j = 0; j < COLUMNS; ++j)
          sum[i][j] += x.x * y[u][j].x, sum[i][j] += x.y * y[u][j].y, sum[i][j] += x.z * y[u][j].z, sum[i][j] += x.w * y[u][j].w;
      }
  }
#else
  b += min(first, n - 4);
  _Pragma("unroll 8") for (int d = lane; d < k; d += LANES) {
    const float4 y = B_QUAD(b + (INDEX)d * n);
    UNROLL for (int i = 0; i < ROWS; ++i) {
      const REAL x = A_LOAD(a, (INDEX)min(i, m - 1) * k + d);
      sum[i][0] += x * y.x, sum[i][1] += x * y.y, sum[i][2] += x * y.z, sum[i][3] += x * y.w;
    }
  }
#endif
  const int at = team * LANES + lane;
  UNROLL for (int i = 0; i < VALUES; ++i) shelf[i][at] = sum[i / COLUMNS][i % COLUMNS];
  for (int left = LANES / 2; left; left /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < left) UNROLL for (int i = 0; i < VALUES; ++i) shelf[i][at] += shelf[i][at + left];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = t; i < ROWS * SPREAD * TEAMS; i += ITEMS) {
    const int across = i % (TEAMS * SPREAD), row = i / (TEAMS * SPREAD), column = get_group_id(0) * TEAMS * SPREAD + across;
    if (row < m && column < n) {
      const INDEX place = (INDEX)row * n + column;
#if GATED
      const REAL v = GATED_VALUE(shelf[row * 2][across * LANES], shelf[row * 2 + 1][across * LANES] + BIAS_AT(column), column);
#else
      const REAL v = FINISHED(shelf[row * COLUMNS + across % COLUMNS][across / COLUMNS * LANES], column, place);
#endif
      C_STORE(c, place, v);
    }
  }
}
