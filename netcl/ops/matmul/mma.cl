// Products on the matrix units of NVIDIA GPUs, with epilogue.cl, reads.cl and ptx.cl before it: blocks of both operands go to local memory
// while those before them are multiplied, in warps of 32 work-items. Rows of both operands start at multiples of 16 bytes; pad_operand sees
// to that.
#ifndef BM
#define BM 64  // rows of the block a work-group computes
#define BN 64  // its columns
#define BK 32  // how deep the blocks of A and B in local memory are: 64 or 128 bytes
#define WM 32  // rows that a warp computes
#define WN 32  // columns that a warp computes
#define STAGES 3  // blocks in local memory at once
#define MMA MMA_TF32  // how the units multiply: float16, bfloat16 or TF32
#define SIZE 4  // bytes of a value of A and B: 2, or 4 for TF32
#define TERMS 1  // 1: operands are rounded to what the units take. 2: float32 as two TF32 that add up to it, three products
#define C_WIDTH 1  // values of the result in one store: 4 where its rows are multiples of that, else 1
#define C_SIZE 4  // bytes of a value of the result
#endif
#if C_SIZE == 2
#ifndef PAIR  // two of 16 bits
#define PAIR pair_bfloat16
#endif
#define TWO uint
#define FOUR uint2
#define EXCHANGED(v) exchanged(v)
#else
#define PAIR(x, y) (uint2)(as_uint(x), as_uint(y))
#define TWO uint2
#define FOUR uint4
#define EXCHANGED(v) (uint2)(exchanged((v).x), exchanged((v).y))
#endif

#define ITEMS (BM / WM * (BN / WN) * 32)
#define ROWS (WM / 16)           // fragments that a warp holds
#define COLUMNS (WN / 8)
#define STEPS (BK * SIZE / 32)   // fragments along the depth of a block
#define EACH (16 / SIZE)         // values of a copy
// A block lies in lines as its operand does: along k, or across it. In a line, pieces of 16 bytes are swirled by its number, so that a
// fragment's rows come from different banks.
#define ALONG_A (!TRANS_A)
#define ALONG_B TRANS_B
#define LINE_A ((ALONG_A ? BK : BM) * SIZE)
#define LINE_B ((ALONG_B ? BK : BN) * SIZE)
#define SWIRL(along, line, r) ((along) ? ((line) == 64 ? (r) / 2 % 4 : (r) % 8) : SIZE == 2 ? (r) % 8 : (r) % 4 * 2)
#define PIECE_AT(along, line, r, piece) ((r) * (line) + ((piece) ^ SWIRL(along, line, r)) * 16)
#define BYTES_A (BM * BK * SIZE)
#define BYTES_B (BN * BK * SIZE)
#define STAGE (BYTES_A + BYTES_B)
// Copies: a work-item takes one piece of every so manieth line.
#define PIECES_A (LINE_A / 16)
#define PIECES_B (LINE_B / 16)
#define LINES_A (ITEMS / PIECES_A)
#define LINES_B (ITEMS / PIECES_B)
#define INSIDE_A(line) (ALONG_A ? piece_a < left && m0 + (line) < m : (line) < left && m0 + piece_a < m)
#define INSIDE_B(line) (ALONG_B ? piece_b < left && n0 + (line) < n : (line) < left && n0 + piece_b < n)
#define LOAD(stage) {                                                                                                    \
    _Pragma("unroll") for (int i = 0; i < BYTES_A / 16 / ITEMS; ++i) {                                                   \
      const int line = t / PIECES_A + i * LINES_A;                                                                       \
      COPY_16((stage) + PIECE_AT(ALONG_A, LINE_A, line, t % PIECES_A), from_a + i * lines_a, INSIDE_A(line) ? 16 : 0);   \
    }                                                                                                                    \
    _Pragma("unroll") for (int i = 0; i < BYTES_B / 16 / ITEMS; ++i) {                                                   \
      const int line = t / PIECES_B + i * LINES_B;                                                                       \
      COPY_16((stage) + BYTES_A + PIECE_AT(ALONG_B, LINE_B, line, t % PIECES_B), from_b + i * lines_b,                   \
              INSIDE_B(line) ? 16 : 0);                                                                                  \
    }                                                                                                                    \
    from_a += (ALONG_A ? 1 : (ulong)lda) * (BK * SIZE);                                                                  \
    from_b += (ALONG_B ? 1 : (ulong)ldb) * (BK * SIZE);                                                                  \
    left -= BK;                                                                                                          \
  }

