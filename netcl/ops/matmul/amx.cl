// Products on the tile registers of x86 CPUs with amx_bf16, by inline assembly: no part of OpenCL C, so only where amx.py has tried it.
// Operands become TERMS values of bfloat16 that add up to them; their products are summed in float32. Operands A B C BIAS. The kernel that
// multiplies ends in vectors (BIAS_LANES C_LANES), the one that repairs in single values: each of them is in a program of its own.
//   a: [term][tile of 16 rows][tile of 32 k][16][32]        b: [term][tile of 16 columns][tile of 32 k][16 pairs of k][16][2]
#ifndef TERMS
#define TERMS 1  // 1: operands rounded to bfloat16; 2: three products, to about 2^-16; 3: six, to float32
#define DIRECT 0  // 1: finished tiles go straight to c: float32, as they are
#define A_PLAIN 1  // 1: a holds float32, else bfloat16
#define B_PLAIN 1
#endif
#define TILE 512  // values of a packed tile

// The parts of x; gives whether x is not finite. That stays in the first part, and a rounding never makes a part infinite.
static inline int split(float x, ushort* terms) {
  const int finite = (as_uint(x) & 0x7f800000u) != 0x7f800000u;
  for (int t = 0; t < TERMS; ++t) {
    const uint bits = as_uint(x), cut = bits >> 16;
    uint kept = (bits + 0x7fffu + (cut & 1u)) >> 16;
    if ((kept & 0x7f80u) == 0x7f80u) kept = cut;
    if (!finite) kept = x != x ? cut | 0x40u : cut;
    terms[t] = (ushort)kept;
    x = finite ? x - as_float(kept << 16) : 0.0f;
  }
  return !finite;
}

typedef struct __attribute__((packed)) { float16 v; } loose_floats;
typedef struct __attribute__((packed)) { ushort16 v; } loose_shorts;

// The same for 16 values at once; gives whether one of them is not finite.
static inline int split_many(float16 x, uint16* terms) {
  const uint16 inside = as_uint16(x) & 0x7f800000u;
  const int16 finite = inside != 0x7f800000u;
  for (int t = 0; t < TERMS; ++t) {
    const uint16 bits = as_uint16(x), cut = bits >> 16;
    uint16 kept = (bits + 0x7fffu + (cut & 1u)) >> 16;
    kept = (kept & 0x7f80u) == 0x7f80u ? cut : kept;
    terms[t] = finite ? kept : (x != x ? cut | 0x40u : cut);
    x = finite ? x - as_float16(kept << 16) : (float16)(0.0f);
  }
  return !all(finite);
}

// 16 neighbours of an operand, split.
#define SPLIT_OPERAND(name, T, plain)                                                \
  static inline int name(__global const T* p, uint16* terms) {                       \
    if (plain) return split_many(((__global const loose_floats*)p)->v, terms);       \
    terms[0] = convert_uint16(((__global const loose_shorts*)p)->v);                 \
    return TERMS == 1 ? 0 : split_many(as_float16(terms[0] << 16), terms);           \
  }
SPLIT_OPERAND(split_a, A_T, A_PLAIN)
SPLIT_OPERAND(split_b, B_T, B_PLAIN)

// A tile of a, whose rows are neighbours in memory and whose values along k lie `step` apart: pairs of those, 16 rows at a time.
static inline int pack_across(__global const A_T* a, const long step, __global ushort* packed, const long plane) {
  int bad = 0;
  for (int pair = 0; pair < 16; ++pair, a += 2 * step) {
    uint16 low[TERMS], high[TERMS];
    bad |= split_a(a, low) | split_a(a + step, high);
    for (int t = 0; t < TERMS; ++t) {
      uint pairs[16] __attribute__((aligned(64)));
      *(uint16*)pairs = low[t] | high[t] << 16;
      __global uint* to = (__global uint*)(packed + t * plane) + pair;
      for (int i = 0; i < 16; ++i) to[i * 16] = pairs[i];
    }
  }
  return bad;
}

// A tile of b, whose values along k are neighbours and whose columns lie `step` apart: the pairs of a column at a time.
static inline int pack_down(__global const B_T* b, const long step, __global ushort* packed, const long plane) {
  int bad = 0;
  for (int j = 0; j < 16; ++j, b += step)
    for (int part = 0; part < 2; ++part) {
      uint16 terms[TERMS];
      bad |= split_b(b + 16 * part, terms);
      for (int t = 0; t < TERMS; ++t) {
        uint pairs[8] __attribute__((aligned(64)));
        *(uint8*)pairs = terms[t].even | terms[t].odd << 16;
        __global uint* to = (__global uint*)(packed + t * plane) + part * 128 + j;
        for (int e = 0; e < 8; ++e) to[e * 16] = pairs[e];
      }
    }
  return bad;
}

