// Folds of one axis of a tensor seen as (rows, count, inner). The program in front of this text defines
//   real, mask, element       a vector of WIDTH compute values, what comparing two gives, one of its lanes
//   SRC, GIVEN, DST           storage types of the input, of the value given per result, and of the result
//   LOAD, LOAD_GIVEN, STORE   (p, i, left[, x]): elements i.. of p as a real, at most `left` of them exist
//   PICK                      (no, yes, mask) lane by lane
//   NEUTRAL                   what combining with changes nothing
//   fold_map, fold_combine, fold_finish, fold_lanes    the row's formulas; the combination of a vector's lanes
//   WIDTH, LANES, LOCAL       lanes of a real and their numbers as a mask; work-items of a group
//   SPAN, TILE                vectors of neighbouring columns that one work-item folds; that one work-group folds
// INDEX_T and PARAM_T are replaced in the text, because the types of kernel arguments are read from it.
//
// A row may be cut into `slices` of `slice` elements; then y holds one partial result per slice, and a second launch
// folds those. No atomics: the order of the additions depends on sizes and device only.

// The arguments of every kernel; a0 and a1 are the parameters of the row, n is the number of folded elements.
#define FOLD_POINTERS __global const SRC* x, __global const GIVEN* given, __global DST* y
#define FOLD_NUMBERS const PARAM_T a0, const PARAM_T a1, const PARAM_T n, const INDEX_T rows, const INDEX_T count, \
  const INDEX_T inner, const INDEX_T slice, const INDEX_T slices
#define BLOCK 64  // elements per lane that are summed before they join the total: keeps rounding errors of long sums small

// Without a loop: where its steps are not known early, v lies in memory instead of registers.
#define FOLD_FOUR(v, k) fold_combine(fold_combine(v[k], v[k + 4]), fold_combine(v[k + 2], v[k + 6]))
#define FOLD_EIGHT(v) fold_combine(FOLD_FOUR(v, 0), FOLD_FOUR(v, 1))

// Lanes beyond the end must not take part.
real in_range(real x, INDEX_T left) {
#if WIDTH == 1
  return x;
#else
  return left >= WIDTH ? x : PICK(NEUTRAL, x, (mask)(LANES - (mask)(left) < (mask)(0)));
#endif
}

// One work-item folds one slice of one row; inner is 1.
__kernel void reduce_rows(FOLD_POINTERS, FOLD_NUMBERS) {
  const INDEX_T item = get_global_id(0);
  if (item >= rows * slices) return;
  const INDEX_T row = item / slices;
  const INDEX_T begin = (item - row * slices) * slice;
  const INDEX_T end = min(begin + slice, count);
  const real v1 = LOAD_GIVEN(given, row, 1);
  x += row * count;
  real total = NEUTRAL;
  for (INDEX_T start = begin; start < end; start += BLOCK * WIDTH) {
    const INDEX_T stop = min(start + BLOCK * WIDTH, end);
    real part0 = NEUTRAL, part1 = NEUTRAL, part2 = NEUTRAL, part3 = NEUTRAL;
    INDEX_T i = start;
    for (; i + 4 * WIDTH <= stop; i += 4 * WIDTH) {  // four chains: one alone waits for each addition
      part0 = fold_combine(part0, fold_map(LOAD(x, i, WIDTH), v1, (real)(a0), (real)(a1)));
      part1 = fold_combine(part1, fold_map(LOAD(x, i + WIDTH, WIDTH), v1, (real)(a0), (real)(a1)));
      part2 = fold_combine(part2, fold_map(LOAD(x, i + 2 * WIDTH, WIDTH), v1, (real)(a0), (real)(a1)));
      part3 = fold_combine(part3, fold_map(LOAD(x, i + 3 * WIDTH, WIDTH), v1, (real)(a0), (real)(a1)));
    }
    for (; i < stop; i += WIDTH)
      part0 = fold_combine(part0, in_range(fold_map(LOAD(x, i, end - i), v1, (real)(a0), (real)(a1)), end - i));
    total = fold_combine(total, fold_combine(fold_combine(part0, part1), fold_combine(part2, part3)));
  }
  STORE(y, item, 1, fold_finish(fold_lanes(total), v1, (real)(n), (real)(a0), (real)(a1)));
}

#if LOCAL > 1
// One work-group folds one slice of one row; inner is 1.
__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void reduce_group(FOLD_POINTERS, FOLD_NUMBERS) {
  __local real parts[LOCAL];
  const INDEX_T item = get_group_id(0);
  const int lane = get_local_id(0);
  const INDEX_T row = item / slices;
  const INDEX_T begin = (item - row * slices) * slice;
  const INDEX_T end = min(begin + slice, count);
  const real v1 = LOAD_GIVEN(given, row, 1);
  x += row * count;
  real part = NEUTRAL;
  for (INDEX_T i = begin + lane * WIDTH; i < end; i += LOCAL * WIDTH)
    part = fold_combine(part, in_range(fold_map(LOAD(x, i, end - i), v1, (real)(a0), (real)(a1)), end - i));
  parts[lane] = part;
  for (int half_size = LOCAL / 2; half_size > 0; half_size /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < half_size) parts[lane] = fold_combine(parts[lane], parts[lane + half_size]);
  }
  if (lane == 0) STORE(y, item, 1, fold_finish(fold_lanes(parts[0]), v1, (real)(n), (real)(a0), (real)(a1)));
}