// Fragments of one step along k: the i-th of A into q[4], all of B into q[COLUMNS][2]. own_a and own_b are where a lane's first ones lie.
#if !TRANS_A
#define OWNS_A STEPS
#define OWN_A(s) PIECE_AT(1, LINE_A, wm + lane % 16, (s) * 2 + lane / 16)
#define TAKE_A(stage, s, i, q) FRAGMENTS(q[0], q[1], q[2], q[3], (stage) + own_a[s] + (i) * 16 * LINE_A)
#elif SIZE == 2
#define OWNS_A ROWS
#define OWN_A(i) PIECE_AT(0, LINE_A, lane % 8 + lane / 16 * 8, wm / 8 + (i) * 2 + lane / 8 % 2)
#define TAKE_A(stage, s, i, q) FRAGMENTS_TURNED(q[0], q[1], q[2], q[3], (stage) + own_a[i] + (s) * 16 * LINE_A)
#else
#define OWNS_A 4
#define OWN_A(j) (lane % 4 * LINE_A + ((wm + (j) * 8 + lane / 4) ^ lane % 4 * 8) * 4)
#define WORD_A(stage, s, j, down) ((stage) + own_a[(j) % 4] + (j) / 4 * 128 + ((s) * 8 + (down)) * LINE_A)
#define TAKE_A(stage, s, i, q) {                                                                                         \
    WORD(q[0], WORD_A(stage, s, 2 * (i), 0)); WORD(q[1], WORD_A(stage, s, 2 * (i) + 1, 0));                              \
    WORD(q[2], WORD_A(stage, s, 2 * (i), 4)); WORD(q[3], WORD_A(stage, s, 2 * (i) + 1, 4));                              \
  }
#endif
#if TRANS_B
#define OWNS_B STEPS
#define OWN_B(s) PIECE_AT(1, LINE_B, wn + lane % 8 + lane / 16 * 8, (s) * 2 + lane / 8 % 2)
#define TAKE_B(stage, s, q)                                                                                              \
  _Pragma("unroll") for (int j = 0; j < COLUMNS; j += 2)                                                                 \
    FRAGMENTS(q[j][0], q[j][1], q[j + 1][0], q[j + 1][1], (stage) + BYTES_A + own_b[s] + j * 8 * LINE_B);
#elif SIZE == 2
#define OWNS_B (COLUMNS / 2)
#define OWN_B(j) PIECE_AT(0, LINE_B, lane % 16, wn / 8 + (j) * 2 + lane / 16)
#define TAKE_B(stage, s, q)                                                                                              \
  _Pragma("unroll") for (int j = 0; j < COLUMNS; j += 2)                                                                 \
    FRAGMENTS_TURNED(q[j][0], q[j][1], q[j + 1][0], q[j + 1][1], (stage) + BYTES_A + own_b[j / 2] + (s) * 16 * LINE_B);
#else
#define OWNS_B 4
#define OWN_B(j) (lane % 4 * LINE_B + ((wn + (j) * 8 + lane / 4) ^ lane % 4 * 8) * 4)
#define TAKE_B(stage, s, q)                                                                                              \
  _Pragma("unroll") for (int j = 0; j < COLUMNS; ++j) {                                                                  \
    WORD(q[j][0], (stage) + BYTES_A + own_b[j % 4] + j / 4 * 128 + (s) * 8 * LINE_B);                                    \
    WORD(q[j][1], (stage) + BYTES_A + own_b[j % 4] + j / 4 * 128 + ((s) * 8 + 4) * LINE_B);                              \
  }
#endif
#define TAKE(stage, s, q) {                                                                                              \
    _Pragma("unroll") for (int i = 0; i < ROWS; ++i) TAKE_A(stage, s, i, qa[q][i]);                                      \
    TAKE_B(stage, s, qb[q])                                                                                              \
  }

#define NEXT_STAGE(at) at = at == (STAGES - 1) * STAGE ? 0 : at + STAGE

