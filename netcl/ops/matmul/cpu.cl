// Matrix products on CPUs. A work-group is one work-item and does a block of rows times a panel of columns; it packs the panel of
// B into local memory (the second cache) and sweeps it with tiles of MR rows that live in registers, reading A where it lies.
// Defined for dtypes that are not converted value by value: B_LANES(p), BIAS_LANES(p), ADDED_LANES(p): vectors of operands as REAL;
// C_LANES(x, p): stores one of the result; B_QUAD(p): four values of B.
#ifndef MR
#define MR 6  // rows of a register tile: 1, 2, 4, 6, 8 or 12
#define NV 4  // vectors of a register tile: 1 to 4
#define STRIPS 4  // register tiles side by side in a panel: narrow tiles share what they read of A while it is in the first cache
#define KC 256  // rows of a panel; KC * NR * STRIPS values must fit local memory
#endif
#ifndef PACKED_A  // 1: A was packed into panels of MR rows by pack_a
#define PACKED_A 0
#endif
#ifndef PACKED_B  // 0: B is read where it lies; for few rows, and N at least NR. 2: B was packed by pack_b
#define PACKED_B 1
#endif

#define NR (NV * VW)
// A panel is read from the second cache in order, and yet faster if it is asked for some rows ahead.
#if FETCHES && PACKED_B
#define AHEAD 8
#define FETCH_ROW UNROLL for (int f = 0; f < NR; f += 16) FETCH_AHEAD(row + AHEAD * NR + f);
#else
#define FETCH_ROW
#endif
#define COLUMNS(F, i) COLUMNS_(NV, F, i)
#define COLUMNS_(n, F, i) JOIN(COLUMNS_, n)(F, i)
#define COLUMNS_1(F, i) F(i, 0)
#define COLUMNS_2(F, i) COLUMNS_1(F, i) F(i, 1)
#define COLUMNS_3(F, i) COLUMNS_2(F, i) F(i, 2)
#define COLUMNS_4(F, i) COLUMNS_3(F, i) F(i, 3)
#define ROWS(F) REPEAT(MR, F)

