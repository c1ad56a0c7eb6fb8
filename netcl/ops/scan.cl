// Running sums, and the position of the extreme element, along one axis of a tensor seen as (rows, count, inner). WIDTH is 1; the
// program in front of this text defines real, element, SRC, DST, LOAD and STORE as for reduce.cl, IS_NAN(x), IS_FINITE(x), MINIMUM where the
// smallest element is looked for, and LANES and AT_ONCE, 1 or more. INDEX_T is replaced in the text.

// One work-item runs over one slice of one column. `before` (where slices > 1) is what comes ahead of each slice;
// exclusive: the sum up to, not including, the element.
__kernel void scan(__global const SRC* x, __global const element* before, __global DST* y, const INDEX_T rows, const INDEX_T count,
                   const INDEX_T inner, const INDEX_T slice, const INDEX_T slices, const int reverse, const int exclusive) {
  const INDEX_T item = get_global_id(0);
  if (item >= rows * slices * inner) return;
  const INDEX_T column = item % inner;
  const INDEX_T row = item / inner / slices;
  const INDEX_T begin = (item / inner - row * slices) * slice;
  const INDEX_T length = min(slice, count - begin);
  x += row * count * inner + column;
  y += row * count * inner + column;
  real total = slices > 1 ? before[item] : (element)(0);
  for (INDEX_T i = 0; i < length; ++i) {
    const INDEX_T at = (begin + (reverse ? length - 1 - i : i)) * inner;
    const real next = total + LOAD(x, at, 1);
    STORE(y, at, 1, exclusive ? total : next);
    total = next;
  }
}

#ifdef MINIMUM
#define BEHIND(a, b) ((a) >= (b))
#else
#define BEHIND(a, b) ((a) <= (b))
#endif

// Whether the element a at i beats b at j: larger (smaller if MINIMUM), NaN above all, the first of equals.
int beats(real a, INDEX_T i, real b, INDEX_T j) {
  const int a_nan = IS_NAN(a), b_nan = IS_NAN(b);
  if (a_nan || b_nan) return a_nan && (!b_nan || i < j);
  return !BEHIND(a, b) || (a == b && i < j);
}

// The best of one slice of one column, found by LANES work-items: a work-group, or one work-item alone. Second launch: `candidates` are the
// winners of the slices. finite: -1 where the best is not finite.
#if LANES > 1
__attribute__((reqd_work_group_size(LANES, 1, 1)))
#endif
__kernel void extreme(__global const SRC* x, __global const long* candidates, __global long* y, const INDEX_T rows, const INDEX_T count,
                      const INDEX_T inner, const INDEX_T slice, const INDEX_T slices, const int second, const int finite) {
  const INDEX_T item = LANES > 1 ? get_group_id(0) : get_global_id(0), lane = LANES > 1 ? get_local_id(0) : 0;
  const INDEX_T parts = second ? 1 : slices;
  if (item >= rows * parts * inner) return;
  const INDEX_T column = item % inner;
  const INDEX_T row = item / inner / parts;
  const INDEX_T begin = second ? 0 : (item / inner - row * parts) * slice;
  const INDEX_T end = second ? slices : min(begin + slice, count);
  x += row * count * inner + column;
  candidates += row * slices * inner + column;
#define PLACE(i) (second ? (INDEX_T)candidates[(i) * inner] : (i))
  INDEX_T best = PLACE(min(begin + lane, end - 1));
  real value = LOAD(x, best * inner, 1);
  INDEX_T i = begin + lane + LANES;
#if LANES > 1  // loads ahead of comparisons
  for (; i + 7 * LANES < end; i += 8 * LANES) {
    INDEX_T places[8];
    real others[8];
    for (int j = 0; j < 8; ++j) places[j] = PLACE(i + j * LANES);
    for (int j = 0; j < 8; ++j) others[j] = LOAD(x, places[j] * inner, 1);
    for (int j = 0; j < 8; ++j)
      if (beats(others[j], places[j], value, best)) {
        best = places[j];
        value = others[j];
      }
  }
#endif
  for (; i < end; i += LANES) {
    const INDEX_T at = PLACE(i);
    const real other = LOAD(x, at * inner, 1);
    if (beats(other, at, value, best)) {
      best = at;
      value = other;
    }
  }
#if LANES > 1
  __local real values[LANES];
  __local INDEX_T places[LANES];
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

#if AT_ONCE > 1
// The position of the extreme element of a slice on CPUs. A work-item compares AT_ONCE elements per step. If inner > 1, they belong to
// AT_ONCE neighboring columns; the last block of columns overlaps the one before. If inner is 1, they belong to one column, and the AT_ONCE
// candidates are compared at the end.
__kernel void extreme_at_once(__global const SRC* x, __global long* y, const INDEX_T rows, const INDEX_T count, const INDEX_T inner,
                              const INDEX_T slice, const INDEX_T slices, const int finite) {
  const INDEX_T blocks = inner == 1 ? 1 : (inner + AT_ONCE - 1) / AT_ONCE, item = get_global_id(0);
  if (item >= rows * slices * blocks) return;
  const INDEX_T row = item / blocks / slices, part = item / blocks % slices;
  const INDEX_T column = inner == 1 ? 0 : min(item % blocks * AT_ONCE, inner - AT_ONCE);
  const INDEX_T begin = part * slice, length = min(slice, count - begin);
  const INDEX_T step = inner == 1 ? AT_ONCE : inner, steps = inner == 1 ? length / AT_ONCE : length;
  x += (row * count + begin) * inner + column;
  real value[AT_ONCE];
  INDEX_T best[AT_ONCE];
  for (int j = 0; j < AT_ONCE; ++j) {
    value[j] = LOAD(x, steps ? j : min((INDEX_T)j, length - 1), 1);
    best[j] = 0;
  }
  for (INDEX_T i = 1; i < steps; ++i)
    for (int j = 0; j < AT_ONCE; ++j) {  // without branches
      const real other = LOAD(x, i * step + j, 1);
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
  for (INDEX_T i = 1; i < (steps ? AT_ONCE + length % AT_ONCE : length); ++i) {  // the candidates, then the rest of the slice
    const INDEX_T at = i < AT_ONCE ? best[i] * AT_ONCE + i : steps * AT_ONCE + i - AT_ONCE;
    const real other = LOAD(x, at, 1);
    if (beats(other, at, value[0], best[0])) {
      value[0] = other;
      best[0] = at;
    }
  }
  y[row * slices + part] = finite && !IS_FINITE(value[0]) ? -1 : (long)(begin + best[0]);
}
#endif
