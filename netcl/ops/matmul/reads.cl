// What the kernels of products that GPUs run (simt.cl, slices.cl, mma.cl, wgmma.cl) share: how operands lie and are read, whose block is
// which.
#ifndef TRANS_A
#define TRANS_A 0  // 1: the left operand is stored transposed, K x M
#define TRANS_B 0  // 1: the right operand is stored transposed, N x K
#endif
#define BAND 8  // block rows that neighbouring work-groups share, so that B is read from cache
#ifndef WIDTH  // values per load: 4 where rows of both operands are multiples of four values long and aligned, else 1
#define WIDTH 1
#endif
#ifndef A_QUAD  // four values of the left operand from p on, as float4; and of the right one
#define A_QUAD(p) (*(__global const float4*)(p))
#define B_QUAD(p) (*(__global const float4*)(p))
#endif

// Where the block of a work-group of BM x BN begins, in which batch, and its part of k: m0, n0, batch, part, k_begin, k_end.
#define BLOCK_OF_GROUP \
  const int down = (m + BM - 1) / BM, across = (n + BN - 1) / BN; \
  const INDEX group = get_group_id(0), part = group / (down * across), batch = part / splits; \
  const int tile = (int)(group % (down * across)), band = tile / (BAND * across); \
  const int high = min(down - band * BAND, BAND), inside = tile - band * BAND * across; \
  const int m0 = (band * BAND + inside % high) * BM, n0 = inside / high * BN; \
  const int k_begin = (int)(part % splits) * depth, k_end = min(k, k_begin + depth);
