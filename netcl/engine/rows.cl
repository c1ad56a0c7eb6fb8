// Rows: what softmax, normalisation and losses share.
// Needs of the operands N it is used with: N_T, N_LOAD, N_STORE, N_VLOAD, N_VSTORE. OP is a function or macro of two numbers, NAME a name.
// A row is a run of n neighbouring elements. GROUP work-items share a row, and each takes VEC neighbours at a time: CPUs give a
// work-item whole rows and wide vectors, GPUs give a work-group to each row. A column is a run of n elements `inner` apart; a
// work-item then takes VEC neighbouring columns, so that its loads are whole vectors as well.

#ifndef LOCAL
#define LOCAL 1  // work-items of a work-group
#define GROUP 1  // work-items that share a row: 1, or LOCAL
#define VEC 1  // elements a work-item takes at a time: 1, 8 or 16, or 4 where every row begins at a multiple of four
#define HELD 0  // vectors of a row that a work-item keeps in registers, so that the row is read once; 0: it is read again
#endif

#pragma OPENCL FP_CONTRACT ON

#define SIZED __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
#define LOWEST ((real)(-INFINITY))

typedef REAL real;
typedef JOIN(REAL, 2) pair;
typedef JOIN(REAL, 4) quad;
#if VEC == 1
typedef real vec;
#define VEC_READ(p) (*(p))
#define VEC_WRITE(v, p) *(p) = (v)
#else
typedef JOIN(REAL, VEC) vec;
#define VEC_READ(p) JOIN(vload, VEC)(0, p)
#define VEC_WRITE(v, p) JOIN(vstore, VEC)(v, 0, p)
#endif

// ---- lanes of a vector

#if VEC == 1
#define FOLD_LANES(v, OP) return v;
#else
#if VEC == 16
#define QUARTERS(v, OP)                                \
  const JOIN(REAL, 8) eight = OP((v).lo, (v).hi);      \
  const JOIN(REAL, 4) four = OP(eight.lo, eight.hi);
#elif VEC == 8
#define QUARTERS(v, OP) const JOIN(REAL, 4) four = OP((v).lo, (v).hi);
#else
#define QUARTERS(v, OP) const JOIN(REAL, 4) four = v;
#endif
#define FOLD_LANES(v, OP)                              \
  QUARTERS(v, OP)                                      \
  const JOIN(REAL, 2) two = OP(four.lo, four.hi);      \
  return OP(two.x, two.y);
#endif
#define PLUS(a, b) ((a) + (b))

static inline real lanes_sum(vec v) { FOLD_LANES(v, PLUS) }
static inline real lanes_max(vec v) { FOLD_LANES(v, fmax) }

#if VEC > 1
// Vectors that lie anywhere: CPU drivers call a function for vload16, which spills all registers; a packed struct is an instruction.
#if VEC == 4  // a GPU would load what is packed byte by byte
typedef struct { vec lanes; } loose;
#else
typedef struct __attribute__((packed)) { vec lanes; } loose;
#endif
#endif

// The larger one; a NaN is never taken, as fmax has it, without fmax's call.
#define LARGER(a, b) ((a) < (b) ? (b) : (a))

// A vector of an operand N whose last lanes may lie beyond the end: `left` lanes are there, the others read as 0.
#define LANES_OF(N)                                                                         \
  static inline vec N##_lanes(__global const N##_T* p, const long i, const int left) {      \
    if (left >= VEC) return N##_VLOAD(p, i);                                                \
    real lanes[VEC];                                                                        \
    for (int l = 0; l < VEC; ++l) lanes[l] = l < left ? (real)N##_LOAD(p, i + l) : (real)0; \
    return VEC_READ(lanes);                                                                 \
  }
#define STORE_LANES_OF(N)                                                                          \
  static inline void N##_store_lanes(__global N##_T* p, const long i, const int left, vec v) {     \
    if (left >= VEC) {                                                                             \
      N##_VSTORE(p, i, v);                                                                         \
      return;                                                                                      \
    }                                                                                              \
    real lanes[VEC];                                                                               \
    VEC_WRITE(v, lanes);                                                                           \
    for (int l = 0; l < left; ++l) N##_STORE(p, i + l, lanes[l]);                                  \
  }

// ---- work-items of a row

