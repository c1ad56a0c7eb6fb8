// What the kernels of cpu.cl, simt.cl and mma.cl share: which of them is built, the numbers of a call, and where heads lie in memory.
// Operand X: queries, keys and values (X_T); M: the mask (M_T).
#ifndef PART
#define PART 1  // 1: forward, 2: the gradient of queries, 3: of keys and values; each is a program of its own, compiled when needed
#define MASK 0  // 0: none, 1: true where a key takes part, 2: added to the scores
#endif

#pragma OPENCL FP_CONTRACT ON

#define INLINE static inline __attribute__((always_inline))
#define LOWEST ((real)(-INFINITY))

typedef REAL real;

#define READ_POINTERS __global const X_T* q, __global const X_T* k, __global const X_T* v, __global const M_T* mask
// size, size_v: elements of a head; heads: of the queries; sharing: query heads that share a head of keys and values; by_..: of the mask.
#define CALL_NUMBERS                                                                                                       \
  const REAL scale, const int causal, const int n, const int m, const int size, const int size_v, const int heads,         \
      const int sharing, const int by_batch, const int by_head, const int by_query, const int by_key
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

INLINE int key_head(const int head, const int heads, const int sharing) {
  return head / heads * (heads / sharing) + head % heads / sharing;
}
