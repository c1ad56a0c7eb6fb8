// Where a convolution begins and ends: its arguments, and what a sum becomes before it is stored. Operands X the gathered input (forward: x;
// input gradient: dy), W weights (of a weight gradient: dy), B bias, Y the result.

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
