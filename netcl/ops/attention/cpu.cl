// Attention on CPUs: a work-item takes LANES queries (in the gradient of keys and values: LANES keys) and walks the other side in blocks.
//
// Scores: every lane of a vector is one query (or key), so the other side is read in place as scalars, no product needs a sum over lanes,
// and only the LANES rows are packed, once. Scores of a block live in BLOCK vectors; no matrix of all scores exists.
// Results: lanes are elements of a head where vectors divide its size (add_rows); elsewhere they are queries or keys (gather, unpack).
// Operands: X queries, keys, values, results and gradients (X_T is REAL); M mask; S sums and logarithms.

#ifndef LANES
#define LANES 16  // queries of a work-item: 16 or 8
#define BLOCK 32  // keys whose scores are known at a time
#define TILE 6  // accumulators held in registers: rows of a product at a time
#define DEPTH 64  // the largest head size
#define WHOLE 0  // 1: every head has that size, and addresses are constants
#define BY_HEAD 0  // 1: the gradients of a head are computed by one work-item
#endif

typedef JOIN(REAL, LANES) vec;
typedef JOIN(REAL, 4) quad;
typedef struct __attribute__((packed, aligned(sizeof(REAL)))) { quad lanes; } loose_quad;
typedef struct __attribute__((packed, aligned(sizeof(REAL)))) { vec lanes; } loose_vec;
// A function: LLVM for x86 cuts vectors of 16 lanes into halves, which then do not fit the registers, unless one was called that gives one.
static inline vec vector_of(const vec* p) { return *p; }
static inline vec row_vector(__global const X_T* p) { return ((__global const loose_vec*)p)->lanes; }

// ---- products

// s[t] = row t of `rows` times `packed`, for `count` rows of `depth` elements; T rows at a time while there are as many.
#define PRODUCTS(T)                                                                                                                 \
  for (; t + T <= count; t += T) {                                                                                                  \
    __global const X_T* row = rows + (long)t * depth;                                                                               \
    vec sum[T];                                                                                                                     \
    _Pragma("unroll") for (int i = 0; i < T; ++i) sum[i] = 0;                                                                       \
    for (int d = 0; d < depth; ++d) {                                                                                               \
      const vec p = vector_of(packed + d);                                                                                          \
      _Pragma("unroll") for (int i = 0; i < T; ++i) sum[i] += row[i * depth + d] * p;                                               \
    }                                                                                                                               \
    _Pragma("unroll") for (int i = 0; i < T; ++i) s[t + i] = sum[i];                                                                \
  }