// A work-group computes a BM x BN block of c, a warp WM x WN of it. With splits > 1 a batch is computed in parts of `depth` along k, which
// lie one after the other in c. b_first is where the right operand begins, if both were written into one memory.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void gemm_mma(IN_POINTERS, END_POINTERS, const int m, const int n, const int k, const int lda, const int ldb, const int has_bias,
              BATCH_NUMBERS, const long b_first, const int splits, const int depth, const REAL scale) {
  __local uchar blocks[STAGES * STAGE] __attribute__((aligned(128)));
  const uint base = LOCAL_AT(blocks), t = get_local_id(0), lane = t % 32, warp = t / 32;
  const uint wm = warp / (BN / WN) * WM, wn = warp % (BN / WN) * WN;
  BLOCK_OF_GROUP
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride + (long)k_begin * (ALONG_A ? 1 : lda);
  b += b_first + batch / batch1 * b0_stride + batch % batch1 * b1_stride + (long)k_begin * (ALONG_B ? 1 : ldb);
  added += part * m * n;
  c += part * m * n;

  const int piece_a = t % PIECES_A * EACH, piece_b = t % PIECES_B * EACH;
  ulong from_a = (ulong)(a + (long)(t / PIECES_A + (ALONG_A ? m0 : 0)) * lda + piece_a + (ALONG_A ? 0 : m0));
  ulong from_b = (ulong)(b + (long)(t / PIECES_B + (ALONG_B ? n0 : 0)) * ldb + piece_b + (ALONG_B ? 0 : n0));
  const ulong lines_a = (ulong)lda * (LINES_A * SIZE), lines_b = (ulong)ldb * (LINES_B * SIZE);
  uint own_a[OWNS_A], own_b[OWNS_B];
  UNROLL for (int i = 0; i < OWNS_A; ++i) own_a[i] = base + OWN_A(i);
  UNROLL for (int i = 0; i < OWNS_B; ++i) own_b[i] = base + OWN_B(i);

  float sum[ROWS][COLUMNS][4];
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int j = 0; j < COLUMNS; ++j)
      UNROLL for (int e = 0; e < 4; ++e) sum[i][j][e] = 0;
  int left = k_end - k_begin;
  const int count = (left + BK - 1) / BK;
  UNROLL for (int s = 0; s < STAGES - 1; ++s) {
    if (s < count) LOAD(base + s * STAGE)
    COPIES_COMMIT();
  }
  uint now = 0, into = (STAGES - 1) * STAGE;
#if TERMS == 2
  // The units cut off what does not fit when they add. So a block's products begin at zero, and are added to the sums by ordinary additions.
  for (int at = 0; at < count; ++at) {
    COPIES_WAIT(STAGES - 2);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (at + STAGES - 1 < count) LOAD(base + into)
    COPIES_COMMIT();
    NEXT_STAGE(into);
    uint b_high[STEPS][COLUMNS][2], b_low[STEPS][COLUMNS][2];
    UNROLL for (int s = 0; s < STEPS; ++s) {
      uint q[COLUMNS][2];
      TAKE_B(now, s, q)
      UNROLL for (int j = 0; j < COLUMNS; ++j)
        UNROLL for (int e = 0; e < 2; ++e) split_tf32(q[j][e], &b_high[s][j][e], &b_low[s][j][e]);
    }
    UNROLL for (int i = 0; i < ROWS; ++i) {
      float fresh[COLUMNS][4];
      UNROLL for (int j = 0; j < COLUMNS; ++j)
        UNROLL for (int e = 0; e < 4; ++e) fresh[j][e] = 0;
      UNROLL for (int s = 0; s < STEPS; ++s) {
        uint q[4], a_high[4], a_low[4];
        TAKE_A(now, s, i, q);
        UNROLL for (int e = 0; e < 4; ++e) split_tf32(q[e], &a_high[e], &a_low[e]);
        UNROLL for (int j = 0; j < COLUMNS; ++j) MMA(fresh[j], a_low, b_high[s][j][0], b_high[s][j][1]);
        UNROLL for (int j = 0; j < COLUMNS; ++j) MMA(fresh[j], a_high, b_low[s][j][0], b_low[s][j][1]);
        UNROLL for (int j = 0; j < COLUMNS; ++j) MMA(fresh[j], a_high, b_high[s][j][0], b_high[s][j][1]);
      }
      UNROLL for (int j = 0; j < COLUMNS; ++j)
        UNROLL for (int e = 0; e < 4; ++e) sum[i][j][e] += fresh[j][e];
    }
    NEXT_STAGE(now);
  }
