// Matrix products through local memory and registers: what GPUs are made for.
#ifndef BM
#define BM 64  // rows of the block a work-group computes
#define BN 64  // its columns
#define BK 16  // how deep the blocks of A and B in local memory are
#define TM 4  // rows a work-item keeps in registers
#define TN 4  // columns a work-item keeps in registers
#define SLICES 1  // parts of a block's depth that different work-items sum: more of them than the result has tiles
#define C_QUADS 0  // 1: results are stored four at a time
#define BUFFERS 2  // 2: the next block is stored while this one is multiplied; 1: where local memory is short
#endif

#define ITEMS_X (BN / TN)
#define ITEMS_Y (BM / TM)
#define TILES (ITEMS_X * ITEMS_Y)
#define ITEMS (TILES * SLICES)
#define DEPTH (BK / SLICES)            // of a slice
#define ROOM (BUFFERS * BK * (BM + BN))
#define RUN_M (TM % 4 == 0 ? 4 : 1)    // neighbouring rows of a work-item: vectors of 4 out of local memory
#define RUN_N (TN % 4 == 0 ? 4 : 1)
#define STEP_M (RUN_M * ITEMS_Y)       // from one run to the next
#define STEP_N (RUN_N * ITEMS_X)
#define ROW(i) (ty * RUN_M + (i) / RUN_M * STEP_M + (i) % RUN_M)
#define COLUMN(j) (tx * RUN_N + (j) / RUN_N * STEP_N + (j) % RUN_N)

// An operand whose rows run along k is turned on its way into local memory. Its columns there are swirled by their depth, in runs of
// four that stay whole: else the lanes that hold one row would write into the same bank.
#define TURN_A (!TRANS_A)
#define TURN_B TRANS_B
#if WIDTH == 4
#define SWIRL(kk) ((kk) / 4 * (128 / BK) & 28)
#else
#define SWIRL(kk) ((kk) * 4 & 28)
#endif
#define SWIRL_A(kk) (TURN_A && BM % 32 == 0 ? SWIRL(kk) : 0)
#define SWIRL_B(kk) (TURN_B && BN % 32 == 0 ? SWIRL(kk) : 0)
#if (TM % 4 == 0 ? 4 : 1) * (BM / TM) % 32 == 0  // runs of a work-item are swirled alike: one address for all of them
#define TAKEN_A(i, kk) (block_a + (own_a ^ SWIRL_A(kk)))[(kk) * BM + (i) / RUN_M * STEP_M + (i) % RUN_M]
#else
#define TAKEN_A(i, kk) block_a[(kk) * BM + (ROW(i) ^ SWIRL_A(slice * DEPTH) ^ SWIRL_A(kk))]
#endif
#if (TN % 4 == 0 ? 4 : 1) * (BN / TN) % 32 == 0
#define TAKEN_B(j, kk) (block_b + (own_b ^ SWIRL_B(kk)))[(kk) * BN + (j) / RUN_N * STEP_N + (j) % RUN_N]
#else
#define TAKEN_B(j, kk) block_b[(kk) * BN + (COLUMN(j) ^ SWIRL_B(slice * DEPTH) ^ SWIRL_B(kk))]
#endif

#define QUAD JOIN(REAL, 4)
#if WIDTH == 4  // a piece is what one load brings
#define PIECE float4
#define A_PIECE(at) A_QUAD(a + (at))
#define B_PIECE(at) B_QUAD(b + (at))
#define SPREAD(p, step, v) (p)[0] = v.x; (p)[step] = v.y; (p)[2 * (step)] = v.z; (p)[3 * (step)] = v.w;
#else
#define PIECE REAL
#define A_PIECE(at) (REAL)A_LOAD(a, at)
#define B_PIECE(at) (REAL)B_LOAD(b, at)
#define SPREAD(p, step, v) *(p) = v;
#endif
#define PIECES_A (BM * BK / WIDTH)
#define PIECES_B (BN * BK / WIDTH)
#define LOADS_A ((PIECES_A + ITEMS - 1) / ITEMS)
#define LOADS_B ((PIECES_B + ITEMS - 1) / ITEMS)
#define INSIDE_A(l) (PIECES_A % ITEMS == 0 || t + (l) * ITEMS < PIECES_A)
#define INSIDE_B(l) (PIECES_B % ITEMS == 0 || t + (l) * ITEMS < PIECES_B)
// Where a work-item's pieces lie: in which row of the operand's block, and how far along it. Told apart so that the first one's place
// and a constant give the others'.
#define ALONG_A ((TURN_A ? BK : BM) / WIDTH)
#define ALONG_B ((TURN_B ? BK : BN) / WIDTH)
#define ROW_OF(l, along) (ITEMS % (along) == 0 ? t / (along) + (l) * (ITEMS / (along)) : (t + (l) * ITEMS) / (along))
#define PLACE_OF(l, along) ((ITEMS % (along) == 0 ? t % (along) : (t + (l) * ITEMS) % (along)) * WIDTH)
#define SWIRLED(l, along, swirl) \
  (ITEMS % (32 * (along)) == 0 ? (int)(t / (along) ^ (swirl)) + (l) * (ITEMS / (along)) : (int)(ROW_OF(l, along) ^ (swirl)))
