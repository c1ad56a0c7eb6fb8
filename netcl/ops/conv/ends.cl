// Where a convolution begins and ends: the operands with their defaults, and what a sum becomes before it is stored.

#ifndef X_T  // the gathered input (forward: x; input gradient: dy)
#define X_T float
#define X_LOAD(p, i) ((p)[i])
#endif
#ifndef W_T  // weights; for weight gradients dy
#define W_T float
#define W_LOAD(p, i) ((p)[i])
#endif
#ifndef B_T  // bias
#define B_T float
#define B_LOAD(p, i) ((p)[i])
#endif
#ifndef Y_T  // the result
#define Y_T float
#define Y_STORE(p, i, x) ((p)[i] = (x))
#endif
// The tensors of ConvOperands.end, and the sizes of Convolution.sizes. C, M: channels and filters of a group; H, W: plane of x; OH, OW: plane of y.
#define END_POINTERS __global const B_T* restrict bias, __global const ADDED_T* restrict added, __global Y_T* restrict y
#define CONV_NUMBERS                                                                                                           \
  int N, int C, int H, int W, int M, int OH, int OW, int KH, int KW, int stride_h, int stride_w, int pad_h, int pad_w,         \
      int dilation_h, int dilation_w, int groups

#ifndef BIAS
#define BIAS 0  // 1: add bias[channel]
#endif
#if BIAS
#define BIAS_OF(filter) B_LOAD(bias, filter)
#else
#define BIAS_OF(filter) ((REAL)0)
#endif
// By the generated epilogue(), for kernels that end in whatever follows the convolution.
#define FINISHED(x, filter, at) epilogue(x, scale, BIAS, BIAS_OF(filter), ADDED_AT(at))
