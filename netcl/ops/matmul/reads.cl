// How the kernels of products that GPUs run (simt.cl, slices.cl) read their operands.
#ifndef TRANS_A  // 1: the left operand is stored transposed, K x M
#define TRANS_A 0
#endif
#ifndef TRANS_B  // 1: the right operand is stored transposed, N x K
#define TRANS_B 0
#endif
#ifndef WIDTH  // values per load: 4 where rows of both operands are multiples of four values long and aligned, else 1
#define WIDTH 1
#endif
#ifndef A_QUAD  // four values of the left operand from p on, as float4; and of the right one
#define A_QUAD(p) (*(__global const float4*)(p))
#define B_QUAD(p) (*(__global const float4*)(p))
#endif
