// What the kernels of simt.cl and mma.cl share: the head and the block of a work-group, and scores under a mask.
// Operand M: the mask (M_T M_LOAD). ITEMS: the size of a work-group.
#ifndef REAL  // the type arithmetic is done in
#define REAL float
#endif
#ifndef WIDE  // 1: it is double
#define WIDE 0
#endif
#ifndef PART  // 1: forward, 2: the gradient of queries, 3: of keys and values; each is a program of its own, compiled when needed
#define PART 1
#endif
#ifndef MASK  // 0: none, 1: true where a key takes part, 2: added to the scores
#define MASK 0
#endif

#ifndef STRIDED  // 1: tensors are read as strided blocks of their memory. 0: they are contiguous
#define STRIDED 0
#endif

#pragma OPENCL FP_CONTRACT ON

#define EACH _Pragma("unroll")
#define INLINE static inline __attribute__((always_inline))
#define SIZED __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
#define LOWEST ((real)(-INFINITY))

typedef REAL real;

// Scores are kept in units of log 2: their powers of two are single instructions.
#if WIDE
#define POWER(x) exp2(x)
#define LOG2_E M_LOG2E
#define LN_2 M_LN2
#else
#define POWER(x) native_exp2(x)
#define LOG2_E M_LOG2E_F
#define LN_2 M_LN2_F
#endif

// The score of query i and key j under the mask; -infinity beyond the last ones.
INLINE real masked(const real s, __global const M_T* mask, const int by_query, const int by_key, const int i, const int j, const int n,
                   const int m, const int causal) {
  if (i >= n || j >= m || (causal && j > i)) return LOWEST;
#if MASK == 1
  return M_LOAD(mask, (long)i * by_query + (long)j * by_key) ? s : LOWEST;
#elif MASK == 2
  return s + LOG2_E * (real)M_LOAD(mask, (long)i * by_query + (long)j * by_key);
#else
  return s;
#endif
}

INLINE real safe_logarithm(const real logarithm) { return logarithm == LOWEST ? (real)INFINITY : logarithm * LOG2_E; }

// heads: of the queries; sharing: query heads that share a head of keys and values.
INLINE int key_head(const int head, const int heads, const int sharing) {
  return head / heads * (heads / sharing) + head % heads / sharing;
}

// Numbers of a block of heads in memory: its offset, and its strides by batch, head and row. O, DK, DV: results; F: the forward result.
#define G_NUMBERS const int g_at, const int g_batch, const int g_head, const int g_row
#define Q_NUMBERS const int q_at, const int q_batch, const int q_head, const int q_row
#define K_NUMBERS const int k_at, const int k_batch, const int k_head, const int k_row
#define V_NUMBERS const int v_at, const int v_batch, const int v_head, const int v_row
#define F_NUMBERS const int f_at, const int f_batch, const int f_head, const int f_row
#define O_NUMBERS const int o_at, const int o_batch, const int o_head, const int o_row
#define DK_NUMBERS const int dk_at, const int dk_batch, const int dk_head, const int dk_row
#define DV_NUMBERS const int dv_at, const int dv_batch, const int dv_head, const int dv_row
// Where head `head`, counted over all batches of `heads` heads each, begins in a block.
#define START(x, head, heads) (x##_at + (long)((head) / (heads)) * x##_batch + (long)((head) % (heads)) * x##_head)
// The same for a tensor that is read, and the distance of its rows.
#if STRIDED
#define FROM(x, head, heads, rows, depth) START(x, head, heads)
#define STEP_OF(x, depth) x##_row
#else
#define FROM(x, head, heads, rows, depth) ((long)(head) * (rows) * (depth))
#define STEP_OF(x, depth) (depth)
#endif

#define GROUP ((int)(get_group_id(1) * get_num_groups(0) + get_group_id(0)))
// All heads' first blocks come first (`last`: last blocks): under a causal mask the longest, so that short ones fill the end.
INLINE int2 head_and_block(const int last) {
  const int blocks = get_num_groups(0), all = get_num_groups(1);
  return (int2)(GROUP % all, last ? blocks - 1 - GROUP / all : GROUP / all);
}