// `broken` tells which tiles hold values that are not finite: there, parts of products would be infinity times zero.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void amx_pack_a(__global const A_T* restrict a, __global ushort* restrict packed, __global int* restrict broken, const int m, const int k,
                const long a_row, const long a_k, const int batch1, const long a0_stride, const long a1_stride, const int row_tiles,
                const int k_tiles, const long plane) {
  const int tile = get_group_id(0), batch = get_group_id(1);
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride;
  packed += ((long)batch * row_tiles + tile) * k_tiles * TILE;
  int bad = 0;
  const int rows = min(16, m - tile * 16);
  for (int kt = 0; kt < k_tiles; ++kt, packed += TILE) {
    const int whole = kt * 32 + 32 <= k;
    if (a_row == 1 && rows == 16 && whole) {
      bad |= pack_across(a + (long)kt * 32 * a_k + tile * 16, a_k, packed, plane);
      continue;
    }
    for (int i = 0; i < 16; ++i) {
      __global ushort* to = packed + i * 32;
      __global const A_T* from = a + (tile * 16 + i) * a_row + kt * 32 * a_k;
      if (a_k == 1 && i < rows && whole) {
        for (int e = 0; e < 32; e += 16) {
          uint16 terms[TERMS];
          bad |= split_a(from + e, terms);
          for (int t = 0; t < TERMS; ++t) ((__global loose_shorts*)(to + t * plane + e))->v = convert_ushort16(terms[t]);
        }
        continue;
      }
      for (int e = 0; e < 32; ++e) {
        ushort terms[TERMS];
        bad |= split(i < rows && kt * 32 + e < k ? (float)A_LOAD(from, e * a_k) : 0.0f, terms);
        for (int t = 0; t < TERMS; ++t) to[t * plane + e] = terms[t];
      }
    }
  }
  broken[batch * row_tiles + tile] = bad;
}

// Pairs of rows of b side by side: 16 columns become 16 numbers of 32 bits.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void amx_pack_b(__global const B_T* restrict b, __global ushort* restrict packed, __global int* restrict broken, const int n, const int k,
                const long b_k, const long b_column, const int batch1, const long b0_stride, const long b1_stride, const int column_tiles,
                const int k_tiles, const long plane, const long first, const int first_broken) {
  const int tile = get_group_id(0), batch = get_group_id(1);
  b += batch / batch1 * b0_stride + batch % batch1 * b1_stride;
  packed += first + ((long)batch * column_tiles + tile) * k_tiles * TILE;
  int bad = 0;
  const int columns = min(16, n - tile * 16);
  for (int kt = 0; kt < k_tiles; ++kt, packed += TILE) {
    if (b_k == 1 && columns == 16 && kt * 32 + 32 <= k) {
      bad |= pack_down(b + kt * 32 + tile * 16 * b_column, b_column, packed, plane);
      continue;
    }
    for (int pair = 0; pair < 16; ++pair) {
      const int at = kt * 32 + 2 * pair;
      __global ushort* to = packed + pair * 32;
      __global const B_T* from = b + at * b_k + tile * 16 * b_column;
      if (b_column == 1 && columns == 16 && at + 2 <= k) {
        uint16 low[TERMS], high[TERMS];
        bad |= split_b(from, low) | split_b(from + b_k, high);
        for (int t = 0; t < TERMS; ++t) *(__global uint16*)(to + t * plane) = low[t] | high[t] << 16;
        continue;
      }
      for (int j = 0; j < 32; ++j) {
        ushort terms[TERMS];
        bad |= split(j / 2 < columns && at + j % 2 < k ? (float)B_LOAD(from, j % 2 * b_k + j / 2 * b_column) : 0.0f, terms);
        for (int t = 0; t < TERMS; ++t) to[t * plane + j] = terms[t];
      }
    }
  }
  broken[first_broken + batch * column_tiles + tile] = bad;
}

