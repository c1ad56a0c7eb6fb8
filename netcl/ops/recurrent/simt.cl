// Recurrent layers on GPUs. A work-group has BLOCK units and some of the B rows, RT at a time: COLS = BLOCK * COLUMN_GATES sums for
// each row. An item has CT columns and every SLICES-th quad of k; the sums of the slices are added up in local memory by all items, then an
// item does a cell. Rows are staged through local memory in chunks of KC values, of which the next is loaded while one is used.
// With HOLDS an item keeps its weights in registers over all steps s0 .. s1. With POLLS a launch does all steps, and groups wait for each
// other: results are SENTINEL before they are there, and an item reads what it needs until it is not. That takes groups that run side by
// side, so their number must not exceed what the device holds at once. After LIMIT readings in vain an item sets `late` and does not
// wait any more, so the kernel ends in any case; what is missing stays SENTINEL, which is a NaN.
#ifndef BLOCK
#define BLOCK 8
#define RT 8  // BLOCK * RT must not exceed ITEMS
#define CT 4
#define ITEMS 256
#define QUADS 2  // of an item in a chunk
#define VK 1  // values of a load: 4, 2 or 1, a divisor of DEPTH
#endif
#ifndef HOLDS
#define HOLDS 0
#endif
#ifndef LIMIT
#define LIMIT 400000
#endif
#if HOLDS
#define UNROLL_CHUNKS UNROLL
#else
#define UNROLL_CHUNKS
#endif
#define COLS (BLOCK * COLUMN_GATES)
#define SLICES (ITEMS / (COLS / CT))
#define KC (4 * SLICES * QUADS)
#define CHUNKS ((DEPTH + KC - 1) / KC)
#define LOADS ((RT * KC / VK + ITEMS - 1) / ITEMS)
#define REAL4 JOIN(REAL, 4)
#define STAGE (RT * KC)                   // values of a chunk
#define PARTIAL (SLICES * RT * COLS)      // values of the sums
#define PARTS (RT * COLS >= ITEMS ? 1 : ITEMS / (RT * COLS))  // into which slices are divided when they are added up
#define EACH (SLICES / PARTS)
#define LOCAL_VALUES (2 * STAGE > PARTIAL ? 2 * STAGE : PARTIAL)
#if VK == 1
#define VA REAL
#define ABSENT(v) (as_uint(v) == SENTINEL)
#else
#define VA JOIN(REAL, VK)
#define ABSENT(v) any(JOIN(as_uint, VK)(v) == (JOIN(uint, VK))(SENTINEL))
#endif
#if POLLS
#define LOAD_ROW(p) (*(volatile __global const VA*)(p))
#else
#define LOAD_ROW(p) (*(__global const VA*)(p))
#undef ABSENT
#define ABSENT(v) 0
#endif

typedef struct { VA v[LOADS]; } Chunk;

// The values of a chunk that this item brings: rows from b on, those below `end`.
static inline VA part_of(const Memory m, const int s, const int b, const int end, const int k) {
  __global const REAL* row = b < end && k < DEPTH ? row_of(m, s, b) : 0;
  return row != 0 ? LOAD_ROW(row + k) : (VA)(0);
}
#define PLACE(l) ((int)get_local_id(0) + (l) * ITEMS)
#define PLACE_ROW(l) (PLACE(l) / (KC / VK))
#define PLACE_K(l) (PLACE(l) % (KC / VK) * VK)
static inline void fetch(const Memory m, Chunk* c, const int s, const int b, const int end, const int k0) {
  UNROLL for (int l = 0; l < LOADS; ++l) c->v[l] = part_of(m, s, b + PLACE_ROW(l), min(end, b + RT), k0 + PLACE_K(l));
}

static inline REAL4 weights_of(__global const REAL* weight, const int column, const int k) {
  const int unit = get_group_id(1) * BLOCK + column / COLUMN_GATES, gate = column % COLUMN_GATES;
  REAL4 w = (REAL4)(0);
  if (unit < UNITS) {
    if (k < DEPTH) w.x = weight[WEIGHT_AT(unit, gate, k)];
    if (k + 1 < DEPTH) w.y = weight[WEIGHT_AT(unit, gate, k + 1)];
    if (k + 2 < DEPTH) w.z = weight[WEIGHT_AT(unit, gate, k + 2)];
    if (k + 3 < DEPTH) w.w = weight[WEIGHT_AT(unit, gate, k + 3)];
  }
  return w;
}

