// Products on the tile registers of x86 CPUs with amx_bf16, by inline assembly: no part of OpenCL C, so only where amx.py has tried it.
// Operands become TERMS values of bfloat16 that add up to them; their products are summed in float32. Macros of epilogue.cl: A_T A_LOAD B_T
// B_LOAD C_T C_STORE BIAS_T.
//   a: [term][tile of 16 rows][tile of 32 k][16][32]        b: [term][tile of 16 columns][tile of 32 k][16 pairs of k][16][2]
#ifndef TERMS  // 1: operands rounded to bfloat16; 2: three products, to about 2^-16; 3: six, to float32
#define TERMS 1
#endif
#ifndef DIRECT  // 1: finished tiles go straight to c: float32, as they are
#define DIRECT 0
#endif
#ifndef A_PLAIN  // 1: a holds float32, else bfloat16
#define A_PLAIN 1
#endif
#ifndef B_PLAIN
#define B_PLAIN 1
#endif
#define A_BITS (TERMS == 1 && !A_PLAIN)  // packed as it is
#define B_BITS (TERMS == 1 && !B_PLAIN)
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
static inline int split_a(__global const A_T* p, uint16* terms) {
#if A_BITS
  terms[0] = convert_uint16(((__global const loose_shorts*)p)->v);
  return 0;
#elif A_PLAIN
  return split_many(((__global const loose_floats*)p)->v, terms);
#else
  return split_many(as_float16(convert_uint16(((__global const loose_shorts*)p)->v) << 16), terms);
#endif
}

static inline int split_b(__global const B_T* p, uint16* terms) {
#if B_BITS
  terms[0] = convert_uint16(((__global const loose_shorts*)p)->v);
  return 0;
#elif B_PLAIN
  return split_many(((__global const loose_floats*)p)->v, terms);
#else
  return split_many(as_float16(convert_uint16(((__global const loose_shorts*)p)->v) << 16), terms);
#endif
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
  for (int i = 0; i < 16; ++i)
    for (int kt = 0; kt < k_tiles; ++kt) {
      const int row = tile * 16 + i;
      __global ushort* to = packed + (long)kt * TILE + i * 32;
      if (a_k == 1 && row < m && kt * 32 + 32 <= k) {
        for (int e = 0; e < 32; e += 16) {
          uint16 terms[TERMS];
          bad |= split_a(a + row * a_row + kt * 32 + e, terms);
          for (int t = 0; t < TERMS; ++t) ((__global loose_shorts*)(to + t * plane + e))->v = convert_ushort16(terms[t]);
        }
        continue;
      }
      for (int e = 0; e < 32; ++e) {
        const int at = kt * 32 + e;
        const float x = row < m && at < k ? (float)A_LOAD(a, row * a_row + at * a_k) : 0.0f;
        ushort terms[TERMS];
        bad |= split(x, terms);
        for (int t = 0; t < TERMS; ++t) to[t * plane + e] = terms[t];
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
  for (int pair = 0; pair < 16 * k_tiles; ++pair) {
    __global ushort* to = packed + (long)pair * 32;
    if (b_column == 1 && 2 * pair + 2 <= k && tile * 16 + 16 <= n) {
      uint16 low[TERMS], high[TERMS];
      __global const B_T* from = b + 2 * pair * b_k + tile * 16;
      bad |= split_b(from, low) | split_b(from + b_k, high);
      for (int t = 0; t < TERMS; ++t) *(__global uint16*)(to + t * plane) = low[t] | high[t] << 16;
      continue;
    }
    for (int j = 0; j < 32; ++j) {
      const int column = tile * 16 + j / 2, at = 2 * pair + j % 2;
      const float x = column < n && at < k ? (float)B_LOAD(b, at * b_k + column * b_column) : 0.0f;
      ushort terms[TERMS];
      bad |= split(x, terms);
      for (int t = 0; t < TERMS; ++t) to[t * plane + j] = terms[t];
    }
  }
  broken[first_broken + batch * column_tiles + tile] = bad;
}

// Work-groups: pairs of column tiles, blocks of pairs of row tiles, batches. Four sums (tmm0-3), two tiles of a (4, 5), two of b (6, 7).
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void amx_multiply(__global const ushort* restrict packed, __global const BIAS_T* restrict bias, __global const ADDED_T* restrict added,
                  __global C_T* restrict c, const int m, const int n, const int has_bias, const int row_tiles, const int column_tiles,
                  const int k_tiles, const long a_plane, const long b_plane, const long first, const int block, const REAL scale) {
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
      for (int j = 0; j < 32 && nt * 16 + j < n; ++j) {
        const float x = tiles[(i / 16 * 2 + j / 16) * 256 + i % 16 * 16 + j % 16];
        const long at = (long)(mt * 16 + i) * n + nt * 16 + j;
        C_STORE(c, at, FINISHED(x, nt * 16 + j, at));
      }
  }
  __asm__ volatile("tilerelease" ::: "memory");
}

// Tiles with operands that are not finite, again and plainly. Work-groups: column tiles, row tiles, batches.
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void amx_repair(__global const A_T* restrict a, __global const B_T* restrict b, __global const BIAS_T* restrict bias,
                __global const ADDED_T* restrict added, __global C_T* restrict c, __global const int* restrict broken, const int m, const int n, const int k, const long a_row, const long a_k, const long b_k,
                const long b_column, const int has_bias, const int batch1, const long a0_stride, const long a1_stride, const long b0_stride,
                const long b1_stride, const int row_tiles, const int column_tiles, const int first_broken, const REAL scale) {
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
