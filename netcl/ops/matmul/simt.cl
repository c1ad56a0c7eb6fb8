// Matrix products through local memory and registers: what GPUs are made for.
#ifndef BM  // rows of the block a work-group computes
#define BM 64
#endif
#ifndef BN  // its columns
#define BN 64
#endif
#ifndef BK  // how deep the blocks of A and B in local memory are
#define BK 16
#endif
#ifndef TM  // rows a work-item keeps in registers
#define TM 4
#endif
#ifndef TN  // columns a work-item keeps in registers
#define TN 4
#endif
#ifndef WIDTH  // values per load: 4 where rows of both operands are multiples of four values long and aligned, else 1
#define WIDTH 1
#endif
#ifndef A_QUAD  // four values of the left operand from p on, as float4; and of the right one
#define A_QUAD(p) (*(__global const float4*)(p))
#define B_QUAD(p) (*(__global const float4*)(p))
#endif
#ifndef BUFFERS  // 2: the next block is stored while this one is multiplied; 1: where local memory is short
#define BUFFERS 2
#endif

#ifndef TRANS_A  // 1: the left operand is stored transposed, K x M
#define TRANS_A 0
#endif
#ifndef TRANS_B  // 1: the right operand is stored transposed, N x K
#define TRANS_B 0
#endif

#define ITEMS_X (BN / TN)
#define ITEMS_Y (BM / TM)
#define ITEMS (ITEMS_X * ITEMS_Y)
#define PAD 4                          // staggers the banks that a column of A's block falls into
#define RUN_M (TM % 4 == 0 ? 4 : 1)    // neighbouring rows of a work-item: vectors of 4 out of local memory
#define RUN_N (TN % 4 == 0 ? 4 : 1)
#define ROW(i) (ty * RUN_M + (i) / RUN_M * (RUN_M * ITEMS_Y) + (i) % RUN_M)
#define COLUMN(j) (tx * RUN_N + (j) / RUN_N * (RUN_N * ITEMS_X) + (j) % RUN_N)
#if BM * BK / WIDTH % (BM / TM * (BN / TN)) == 0  // the work-items divide the block among them
#define INSIDE_A(e) 1
#else
#define INSIDE_A(e) ((e) < BM * BK)
#endif
#if BN * BK / WIDTH % (BM / TM * (BN / TN)) == 0
#define INSIDE_B(e) 1
#else
#define INSIDE_B(e) ((e) < BN * BK)
#endif
#define LOADS_A ((BM * BK / WIDTH + ITEMS - 1) / ITEMS)
#define LOADS_B ((BN * BK / WIDTH + ITEMS - 1) / ITEMS)
#define GROUP_ROWS 8                   // block rows that neighbouring work-groups share, so that B is read from cache

// One value of op(a) or op(b); zero beyond the edges, so that sums need no care.
static inline REAL a_at(__global const A_T* a, const int i, const int kk, const int m, const int k, const int lda) {
  return i < m && kk < k ? (REAL)(TRANS_A ? A_LOAD(a, (INDEX)kk * lda + i) : A_LOAD(a, (INDEX)i * lda + kk)) : (REAL)0;
}

static inline REAL b_at(__global const B_T* b, const int kk, const int j, const int n, const int k, const int ldb) {
  return j < n && kk < k ? (REAL)(TRANS_B ? B_LOAD(b, (INDEX)j * ldb + kk) : B_LOAD(b, (INDEX)kk * ldb + j)) : (REAL)0;
}

#define FETCH_A(k0)                                                                                                     \
  _Pragma("unroll") for (int l = 0; l < LOADS_A; ++l) {                                                                 \
    const int e = (t + l * ITEMS) * WIDTH, i = TRANS_A ? e % BM : e / BK, kk = TRANS_A ? e / BM : e % BK;               \
    if (INSIDE_A(e))                                                                                                    \
      for (int w = 0; w < WIDTH; ++w)                                                                                   \
        next_a[l][w] = a_at(a, m0 + i + (TRANS_A ? w : 0), (k0) + kk + (TRANS_A ? 0 : w), m, k_end, lda);               \
  }
#define FETCH_B(k0)                                                                                                     \
  _Pragma("unroll") for (int l = 0; l < LOADS_B; ++l) {                                                                 \
    const int e = (t + l * ITEMS) * WIDTH, j = TRANS_B ? e / BK : e % BN, kk = TRANS_B ? e % BK : e / BN;               \
    if (INSIDE_B(e))                                                                                                    \
      for (int w = 0; w < WIDTH; ++w)                                                                                   \
        next_b[l][w] = b_at(b, (k0) + kk + (TRANS_B ? w : 0), n0 + j + (TRANS_B ? 0 : w), n, k_end, ldb);               \
  }