#else
  uint qa[2][ROWS][4], qb[2][COLUMNS][2];  // the fragments of the next step come while this one's are multiplied
  COPIES_WAIT(STAGES - 2);
  barrier(CLK_LOCAL_MEM_FENCE);
  TAKE(0, 0, 0)
  for (int at = 0; at < count; ++at) {
    UNROLL for (int s = 0; s < STEPS; ++s) {
      if (s == STEPS - 1) {
        COPIES_WAIT(STAGES - 2);
        barrier(CLK_LOCAL_MEM_FENCE);
        NEXT_STAGE(now);
      }
      TAKE(now, (s + 1) % STEPS, (s + 1) % 2)
      if (s == 0) {
        if (at + STAGES - 1 < count) LOAD(base + into)
        COPIES_COMMIT();
        NEXT_STAGE(into);
      }
#if SIZE == 4
      UNROLL for (int i = 0; i < ROWS; ++i)
        UNROLL for (int e = 0; e < 4; ++e) qa[s % 2][i][e] = tf32_bits(as_float(qa[s % 2][i][e]));
      UNROLL for (int j = 0; j < COLUMNS; ++j)
        UNROLL for (int e = 0; e < 2; ++e) qb[s % 2][j][e] = tf32_bits(as_float(qb[s % 2][j][e]));
#endif
      UNROLL for (int i = 0; i < ROWS; ++i)
        UNROLL for (int j = 0; j < COLUMNS; ++j) {
          const int column = i % 2 ? COLUMNS - 1 - j : j;  // there and back: what was read last is used first
          MMA(sum[i][column], qa[s % 2][i], qb[s % 2][column][0], qb[s % 2][column][1]);
        }
    }
  }
#endif
  COPIES_WAIT(0);

  const int row0 = m0 + wm + lane / 4, column0 = n0 + wn + lane % 4 * 2;
#if SIZE == 4
  // Parts of a value that is not finite are not that value: sums that hold one, which are not finite either, are done again and plainly.
  float test = 0;
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int j = 0; j < COLUMNS; ++j)
      UNROLL for (int e = 0; e < 4; ++e) test += sum[i][j][e] * 0.0f;
  if (any_lane(!(test == 0.0f))) {
    _Pragma("unroll 1") for (int e = 0; e < ROWS * COLUMNS * 4; ++e) {
      const int row = row0 + e / (COLUMNS * 2) * 8, column = column0 + e / 2 % COLUMNS * 8 + e % 2;
      if (row >= m || column >= n) continue;
      REAL x = 0;
      _Pragma("unroll 1") for (long kk = 0; kk < k_end - k_begin; ++kk)
        x += a[ALONG_A ? (long)row * lda + kk : kk * lda + row] * b[ALONG_B ? (long)column * ldb + kk : kk * ldb + column];
      const INDEX to = (INDEX)row * n + column;
      C_STORE(c, to, FINISHED(x, column, to));
    }
    return;
  }
#endif
  UNROLL for (int i = 0; i < 2 * ROWS; ++i) {
    const int row = row0 + i * 8;
    const INDEX start = (INDEX)row * n;
#define ENDED(j, e, column) FINISHED(sum[i / 2][j][i % 2 * 2 + (e)], (column) + (e), start + (column) + (e))
#if C_WIDTH == 4
    // Neighbouring lanes exchange halves of two fragments, so that each stores four values and what four of them store lies side by side.
    UNROLL for (int j = 0; j < COLUMNS; j += 2) {
      const int column = column0 + j * 8, mine = n0 + wn + (j + lane % 2) * 8 + lane / 2 % 2 * 4;
      TWO low = 0, high = 0;
      if (row < m && column < n) low = PAIR(ENDED(j, 0, column), ENDED(j, 1, column));
      if (row < m && column + 8 < n) high = PAIR(ENDED(j + 1, 0, column + 8), ENDED(j + 1, 1, column + 8));
      const TWO given = lane % 2 ? low : high, got = EXCHANGED(given);
      if (row < m && mine < n) *(__global FOUR*)(c + start + mine) = lane % 2 ? (FOUR)(got, high) : (FOUR)(low, got);
    }
#else
    UNROLL for (int j = 0; j < COLUMNS; ++j) {
      const int column = column0 + j * 8;
      if (row >= m || column >= n) continue;
      C_STORE(c, start + column, ENDED(j, 0, column));
      if (column + 1 < n) C_STORE(c, start + column + 1, ENDED(j, 1, column));
    }
#endif
  }
}
