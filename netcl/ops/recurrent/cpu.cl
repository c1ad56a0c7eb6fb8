// Recurrent layers on CPUs. A work-group is one work-item: it has some of the B rows of the batch and some blocks of units, and goes through the
// steps s0 .. s1. Rows do not depend on each other, so with all units in a group one launch does all steps; with few rows, or weights that
// exceed a core's cache, units are divided as well and a launch does one step. A block is CELLS vectors of units for each of COLUMN_GATES
// gates, NV vectors together; MR rows of sums live in registers. Weights are packed into panels: block, k, vector, lane.
#ifndef MR
#define MR 4  // rows of a register tile
#define CELLS 1
#endif
#define REAL4 JOIN(REAL, 4)
#define NV (CELLS * COLUMN_GATES)
#define BLOCK (CELLS * VW)  // units of a block
#if NV == 1
#define COLUMNS(F, i) F(i, 0)
#elif NV == 2
#define COLUMNS(F, i) F(i, 0) F(i, 1)
#elif NV == 3
#define COLUMNS(F, i) F(i, 0) F(i, 1) F(i, 2)
#else
#define COLUMNS(F, i) F(i, 0) F(i, 1) F(i, 2) F(i, 3)
#endif
#define ROWS(F) REPEAT(MR, F)

#define ROW(i) __global const REAL* a##i = row_of(m, s, min(b + i, end - 1)); some |= a##i != 0; if (!a##i) a##i = zeros;
#define ZERO(i, j) V c##i##_##j = (V)(0);
#define ZERO_ROW(i) COLUMNS(ZERO, i)
#define WEIGHT(i, j) const V w##j = load_global(p + j * VW);
#define MULTIPLY_ADD(i, j) c##i##_##j += x##i * w##j;
#define MULTIPLY_ADD_ROW(i) const V x##i = (V)(a##i[k]); COLUMNS(MULTIPLY_ADD, i)
#define TO_SUM(i, j) sums[i][j] = c##i##_##j;
#define TO_SUMS(i) COLUMNS(TO_SUM, i)

// A tile: MR rows from b on, those below `end`, times the panel of the units from u on. `zeros` stands for rows that row_of() does not
// have.
static inline void tile(const Memory m, __global const REAL* panel, __global const REAL* zeros, const int s, const int b, const int end,
                        const int u) {
#pragma OPENCL FP_CONTRACT ON
  ROWS(ZERO_ROW)
  int some = 0;
  ROWS(ROW)
  if (some) {
    __global const REAL* p = panel;
    for (int k = 0; k < DEPTH; ++k, p += NV * VW) {
      COLUMNS(WEIGHT, 0)
      ROWS(MULTIPLY_ADD_ROW)
    }
  }
  V sums[MR][NV];
  ROWS(TO_SUMS)
  for (int i = 0; i < MR && b + i < end; ++i)
    for (int j = 0; j < CELLS && u + j * VW < UNITS; ++j) {
      const int at = u + j * VW, n = UNITS - at;
      Known k;
      know(&k, m, s, b + i, at, n);
      finish(m, s, b + i, at, n, k, sums[i] + j);
    }
}

// `weight` holds the panels, and DEPTH zeros behind them.
static inline void run(const Memory m, __global const REAL* weight, __global int* late, const int s0, const int s1, const int rows,
                       const int units, __local REAL* shared) {
  const int start = get_group_id(0) * rows, end = min(m.B, start + rows), blocks = (UNITS + BLOCK - 1) / BLOCK;
  const int first = get_group_id(1) * units, last = min(blocks, first + units);
  __global const REAL* zeros = weight + (long)blocks * DEPTH * NV * VW;
  for (int s = s0; s < s1; ++s)
    for (int block = first; block < last; ++block)
      for (int b = start; b < end; b += MR) tile(m, weight + (long)block * DEPTH * NV * VW, zeros, s, b, end, block * BLOCK);
}

// Weights into panels, and zeros behind them.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack(__global const REAL* weight, __global REAL* panels) {
  const int block = get_group_id(0), blocks = (UNITS + BLOCK - 1) / BLOCK;
  __global REAL* p = panels + (long)block * DEPTH * NV * VW;
  if (block == blocks) {
    for (int k = 0; k < DEPTH; ++k) p[k] = 0;
    return;
  }
  for (int j = 0; j < NV; ++j, p += VW) {
    const int gate = COLUMN_GATES > 1 ? j : 0, u = block * BLOCK + (COLUMN_GATES > 1 ? 0 : j * VW);
#if ALONG_K
    for (int e = 0; e < VW; e += 4) {
      int k = 0;
      __global REAL* to = p + e;
      if (VW >= 4 && u + e + 4 <= UNITS)
        for (; k + 4 <= DEPTH; k += 4, to += 4 * NV * VW) {  // four units of four k
          __global const REAL* w = weight + WEIGHT_AT(u + e, gate, k);
          const REAL4 a = vload4(0, w), b = vload4(0, w + DEPTH), c = vload4(0, w + 2 * DEPTH), d = vload4(0, w + 3 * DEPTH);
          vstore4((REAL4)(a.x, b.x, c.x, d.x), 0, to);
          vstore4((REAL4)(a.y, b.y, c.y, d.y), 0, to + NV * VW);
          vstore4((REAL4)(a.z, b.z, c.z, d.z), 0, to + 2 * NV * VW);
          vstore4((REAL4)(a.w, b.w, c.w, d.w), 0, to + 3 * NV * VW);
        }
      for (; k < DEPTH; ++k, to += NV * VW)
        for (int i = 0; i < min(4, VW - e); ++i) to[i] = u + e + i < UNITS ? weight[WEIGHT_AT(u + e + i, gate, k)] : 0;
    }
#else
    for (int k = 0; k < DEPTH; ++k) {
      const V w = u < UNITS ? GET(weight + WEIGHT_AT(u, gate, k), UNITS - u) : (V)(0);
      PUT(w, p + (long)k * NV * VW, VW);
    }
#endif
  }
}