#if WIDTH == 4  // rows are multiples of four values long, so a vector is either whole or beyond the edge
#undef FETCH_A
#undef FETCH_B
#if TRANS_A
#define A_PLACE                                                                                                         \
  const int kk = from + e / BM, i = m0 + e % BM;                                                                        \
  const int there = kk < k_end && i < m;                                                                                \
  const INDEX at = (INDEX)kk * lda + i;
#else  // a row beyond the edge is the last one again: what comes of it is not stored
#define A_PLACE                                                                                                         \
  const int kk = from + e % BK, i = min(m0 + e / BK, m - 1);                                                            \
  const int there = kk < k_end;                                                                                         \
  const INDEX at = (INDEX)i * lda + kk;
#endif
#if TRANS_B
#define B_PLACE                                                                                                         \
  const int kk = from + e % BK, j = min(n0 + e / BK, n - 1);                                                            \
  const int there = kk < k_end;                                                                                         \
  const INDEX at = (INDEX)j * ldb + kk;
#else
#define B_PLACE                                                                                                         \
  const int kk = from + e / BN, j = n0 + e % BN;                                                                        \
  const int there = kk < k_end && j < n;                                                                                \
  const INDEX at = (INDEX)kk * ldb + j;
#endif
#define FETCH(LOADS, INSIDE, PLACE, LOAD, p, next)                                                                      \
  _Pragma("unroll") for (int l = 0; l < LOADS; ++l) {                                                                   \
    const int e = (t + l * ITEMS) * 4;                                                                                  \
    PLACE                                                                                                               \
    float4 v = (float4)(0);                                                                                             \
    if (INSIDE(e) && there) v = LOAD(p + at);                                                                           \
    next[l][0] = v.x; next[l][1] = v.y; next[l][2] = v.z; next[l][3] = v.w;                                             \
  }
#define FETCH_A(start) { const int from = start; FETCH(LOADS_A, INSIDE_A, A_PLACE, A_QUAD, a, next_a) }
#define FETCH_B(start) { const int from = start; FETCH(LOADS_B, INSIDE_B, B_PLACE, B_QUAD, b, next_b) }
#endif
#define KEEP_A(S)                                                                                                       \
  _Pragma("unroll") for (int l = 0; l < LOADS_A; ++l) {                                                                 \
    const int e = (t + l * ITEMS) * WIDTH, i = TRANS_A ? e % BM : e / BK, kk = TRANS_A ? e / BM : e % BK;               \
    if (INSIDE_A(e))                                                                                                    \
      for (int w = 0; w < WIDTH; ++w) block_a[S][kk + (TRANS_A ? 0 : w)][i + (TRANS_A ? w : 0)] = next_a[l][w];         \
  }
#define KEEP_B(S)                                                                                                       \
  _Pragma("unroll") for (int l = 0; l < LOADS_B; ++l) {                                                                 \
    const int e = (t + l * ITEMS) * WIDTH, j = TRANS_B ? e / BK : e % BN, kk = TRANS_B ? e % BK : e / BN;               \
    if (INSIDE_B(e))                                                                                                    \
      for (int w = 0; w < WIDTH; ++w) block_b[S][kk + (TRANS_B ? w : 0)][j + (TRANS_B ? 0 : w)] = next_b[l][w];         \
  }

#define QUAD_(real) real##4
#define QUAD_OF(real) QUAD_(real)
// The values of one k that a work-item multiplies, out of local memory.
#if TM % 4 == 0
#define TAKE_A(kk)                                                                                                      \
  _Pragma("unroll") for (int i = 0; i < TM; i += 4) {                                                                   \
    const QUAD_OF(REAL) v = *(__local const QUAD_OF(REAL)*)&block_a[now][kk][ROW(i)];                                   \
    x[i] = v.x; x[i + 1] = v.y; x[i + 2] = v.z; x[i + 3] = v.w;                                                         \
  }