#ifdef VW  // with vectors.cl and line.cl before it
// Work-groups: pairs of column tiles, blocks of pairs of row tiles, batches. Four sums (tmm0-3), two tiles of a (4, 5), two of b (6, 7).
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void amx_multiply(__global const ushort* restrict packed, END_POINTERS, const int m, const int n, const int has_bias, const int row_tiles,
                  const int column_tiles, const int k_tiles, const long a_plane, const long b_plane, const long first, const int block,
                  const REAL scale) {
  uchar shape[64] __attribute__((aligned(64)));
  float tiles[1024] __attribute__((aligned(64)));
  for (int i = 0; i < 64; ++i) shape[i] = i == 0 ? 1 : i >= 16 && i < 32 ? (i % 2 ? 0 : 64) : i >= 48 && i < 56 ? 16 : 0;
  __asm__ volatile("ldtilecfg (%0)" ::"r"(shape) : "memory");
  const int nt = get_group_id(0) * 2, batch = get_group_id(2), end = min(row_tiles, (int)(get_group_id(1) + 1) * block);
  const long line = 64;
  added += (long)batch * m * n;
  c += (long)batch * m * n;
  for (int mt = get_group_id(1) * block; mt < end; mt += 2) {
    __global const ushort* a = packed + ((long)batch * row_tiles + mt) * k_tiles * TILE;
    __global const ushort* b = packed + first + ((long)batch * column_tiles + nt) * k_tiles * TILE;
    __asm__ volatile("tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3" ::: "memory");
    for (int kt = 0; kt < k_tiles; ++kt, a += TILE, b += TILE)
      for (int s = 0; s < TERMS; ++s)
        for (int t = 0; s + t < TERMS; ++t) {
          __global const ushort *a0 = a + s * a_plane, *a1 = a0 + (long)k_tiles * TILE, *b0 = b + t * b_plane, *b1 = b0 + (long)k_tiles * TILE;
          __asm__ volatile(
              "tileloadd (%0,%4,1), %%tmm4\n tileloadd (%1,%4,1), %%tmm5\n tileloadd (%2,%4,1), %%tmm6\n tileloadd (%3,%4,1), %%tmm7\n"
              "tdpbf16ps %%tmm6,%%tmm4,%%tmm0\n tdpbf16ps %%tmm7,%%tmm4,%%tmm1\n tdpbf16ps %%tmm6,%%tmm5,%%tmm2\n"
              "tdpbf16ps %%tmm7,%%tmm5,%%tmm3" ::"r"(a0), "r"(a1), "r"(b0), "r"(b1), "r"(line)
              : "memory");
        }
#if DIRECT
    if (mt * 16 + 32 <= m && nt * 16 + 32 <= n) {
      __global float* to = (__global float*)c + (long)mt * 16 * n + nt * 16;
      const long row = (long)n * 4;
      __asm__ volatile("tilestored %%tmm0, (%0,%2,1)\n tilestored %%tmm1, 64(%0,%2,1)\n tilestored %%tmm2, (%1,%2,1)\n"
                       "tilestored %%tmm3, 64(%1,%2,1)" ::"r"(to), "r"(to + (long)16 * n), "r"(row)
                       : "memory");
      continue;
    }
#endif
    __asm__ volatile("tilestored %%tmm0, (%0,%1,1)\n tilestored %%tmm1, 1024(%0,%1,1)\n tilestored %%tmm2, 2048(%0,%1,1)\n"
                     "tilestored %%tmm3, 3072(%0,%1,1)" ::"r"(tiles), "r"(line)
                     : "memory");
    for (int i = 0; i < 32 && mt * 16 + i < m; ++i)
      for (int h = 0, column = nt * 16; h < 2 && column < n; ++h, column += 16) {
        const REAL* line = tiles + (i / 16 * 2 + h) * 256 + i % 16 * 16;
        const INDEX at = (INDEX)(mt * 16 + i) * n + column;
#if WHOLE_VECTORS
        if (column + 16 <= n) {
          const V shift = has_bias ? BIAS_LANES(bias + column) : (V)(0);
          C_LANES(epilogue(P_LOAD(line), scale, has_bias, shift, ADDED_VECTOR(at)), c + at);
          continue;
        }
#endif
        end_line(line, min(16, n - column), column, at, bias, has_bias, added, scale, c);
      }
  }
  __asm__ volatile("tilerelease" ::: "memory");
}

#else
// Tiles with operands that are not finite, again and plainly. Work-groups: column tiles, row tiles, batches.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void amx_repair(IN_POINTERS, END_POINTERS, __global const int* restrict broken, const int m, const int n, const int k, const long a_row,
                const long a_k, const long b_k, const long b_column, const int has_bias, BATCH_NUMBERS, const int row_tiles,
                const int column_tiles, const int first_broken, const REAL scale) {
  const int nt = get_group_id(0), mt = get_group_id(1), batch = get_group_id(2);
  if (!broken[batch * row_tiles + mt] && !broken[first_broken + batch * column_tiles + nt]) return;
  a += batch / batch1 * a0_stride + batch % batch1 * a1_stride;
  b += batch / batch1 * b0_stride + batch % batch1 * b1_stride;
  for (int row = mt * 16; row < min(m, mt * 16 + 16); ++row)
    for (int column = nt * 16; column < min(n, nt * 16 + 16); ++column) {
      float sum = 0;
      for (int kk = 0; kk < k; ++kk) sum += (float)A_LOAD(a, row * a_row + kk * a_k) * (float)B_LOAD(b, kk * b_k + column * b_column);
      const long at = ((long)batch * m + row) * n + column;
      C_STORE(c, at, FINISHED(sum, column, at));
    }
}
#endif