#define KA_OF(l) (int)(TURN_A ? PLACE_OF(l, ALONG_A) : ROW_OF(l, ALONG_A))
#define KB_OF(l) (int)(TURN_B ? PLACE_OF(l, ALONG_B) : ROW_OF(l, ALONG_B))
#define I_OF(l) (int)(TURN_A ? ROW_OF(l, ALONG_A) : PLACE_OF(l, ALONG_A))
#define J_OF(l) (int)(TURN_B ? ROW_OF(l, ALONG_B) : PLACE_OF(l, ALONG_B))

// The next block, into registers; with `there`, as far as k goes.
#define FETCH(there)                                                                                                    \
  _Pragma("unroll") for (int l = 0; l < LOADS_A; ++l)                                                                   \
    if (INSIDE_A(l)) next_a[l] = there(KA_OF(l)) ? A_PIECE(from_a[l]) : (PIECE)(0);                                     \
  _Pragma("unroll") for (int l = 0; l < LOADS_B; ++l)                                                                   \
    if (INSIDE_B(l)) next_b[l] = there(KB_OF(l)) ? B_PIECE(from_b[l]) : (PIECE)(0);
#define ALL(kk) 1
#define FIRST(kk) ((kk) < first)
// And from there into local memory.
#define KEEP                                                                                                            \
  _Pragma("unroll") for (int l = 0; l < LOADS_A; ++l)                                                                   \
    if (INSIDE_A(l)) {                                                                                                  \
      __local REAL* to = into_a + KA_OF(l) * BM;                                                                        \
      if (TURN_A) { SPREAD(to + SWIRLED(l, ALONG_A, SWIRL_A(KA_OF(l))), BM, next_a[l]) }                                \
      else *(__local PIECE*)(to + I_OF(l)) = next_a[l];                                                                 \
    }                                                                                                                   \
  _Pragma("unroll") for (int l = 0; l < LOADS_B; ++l)                                                                   \
    if (INSIDE_B(l)) {                                                                                                  \
      __local REAL* to = into_b + KB_OF(l) * BN;                                                                        \
      if (TURN_B) { SPREAD(to + SWIRLED(l, ALONG_B, SWIRL_B(KB_OF(l))), BN, next_b[l]) }                                \
      else *(__local PIECE*)(to + J_OF(l)) = next_b[l];                                                                 \
    }
// The values of one k that a work-item multiplies, out of local memory: in fours, or one by one.
#define TAKE_FOURS(to, count, TAKEN, kk)                                                                                \
  _Pragma("unroll") for (int i = 0; i < count; i += 4) {                                                                \
    const QUAD v = *(__local const QUAD*)&TAKEN(i, kk);                                                                 \
    to[(kk) % 2][i] = v.x; to[(kk) % 2][i + 1] = v.y; to[(kk) % 2][i + 2] = v.z; to[(kk) % 2][i + 3] = v.w;             \
  }
#define TAKE_ONES(to, count, TAKEN, kk) UNROLL for (int i = 0; i < count; ++i) to[(kk) % 2][i] = TAKEN(i, kk);
#if TM % 4 == 0
#define TAKE_A TAKE_FOURS
#else
#define TAKE_A TAKE_ONES
#endif
#if TN % 4 == 0
#define TAKE_B TAKE_FOURS
#else
#define TAKE_B TAKE_ONES
#endif
#define TAKE(kk) { TAKE_A(x, TM, TAKEN_A, kk) TAKE_B(y, TN, TAKEN_B, kk) }
#define MULTIPLY(kk)                                                                                                    \
  _Pragma("unroll") for (int i = 0; i < TM; ++i)                                                                        \
    UNROLL for (int j = 0; j < TN; ++j) sum[i][j] += x[(kk) % 2][i] * y[(kk) % 2][j];

