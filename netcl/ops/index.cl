// Gathering and adding by index. Indices out of range are never followed: they give zeros, or are left out, and leave a mark.
// Operands: IDX indices, X what is added.
#ifndef T  // the element of what is only moved: uchar, ushort, uint, ulong or uint4, by its bytes
#define T uint
#endif
#ifndef KEY  // uint or ulong: the sorted destinations
#define KEY uint
#endif
#ifndef LANES  // neighbouring elements a work-item adds up: 1 on GPUs, more on CPUs
#define LANES 1
#endif

static inline int in_range(const long at, const long n, __global int* fault, const int code) {
  if ((ulong)at < (ulong)n) return 1;
  atomic_cmpxchg(fault, 0, code);
  return 0;
}

// dst[o, l] = src[o, idx[l]] for rows of `inner` elements; a work-item does `chunk` of them.
__kernel void take_rows(__global const T* restrict src, __global const IDX_T* restrict idx, __global T* restrict dst, __global int* fault,
                        const int code, const long total, const long n, const long count, const long inner, const long chunk) {
  const long per_row = (inner + chunk - 1) / chunk, item = get_global_id(0), row = item / per_row;
  if (row >= total) return;
  const long at = IDX_LOAD(idx, row % count), begin = (item - row * per_row) * chunk, end = min(begin + chunk, inner);
  const int good = in_range(at, n, fault, code);
  __global const T* s = src + (row / count * n + (good ? at : 0)) * inner;
  __global T* d = dst + row * inner;
  for (long i = begin; i < end; ++i) d[i] = good ? s[i] : (T)(0);
}

// dst[o, l, i] = src[o, idx[o, l, i], i].
__kernel void gather(__global const T* restrict src, __global const IDX_T* restrict idx, __global T* restrict dst, __global int* fault,
                     const int code, const long total, const long n, const long count, const long inner) {
  const long i = get_global_id(0);
  if (i >= total) return;
  const long at = IDX_LOAD(idx, i), o = i / (count * inner);
  const int good = in_range(at, n, fault, code);
  dst[i] = good ? src[(o * n + at) * inner + i % inner] : (T)(0);
}

// The target of each element of a scatter, as a number; `nowhere` if it is out of range or the index is `skipped`.
__kernel void scatter_keys(__global const IDX_T* restrict idx, __global KEY* restrict keys, __global int* fault, const int code,
                           const long total, const long n, const long count, const long inner, const long nowhere, const long skipped) {
  const long i = get_global_id(0);
  if (i >= total) return;
  const long at = IDX_LOAD(idx, i), o = i / (count * inner);
  keys[i] = (KEY)(in_range(at, n, fault, code) && at != skipped ? (o * n + at) * inner + i % inner : nowhere);
}

// One work-item per column walks its indices in order: what is added where depends on nothing else. For many columns.
__kernel void add_columns(__global X_T* restrict dst, __global const IDX_T* restrict idx, __global const X_T* restrict src,
                          __global int* fault, const int code, const long columns, const long n, const long count, const long inner) {
  const long column = get_global_id(0);
  if (column >= columns) return;
  const long o = column / inner, i = column % inner;
  for (long l = 0; l < count; ++l) {
    const long from = (o * count + l) * inner + i, at = IDX_LOAD(idx, from);
    if (!in_range(at, n, fault, code)) continue;
    const long to = (o * n + at) * inner + i;
    const X_REAL sum = X_LOAD(dst, to) + X_LOAD(src, from);
    X_STORE(dst, to, sum);
  }
}

// Sums over runs of equal keys: the first of a run adds all of it, in the order it came. dst rows of `inner` elements, `outer` times.
__kernel void add_sorted(__global X_T* restrict dst, __global const KEY* restrict keys, __global const int* restrict order,
                         __global const X_T* restrict src, const long count, const long n, const long inner, const long items) {
  const long item = get_global_id(0);
  if (item >= items) return;
  const long parts = (inner + LANES - 1) / LANES, begin = item % parts * LANES, p = item / parts % count, o = item / parts / count;
  const KEY key = keys[p];
  if ((long)key >= n || (p > 0 && keys[p - 1] == key)) return;
  const int lanes = (int)min((long)LANES, inner - begin);
  const long to = (o * n + (long)key) * inner + begin;
  X_REAL sum[LANES];
  for (int j = 0; j < lanes; ++j) sum[j] = X_LOAD(dst, to + j);
  for (long q = p; q < count && keys[q] == key; ++q) {
    const long from = (o * count + order[q]) * inner + begin;
    for (int j = 0; j < lanes; ++j) sum[j] += X_LOAD(src, from + j);
  }
  for (int j = 0; j < lanes; ++j) X_STORE(dst, to + j, sum[j]);
}

// The last of a run of equal keys is written: dst[key] = src[order], single elements.
__kernel void put_sorted(__global T* restrict dst, __global const KEY* restrict keys, __global const int* restrict order,
                         __global const T* restrict src, const long count, const long n) {
  const long p = get_global_id(0);
  if (p >= count || (long)keys[p] >= n || (p + 1 < count && keys[p + 1] == keys[p])) return;
  dst[keys[p]] = src[order[p]];
}

// out = before + wrapped index * stride: several indices become one. A negative index counts from the end; one out of range leaves
// its mark and becomes -1, which no gather follows.
__kernel void join_index(__global const IDX_T* restrict idx, __global const long* restrict before, __global long* restrict out,
                         __global int* fault, const int code, const long total, const long n, const long stride, const int first) {
  const long i = get_global_id(0);
  if (i >= total) return;
  long at = IDX_LOAD(idx, i);
  at += n & (at >> 63);  // where it is negative
  const int good = in_range(at, n, fault, code) && (first || before[i] >= 0);
  out[i] = good ? (first ? 0 : before[i]) + at * stride : -1;
}

__kernel void one_hot(__global const IDX_T* restrict idx, __global X_T* restrict out, __global int* fault, const int code,
                      const long total, const long classes) {
  const long i = get_global_id(0);
  if (i >= total) return;
  const long at = IDX_LOAD(idx, i / classes);
  in_range(at, classes, fault, code);
  const X_REAL value = at == i % classes ? 1 : 0;
  X_STORE(out, i, value);
}

// How many elements of each block of `block` are not zero; then their positions.
__kernel void count_blocks(__global const X_T* restrict x, __global int* restrict counts, const long total, const long block) {
  const long begin = get_global_id(0) * block, end = min(begin + block, total);
  if (begin >= total) return;
  int count = 0;
  for (long i = begin; i < end; ++i) count += X_LOAD(x, i) != 0;
  counts[get_global_id(0)] = count;
}

__kernel void write_positions(__global const X_T* restrict x, __global const long* restrict starts, __global long* restrict out,
                              const long total, const long block) {
  const long begin = get_global_id(0) * block, end = min(begin + block, total);
  if (begin >= total) return;
  long at = starts[get_global_id(0)];
  for (long i = begin; i < end; ++i)
    if (X_LOAD(x, i) != 0) out[at++] = i;
}

// One coordinate of flat positions.
__kernel void unravel(__global const long* restrict flat, __global long* restrict out, const long total, const long ndim, const long axis,
                      const long size, const long stride) {
  const long i = get_global_id(0);
  if (i < total) out[i * ndim + axis] = flat[i] / stride % size;
}
