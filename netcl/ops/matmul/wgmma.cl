// Products by wgmma, the instructions of four warps together that processors of compute capability 9.0 have.
//
// A work-group is three warpgroups around a ring of stages in local memory: the last one fills them by copies that nobody waits for,
// the first two multiply, 64 rows of the tile each. As many work-groups as there are processors take tiles in turn, so the next tile
// is on its way while one is stored. Lines behind a mark reach the assembler in a second pass (core/kernels/program.py). Generated:
// MULTIPLY(sums, x, y) and MULTIPLY_FIRST for a tile's columns, and SETTLED(sums), behind which they may be read.
#ifndef COLUMNS
#define COLUMNS 128  // of a tile
#define STAGES 4
#define SIZE 4  // bytes of an operand's values: 2, or 4 for float32, which is split into the two parts that the unit multiplies
#define SWAPPED 0  // 1: the tile's rows are columns of the result
#endif
#ifndef PAIR  // two results of 16 bits, the first in the lower half
#define PAIR(low, high) pair_bfloat16(low, high)
#endif
#ifndef C_WIDTH  // values that are stored at once: 4 of 16 bits, 2 of 32, or 1
#define C_WIDTH 1
#endif
#ifndef LAG  // stages whose copies may be under way before the first of them is given to the consumers; at most STAGES - 2
#define LAG (STAGES / 2)
#endif

#define ROWS 128
#define DEPTH (128 / SIZE)           // values along k of a stage: rows there are 128 bytes
#define PIECE (16 / SIZE)            // values that a copy takes
#define LEFT_BYTES (ROWS * 128)
#define RIGHT_BYTES (COLUMNS * 128)
#define STAGE_BYTES (LEFT_BYTES + RIGHT_BYTES * (SIZE == 4 ? 2 : 1))
#define COPIERS 128
#define ITEMS (256 + COPIERS)

// The instruction's left operand gives the rows of a tile. LEFT_K, RIGHT_K: the operand is stored with its values along k side by side.
#if SWAPPED
#define LEFT_T B_T
#define RIGHT_T A_T
#define LEFT_K TRANS_B
#define RIGHT_K (!TRANS_A)
#else
#define LEFT_T A_T
#define RIGHT_T B_T
#define LEFT_K (!TRANS_A)
#define RIGHT_K TRANS_B
#endif

#define COPIES_ARRIVE(at) __asm__ volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at))
#define ARRIVE(at) __asm__ volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" :: "r"(at))
// What other units wrote is seen by wgmma only after this. It stands where a stage is read, so that nobody waits before copying on;
// and without shared::cta it would wait for every copy under way.
#define SEEN() __asm__ volatile("fence.proxy.async.shared::cta;")
#define SUMS_BEGIN() __asm__ volatile("//@sm_90a wgmma.fence.sync.aligned;")
#define SUMS_END() __asm__ volatile("//@sm_90a wgmma.commit_group.sync.aligned;")
#define SUMS_LEFT(n) __asm__ volatile("//@sm_90a wgmma.wait_group.sync.aligned %0;" :: "n"(n))
#define LOAD_4(x, at) \
  __asm__ volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"((x)[0]), "=r"((x)[1]), "=r"((x)[2]), "=r"((x)[3]) : "r"(at))
#define STORE_4(at, x, y, z, w) __asm__ volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(x), "r"(y), "r"(z), "r"(w))

// Two sets of sums do not fit a third of the registers each: the copiers give some of theirs.
#if SIZE == 4 && COLUMNS == 128
#define FEWER_REGISTERS() __asm__ volatile("//@sm_90a setmaxnreg.dec.sync.aligned.u32 104;")
#define MORE_REGISTERS() __asm__ volatile("//@sm_90a setmaxnreg.inc.sync.aligned.u32 200;")
#else
#define FEWER_REGISTERS()
#define MORE_REGISTERS()
#endif

