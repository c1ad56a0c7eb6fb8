// Copies between strided blocks. Nothing here computes, so the element is any type of the right size.
#ifndef T
#define T uint  // the element: uchar, ushort, uint, ulong or uint4, by its bytes
#define INDEX int  // long where an offset does not fit an int
#endif
#ifndef TILE  // side of the tiles of a transposition
#define TILE 32
#endif
#ifndef ROWS  // work-items along the tile's slow side; TILE / ROWS rows each
#define ROWS 8
#endif

// 64 bytes of whole elements. A function gives them: LLVM for x86 cuts them into halves otherwise.
typedef struct __attribute__((packed, aligned(sizeof(T)))) { uint16 bytes; } line;
static inline uint16 line_at(__global const T* p) { return ((__global const line*)p)->bytes; }
#define LINE(p) ((__global line*)(p))->bytes

static inline void copy_run(__global const T* s, __global T* d, const INDEX n, const INDEX s_step, const INDEX d_step) {
  if (s_step == 1 && d_step == 1) {
    const INDEX step = 64 / sizeof(T);
    INDEX i = 0;
    if (n <= 16 * step)  // a plain loop becomes a call of memcpy, which only longer runs are worth; so does one over single lines
      for (; i + 4 * step <= n; i += 4 * step) {
        const uint16 l0 = line_at(s + i), l1 = line_at(s + i + step), l2 = line_at(s + i + 2 * step), l3 = line_at(s + i + 3 * step);
        LINE(d + i) = l0;
        LINE(d + i + step) = l1;
        LINE(d + i + 2 * step) = l2;
        LINE(d + i + 3 * step) = l3;
      }
    for (; i < n; ++i) d[i] = s[i];
  } else if (s_step == 0 && d_step == 1) {
    const T value = s[0];
    for (INDEX i = 0; i < n; ++i) d[i] = value;
  } else {
    for (INDEX i = 0; i < n; ++i) d[i * d_step] = s[i * s_step];
  }
}

// GPUs, up to four axes: a work-item copies one element of the inner axis in some rows of the axis above, four of them on their way at a
// time; the outer two axes are the launch's third, so that nothing is divided but one number.
__kernel void copy_grid(__global const T* restrict src, __global T* restrict dst, const long s_start, const long d_start, const long n0,
                        const long n1, const long n2, const long inner, const long s0, const long s1, const long s2, const long s_inner,
                        const long d0, const long d1, const long d2, const long d_inner) {
  const INDEX at = get_global_id(0), step = get_global_size(1);
  if (at >= (INDEX)inner) return;
  src += (INDEX)s_start + at * (INDEX)s_inner;
  dst += (INDEX)d_start + at * (INDEX)d_inner;
  for (INDEX block = get_global_id(2); block < (INDEX)n0 * (INDEX)n1; block += get_global_size(2)) {
    const INDEX i0 = block / (INDEX)n1, i1 = block - i0 * (INDEX)n1;
    __global const T* s = src + (i0 * (INDEX)s0 + i1 * (INDEX)s1);
    __global T* d = dst + (i0 * (INDEX)d0 + i1 * (INDEX)d1);
#pragma unroll 4
    for (INDEX i = get_global_id(1); i < (INDEX)n2; i += step) d[i * (INDEX)d2] = s[i * (INDEX)s2];
  }
}

// CPUs, up to four axes: a work-item copies `count` rows, or `chunk` elements of a long one. Only its first row is found by division.
__kernel void copy_rows(__global const T* restrict src, __global T* restrict dst, const long s_start, const long d_start, const long chunk,
                        const long count, const long rows, const long n1, const long n2, const long inner,
                        const long s0, const long s1, const long s2, const long s_inner,
                        const long d0, const long d1, const long d2, const long d_inner) {
  const INDEX per_row = (INDEX)((inner + chunk - 1) / chunk), item = get_global_id(0), group = item / per_row;
  const INDEX begin = (item - group * per_row) * (INDEX)chunk, length = min((INDEX)chunk, (INDEX)inner - begin);
  INDEX row = group * (INDEX)count, i1 = row / (INDEX)n2, i2 = row - i1 * (INDEX)n2;
  const INDEX end = min(row + (INDEX)count, (INDEX)rows), i0 = i1 / (INDEX)n1;
  i1 -= i0 * (INDEX)n1;
  INDEX s = (INDEX)s_start + i0 * (INDEX)s0 + i1 * (INDEX)s1 + begin * (INDEX)s_inner;
  INDEX d = (INDEX)d_start + i0 * (INDEX)d0 + i1 * (INDEX)d1 + begin * (INDEX)d_inner;
  while (row < end) {
    const INDEX here = min((INDEX)n2 - i2, end - row);
    for (INDEX i = i2; i < i2 + here; ++i)
      copy_run(src + s + i * (INDEX)s2, dst + d + i * (INDEX)d2, length, (INDEX)s_inner, (INDEX)d_inner);
    row += here;
    i2 = 0;
    s += (INDEX)s1;
    d += (INDEX)d1;
    if (++i1 == (INDEX)n1) {
      i1 = 0;
      s += (INDEX)s0 - (INDEX)n1 * (INDEX)s1;
      d += (INDEX)d0 - (INDEX)n1 * (INDEX)d1;
    }
  }
}

