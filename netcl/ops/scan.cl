// Running sums, and the position of the extreme element, along one axis of a tensor seen as (rows, count, inner).
// Operands: X the elements (X_T X_LOAD), Y running sums (Y_T Y_STORE).
#ifndef INDEX  // long where an index does not fit an int
#define INDEX int
#endif
#ifndef SMALLEST  // 1: the smallest element is looked for, 0: the largest
#define SMALLEST 0
#endif
#ifndef LANES  // work-items that share a column
#define LANES 1
#endif
#ifndef AT_ONCE  // elements that a work-item of a CPU compares per step
#define AT_ONCE 16
#endif

#define IS_FINITE(x) ((x) - (x) == 0)

// One work-item runs over one slice of one column. `before` (where slices > 1) is what comes ahead of each slice;
// exclusive: the sum up to, not including, the element.
__kernel void scan(__global const X_T* x, __global const REAL* before, __global Y_T* y, const INDEX rows, const INDEX count,
                   const INDEX inner, const INDEX slice, const INDEX slices, const int reverse, const int exclusive) {
  const INDEX item = get_global_id(0);
  if (item >= rows * slices * inner) return;
  const INDEX column = item % inner;
  const INDEX row = item / inner / slices;
  const INDEX begin = (item / inner - row * slices) * slice;
  const INDEX length = min(slice, count - begin);
  x += row * count * inner + column;
  y += row * count * inner + column;
  REAL total = slices > 1 ? before[item] : (REAL)0;
  for (INDEX i = 0; i < length; ++i) {
    const INDEX at = (begin + (reverse ? length - 1 - i : i)) * inner;
    const REAL next = total + X_LOAD(x, at);
    Y_STORE(y, at, exclusive ? total : next);
    total = next;
  }
}

#if SMALLEST
#define BEHIND(a, b) ((a) >= (b))
#else
#define BEHIND(a, b) ((a) <= (b))
#endif

// Whether the element a at i beats b at j: larger (smaller if SMALLEST), NaN above all, the first of equals.
int beats(REAL a, INDEX i, REAL b, INDEX j) {
  const int a_nan = a != a, b_nan = b != b;
  if (a_nan || b_nan) return a_nan && (!b_nan || i < j);
  return !BEHIND(a, b) || (a == b && i < j);
}

// The best of one slice of one column, found by LANES work-items: a work-group, or one work-item alone. Second launch: `candidates` are the
// winners of the slices. finite: -1 where the best is not finite.
#if LANES > 1
#define SIZED __attribute__((reqd_work_group_size(LANES, 1, 1)))
#else
#define SIZED
#endif
SIZED __kernel void extreme(__global const X_T* x, __global const long* candidates, __global long* y, const INDEX rows, const INDEX count,
                            const INDEX inner, const INDEX slice, const INDEX slices, const int second, const int finite) {
  const INDEX item = LANES > 1 ? get_group_id(0) : get_global_id(0), lane = LANES > 1 ? get_local_id(0) : 0;
  const INDEX parts = second ? 1 : slices;
  if (item >= rows * parts * inner) return;
  const INDEX column = item % inner;
  const INDEX row = item / inner / parts;
  const INDEX begin = second ? 0 : (item / inner - row * parts) * slice;
  const INDEX end = second ? slices : min(begin + slice, count);
  x += row * count * inner + column;
  candidates += row * slices * inner + column;
#define PLACE(i) (second ? (INDEX)candidates[(i) * inner] : (i))
  INDEX best = PLACE(min(begin + lane, end - 1));
  REAL value = X_LOAD(x, best * inner);
  INDEX i = begin + lane + LANES;
#if LANES > 1  // loads ahead of comparisons
  for (; i + 7 * LANES < end; i += 8 * LANES) {
    INDEX places[8];
    REAL others[8];
    for (int j = 0; j < 8; ++j) places[j] = PLACE(i + j * LANES);
    for (int j = 0; j < 8; ++j) others[j] = X_LOAD(x, places[j] * inner);
    for (int j = 0; j < 8; ++j)
      if (beats(others[j], places[j], value, best)) {
        best = places[j];
        value = others[j];
      }
  }
#endif
  for (; i < end; i += LANES) {
    const INDEX at = PLACE(i);
    const REAL other = X_LOAD(x, at * inner);
    if (beats(other, at, value, best)) {
      best = at;
      value = other;
    }
  }
#if LANES > 1
  __local REAL values[LANES];
  __local INDEX places[LANES];
  for (int left = LANES / 2; left; left /= 2) {
    values[lane] = value;
    places[lane] = best;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < left && beats(values[lane + left], places[lane + left], value, best)) {
      best = places[lane + left];
      value = values[lane + left];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
#endif
  if (lane == 0) y[item] = finite && !IS_FINITE(value) ? -1 : (long)best;
}

// The position of the extreme element of a slice on CPUs. A work-item compares AT_ONCE elements per step. If inner > 1, they belong to
// AT_ONCE neighboring columns; the last block of columns overlaps the one before. If inner is 1, they belong to one column, and the AT_ONCE
// candidates are compared at the end.
__kernel void extreme_at_once(__global const X_T* x, __global long* y, const INDEX rows, const INDEX count, const INDEX inner,
                              const INDEX slice, const INDEX slices, const int finite) {
  const INDEX blocks = inner == 1 ? 1 : (inner + AT_ONCE - 1) / AT_ONCE, item = get_global_id(0);
  if (item >= rows * slices * blocks) return;
  const INDEX row = item / blocks / slices, part = item / blocks % slices;
  const INDEX column = inner == 1 ? 0 : min(item % blocks * AT_ONCE, inner - AT_ONCE);
  const INDEX begin = part * slice, length = min(slice, count - begin);
  const INDEX step = inner == 1 ? AT_ONCE : inner, steps = inner == 1 ? length / AT_ONCE : length;
  x += (row * count + begin) * inner + column;
  REAL value[AT_ONCE];
  INDEX best[AT_ONCE];
  for (int j = 0; j < AT_ONCE; ++j) {
    value[j] = X_LOAD(x, steps ? j : min((INDEX)j, length - 1));
    best[j] = 0;
  }
  for (INDEX i = 1; i < steps; ++i)
    for (int j = 0; j < AT_ONCE; ++j) {  // without branches
      const REAL other = X_LOAD(x, i * step + j);
      const int better = !BEHIND(other, value[j]) & (value[j] == value[j]);
      value[j] = better ? other : value[j];
      best[j] = better ? i : best[j];
    }
  if (inner > 1) {
    for (int j = 0; j < AT_ONCE; ++j)
      y[(row * slices + part) * inner + column + j] = finite && !IS_FINITE(value[j]) ? -1 : (long)(begin + best[j]);
    return;
  }
  best[0] *= AT_ONCE;
  for (INDEX i = 1; i < (steps ? AT_ONCE + length % AT_ONCE : length); ++i) {  // the candidates, then the rest of the slice
    const INDEX at = i < AT_ONCE ? best[i] * AT_ONCE + i : steps * AT_ONCE + i - AT_ONCE;
    const REAL other = X_LOAD(x, at);
    if (beats(other, at, value[0], best[0])) {
      value[0] = other;
      best[0] = at;
    }
  }
  y[row * slices + part] = finite && !IS_FINITE(value[0]) ? -1 : (long)(begin + best[0]);
}
