// Running sums, and the position of the extreme element, along one axis of a tensor seen as (rows, count, inner). WIDTH is 1; the
// program in front of this text defines real, element, SRC, DST, LOAD and STORE as for reduce.cl, IS_NAN(x), and MINIMUM where the
// smallest element is looked for. INDEX_T is replaced in the text.

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

// Whether the element a at i beats b at j: larger (smaller if MINIMUM), NaN above all, the first of equals.
int beats(real a, INDEX_T i, real b, INDEX_T j) {
  const int a_nan = IS_NAN(a), b_nan = IS_NAN(b);
  if (a_nan || b_nan) return a_nan && (!b_nan || i < j);
#ifdef MINIMUM
  return a < b || (a == b && i < j);
#else
  return a > b || (a == b && i < j);
#endif
}

// One work-item finds the best of one slice of one column. Second launch: `candidates` are the winners of the slices.
__kernel void extreme(__global const SRC* x, __global const long* candidates, __global long* y, const INDEX_T rows, const INDEX_T count,
                      const INDEX_T inner, const INDEX_T slice, const INDEX_T slices, const int second) {
  const INDEX_T item = get_global_id(0);
  const INDEX_T parts = second ? 1 : slices;
  if (item >= rows * parts * inner) return;
  const INDEX_T column = item % inner;
  const INDEX_T row = item / inner / parts;
  const INDEX_T begin = second ? 0 : (item / inner - row * parts) * slice;
  const INDEX_T end = second ? slices : min(begin + slice, count);
  x += row * count * inner + column;
  candidates += row * slices * inner + column;
  INDEX_T best = second ? (INDEX_T)candidates[0] : begin;
  real value = LOAD(x, best * inner, 1);
  for (INDEX_T i = begin + 1; i < end; ++i) {
    const INDEX_T at = second ? (INDEX_T)candidates[i * inner] : i;
    const real other = LOAD(x, at * inner, 1);
    if (beats(other, at, value, best)) {
      best = at;
      value = other;
    }
  }
  y[item] = best;
}