// The unit cuts the lowest 13 bits of a float32: a value is given to it as the nearest one without them, and what is left as another.
// What is NaN stays NaN in one of the two, an infinity becomes NaN in either.
#define NEAREST(x) ((x) + 0x1000u)
#define REST(x) as_uint(as_float(x) - as_float(NEAREST(x) & 0xffffe000u))

// A matrix in local memory as the instruction is told of it: rows of 128 bytes, swizzled, eight of them in 1024 bytes. One whose values
// lie across k comes in blocks of 64 columns.
#define ALONG_K ((1UL << 62) | ((ulong)(1024 >> 4) << 32) | (1UL << 16))
#define ACROSS_K ((1UL << 62) | ((ulong)(1024 >> 4) << 32) | ((ulong)((DEPTH * 128) >> 4) << 16))

#define NEXT(stage, phase) if (++stage == STAGES) { stage = 0; phase ^= 1; }
// Where an item of work lies: its batch, its part of k in stages, its tile. Quotients are taken only where there is something to divide:
// with few steps along k they would take as long as the products.
#define PLACE(item)                                                                                                     \
  const int part = (item) / (down * across), tile = (item) - part * (down * across);                                    \
  int batch = part, begin = 0, end = steps;                                                                             \
  if (splits > 1) {                                                                                                     \
    batch = part / splits;                                                                                              \
    begin = steps * (part - batch * splits) / splits;                                                                   \
    end = steps * (part - batch * splits + 1) / splits;                                                                 \
  }                                                                                                                     \
  const int outer = batches > batch1 ? batch / batch1 : 0, inner = batch - outer * batch1;                              \
  const int band = tile / (BAND * across), high = min(down - band * BAND, BAND), inside = tile - band * BAND * across;  \
  const int column = inside / high, r0 = (band * BAND + inside - column * high) * ROWS, c0 = column * COLUMNS;          \
  __global const LEFT_T* left = left_operand + (outer * left0 + inner * left1);                                         \
  __global const RIGHT_T* right = right_operand + (outer * right0 + inner * right1);