static inline INDEX step_in(INDEX* rest, const long size, const long stride) {
  const INDEX at = *rest % (INDEX)size;
  *rest /= (INDEX)size;
  return at * (INDEX)stride;
}

// More axes: a work-item copies `chunk` elements of the inner axis (the last one) of one row; rows = product of the outer axes.
__kernel void copy8(__global const T* restrict src, __global T* restrict dst, const long s_start, const long d_start, const long chunk,
                    const long rows, const long n1, const long n2, const long n3, const long n4, const long n5, const long n6, const long inner,
                    const long s0, const long s1, const long s2, const long s3, const long s4, const long s5, const long s6, const long s_inner,
                    const long d0, const long d1, const long d2, const long d3, const long d4, const long d5, const long d6, const long d_inner) {
  const INDEX per_row = (INDEX)((inner + chunk - 1) / chunk);
  const INDEX item = get_global_id(0), row = item / per_row;
  if (row >= (INDEX)rows) return;
  const INDEX begin = (item - row * per_row) * (INDEX)chunk;
  INDEX at_s = row, at_d = row;
  INDEX s = (INDEX)s_start + begin * (INDEX)s_inner, d = (INDEX)d_start + begin * (INDEX)d_inner;
  s += step_in(&at_s, n6, s6); d += step_in(&at_d, n6, d6);
  s += step_in(&at_s, n5, s5); d += step_in(&at_d, n5, d5);
  s += step_in(&at_s, n4, s4); d += step_in(&at_d, n4, d4);
  s += step_in(&at_s, n3, s3); d += step_in(&at_d, n3, d3);
  s += step_in(&at_s, n2, s2); d += step_in(&at_d, n2, d2);
  s += step_in(&at_s, n1, s1); d += step_in(&at_d, n1, d1);
  s += at_s * (INDEX)s0; d += at_d * (INDEX)d0;
  copy_run(src + s, dst + d, min((INDEX)chunk, (INDEX)inner - begin), (INDEX)s_inner, (INDEX)d_inner);
}

// A transposition in tiles: along p the source is dense, along q the destination. `batch` further blocks of n1 x n2.
// The tile of an item begins at p0 and q0 of its block.
#define FIND_TILE \
  const INDEX tiles_q = (INDEX)((nq + TILE - 1) / TILE), tiles_p = (INDEX)((np + TILE - 1) / TILE), block = item / tiles_q / tiles_p; \
  const INDEX q0 = item % tiles_q * TILE, p0 = item / tiles_q % tiles_p * TILE; \
  const INDEX i2 = block % (INDEX)n2, i1 = block / (INDEX)n2 % (INDEX)n1, i0 = block / (INDEX)n2 / (INDEX)n1; \
  src += (INDEX)s_start + i0 * (INDEX)s0 + i1 * (INDEX)s1 + i2 * (INDEX)s2; \
  dst += (INDEX)d_start + i0 * (INDEX)d0 + i1 * (INDEX)d1 + i2 * (INDEX)d2;
// GPUs: through local memory, so that both sides are read and written along their dense axis.
__kernel __attribute__((reqd_work_group_size(TILE, ROWS, 1)))
void transpose_local(__global const T* restrict src, __global T* restrict dst, const long s_start, const long d_start,
                     const long np, const long nq, const long s_q, const long d_p, const long n1, const long n2,
                     const long s0, const long s1, const long s2, const long d0, const long d1, const long d2) {
  __local T tile[TILE][TILE + 1];  // one column more: the lanes of a column fall into different banks
  const INDEX item = get_group_id(0);
  FIND_TILE
  const int x = get_local_id(0), y = get_local_id(1);
  for (int j = y; j < TILE; j += ROWS)
    if (p0 + x < (INDEX)np && q0 + j < (INDEX)nq) tile[j][x] = src[(q0 + j) * (INDEX)s_q + p0 + x];
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int j = y; j < TILE; j += ROWS)
    if (p0 + j < (INDEX)np && q0 + x < (INDEX)nq) dst[(p0 + j) * (INDEX)d_p + q0 + x] = tile[x][j];
}

// CPUs: a work-item does a tile that stays in the first cache.
__kernel void transpose_cached(__global const T* restrict src, __global T* restrict dst, const long s_start, const long d_start,
                               const long np, const long nq, const long s_q, const long d_p, const long n1, const long n2,
                               const long s0, const long s1, const long s2, const long d0, const long d1, const long d2, const long blocks) {
  const INDEX item = get_global_id(0);
  if (item >= (INDEX)blocks) return;
  FIND_TILE
  const INDEX p1 = min(p0 + TILE, (INDEX)np), q1 = min(q0 + TILE, (INDEX)nq);
  INDEX p = p0;
  for (; p + 4 <= p1; p += 4) {
    for (INDEX q = q0; q < q1; ++q) {
      __global const T* s = src + q * (INDEX)s_q + p;
      __global T* d = dst + p * (INDEX)d_p + q;
      d[0] = s[0];
      d[(INDEX)d_p] = s[1];
      d[2 * (INDEX)d_p] = s[2];
      d[3 * (INDEX)d_p] = s[3];
    }
  }
  for (; p < p1; ++p)
    for (INDEX q = q0; q < q1; ++q) dst[p * (INDEX)d_p + q] = src[q * (INDEX)s_q + p];
}