static inline void run(const Memory m, __global const REAL* weight, __global int* late, const int s0, const int s1, const int rows,
                       const int units, __local REAL* shared) {
#pragma OPENCL FP_CONTRACT ON
  const int tid = get_local_id(0), slice = tid / (COLS / CT), column = tid % (COLS / CT) * CT;
  const int start = get_group_id(0) * rows, end = min(m.B, start + rows);
  const int cell_row = tid / BLOCK, unit = get_group_id(1) * BLOCK + tid % BLOCK;
  int alone = 0;  // has waited in vain
#if HOLDS
  REAL4 held[CHUNKS][QUADS][CT];
  UNROLL for (int i = 0; i < CHUNKS * QUADS * CT; ++i)
    held[i / CT / QUADS][i / CT % QUADS][i % CT] =
        weights_of(weight, column + i % CT, i / CT / QUADS * KC + (i / CT % QUADS * SLICES + slice) * 4);
#define WEIGHTS(chunk, q, j) held[chunk][q][j]
#else
#define WEIGHTS(chunk, q, j) weights_of(weight, column + (j), (chunk) * KC + ((q) * SLICES + slice) * 4)
#endif
  Chunk next;
  for (int s = s0; s < s1; ++s) {
    fetch(m, &next, s, start, end, 0);
    for (int b0 = start; b0 < end; b0 += RT) {
      const int b = b0 + cell_row, works = cell_row < RT && b < end && unit < UNITS;
      Known known;
      if (works) know(&known, m, s, b, unit, 1);
      REAL sums[RT][CT];
      UNROLL for (int i = 0; i < RT * CT; ++i) sums[i / CT][i % CT] = 0;
      UNROLL_CHUNKS for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        __local REAL* stage = shared + chunk % 2 * STAGE;
        if (chunk == 0) barrier(CLK_LOCAL_MEM_FENCE);  // the sums of the rows before lie there
        UNROLL for (int l = 0; l < LOADS; ++l) {
          for (int tries = 0; ABSENT(next.v[l]) && !alone; ++tries) {
            if (tries >= LIMIT) *late = alone = 1;
            else fetch(m, &next, s, b0, end, chunk * KC);
          }
          if (PLACE_ROW(l) < RT) *(__local VA*)(stage + PLACE_ROW(l) * KC + PLACE_K(l)) = next.v[l];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        const int more = chunk + 1 < CHUNKS;
        fetch(m, &next, s, more ? b0 : b0 + RT, end, more ? (chunk + 1) * KC : 0);  // of rows beyond the last: zeros
        UNROLL for (int q = 0; q < QUADS; ++q) {
          REAL4 w[CT];
          UNROLL for (int j = 0; j < CT; ++j) w[j] = WEIGHTS(chunk, q, j);
          UNROLL for (int i = 0; i < RT; ++i) {
            const REAL4 a = *(__local REAL4*)(stage + i * KC + (q * SLICES + slice) * 4);
            UNROLL for (int j = 0; j < CT; ++j) {
              sums[i][j] += a.x * w[j].x;
              sums[i][j] += a.y * w[j].y;
              sums[i][j] += a.z * w[j].z;
              sums[i][j] += a.w * w[j].w;
            }
          }
        }
      }
      barrier(CLK_LOCAL_MEM_FENCE);
      UNROLL for (int i = 0; i < RT * CT; ++i) shared[(slice * RT + i / CT) * COLS + column + i % CT] = sums[i / CT][i % CT];
      barrier(CLK_LOCAL_MEM_FENCE);
      for (int o = tid; o < PARTS * RT * COLS; o += ITEMS) {  // into the first slice of each part
        __local REAL* p = shared + o / (RT * COLS) * EACH * RT * COLS + o % (RT * COLS);
        REAL total = 0;
        for (int i = 0; i < EACH; ++i) total += p[i * RT * COLS];
        *p = total;
      }
      barrier(CLK_LOCAL_MEM_FENCE);
      if (works) {
        REAL sum[COLUMN_GATES];
        for (int g = 0; g < COLUMN_GATES; ++g) {
          sum[g] = 0;
          for (int i = 0; i < PARTS; ++i)
            sum[g] += shared[(i * EACH * RT + cell_row) * COLS + tid % BLOCK * COLUMN_GATES + g];
        }
        finish(m, s, b, unit, 1, known, sum);
      }
    }
  }
}
