// What the kernels of simt.cl and mma.cl share: the head and the block of a work-group, and scores under a mask.
// Operand M: the mask (M_T M_LOAD). ITEMS: the size of a work-group.
#ifndef WIDE  // 1: it is double
#define WIDE 0
#endif
#ifndef STRIDED  // 1: tensors are read as strided blocks of their memory. 0: they are contiguous
#define STRIDED 0
#endif

#define EACH _Pragma("unroll")
#define SIZED __attribute__((reqd_work_group_size(ITEMS, 1, 1)))

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

// Where a head begins in a tensor that is read, and the distance of its rows.
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
// The head of queries and the block of rows of a work-group, and where its mask, q, k and v begin.
#define HEAD_OF_GROUP                                                                                                    \
  const int2 where = head_and_block(causal);                                                                             \
  const int head = where.x, first = where.y * ROWS, kv_head = key_head(head, heads, sharing);                            \
  __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;               \
  q += FROM(q, head, heads, n, DEPTH);                                                                                   \
  k += FROM(k, kv_head, heads / sharing, m, DEPTH);                                                                      \
  v += FROM(v, kv_head, heads / sharing, m, DEPTH_V);