#else
#define TAKE_A(kk) _Pragma("unroll") for (int i = 0; i < TM; ++i) x[i] = block_a[now][kk][ROW(i)];
#endif
#if TN % 4 == 0
#define TAKE_B(kk)                                                                                                      \
  _Pragma("unroll") for (int j = 0; j < TN; j += 4) {                                                                   \
    const QUAD_OF(REAL) v = *(__local const QUAD_OF(REAL)*)&block_b[now][kk][COLUMN(j)];                                \
    y[j] = v.x; y[j + 1] = v.y; y[j + 2] = v.z; y[j + 3] = v.w;                                                         \
  }
#else
#define TAKE_B(kk) _Pragma("unroll") for (int j = 0; j < TN; ++j) y[j] = block_b[now][kk][COLUMN(j)];
#endif

// A work-group computes a BM x BN block of c through blocks of A and B in local memory; a work-item TM x TN of it in registers.
// With splits > 1 a batch is computed in parts of `depth` along k, which lie one after the other in c.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void gemm_tiles(__global const A_T* restrict a, __global const B_T* restrict b, __global const BIAS_T* restrict bias,
                __global const ADDED_T* restrict added, __global C_T* restrict c, const int m, const int n, const int k, const int lda,
                const int ldb, const int has_bias, const int batch1,
                const long a0_stride, const long a1_stride, const long b0_stride, const long b1_stride, const int splits, const int depth,
                const REAL scale) {
  __local REAL block_a[BUFFERS][BK][BM + PAD] __attribute__((aligned(32)));
  __local REAL block_b[BUFFERS][BK][BN + PAD] __attribute__((aligned(32)));
  const int t = get_local_id(0);
  // Eight lanes across and four down read the fewest distinct words of both blocks.
#if (BN / TN) % 8 == 0 && (BM / TM) % 4 == 0
  const int lane = t % 32, wave = t / 32;
  const int tx = wave % (ITEMS_X / 8) * 8 + lane % 8, ty = wave / (ITEMS_X / 8) * 4 + lane / 8;
#else
  const int tx = t % ITEMS_X, ty = t / ITEMS_X;
#endif
  const int down = (m + BM - 1) / BM, across = (n + BN - 1) / BN;
  INDEX group = get_group_id(0);
  const INDEX part = group / (down * across), batch = part / splits;
  const int tile = (int)(group % (down * across)), band = tile / (GROUP_ROWS * across), first = band * GROUP_ROWS;
  const int high = min(down - first, GROUP_ROWS), inside = tile - band * GROUP_ROWS * across;
  const int m0 = (first + inside % high) * BM, n0 = inside / high * BN;
  const int k_begin = (int)(part % splits) * depth, k_end = min(k, k_begin + depth);
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride;
  b += batch / batch1 * b0_stride + batch % batch1 * b1_stride;
  added += part * m * n;
  c += part * m * n;

  REAL sum[TM][TN];
  _Pragma("unroll") for (int i = 0; i < TM; ++i)
    _Pragma("unroll") for (int j = 0; j < TN; ++j) sum[i][j] = 0;
  REAL next_a[LOADS_A][WIDTH], next_b[LOADS_B][WIDTH];
  FETCH_A(k_begin)
  FETCH_B(k_begin)
  KEEP_A(0)
  KEEP_B(0)
  barrier(CLK_LOCAL_MEM_FENCE);
  int now = 0;
  for (int k0 = k_begin; k0 < k_end; k0 += BK) {
    const int more = k0 + BK < k_end;
    if (more) {
      FETCH_A(k0 + BK)
      FETCH_B(k0 + BK)
    }
    _Pragma("unroll") for (int kk = 0; kk < BK; ++kk) {
      REAL x[TM], y[TN];
      TAKE_A(kk)
      TAKE_B(kk)
      _Pragma("unroll") for (int i = 0; i < TM; ++i)
        _Pragma("unroll") for (int j = 0; j < TN; ++j) sum[i][j] += x[i] * y[j];
    }
    if (more) {
      if (BUFFERS == 1) barrier(CLK_LOCAL_MEM_FENCE);
      now = (now + 1) % BUFFERS;
      KEEP_A(now)
      KEEP_B(now)
      barrier(CLK_LOCAL_MEM_FENCE);
    }
  }
  _Pragma("unroll") for (int i = 0; i < TM; ++i)
    _Pragma("unroll") for (int j = 0; j < TN; ++j) {
      const int row = m0 + ROW(i), column = n0 + COLUMN(j);
      if (row < m && column < n) {
        const INDEX at = (INDEX)row * n + column;
        const REAL x = FINISHED(sum[i][j], column, at);
        C_STORE(c, at, x);
      }
    }
}