#define LEFT_AT(r, kk) (LEFT_K ? (long)(r) * ldl + (kk) : (long)(kk) * ldl + (r))
#define RIGHT_AT(s, kk) (RIGHT_K ? (long)(s) * ldr + (kk) : (long)(kk) * ldr + (s))
#if SWAPPED
#define RESULT_AT(r, s) ((INDEX)(s) * n + (r))
#define RESULT_COLUMN(r, s) (r)
#else
#define RESULT_AT(r, s) ((INDEX)(r) * n + (s))
#define RESULT_COLUMN(r, s) (s)
#endif
#define FINISHED_AT(x, r, s) FINISHED(x, RESULT_COLUMN(r, s), RESULT_AT(r, s))

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void gemm_wgmma(IN_POINTERS, __global const BIAS_T* restrict bias, __global const ADDED_T* restrict added_operand,
                __global C_T* restrict result, const int m, const int n, const int k, const int lda, const int ldb, const int has_bias,
                BATCH_NUMBERS, const long b_first, const int batches, const int splits, const REAL scale) {
  __local uchar ring[STAGES * STAGE_BYTES] __attribute__((aligned(1024)));
  __local ulong barriers[2 * STAGES];
  const uint stages = LOCAL_AT(ring), full = LOCAL_AT(barriers), empty = full + 8 * STAGES;
  const int t = get_local_id(0), lane = t & 31, warp = (t >> 5) & 3, group = t >> 7;
#if SWAPPED
  __global const LEFT_T* left_operand = b + b_first;
  __global const RIGHT_T* right_operand = a;
  const int rows = n, columns = m, ldl = ldb, ldr = lda;
  const long left0 = b0_stride, left1 = b1_stride, right0 = a0_stride, right1 = a1_stride;
#else
  __global const LEFT_T* left_operand = a;
  __global const RIGHT_T* right_operand = b + b_first;
  const int rows = m, columns = n, ldl = lda, ldr = ldb;
  const long left0 = a0_stride, left1 = a1_stride, right0 = b0_stride, right1 = b1_stride;
#endif
  const int down = (rows + ROWS - 1) / ROWS, across = (columns + COLUMNS - 1) / COLUMNS, steps = (k + DEPTH - 1) / DEPTH;
  const int items = down * across * splits * batches;
  if (t == 0) {
    for (int i = 0; i < STAGES; ++i) {
      BARRIER_INIT(full + 8 * i, COPIERS);
      BARRIER_INIT(empty + 8 * i, 8);  // a warp of the consumers each
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if (group == 2) {
    FEWER_REGISTERS();
    // A work-item takes the same pieces of every stage. Of an operand along k: eight of them are a row, exchanged by its number.
    const int own = t & 127, own_row = own >> 3, own_piece = own & 7;
    const uint along = stages + own_row * 128 + ((own_piece ^ (own_row & 7)) << 4);
#if LEFT_K
#define K_L(i) (own_piece * PIECE)
#define R_L(i) (own_row + (i) * 16)
#define TO_L(i) (along + (i) * 2048)
#define LAST_L (rows - 1)
#else
#define K_L(i) (own / (ROWS / PIECE) + (i) * (COPIERS * PIECE / ROWS))
#define R_L(i) (own % (ROWS / PIECE) * PIECE)
#define LAST_L ((rows - 1) / PIECE * PIECE)
#if SIZE == 4
#define TO_L(i) (stages + K_L(i) * (ROWS * 4) + ((own % (ROWS / PIECE) ^ (K_L(i) & 3) << 1) << 4))
#else
#define TO_L(i) BLOCKS(stages, own % (ROWS / PIECE), K_L(i))
#endif
#endif
#define BLOCKS(base, piece, kk) ((base) + ((piece) >> 3) * (DEPTH * 128) + (kk) * 128 + ((((piece) & 7) ^ ((kk) & 7)) << 4))
#if RIGHT_K
#define K_R(i) (own_piece * PIECE)
#define C_R(i) (own_row + (i) * 16)
#define TO_R(i) (along + LEFT_BYTES + (i) * 2048)
#define LAST_R (columns - 1)
#elif SIZE == 2
#define K_R(i) (own / (COLUMNS / PIECE) + (i) * (COPIERS * PIECE / COLUMNS))
#define C_R(i) (own % (COLUMNS / PIECE) * PIECE)
#define TO_R(i) BLOCKS(stages + LEFT_BYTES, own % (COLUMNS / PIECE), K_R(i))
#define LAST_R ((columns - 1) / PIECE * PIECE)
#else
    // float32 must lie along k, so what does not is turned: a work-item copies blocks of 4 x 4 to where their second parts will be, takes
    // them from there and writes both parts. Eight of them in turn touch all banks.
    const int k_r = ((own >> 1) & 3) | ((own >> 5) & 1) << 2, piece_r = (own & 1) | ((own >> 3) & 3) << 1 | (own >> 6) << 3;
#define K_R(i) (k_r * 4 + (i) % 4)
#define C_R(i) (piece_r * 4 + (i) / 4 * 64)
#define TURNED(i, row) (stages + LEFT_BYTES + ((piece_r + 16 * (i)) * 4 + (row)) * 128 + ((k_r ^ ((piece_r * 4 + (row)) & 7)) << 4))
#define TO_R(i) (TURNED((i) / 4, (i) % 4) + RIGHT_BYTES)
#define LAST_R ((columns - 1) / PIECE * PIECE)
#endif
#define FETCH(inside)                                                                                                   \
  _Pragma("unroll") for (int i = 0; i < ROWS / 16; ++i) {                                                               \
    COPY_16(TO_L(i) + at, from_l[i], inside(K_L(i)) ? 16 : 0);                                                          \
    from_l[i] += LEFT_K ? 128 : step_l;                                                                                 \
  }                                                                                                                     \
  _Pragma("unroll") for (int i = 0; i < COLUMNS / 16; ++i) {                                                            \
    COPY_16(TO_R(i) + at, from_r[i], inside(K_R(i)) ? 16 : 0);                                                          \
    from_r[i] += RIGHT_K ? 128 : step_r;                                                                                \
  }
#define ALL(kk) 1
#define FIRST(kk) ((kk) < there)
#if SIZE == 4
#if RIGHT_K
#define PART(at)                                                                                                        \
  _Pragma("unroll") for (int i = 0; i < COLUMNS / 16; ++i) {                                                            \
    const uint p = along + LEFT_BYTES + (at) + i * 2048;                                                                \
    uint x[4];                                                                                                          \
    LOAD_4(x, p);                                                                                                       \
    STORE_4(p, NEAREST(x[0]), NEAREST(x[1]), NEAREST(x[2]), NEAREST(x[3]));                                             \
    STORE_4(p + RIGHT_BYTES, REST(x[0]), REST(x[1]), REST(x[2]), REST(x[3]));                                           \
  }
#else
#define PART(at)                                                                                                        \
  _Pragma("unroll") for (int i = 0; i < COLUMNS / 64; ++i) {                                                            \
    uint x[4][4];                                                                                                       \
    _Pragma("unroll") for (int row = 0; row < 4; ++row) LOAD_4(x[row], TURNED(i, row) + (at) + RIGHT_BYTES);            \
    _Pragma("unroll") for (int row = 0; row < 4; ++row) {                                                               \
      const uint p = TURNED(i, row) + (at);                                                                             \
      STORE_4(p, NEAREST(x[0][row]), NEAREST(x[1][row]), NEAREST(x[2][row]), NEAREST(x[3][row]));                       \
      STORE_4(p + RIGHT_BYTES, REST(x[0][row]), REST(x[1][row]), REST(x[2][row]), REST(x[3][row]));                     \
    }                                                                                                                   \
  }
#endif
    uint fetched = 0, ready = 0;
#endif
    const ulong step_l = (ulong)ldl * (SIZE * DEPTH), step_r = (ulong)ldr * (SIZE * DEPTH);
    uint stage = 0, phase = 1;
    for (int item = get_group_id(0); item < items; item += get_num_groups(0)) {
      PLACE(item)
      ulong from_l[ROWS / 16], from_r[COLUMNS / 16];  // beyond the edge the last ones again: what comes of them is not stored
      UNROLL for (int i = 0; i < ROWS / 16; ++i)
        from_l[i] = (ulong)(left + LEFT_AT(min(r0 + R_L(i), LAST_L), begin * DEPTH + K_L(i)));
      UNROLL for (int i = 0; i < COLUMNS / 16; ++i)
        from_r[i] = (ulong)(right + RIGHT_AT(min(c0 + C_R(i), LAST_R), begin * DEPTH + K_R(i)));
      int there = k - begin * DEPTH;  // values along k from here on
      for (int step = begin; step < end; ++step) {
        await(empty + 8 * stage, phase);
        const uint at = stage * STAGE_BYTES;
        if (there >= DEPTH) { FETCH(ALL) } else { FETCH(FIRST) }
        there -= DEPTH;
#if SIZE == 4
        COPIES_COMMIT();
        if (fetched >= LAG) {
          COPIES_WAIT(LAG);
          PART(ready * STAGE_BYTES)
          ARRIVE(full + 8 * ready);
          if (++ready == STAGES) ready = 0;
        }
        ++fetched;
#else
        COPIES_ARRIVE(full + 8 * stage);
#endif
        NEXT(stage, phase)
      }
    }
    COPIES_WAIT(0);
#if SIZE == 4
    for (uint i = min(fetched, (uint)LAG); i > 0; --i) {
      PART(ready * STAGE_BYTES)
      ARRIVE(full + 8 * ready);
      if (++ready == STAGES) ready = 0;
    }
#endif
    return;
  }

  MORE_REGISTERS();
  uint stage = 0, phase = 0;
#if SIZE == 4
  const ulong right_told = ALONG_K | (ulong)((stages + LEFT_BYTES) >> 4);
#if LEFT_K
  uint own_left[4];
  UNROLL for (int i = 0; i < 4; ++i)
    own_left[i] = stages + (group * 64 + warp * 16 + (lane & 15)) * 128 + (((i * 2 + (lane >> 4)) ^ (lane & 7)) << 4);
#define TAKE(x, i) FRAGMENTS(x[0], x[1], x[2], x[3], own_left[i] + at);
#else
  uint own_left[2];
  UNROLL for (int h = 0; h < 2; ++h)
    own_left[h] = stages + (lane & 3) * (ROWS * 4) + (((group * 64 + warp * 16 + h * 8 + (lane >> 2)) ^ ((lane & 3) << 3)) << 2);
#define TAKE(x, i)                                                                                                      \
  UNROLL for (int q = 0; q < 4; ++q) WORD(x[q], own_left[q & 1] + at + ((i) * 8 + (q >> 1) * 4) * (ROWS * 4));
#endif
#else
#if LEFT_K
  const ulong left_told = ALONG_K | (ulong)((stages + group * 64 * 128) >> 4);
#else
  const ulong left_told = ACROSS_K | (ulong)((stages + group * DEPTH * 128) >> 4);
#endif
  const ulong right_told = (RIGHT_K ? ALONG_K : ACROSS_K) | (ulong)((stages + LEFT_BYTES) >> 4);
#define LEFT_STEP (LEFT_K ? 2 : 2048 >> 4)    // from one instruction to the next, 16 values along k
#define RIGHT_STEP (RIGHT_K ? 2 : 2048 >> 4)
#endif
  for (int item = get_group_id(0); item < items; item += get_num_groups(0)) {
    PLACE(item)
    float sum[COLUMNS / 2];
    UNROLL for (int j = 0; j < COLUMNS / 2; ++j) sum[j] = 0;
#if SIZE == 4
    // The unit cuts while it adds, which many steps would feel: each is summed by itself and added in float32.
    float partial[COLUMNS / 2];
    for (int step = begin; step < end; ++step) {
      await(full + 8 * stage, phase);
      SEEN();
      const uint at = stage * STAGE_BYTES;
      uint x[4][4], rest[4][4];
      UNROLL for (int i = 0; i < 4; ++i) {
        TAKE(x[i], i)
        UNROLL for (int q = 0; q < 4; ++q) {
          rest[i][q] = REST(x[i][q]);
          x[i][q] = NEAREST(x[i][q]);
        }
      }
      const ulong y = right_told + (at >> 4);
      SUMS_BEGIN();
      MULTIPLY_FIRST(partial, rest[0], y);
      MULTIPLY(partial, x[0], y + (RIGHT_BYTES >> 4));
      MULTIPLY(partial, x[0], y);
      UNROLL for (int i = 1; i < 4; ++i) {
        MULTIPLY(partial, rest[i], y + i * 2);
        MULTIPLY(partial, x[i], y + (RIGHT_BYTES >> 4) + i * 2);
        MULTIPLY(partial, x[i], y + i * 2);
      }
      SUMS_END();
      SUMS_LEFT(0);
      SETTLED(partial);
      if (lane == 0) ARRIVE(empty + 8 * stage);
      UNROLL for (int j = 0; j < COLUMNS / 2; ++j) sum[j] += partial[j];
      NEXT(stage, phase)
    }
    int odd = 0;
    UNROLL for (int j = 0; j < COLUMNS / 2; ++j) odd |= sum[j] != sum[j];
#else
    uint before = 0;
    for (int step = begin; step < end; ++step) {
      await(full + 8 * stage, phase);
      SEEN();
      const uint at = (stage * STAGE_BYTES) >> 4;
      SUMS_BEGIN();
      UNROLL for (int i = 0; i < 4; ++i) MULTIPLY(sum, left_told + at + i * LEFT_STEP, right_told + at + i * RIGHT_STEP);
      SUMS_END();
      SUMS_LEFT(1);
      if (step > begin && lane == 0) ARRIVE(empty + 8 * before);
      before = stage;
      NEXT(stage, phase)
    }
    SUMS_LEFT(0);
    SETTLED(sum);
    if (end > begin && lane == 0) ARRIVE(empty + 8 * before);
#endif
    __global const ADDED_T* added = added_operand + (size_t)part * m * n;
    __global C_T* c = result + (size_t)part * m * n;
    UNROLL for (int h = 0; h < 2; ++h) {
      const int r = r0 + group * 64 + warp * 16 + h * 8 + (lane >> 2);
#if C_WIDTH == 4
      // Two lanes exchange half of what they have, so that each stores four values in a row.
      UNROLL for (int j = 0; j < COLUMNS / 8; j += 2) {
        const int s = c0 + j * 8 + (lane & 3) * 2, inside_s = r < rows;
        uint pair[2];
        UNROLL for (int i = 0; i < 2; ++i) {
          const int s_i = s + i * 8;
          const float first = inside_s && s_i < columns ? FINISHED_AT(sum[(j + i) * 4 + 2 * h], r, s_i) : 0;
          const float second = inside_s && s_i < columns ? FINISHED_AT(sum[(j + i) * 4 + 2 * h + 1], r, s_i + 1) : 0;
          pair[i] = PAIR(first, second);
        }
        uint other;
        __asm__ volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, -1;" : "=r"(other) : "r"(lane & 1 ? pair[0] : pair[1]));
        const int s_to = c0 + (j + (lane & 1)) * 8 + (lane & 2) * 2;
        if (inside_s && s_to < columns)
          *(__global uint2*)(c + RESULT_AT(r, s_to)) = lane & 1 ? (uint2)(other, pair[1]) : (uint2)(pair[0], other);
      }
#else
      UNROLL for (int j = 0; j < COLUMNS / 8; ++j) {
        const int s = c0 + j * 8 + (lane & 3) * 2;
        if (r < rows && s < columns) {
#if C_WIDTH == 2
          *(__global float2*)(c + RESULT_AT(r, s)) =
              (float2)(FINISHED_AT(sum[j * 4 + 2 * h], r, s), FINISHED_AT(sum[j * 4 + 2 * h + 1], r, s + 1));
#else
          const float low = FINISHED_AT(sum[j * 4 + 2 * h], r, s);
          C_STORE(c, RESULT_AT(r, s), low);
          if (s + 1 < columns) {
            const float next = FINISHED_AT(sum[j * 4 + 2 * h + 1], r, s + 1);
            C_STORE(c, RESULT_AT(r, s + 1), next);
          }
#endif
        }
      }
#endif
    }
#if SIZE == 4
    // The parts of an infinity are no numbers, nor is its product with a part that is zero: who got such a sum does its own again.
    if (odd) {
      _Pragma("unroll 1") for (int j = 0; j < COLUMNS / 2; ++j) {
        const int r = r0 + group * 64 + warp * 16 + ((j >> 1) & 1) * 8 + (lane >> 2), s = c0 + (j >> 2) * 8 + (lane & 3) * 2 + (j & 1);
        if (r < rows && s < columns) {
          float x = 0;
          for (int kk = begin * DEPTH; kk < min(k, end * DEPTH) && x == x; ++kk) x += left[LEFT_AT(r, kk)] * right[RIGHT_AT(s, kk)];
          x = FINISHED_AT(x, r, s);
          C_STORE(c, RESULT_AT(r, s), x);
        }
      }
    }
#endif
  }
}