#if GROUP > 1
#define LANE ((int)get_local_id(0))
// Every work-item folds what all have written: a tree would wait at a barrier for each of its levels. Large groups do it in two steps.
#define SECTIONS 16
#if GROUP > 64
#define LAST_FROM GROUP
#define LAST_COUNT SECTIONS
#define FOLD_SECTIONS(OP)                                                                     \
  if (LANE < SECTIONS) {                                                                      \
    for (int k = LANE + SECTIONS; k < GROUP; k += SECTIONS) x = OP(x, places[k]);             \
    places[GROUP + LANE] = x;                                                                 \
  }                                                                                           \
  barrier(CLK_LOCAL_MEM_FENCE);
#else
#define LAST_FROM 0
#define LAST_COUNT GROUP
#define FOLD_SECTIONS(OP)
#endif
#define SHARED __local quad shared[(GROUP + SECTIONS) / 2];
// Of numbers of type T, PER of which make a quad; JOINED folds those of a quad.
#define FOLD_GROUP(NAME, T, PER, OP, JOINED)                                                  \
  static inline T NAME(T x, __local quad* shared) {                                           \
    __local T* places = (__local T*)shared;                                                   \
    places[LANE] = x;                                                                         \
    barrier(CLK_LOCAL_MEM_FENCE);                                                             \
    FOLD_SECTIONS(OP)                                                                         \
    quad all = shared[LAST_FROM / PER];                                                       \
    _Pragma("unroll") for (int k = 1; k < LAST_COUNT / PER; ++k) all = OP(all, shared[LAST_FROM / PER + k]); \
    barrier(CLK_LOCAL_MEM_FENCE); /* the next fold writes here */                             \
    return JOINED;                                                                            \
  }
FOLD_GROUP(fold_sum, real, 4, PLUS, (all.x + all.y) + (all.z + all.w))
FOLD_GROUP(fold_sums, pair, 2, PLUS, all.lo + all.hi)
FOLD_GROUP(fold_max, real, 4, fmax, fmax(fmax(all.x, all.y), fmax(all.z, all.w)))
#define SHARED_ARG , __local quad* shared
#define SHARED_PASS , shared
#define GROUP_SUM(x) fold_sum(x, shared)
#define GROUP_SUMS(x) fold_sums(x, shared)
#define GROUP_MAX(x) fold_max(x, shared)
#else
#define LANE 0
#define SHARED
#define SHARED_ARG
#define SHARED_PASS
#define GROUP_SUM(x) (x)
#define GROUP_SUMS(x) (x)
#define GROUP_MAX(x) (x)
#endif

// The elements of a row that this work-item takes: whole vectors, then what is left.
#define FOR_VECTORS(i, n) for (int i = LANE * VEC; i + VEC <= (n); i += GROUP * VEC)
#define FOR_REST(i, n) for (int i = (n) / VEC * VEC + LANE; i < (n); i += GROUP)
// The sum of a vector expression E(i) over those whole vectors, in four chains: one alone waits for each addition.
#define SUM_VECTORS(total, n, E)                                                \
  vec total;                                                                    \
  {                                                                             \
    const int step = GROUP * VEC;                                               \
    vec part0 = 0, part1 = 0, part2 = 0, part3 = 0;                             \
    int at = LANE * VEC;                                                        \
    for (; at + 3 * step + VEC <= (n); at += 4 * step) {                        \
      part0 += E(at);                                                           \
      part1 += E(at + step);                                                    \
      part2 += E(at + 2 * step);                                                \
      part3 += E(at + 3 * step);                                                \
    }                                                                           \
    for (; at + VEC <= (n); at += step) part0 += E(at);                         \
    total = (part0 + part1) + (part2 + part3);                                  \
  }
// The same vectors in CHAINS chains, number c each.
#define CHAINS 4
#define FOR_CHAINS(c, i, n)                                                     \
  for (int at = LANE * VEC; at + VEC <= (n); at += CHAINS * GROUP * VEC)        \
    _Pragma("unroll") for (int c = 0, i = at; c < CHAINS; ++c, i += GROUP * VEC) if (i + VEC <= (n))
// The vectors of a row that are held in registers; n is a multiple of VEC.
#define FOR_HELD(k, i, n) _Pragma("unroll") for (int k = 0, i = LANE * VEC; k < HELD; ++k, i += GROUP * VEC) if (i < (n))
// The rows that this work-item (or its group) takes: `each` neighbours.
#define FOR_ROWS(row, rows, each)                                   \
  const int first_row = (int)(get_global_id(0) / GROUP) * (each);   \
  for (int row = first_row; row < min(first_row + (each), (rows)); ++row)