#define ABOVE (LOCAL / TILE)  // work-items that share a column: neighbours in a group take neighbouring columns, then further elements

// One work-group folds one slice of TILE * WIDTH neighbouring columns: where there are too few columns for a work-item each.
__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void reduce_tile(FOLD_POINTERS, FOLD_NUMBERS) {
  __local real parts[LOCAL];
  const INDEX_T across = (inner + TILE * WIDTH - 1) / (TILE * WIDTH);
  const INDEX_T part_row = get_group_id(0) / across;
  const int item = get_local_id(0);
  const INDEX_T column = (get_group_id(0) - part_row * across) * (TILE * WIDTH) + item % TILE * WIDTH;
  const INDEX_T row = part_row / slices;
  const INDEX_T begin = (part_row - row * slices) * slice;
  const INDEX_T end = min(begin + slice, count);
  const bool inside = column < inner;
  const real v1 = inside ? LOAD_GIVEN(given + row * inner, column, inner - column) : (real)(0);
  real part = NEUTRAL;
  x += row * count * inner;
  INDEX_T i = inside ? begin + item / TILE : end;
  for (; i + 7 * ABOVE < end; i += 8 * ABOVE) {  // eight loads on their way at a time: one alone waits for each
    real v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = fold_map(LOAD(x + (i + j * ABOVE) * inner, column, inner - column), v1, (real)(a0), (real)(a1));
    part = fold_combine(part, FOLD_EIGHT(v));
  }
  for (; i < end; i += ABOVE)
    part = fold_combine(part, fold_map(LOAD(x + i * inner, column, inner - column), v1, (real)(a0), (real)(a1)));
  parts[item] = part;
  for (int step = LOCAL / 2; step >= TILE; step /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item < step) parts[item] = fold_combine(parts[item], parts[item + step]);
  }
  if (item < TILE && inside)
    STORE(y + part_row * inner, column, inner - column, fold_finish(parts[item], v1, (real)(n), (real)(a0), (real)(a1)));
}
#endif

// One work-item folds one slice of SPAN * WIDTH neighbouring columns: CPUs want long pieces of each row, GPUs many work-items.
__kernel void reduce_columns(FOLD_POINTERS, FOLD_NUMBERS) {
  const INDEX_T across = (inner + SPAN * WIDTH - 1) / (SPAN * WIDTH);
  const INDEX_T item = get_global_id(0);
  if (item >= rows * slices * across) return;
  const INDEX_T part_row = item / across;
  const INDEX_T column = (item - part_row * across) * (SPAN * WIDTH);
  const INDEX_T row = part_row / slices;
  const INDEX_T begin = (part_row - row * slices) * slice;
  const INDEX_T end = min(begin + slice, count);
  const int vectors = (int)min((INDEX_T)SPAN, (inner - column + WIDTH - 1) / WIDTH);
  real v1[SPAN], part[SPAN], total[SPAN];
  for (int k = 0; k < vectors; ++k) {
    const INDEX_T at = column + k * WIDTH;
    v1[k] = LOAD_GIVEN(given + row * inner, at, inner - at);
    total[k] = NEUTRAL;
  }
  x += row * count * inner;
  for (INDEX_T start = begin; start < end; start += BLOCK) {
    const INDEX_T stop = min(start + BLOCK, end);
    for (int k = 0; k < vectors; ++k) part[k] = NEUTRAL;
    INDEX_T i = start;
#if SPAN == 1  // eight loads on their way at a time: one alone waits for each
    for (; i + 8 <= stop; i += 8) {
      real v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = fold_map(LOAD(x + (i + j) * inner, column, inner - column), v1[0], (real)(a0), (real)(a1));
      part[0] = fold_combine(part[0], FOLD_EIGHT(v));
    }
#else  // four rows at a time: parts lie in memory, and are read and written once for all of them
    for (; i + 4 <= stop; i += 4)
      for (int k = 0; k < vectors; ++k) {
        const INDEX_T at = column + k * WIDTH;
        real v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = fold_map(LOAD(x + (i + j) * inner, at, inner - at), v1[k], (real)(a0), (real)(a1));
        part[k] = fold_combine(part[k], fold_combine(fold_combine(v[0], v[1]), fold_combine(v[2], v[3])));
      }
#endif
    for (; i < stop; ++i)
      for (int k = 0; k < vectors; ++k) {
        const INDEX_T at = column + k * WIDTH;
        part[k] = fold_combine(part[k], fold_map(LOAD(x + i * inner, at, inner - at), v1[k], (real)(a0), (real)(a1)));
      }
    for (int k = 0; k < vectors; ++k) total[k] = fold_combine(total[k], part[k]);
  }
  for (int k = 0; k < vectors; ++k) {
    const INDEX_T at = column + k * WIDTH;
    STORE(y + part_row * inner, at, inner - at, fold_finish(total[k], v1[k], (real)(n), (real)(a0), (real)(a1)));
  }
}