static inline void products(vec* s, __global const X_T* rows, const int count, const int depth, const vec* packed) {
  int t = 0;
  PRODUCTS(TILE)
  PRODUCTS(4)
  for (; t < count; ++t) {  // a single row: four sums, because one would wait for each of its additions
    __global const X_T* row = rows + (long)t * depth;
    vec sum[4] = {0, 0, 0, 0};
    int d = 0;
    for (; d + 4 <= depth; d += 4) {
      UNROLL for (int i = 0; i < 4; ++i) sum[i] += row[d + i] * vector_of(packed + d + i);
    }
    for (; d < depth; ++d) sum[0] += row[d] * vector_of(packed + d);
    s[t] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}

// result = result * scale + the sum over t of row t of `rows` times s[t]; T elements at a time while there are as many.
#define GATHER(T)                                                                                                                   \
  for (; d + T <= depth; d += T) {                                                                                                  \
    vec sum[T];                                                                                                                     \
    _Pragma("unroll") for (int i = 0; i < T; ++i) sum[i] = result[d + i] * scale;                                                   \
    for (int t = 0; t < count; ++t) {                                                                                               \
      const vec p = vector_of(s + t);                                                                                               \
      _Pragma("unroll") for (int i = 0; i < T; ++i) sum[i] += rows[t * depth + d + i] * p;                                          \
    }                                                                                                                               \
    _Pragma("unroll") for (int i = 0; i < T; ++i) result[d + i] = sum[i];                                                           \
  }

static inline void gather(vec* result, const vec scale, __global const X_T* rows, const int count, const int depth, const vec* s) {
  int d = 0;
  GATHER(TILE)
  GATHER(4)
  GATHER(1)
}

// Row r of `into` = that row * factors[r] + the sum over t of weights[r * by_row + t * by_term] times row t of `rows`: T rows and W vectors
// of them at a time. Without `factors`, these are 1. Lanes are elements of a head, whose size must be a multiple of LANES.
#define ADD_ROWS(T, W)                                                                                                              \
  for (; r + T <= height; r += T) {                                                                                                 \
    __global X_T* to = into + (long)r * step + d;                                                                                   \
    __global const X_T* row = rows + d;                                                                                             \
    const real* weight = weights + r * by_row;                                                                                      \
    vec sum[T * W], x[W];                                                                                                           \
    _Pragma("unroll") for (int i = 0; i < T * W; ++i) {                                                                             \
      sum[i] = row_vector(to + (long)(i / W) * step + i % W * LANES);                                                               \
      if (factors) sum[i] *= factors[r + i / W];                                                                                    \
    }                                                                                                                               \
    for (int t = 0; t < count; ++t, row += depth, weight += by_term) {                                                              \
      _Pragma("unroll") for (int w = 0; w < W; ++w) x[w] = row_vector(row + w * LANES);                                             \
      _Pragma("unroll") for (int i = 0; i < T * W; ++i) sum[i] += weight[i / W * by_row] * x[i % W];                                \
    }                                                                                                                               \
    _Pragma("unroll") for (int i = 0; i < T * W; ++i)                                                                               \
        ((__global loose_vec*)(to + (long)(i / W) * step + i % W * LANES))->lanes = sum[i];                                         \
  }

static inline __attribute__((always_inline)) void add_rows(__global X_T* into, const int step, const int height, const real* factors,
                                                           __global const X_T* rows, const int count, const int depth, const vec* s,
                                                           const int by_row, const int by_term) {
  const real* weights = (const real*)s;
  int d = 0;
#if TILE >= 16  // registers for two vectors of every row
  for (; d + 2 * LANES <= depth; d += 2 * LANES) {
    int r = 0;
    ADD_ROWS(TILE / 2, 2)
    ADD_ROWS(4, 2)
    ADD_ROWS(1, 2)
  }
#endif
  for (; d < depth; d += LANES) {
    int r = 0;
    ADD_ROWS(TILE, 1)
    ADD_ROWS(4, 1)
    ADD_ROWS(1, 1)
  }
}

// ---- lanes

// A vector and its lanes. (vload and vstore are calls on some CPU drivers, and spill every register.)
typedef union {
  vec all;
  real each[LANES];
} lanes_of;

// 0, 1, 2, ..
static inline vec lane_numbers(void) {
  lanes_of lanes;
  for (int l = 0; l < LANES; ++l) lanes.each[l] = l;
  return lanes.all;
}

// The first and the second halves of every four lanes of two vectors, alternating; a vector with four elements of every fourth row.
// (clang's builtin: it takes literals of lanes apart and needs three times the instructions.)
#if LANES == 16
#define LOWER(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define UPPER(a, b) __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define FOURTH_ROWS(LOAD, i) ((vec)(LOAD(row[i], d), LOAD(row[i + 4], d), LOAD(row[i + 8], d), LOAD(row[i + 12], d)))
#else
#define LOWER(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define UPPER(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define FOURTH_ROWS(LOAD, i) ((vec)(LOAD(row[i], d), LOAD(row[i + 4], d)))
#endif

// LANES rows, `step` apart in memory, transposed, four elements at a time; rows beyond the last one repeat it.
#define PACK(name, T, LOAD, LOAD_QUAD)                                                                                              \
  static inline void name(vec* packed, __global const T* x, const int step, const int first, const int n, const int depth,          \
                          const real scale) {                                                                                       \
    __global const T* row[LANES];                                                                                                   \
    for (int l = 0; l < LANES; ++l) row[l] = x + (long)(first + l < n ? first + l : n - 1) * step;                                  \
    int d = 0;                                                                                                                      \
    for (; d + 4 <= depth; d += 4) {                                                                                                \
      const vec a = FOURTH_ROWS(LOAD_QUAD, 0) * scale, b = FOURTH_ROWS(LOAD_QUAD, 1) * scale;                                       \
      const vec e = FOURTH_ROWS(LOAD_QUAD, 2) * scale, f = FOURTH_ROWS(LOAD_QUAD, 3) * scale;                                       \
      const vec ae_low = LOWER(a, e), bf_low = LOWER(b, f), ae_high = UPPER(a, e), bf_high = UPPER(b, f);                           \
      packed[d] = LOWER(ae_low, bf_low);                                                                                            \
      packed[d + 1] = UPPER(ae_low, bf_low);                                                                                        \
      packed[d + 2] = LOWER(ae_high, bf_high);                                                                                      \
      packed[d + 3] = UPPER(ae_high, bf_high);                                                                                      \
    }                                                                                                                               \
    for (; d < depth; ++d)                                                                                                          \
      for (int l = 0; l < LANES; ++l) ((real*)(packed + d))[l] = LOAD(row[l], d) * scale;                                           \
  }
#define X_ONE(p, i) ((p)[i])
#define X_FOUR(p, i) (((__global const loose_quad*)((p) + (i)))->lanes)
PACK(pack, X_T, X_ONE, X_FOUR)

static inline void unpack(__global X_T* x, const int step, const vec* packed, const int first, const int n, const int depth,
                          const real scale) {
  for (int l = 0; l < LANES && first + l < n; l += 4) {
    const real* from = (const real*)packed + l;
    __global X_T* row = x + (long)(first + l) * step;
    const int rows = n - first - l;
    int d = 0;
    for (; rows >= 4 && d + 4 <= depth; d += 4, from += 4 * LANES) {
      quad r[4];
      for (int i = 0; i < 4; ++i) r[i] = *(const quad*)(from + i * LANES) * scale;
      ((__global loose_quad*)(row + d))->lanes = (quad)(r[0].x, r[1].x, r[2].x, r[3].x);
      ((__global loose_quad*)(row + step + d))->lanes = (quad)(r[0].y, r[1].y, r[2].y, r[3].y);
      ((__global loose_quad*)(row + 2 * step + d))->lanes = (quad)(r[0].z, r[1].z, r[2].z, r[3].z);
      ((__global loose_quad*)(row + 3 * step + d))->lanes = (quad)(r[0].w, r[1].w, r[2].w, r[3].w);
    }
    for (; d < depth; ++d, from += LANES)
      for (int i = 0; i < 4 && i < rows; ++i) row[i * step + d] = from[i] * scale;
  }
}

static inline vec load_sums(__global const S_T* sums, const int first, const int n) {
  lanes_of lanes;
  for (int l = 0; l < LANES; ++l) lanes.each[l] = S_LOAD(sums, min(first + l, n - 1));
  return lanes.all;
}

static inline void store_sums(__global S_T* sums, const vec v, const int first, const int n) {
  lanes_of lanes;
  lanes.all = v;
  for (int l = 0; l < min(LANES, n - first); ++l) S_STORE(sums, first + l, lanes.each[l]);
}

static inline void store_row(__global X_T* row, const vec v, const int count) {
  lanes_of lanes;
  lanes.all = v;
  if (count == LANES) ((__global loose_vec*)row)->lanes = v;
  else
    for (int l = 0; l < count; ++l) row[l] = lanes.each[l];
}

#if MASK
#define M_ONE(p, i) ((real)M_LOAD(p, i))
#define M_FOUR(p, i) ((quad)(M_ONE(p, i), M_ONE(p, (i) + 1), M_ONE(p, (i) + 2), M_ONE(p, (i) + 3)))
PACK(pack_mask, M_T, M_ONE, M_FOUR)

static inline vec masked(const vec s, const vec mask) { return MASK == 1 ? (mask == (vec)(0) ? (vec)(LOWEST) : s) : s + mask; }

// The mask of `count` lanes, `step` apart; 0 for the others.
static inline vec mask_lanes(__global const M_T* mask, const int step, const int count) {
  lanes_of lanes;
  lanes.all = 0;
  if (step == 1 && count >= LANES)
    for (int l = 0; l < LANES; ++l) lanes.each[l] = M_ONE(mask, l);
  else
    for (int l = 0; l < min(count, LANES); ++l) lanes.each[l] = M_ONE(mask, l * step);
  return lanes.all;
}
#endif

// The scores of queries `first`, `first` + 1, .. with `count` keys from j on, under the mask.
static inline void mask_queries(vec* s, __global const M_T* mask, const int by_query, const int by_key, const int first, const int n,
                                const int j, const int count, const int causal) {
#if MASK
  vec lanes[BLOCK];
  if (by_key == 1) pack_mask(lanes, mask + j, by_query, first, n, count, 1);
  for (int t = 0; t < count; ++t)
    s[t] = masked(s[t], by_key == 1 ? lanes[t] : mask_lanes(mask + (long)first * by_query + (long)(j + t) * by_key, by_query, n - first));
#endif
  if (causal && j + count > first + 1)
    for (int t = 0; t < count; ++t) s[t] = lane_numbers() < (vec)((real)(j + t - first)) ? (vec)(LOWEST) : s[t];
}

// The scores of keys `first`, `first` + 1, .. with query i, under the mask.
static inline vec mask_keys(vec s, __global const M_T* mask, const int by_query, const int by_key, const int first, const int m,
                            const int i, const int causal) {
#if MASK
  s = masked(s, mask_lanes(mask + (long)i * by_query + (long)first * by_key, by_key, m - first));
#endif
  return causal ? (lane_numbers() > (vec)((real)(i - first)) ? (vec)(LOWEST) : s) : s;
}

static inline void clear(__global X_T* rows, const int step, const int count, const int depth) {
  for (int r = 0; r < count; ++r)
    for (int d = 0; d < depth; d += LANES) ((__global loose_vec*)(rows + (long)r * step + d))->lanes = 0;
}

// Row r times lane r of `factors`.
static inline void scale_rows(__global X_T* rows, const int step, const int count, const int depth, const vec factors) {
  lanes_of lanes;
  lanes.all = factors;
  for (int r = 0; r < count; ++r)
    for (int d = 0; d < depth; d += LANES) {
      __global X_T* x = rows + (long)r * step + d;
      ((__global loose_vec*)x)->lanes = row_vector(x) * lanes.each[r];
    }
}

// Infinity where a row saw no key at all: exp(score - infinity) is 0, as its gradient is.
static inline real safe_logarithm(const real logarithm) { return logarithm == LOWEST ? (real)INFINITY : logarithm; }

// ---- kernels

// The head and the first query of a work-item, their head of keys, and the mask.
#define QUERIES_OF_ITEM                                                                   \
  const int depth = WHOLE ? DEPTH : size, depth_v = WHOLE ? DEPTH : size_v;               \
  const int head = get_global_id(1), first = get_global_id(0) * LANES;                    \
  const long kv = (long)key_head(head, heads, sharing) * m;                               \
  __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;

#if PART == 1
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attention(
    READ_POINTERS, __global X_T* out, __global S_T* logarithms, CALL_NUMBERS, O_NUMBERS) {
  QUERIES_OF_ITEM
  vec packed[DEPTH], s[BLOCK];
  pack(packed, q + (long)head * n * depth, depth, first, n, depth, scale);
#if WHOLE  // vectors divide heads: results are added in memory, and only those of queries that exist
  const int rows = min(LANES, n - first);
  __global X_T* to = out + START(o, head, heads) + (long)first * o_row;
  clear(to, o_row, rows, depth_v);
#else
  vec result[DEPTH];
  for (int d = 0; d < depth_v; ++d) result[d] = 0;
#endif
  vec most = LOWEST, sum = 0;
  const int end = causal ? min(m, first + LANES) : m;
  for (int j = 0; j < end; j += BLOCK) {
    const int count = min(BLOCK, end - j);
    products(s, k + (kv + j) * depth, count, depth, packed);
    mask_queries(s, mask_here, by_query, by_key, first, n, j, count, causal);
    vec higher = most;
    for (int t = 0; t < count; ++t) higher = higher < s[t] ? s[t] : higher;
    const vec safe = higher == (vec)(LOWEST) ? (vec)(0) : higher;
    const vec keep = EXP_BELOW(most - safe);
    sum *= keep;
    for (int t = 0; t < count; ++t) {
      s[t] = EXP_BELOW(s[t] - safe);
      sum += s[t];
    }
#if WHOLE
    add_rows(to, o_row, rows, (const real*)&keep, v + (kv + j) * depth_v, count, depth_v, s, 1, LANES);
#else
    gather(result, keep, v + (kv + j) * depth_v, count, depth_v, s);
#endif
    most = higher;
  }
  const vec share = sum == (vec)(0) ? (vec)(0) : 1 / sum;
#if WHOLE
  scale_rows(to, o_row, rows, depth_v, share);
#else
  for (int d = 0; d < depth_v; ++d) result[d] *= share;
  unpack(out + START(o, head, heads), o_row, result, first, n, depth_v, 1);
#endif
  store_sums(logarithms + (long)head * n, most + log(sum), first, n);
}

#elif PART == 2

// Also leaves delta: the sum of gradient times result of each row, less the gradient that arrives through the logarithm.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attention_query_grad(
    __global const X_T* g, READ_POINTERS, __global const S_T* logarithms, __global S_T* delta, __global const X_T* forward,
    __global const S_T* through, __global X_T* out, const int has_through, CALL_NUMBERS, O_NUMBERS, F_NUMBERS) {
  QUERIES_OF_ITEM
  vec packed[DEPTH], packed_g[DEPTH], result[DEPTH], s[BLOCK], dp[BLOCK];
  pack(packed, q + (long)head * n * depth, depth, first, n, depth, scale);
  pack(packed_g, g + (long)head * n * depth_v, depth_v, first, n, depth_v, 1);
  pack(result, forward + START(f, head, heads), f_row, first, n, depth_v, 1);
  vec less = has_through ? -load_sums(through + (long)head * n, first, n) : (vec)(0);
  for (int d = 0; d < depth_v; ++d) less += packed_g[d] * result[d];
  store_sums(delta + (long)head * n, less, first, n);
  for (int d = 0; d < depth; ++d) result[d] = 0;
  const vec logarithm = load_sums(logarithms + (long)head * n, first, n);
  const vec safe = logarithm == (vec)(LOWEST) ? (vec)(INFINITY) : logarithm;
  const int end = causal ? min(m, first + LANES) : m;
  for (int j = 0; j < end; j += BLOCK) {
    const int count = min(BLOCK, end - j);
    products(s, k + (kv + j) * depth, count, depth, packed);
    products(dp, v + (kv + j) * depth_v, count, depth_v, packed_g);
    mask_queries(s, mask_here, by_query, by_key, first, n, j, count, causal);
    for (int t = 0; t < count; ++t) s[t] = EXP_BELOW(s[t] - safe) * (dp[t] - less);
    gather(result, (vec)(1), k + (kv + j) * depth, count, depth, s);
  }
  unpack(out + START(o, head, heads), o_row, result, first, n, depth, scale);
}

