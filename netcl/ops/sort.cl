// Stable sorting of rows: runs of BLOCK are sorted by insertion, then merged pairwise, each pass into the other buffer. A work-item
// of a pass writes `chunk` elements; where its part of the two runs begins is found by bisection.
// Operands: X the values that are sorted (X_REAL X_T X_LOAD).
#ifndef KEY
#define KEY uint  // uint, or ulong for dtypes of 8 bytes
#define KIND 1  // of the values: 0 integers, 1 float, 2 double, 3 unsigned integers of the size of KEY
#endif
#define BLOCK 16
#define MOST 64  // how many keys a work-item of least_of_parts keeps at the most

// Unsigned numbers in the order of the values; zeros are equal, a NaN is above everything.
static inline KEY key_of(const X_REAL x) {
#if KIND == 0
  const KEY sign = (KEY)1 << (sizeof(KEY) * 8 - 1);
  return (KEY)x ^ sign;
#elif KIND == 3
  return (KEY)x;
#elif KIND == 1
  if (x != x) return ~(KEY)0;
  const uint u = x == 0 ? 0u : as_uint((float)x);
  return u >> 31 ? ~u : u | 0x80000000u;
#else
  if (x != x) return ~(KEY)0;
  const ulong u = x == 0 ? 0ul : as_ulong(x);
  return u >> 63 ? ~u : u | 0x8000000000000000ul;
#endif
}

__kernel void make_keys(__global const X_T* restrict x, __global KEY* restrict keys, const long total, const int descending) {
  const long i = get_global_id(0);
  if (i >= total) return;
  const KEY key = key_of(X_LOAD(x, i));
  keys[i] = descending ? ~key : key;
}

__kernel void sort_blocks(__global const KEY* restrict in, __global KEY* restrict keys, __global int* restrict order, const long rows,
                          const long n) {
  const long per_row = (n + BLOCK - 1) / BLOCK, item = get_global_id(0), row = item / per_row;
  if (row >= rows) return;
  const long begin = (item - row * per_row) * BLOCK;
  const int size = (int)min((long)BLOCK, n - begin);
  KEY k[BLOCK];
  int o[BLOCK];
  for (int i = 0; i < size; ++i) {
    const KEY key = in[row * n + begin + i];
    int j = i;
    for (; j > 0 && k[j - 1] > key; --j) {
      k[j] = k[j - 1];
      o[j] = o[j - 1];
    }
    k[j] = key;
    o[j] = (int)(begin + i);
  }
  for (int i = 0; i < size; ++i) {
    keys[row * n + begin + i] = k[i];
    order[row * n + begin + i] = o[i];
  }
}

__kernel void merge_runs(__global const KEY* restrict in_keys, __global const int* restrict in_order, __global KEY* restrict keys,
                         __global int* restrict order, const long rows, const long n, const long run, const long chunk) {
  const long per_row = (n + chunk - 1) / chunk, item = get_global_id(0), row = item / per_row;
  if (row >= rows) return;
  in_keys += row * n;
  in_order += row * n;
  keys += row * n;
  order += row * n;
  long out = (item - row * per_row) * chunk;
  const long end = min(out + chunk, n);
  while (out < end) {
    const long low = out / (2 * run) * (2 * run), middle = min(low + run, n), high = min(low + 2 * run, n), stop = min(end, high);
    // How many of the first `out - low` come from the left run: the least i with left[i] > right[out - low - i - 1].
    const long before = out - low;
    long i = max(0l, before - (high - middle)), most = min(before, middle - low);
    while (i < most) {
      const long half_way = (i + most) / 2;
      if (in_keys[low + half_way] <= in_keys[middle + before - half_way - 1]) i = half_way + 1;
      else most = half_way;
    }
    long a = low + i, b = middle + before - i;
    for (; out < stop; ++out) {
      const int left = b >= high || (a < middle && in_keys[a] <= in_keys[b]);
      const long from = left ? a++ : b++;
      keys[out] = in_keys[from];
      order[out] = in_order[from];
    }
  }
}

// The k least keys of every part of a row, in order; a part has `chunk` elements, the last one k or more.
__kernel void least_of_parts(__global const KEY* restrict in, __global KEY* restrict keys, __global int* restrict order, const long rows,
                             const long n, const long parts, const long chunk, const int k) {
  const long item = get_global_id(0), row = item / parts, part = item - row * parts;
  if (row >= rows) return;
  const long end = part + 1 == parts ? n : (part + 1) * chunk;
  KEY best[MOST];
  int from[MOST];
  int count = 0;
  for (long i = part * chunk; i < end; ++i) {
    const KEY key = in[row * n + i];
    if (count == k && key >= best[k - 1]) continue;
    int j = count < k ? count++ : k - 1;
    for (; j > 0 && best[j - 1] > key; --j) {
      best[j] = best[j - 1];
      from[j] = from[j - 1];
    }
    best[j] = key;
    from[j] = (int)i;
  }
  for (int j = 0; j < k; ++j) {
    keys[item * k + j] = best[j];
    order[item * k + j] = from[j];
  }
}

// The first k of sorted candidates, as places in the row they came from.
__kernel void pick(__global const int* restrict sorted, __global const int* restrict candidates, __global long* restrict out,
                   const long total, const long width, const long k) {
  const long i = get_global_id(0);
  if (i >= total) return;
  const long row = i / k * width;
  out[i] = candidates[row + sorted[row + i % k]];
}

// Whether each key is among the sorted ones; the key of a NaN never is.
__kernel void search(__global const KEY* restrict keys, __global const KEY* restrict sorted, __global uchar* restrict out,
                     const long total, const long count, const int invert) {
  const long i = get_global_id(0);
  if (i >= total) return;
  const KEY key = keys[i];
  long low = 0, high = count;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (sorted[middle] < key) low = middle + 1;
    else high = middle;
  }
  int found = low < count && sorted[low] == key;
#if KIND
  found = found && key != ~(KEY)0;
#endif
  out[i] = found != invert;
}