// A work-group computes a BM x BN block of c through blocks of A and B in local memory; a work-item TM x TN of it in registers.
// With splits > 1 a batch is computed in parts of `depth` along k, which lie one after the other in c.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void gemm_tiles(IN_POINTERS, END_POINTERS, const int m, const int n, const int k, const int lda, const int ldb, const int has_bias,
                BATCH_NUMBERS, const int splits, const int depth, const REAL scale) {
  __local REAL blocks[ROOM] __attribute__((aligned(32)));
  __local REAL *into_a = blocks, *into_b = blocks + BUFFERS * BK * BM;
  const uint t = get_local_id(0);  // unsigned: quotients are shifts
  const int slice = t / TILES, item = t % TILES;
  // Eight lanes across and four down read the fewest words; neighbours read the same of B, and those two apart the same of A, which
  // lets half a wave's vectors come out of local memory at once.
#if (BN / TN) % 8 == 0 && (BM / TM) % 4 == 0
  const int lane = item % 32, wave = item / 32;
  const int tx = wave % (ITEMS_X / 8) * 8 + lane / 2 % 8, ty = wave / (ITEMS_X / 8) * 4 + lane % 2 + lane / 16 * 2;
#else
  const int tx = item % ITEMS_X, ty = item / ITEMS_X;
#endif
  BLOCK_OF_GROUP
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride + (INDEX)k_begin * (TURN_A ? 1 : lda);
  b += batch / batch1 * b0_stride + batch % batch1 * b1_stride + (INDEX)k_begin * (TURN_B ? 1 : ldb);
  added += part * m * n;
  c += part * m * n;

  REAL sum[TM][TN];
  UNROLL for (int i = 0; i < TM; ++i)
    UNROLL for (int j = 0; j < TN; ++j) sum[i][j] = 0;
  PIECE next_a[LOADS_A], next_b[LOADS_B];
  INDEX from_a[LOADS_A], from_b[LOADS_B];  // beyond the edge: the last ones again, what comes of them is not stored
  UNROLL for (int l = 0; l < LOADS_A; ++l)
    from_a[l] = TURN_A ? (INDEX)min(m0 + I_OF(l), m - 1) * lda + KA_OF(l) : (INDEX)KA_OF(l) * lda + min(m0 + I_OF(l), m - WIDTH);
  UNROLL for (int l = 0; l < LOADS_B; ++l)
    from_b[l] = TURN_B ? (INDEX)min(n0 + J_OF(l), n - 1) * ldb + KB_OF(l) : (INDEX)KB_OF(l) * ldb + min(n0 + J_OF(l), n - WIDTH);
  // A block that k does not fill comes first, so that the others need no care.
  int left = (k_end - k_begin - 1) / BK;
  const int first = k_end - k_begin - left * BK;
  FETCH(FIRST)
  KEEP
  barrier(CLK_LOCAL_MEM_FENCE);
  const int own_a = ROW(0) ^ SWIRL_A(slice * DEPTH), own_b = COLUMN(0) ^ SWIRL_B(slice * DEPTH);
  __local const REAL *block_a = into_a + slice * DEPTH * BM, *block_b = into_b + slice * DEPTH * BN;
  REAL x[2][TM], y[2][TN];
  TAKE(0)
  a += (INDEX)first * (TURN_A ? 1 : lda);
  b += (INDEX)first * (TURN_B ? 1 : ldb);
  for (int now = BUFFERS - 1;; --left) {
    if (left > 0) { FETCH(ALL) }
    UNROLL for (int kk = 0; kk < DEPTH - 1; ++kk) {
      TAKE(kk + 1)
      MULTIPLY(kk)
    }
    if (left > 0) {  // the next block is there before this one's last products are
      if (BUFFERS == 1) barrier(CLK_LOCAL_MEM_FENCE);
      into_a = blocks + now * (BK * BM);
      into_b = blocks + BUFFERS * BK * BM + now * (BK * BN);
      block_a = into_a + slice * DEPTH * BM;
      block_b = into_b + slice * DEPTH * BN;
      now = BUFFERS - 1 - now;
      KEEP
      barrier(CLK_LOCAL_MEM_FENCE);
      TAKE(0)
    }
    MULTIPLY(DEPTH - 1)
    if (left <= 0) break;
    a += (INDEX)BK * (TURN_A ? 1 : lda);
    b += (INDEX)BK * (TURN_B ? 1 : ldb);
  }
#if SLICES > 1
#define TAKES (ROOM / ((SLICES - 1) * TILES * TN) < TM ? ROOM / ((SLICES - 1) * TILES * TN) : TM)  // rows that there is room for at once
  UNROLL for (int i0 = 0; i0 < TM; i0 += TAKES) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (slice > 0) {
      UNROLL for (int i = 0; i < TAKES && i0 + i < TM; ++i)
        UNROLL for (int j = 0; j < TN; ++j) blocks[(((slice - 1) * TAKES + i) * TN + j) * TILES + item] = sum[i0 + i][j];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (slice == 0) {
      for (int s = 0; s < SLICES - 1; ++s)
        UNROLL for (int i = 0; i < TAKES && i0 + i < TM; ++i)
          UNROLL for (int j = 0; j < TN; ++j) sum[i0 + i][j] += blocks[((s * TAKES + i) * TN + j) * TILES + item];
    }
  }
  if (slice > 0) return;
#endif
  UNROLL for (int i = 0; i < TM; ++i) {
    const int row = m0 + ROW(i);
    const INDEX start = (INDEX)row * n;
    if (row < m) {
#if C_QUADS
      UNROLL for (int j = 0; j < TN; j += 4) {
        const int column = n0 + COLUMN(j);
        if (column < n) {
          QUAD v;
          v.x = FINISHED(sum[i][j], column, start + column);
          v.y = FINISHED(sum[i][j + 1], column + 1, start + column + 1);
          v.z = FINISHED(sum[i][j + 2], column + 2, start + column + 2);
          v.w = FINISHED(sum[i][j + 3], column + 3, start + column + 3);
          *(__global QUAD*)(c + start + column) = v;
        }
      }
#else
      UNROLL for (int j = 0; j < TN; ++j) {
        const int column = n0 + COLUMN(j);
        if (column < n) {
          const REAL v = FINISHED(sum[i][j], column, start + column);
          C_STORE(c, start + column, v);
        }
      }
#endif
    }
  }
}