#else

// The gradients of LANES keys and values. BY_HEAD: those of all keys, and of the queries of all heads that share them; head sizes must be
// multiples of LANES. Only one work-item adds to a row of these in memory, in order of the keys.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attention_key_grad(
    __global const X_T* g, READ_POINTERS, __global const S_T* logarithms, __global S_T* delta, __global const X_T* forward,
    __global const S_T* through, __global X_T* out, const int has_through, __global X_T* out_k, __global X_T* out_v,
    __global X_T* out_scores, const int has_scores, CALL_NUMBERS, O_NUMBERS, DK_NUMBERS, DV_NUMBERS, F_NUMBERS) {
  const int depth = WHOLE ? DEPTH : size, depth_v = WHOLE ? DEPTH : size_v;
  const int kv_head = get_global_id(1), kv_heads = heads / sharing;
  const int head_0 = kv_head / kv_heads * heads + kv_head % kv_heads * sharing;
  out_k += START(dk, kv_head, kv_heads);
  out_v += START(dv, kv_head, kv_heads);
  vec packed_k[DEPTH], packed_v[DEPTH], s[BLOCK], dp[BLOCK];
#if !BY_HEAD
  vec result_k[DEPTH], result_v[DEPTH];
  const int from = get_global_id(0) * LANES, end = from + 1;
#else
  const int from = 0, end = m;
  for (int head = head_0; head < head_0 + sharing; ++head) {
    clear(out + START(o, head, heads), o_row, n, depth);
    for (int i = 0; i < n; ++i) {
      const long row = (long)head * n + i;
      lanes_of sum;
      sum.all = 0;
      for (int d = 0; d < depth_v; d += LANES)
        sum.all += row_vector(g + row * depth_v + d) * row_vector(forward + START(f, head, heads) + (long)i * f_row + d);
      UNROLL for (int h = LANES / 2; h; h /= 2) for (int l = 0; l < h; ++l) sum.each[l] += sum.each[l + h];
      S_STORE(delta, row, sum.each[0] - (has_through ? (real)S_LOAD(through, row) : 0));
    }
  }
#endif
  for (int first = from; first < end; first += LANES) {
    const int keys = min(LANES, m - first);
    pack(packed_k, k + (long)kv_head * m * depth, depth, first, m, depth, scale);
    pack(packed_v, v + (long)kv_head * m * depth_v, depth_v, first, m, depth_v, 1);
#if !BY_HEAD
    for (int d = 0; d < depth; ++d) result_k[d] = 0;
    for (int d = 0; d < depth_v; ++d) result_v[d] = 0;
#else
    clear(out_k + (long)first * dk_row, dk_row, keys, depth);
    clear(out_v + (long)first * dv_row, dv_row, keys, depth_v);
#endif
    for (int head = head_0; head < head_0 + sharing; ++head) {
      __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;
      for (int i = causal ? first : 0; i < n; i += BLOCK) {
        const int count = min(BLOCK, n - i), crosses = causal && i < first + LANES - 1;
        const long row = (long)head * n + i;
        products(s, q + row * depth, count, depth, packed_k);
        products(dp, g + row * depth_v, count, depth_v, packed_v);
        for (int t = 0; t < count; ++t) {
          if (MASK || crosses) s[t] = mask_keys(s[t], mask_here, by_query, by_key, first, m, i + t, crosses);
          s[t] = EXP_BELOW(s[t] - safe_logarithm(S_LOAD(logarithms, row + t)));
          dp[t] = s[t] * (dp[t] - S_LOAD(delta, row + t));
          if (has_scores) store_row(out_scores + (row + t) * m + first, dp[t], keys);
          dp[t] *= scale;
        }
#if !BY_HEAD
        gather(result_v, (vec)(1), g + row * depth_v, count, depth_v, s);
        gather(result_k, (vec)(1), q + row * depth, count, depth, dp);
#else
        add_rows(out_v + (long)first * dv_row, dv_row, keys, 0, g + row * depth_v, count, depth_v, s, 1, LANES);
        add_rows(out_k + (long)first * dk_row, dk_row, keys, 0, q + row * depth, count, depth, dp, 1, LANES);
        add_rows(out + START(o, head, heads) + (long)i * o_row, o_row, count, 0, k + ((long)kv_head * m + first) * depth, keys, depth, dp,
                 LANES, 1);
#endif
      }
    }
#if !BY_HEAD
    unpack(out_k, dk_row, result_k, first, m, depth, 1);
    unpack(out_v, dv_row, result_v, first, m, depth_v, 1);
#endif
  }
}
#endif
