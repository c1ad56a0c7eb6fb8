// What matrix products share: the operands' dtypes and what happens to a finished value.
#ifndef A_T  // left operand
#define A_T float
#define A_LOAD(p, i) ((p)[i])
#endif
#ifndef B_T  // right operand
#define B_T float
#define B_LOAD(p, i) ((p)[i])
#endif
#ifndef C_T  // result
#define C_T float
#define C_STORE(p, i, x) (p)[i] = (x)
#endif
#ifndef BIAS_T  // one value per column of the result
#define BIAS_T float
#define BIAS_LOAD(p, i) ((p)[i])
#endif
#ifndef REAL  // the type sums are kept in
#define REAL float
#endif
#ifndef ACTIVATION  // of a finished value, in x
#define ACTIVATION(x) (x)
#endif
#ifndef INDEX  // long where an offset does not fit an int
#define INDEX int
#endif

#pragma OPENCL FP_CONTRACT ON  // c += a * b is one instruction; fma() is slower where the hardware lacks it, and on PoCL

#define RELU_OF(x) ((x) < 0 ? (REAL)0 : (x))  // a NaN is not below zero and stays
#define TANH_OF(x) tanh(x)
#define SIGMOID_OF(x) (1 / (1 + exp(-(x))))
#define SILU_OF(x) ((x) / (1 + exp(-(x))))
#define GELU_OF(x) ((REAL)0.5 * (x) * (1 + erf((x) * (REAL)0.70710678118654752440)))

static inline REAL finish(REAL x, __global const BIAS_T* bias, const int has_bias, const int column) {
  if (has_bias) x += (REAL)BIAS_LOAD(bias, column);
  return ACTIVATION(x);
}
