// Many tensors in one launch: the updates of optimizers, and norms over all gradients.
//
// OpenCL 1.2 has no arrays of pointers, so a kernel takes the buffers of a whole batch as parameters, SLOTS of each role (parameter,
// gradient, state ..). A work-group finds in `blocks` which slot it works on and on which elements: three numbers per group. Sizes are
// data, so a new model needs no new kernel.
//
// The program in front of this text defines
//   real, mask, element     a vector of WIDTH compute values, what comparing two gives, one of its lanes
//   WIDTH, LANES, PUT_LANES lanes of a real; their numbers as a mask; writes them to an array
//   PICK(no, yes, mask)     the ternary operator, lane by lane
//   LOCAL                   work-items of a group
//   FOLD                    1: the kernels that fold all elements of all tensors, 0: the one that updates them
//   ORDER                   how a fold ends: 2, 1 and 3 (any other) as the norm of that order, 4 as 1 if anything was counted; 0: as the
//                           largest value, where the others add
// and these words are replaced in the text, because the types of kernel arguments are read from it:
//   BUFFERS, SCALARS        parameters: the buffers of every role; the numbers, each with a comma before it
//   REAL, GIVEN             type of the numbers; parameters: the numbers that live on the device, each with a comma before it
//   GUARD                   ends the work-group where a number on the device says that nothing is to change
//   BIND                    picks the group's buffers out of the slots and moves them to its first element
//   NUMBERS, LOADS, LINES, STORES   of the formula: numbers as reals, values read, assignments, values written
//   AHEAD                   asks for what is read soon: by itself a core asks for too little of so many streams

#define STEP (LOCAL * WIDTH)
#define BLOCK_OF_GROUP                                        \
  __global const long* block = blocks + 3 * get_group_id(0); \
  const int slot = (int)block[0];                             \
  const long first = block[1];                                \
  const int n = (int)(block[2] - first);

#if !FOLD

__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void update(BUFFERS, __global const long* blocks GIVEN SCALARS) {
  GUARD
  BLOCK_OF_GROUP
  BIND
  NUMBERS
  int i = (int)get_local_id(0) * WIDTH;
  for (; i + WIDTH <= n; i += STEP) {  // whole vectors: the care for a rest would keep registers from the loop
    const int left = WIDTH;
    AHEAD
    LOADS
    LINES
    STORES
  }
  if (i < n) {
    const int left = n - i;
    LOADS
    LINES
    STORES
  }
}

#else

#define RUN 32  // vectors that are folded before they join the total: keeps the rounding of long sums small

#if ORDER == 0  // a NaN on either side wins
#define COMBINE(a, b) PICK(b, a, (mask)(((a) > (b)) | ((a) != (a))))
#define COMBINE_LANES(a, b) ((a) > (b) || isnan(a) ? (a) : (b))
#else
#define COMBINE(a, b) ((a) + (b))
#define COMBINE_LANES(a, b) ((a) + (b))
#endif

real fold_present(real x, int left) {
#if WIDTH == 1
  return x;
#else
  return left >= WIDTH ? x : PICK((real)(0), x, (mask)(LANES < (mask)(left)));
#endif
}

element fold_lanes(real x) {
#if WIDTH == 1
  return x;
#else
  element lanes[WIDTH];
  PUT_LANES(x, lanes);
  element all = lanes[0];
  for (int l = 1; l < WIDTH; ++l) all = COMBINE_LANES(lanes[l], all);
  return all;
#endif
}

// One partial result per block; what is folded is never negative, so 0 is neutral to both ways of folding.
__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void fold(BUFFERS, __global const long* blocks, __global REAL* partial, const int start, const REAL a_order) {
  __local real parts[LOCAL];
  BLOCK_OF_GROUP
  BIND
  NUMBERS
  real total = (real)(0);
  for (int begin = 0; begin < n; begin += STEP * RUN) {
    real run = (real)(0);
    const int end = min(begin + STEP * RUN, n);
    for (int i = begin + (int)get_local_id(0) * WIDTH; i < end; i += STEP) {
      const int left = n - i;
      LOADS
      LINES
      run = COMBINE(fold_present(value_, left), run);
    }
    total = COMBINE(run, total);
  }
  const int lane = get_local_id(0);
  parts[lane] = total;
  for (int half_size = LOCAL / 2; half_size > 0; half_size /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < half_size) parts[lane] = COMBINE(parts[lane + half_size], parts[lane]);
  }
  if (lane == 0) partial[start + get_group_id(0)] = fold_lanes(parts[0]);
}

// One work-group: the norm, and the factor that brings it down to max_norm (as torch: 1e-6 keeps a norm of 0 harmless).
__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void finish(__global const REAL* partial, __global REAL* norm, __global REAL* factor, const int count, const REAL order,
            const REAL max_norm) {
  __local element parts[LOCAL];
  const int lane = get_local_id(0);
  element total = 0;
  for (int begin = 0; begin < count; begin += LOCAL * RUN) {
    element run = 0;
    for (int i = begin + lane; i < min(begin + LOCAL * RUN, count); i += LOCAL) run = COMBINE_LANES(partial[i], run);
    total = COMBINE_LANES(run, total);
  }
  parts[lane] = total;
  for (int half_size = LOCAL / 2; half_size > 0; half_size /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < half_size) parts[lane] = COMBINE_LANES(parts[lane + half_size], parts[lane]);
  }
  if (lane > 0) return;
#if ORDER == 2
  const element all = sqrt(parts[0]);
#elif ORDER == 3
  const element all = pow(parts[0], 1 / order);
#elif ORDER == 4
  const element all = parts[0] > 0 ? 1 : 0;
#else
  const element all = parts[0];
#endif
  const element wanted = max_norm / (all + (element)1e-6f);
  norm[0] = all;
  factor[0] = wanted > 1 ? 1 : wanted;  // a NaN stays one: a step with it is visibly wrong, not silently unclipped
}

#endif
