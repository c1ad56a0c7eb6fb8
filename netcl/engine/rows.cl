// Rows: what softmax, normalisation and losses share.
// Needs of the operands N it is used with: N_T, N_LOAD, N_STORE, N_VLOAD, N_VSTORE. OP is a function or macro of two numbers, NAME a name.
// A row is a run of n neighbouring elements. GROUP work-items share a row, and each takes VEC neighbours at a time: CPUs give a
// work-item whole rows and wide vectors, GPUs give a work-group to each row. A column is a run of n elements `inner` apart; a
// work-item then takes VEC neighbouring columns, so that its loads are whole vectors as well.

#ifndef LOCAL  // work-items of a work-group
#define LOCAL 1
#endif
#ifndef GROUP  // work-items that share a row: 1, or LOCAL
#define GROUP 1
#endif
#ifndef VEC  // elements a work-item takes at a time: 1, 8 or 16, or 4 where every row begins at a multiple of four
#define VEC 1
#endif
#ifndef HELD  // vectors of a row that a work-item keeps in registers, so that the row is read once; 0: it is read again
#define HELD 0
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
// Loads and stores of vectors that lie anywhere. CPU drivers call a function for vload16 and for every lane of vload_half16, which spills
// all registers; a packed struct is an instruction, and halves are converted by their bits (2^112 moves the exponent).
#define BITS JOIN(uint, VEC)
#define SHORTS JOIN(ushort, VEC)
#define FLOATS JOIN(float, VEC)
#if VEC == 4  // a GPU would load what is packed byte by byte
#define ANYWHERE
#else
#define ANYWHERE __attribute__((packed))
#endif
typedef struct ANYWHERE { vec lanes; } loose;
typedef struct ANYWHERE { SHORTS lanes; } loose_shorts;

#if VEC == 16
#define WIDEN(x) ((BITS)(convert_uint8((x).lo), convert_uint8((x).hi)))
#define NARROW(x) ((SHORTS)(convert_ushort8((x).lo), convert_ushort8((x).hi)))
#else
#define WIDEN(x) JOIN(convert_uint, VEC)(x)
#define NARROW(x) JOIN(convert_ushort, VEC)(x)
#endif
#define AS_BITS JOIN(as_uint, VEC)
#define AS_FLOATS JOIN(as_float, VEC)

static inline FLOATS of_bfloat16(SHORTS h) { return AS_FLOATS(WIDEN(h) << 16); }

static inline SHORTS to_bfloat16(FLOATS x) {  // to nearest even; a NaN stays one
  const BITS bits = AS_BITS(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const BITS value = x != x ? (bits >> 16) | 0x40u : rounded;
  return NARROW(value);
}

static inline FLOATS of_half(SHORTS h) {
  const BITS bits = WIDEN(h), rest = (bits & 0x7fffu) << 13;
  const BITS finite = AS_BITS(AS_FLOATS(rest) * 0x1p112f);
  const BITS value = rest >= 0x0f800000u ? rest | 0x7f800000u : finite;
  return AS_FLOATS(value | ((bits & 0x8000u) << 16));
}

static inline SHORTS to_half(FLOATS x) {  // to nearest even
  const BITS sign = AS_BITS(x) & 0x80000000u, bits = AS_BITS(x) ^ sign;
  const BITS normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const BITS small = AS_BITS(AS_FLOATS(bits) + 0.5f) - 0x3f000000u;
  const BITS large = bits > 0x7f800000u ? (BITS)(0x7e00u) : (BITS)(0x7c00u);
  const BITS finite = bits < 0x38800000u ? small : normal;
  const BITS value = (bits >= 0x47800000u ? large : finite) | (sign >> 16);
  return NARROW(value);
}
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