#if PACKED_A
#define A_POINTER(i)
#define A_VALUE(i) a_panel[(INDEX)kk * MR + i]
#else
#define A_POINTER(i) __global const A_T* a##i = a + min(m0 + i, m - 1) * (INDEX)a_row + k0 * (INDEX)a_k;
#define A_VALUE(i) A_LOAD(a##i, at_k)
#endif
#define ZERO(i, j) V c##i##_##j = (V)(0);
#define ZERO_ROW(i) COLUMNS(ZERO, i)
#if PACKED_B == 1
#define B_VECTOR(i, j) const V b##j = L_LOAD(row + j * VW);
#else
#define B_VECTOR(i, j) const V b##j = G_LOAD(row + j * VW);
#endif
#define MULTIPLY_ADD(i, j) c##i##_##j += x##i * b##j;
#define MULTIPLY_ADD_ROW(i) const V x##i = (V)(A_VALUE(i)); COLUMNS(MULTIPLY_ADD, i)
#define TO_TILE(i, j) P_STORE(c##i##_##j, tile + i * NR + j * VW);
#define TO_TILE_ROW(i) COLUMNS(TO_TILE, i)
#define TO_C(i, j)                                                                  \
  {                                                                                 \
    const INDEX at = (INDEX)(m0 + i) * n + n1 + j * VW;                             \
    const V r = k0 ? G_LOAD(partial + at) + c##i##_##j : c##i##_##j;                \
    if (last) C_LANES(epilogue(r, scale, 1, bias##j, ADDED_VECTOR(at)), c + at);      \
    else G_STORE(r, partial + at);                                                  \
  }
#define TO_C_ROW(i) COLUMNS(TO_C, i)
#define BIAS_VECTOR(i, j) const V bias##j = has_bias ? BIAS_LANES(bias + n1 + j * VW) : (V)(0);

#define PACKED_ROWS 16  // of a strip: what is written of them, four columns at a time, stays in the first cache
#define BLOCKS_AHEAD 2  // distance of the prefetch while B is packed: blocks of PACKED_ROWS of a transposed B
#define ROWS_AHEAD 8    // rows of a B that is not transposed

// Rows k0 .. k0 + kc of B's columns n1 .. n1 + NR, zeros beyond the edge: B stored N x K, and K x N.
static inline void pack_transposed(__global const B_T* b, __local REAL* strip, const int n, const int ldb, const int n1,
                                   const int k0, const int kc) {
  const int width = min(NR, n - n1);
  int j = 0;
#ifdef B_QUAD
  for (int begin = 0; begin < kc; begin += PACKED_ROWS) {
    const int end = min(kc, begin + PACKED_ROWS);
    for (j = 0; j + 4 <= width; j += 4) {
      __global const B_T* s = b + (INDEX)(n1 + j) * ldb + k0;
      int kk = begin;
      for (int e = 0; e < 4; ++e) FETCH_AHEAD(s + (INDEX)e * ldb + begin + BLOCKS_AHEAD * PACKED_ROWS);
      for (; kk + 4 <= end; kk += 4) {
        const QUAD r0 = B_QUAD(s + kk), r1 = B_QUAD(s + (INDEX)ldb + kk), r2 = B_QUAD(s + 2 * (INDEX)ldb + kk),
                   r3 = B_QUAD(s + 3 * (INDEX)ldb + kk);
        __local REAL* d = strip + kk * NR + j;
        QUAD_STORE((QUAD)(r0.x, r1.x, r2.x, r3.x), d);
        QUAD_STORE((QUAD)(r0.y, r1.y, r2.y, r3.y), d + NR);
        QUAD_STORE((QUAD)(r0.z, r1.z, r2.z, r3.z), d + 2 * NR);
        QUAD_STORE((QUAD)(r0.w, r1.w, r2.w, r3.w), d + 3 * NR);
      }
      for (; kk < end; ++kk)
        for (int e = 0; e < 4; ++e) strip[kk * NR + j + e] = B_LOAD(s, (INDEX)e * ldb + kk);
    }
  }
#endif
  for (; j < width; ++j)
    for (int kk = 0; kk < kc; ++kk) strip[kk * NR + j] = (REAL)B_LOAD(b, (INDEX)(n1 + j) * ldb + k0 + kk);
  for (j = width; j < NR; ++j)
    for (int kk = 0; kk < kc; ++kk) strip[kk * NR + j] = 0;
}

static inline void pack_rows(__global const B_T* b, __local REAL* strip, const int n, const int ldb, const int n1,
                             const int k0, const int kc) {
  const int width = min(NR, n - n1);
  for (int kk = 0; kk < kc; ++kk) {
    __local REAL* d = strip + kk * NR;
    __global const B_T* s = b + (INDEX)(k0 + kk) * ldb + n1;
    for (int j = 0; j < NR; j += 16) FETCH_AHEAD(s + ROWS_AHEAD * (INDEX)ldb + j);
#ifdef B_LANES
    if (width == NR) {
      for (int j = 0; j < NR; j += VW) L_STORE(B_LANES(s + j), d + j);
      continue;
    }
#endif
    for (int j = 0; j < NR; ++j) d[j] = j < width ? (REAL)B_LOAD(s, j) : (REAL)0;
  }
}

// op(b) into strips of NR columns, [n / NR][k][NR], KC rows of a strip per work-item.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void pack_b(__global const B_T* restrict b, __global REAL* restrict packed, const int n, const int k, const int ldb, const int trans_b) {
  __local REAL strip[KC * NR] __attribute__((aligned(64)));
  const int k0 = get_group_id(0) * KC, kc = min(KC, k - k0), at = get_group_id(1);
  if (trans_b) pack_transposed(b, strip, n, ldb, at * NR, k0, kc);
  else pack_rows(b, strip, n, ldb, at * NR, k0, kc);
  packed += ((INDEX)at * k + k0) * NR;
  for (int i = 0; i < kc * NR; i += VW) G_STORE(L_LOAD(strip + i), packed + i);
}

// c[batch] = op(a) op(b), m x n; `partial` holds sums between blocks of k where c itself cannot (c is stored in fewer bits).
// A group does `block` rows, a multiple of MR.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void gemm_panel(IN_POINTERS, __global const BIAS_T* restrict bias, __global const ADDED_T* restrict added, __global C_T* c,
                __global REAL* partial, const int m, const int n, const int k, const long a_row, const long a_k, const int ldb,
                const int trans_b, const int has_bias, const int block, BATCH_NUMBERS, const REAL scale) {
#if PACKED_B == 1
  __local REAL panel[KC * NR * STRIPS] __attribute__((aligned(64)));
#endif
  const int columns = PACKED_B ? NR * STRIPS : NR;
  const int panels = (n + columns - 1) / columns, blocks = (m + block - 1) / block;
  INDEX group = get_group_id(0);
  const int n0 = (int)(group % panels) * columns;
  group /= panels;
  const int m_begin = (int)(group % blocks) * block, m_end = min(m, m_begin + block);
  group /= blocks;
  OFFSETS(group)
  partial += group * m * n;
  const int n_end = min(n, n0 + columns);

  for (int k0 = 0; k0 < k; k0 += KC) {
    const int kc = min(KC, k - k0), last = k0 + KC >= k;
#if PACKED_B == 1
    for (int n1 = n0, s = 0; n1 < n_end; n1 += NR, ++s) {
      if (trans_b) pack_transposed(b, panel + s * (KC * NR), n, ldb, n1, k0, kc);
      else pack_rows(b, panel + s * (KC * NR), n, ldb, n1, k0, kc);
    }
#endif
    for (int m0 = m_begin; m0 < m_end; m0 += MR) {
      ROWS(A_POINTER)
#if PACKED_A
      __global const A_T* a_panel = a + (INDEX)(m0 / MR) * k * MR + (INDEX)k0 * MR;
#endif
      for (int n1 = n0, s = 0; n1 < n_end; n1 += NR, ++s) {
#if PACKED_B == 1
        __local const REAL* row = panel + s * (KC * NR);
        const int step = NR, first = n1;
#elif PACKED_B
        __global const REAL* row = (__global const REAL*)b + ((INDEX)(n1 / NR) * k + k0) * NR;
        const int step = NR, first = n1;
#else
        const int step = ldb, first = min(n1, n - NR);  // a whole tile at the edge, too: the columns before n1 are not stored
        __global const REAL* row = (__global const REAL*)b + (INDEX)k0 * ldb + first;
#endif
        ROWS(ZERO_ROW)
        for (INDEX kk = 0, at_k = 0; kk < kc; ++kk, at_k += (INDEX)a_k) {
          FETCH_ROW
          COLUMNS(B_VECTOR, 0)
          ROWS(MULTIPLY_ADD_ROW)
          row += step;
        }
#if WHOLE_VECTORS
        if (first == n1 && n1 + NR <= n && m0 + MR <= m) {
          COLUMNS(BIAS_VECTOR, 0)
          ROWS(TO_C_ROW)
          continue;
        }
#endif
        REAL tile[MR * NR] __attribute__((aligned(64)));
        ROWS(TO_TILE_ROW)
        const int rows = min(MR, m - m0), width = min(n_end, n1 + NR) - n1;
        for (int i = 0; i < rows; ++i) {
          const INDEX at = (INDEX)(m0 + i) * n + n1;
          REAL line[NR];
          for (int j = 0; j < width; ++j) {
            line[j] = tile[i * NR + (n1 - first) + j];
            if (k0) line[j] += partial[at + j];
          }
          if (!last) {
            for (int j = 0; j < width; ++j) partial[at + j] = line[j];
            continue;
          }
          for (int j = 0; j < width; j += VW)
            end_line(line + j, min(VW, width - j), n1 + j, at + j, bias, has_bias, added, scale, c);
        }
      }
    }
  }
}
