// What matrix products share: the operands' dtypes and where a finished value comes from. finish() itself is generated.
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
#ifndef INDEX  // long where an offset does not fit an int
#define INDEX int
#endif

#pragma OPENCL FP_CONTRACT ON  // c += a * b is one instruction; fma() is slower where the hardware lacks it, and on PoCL

#define BIAS_AT(column) (has_bias ? (REAL)BIAS_LOAD(bias, column) : (REAL)0)
#define FINISHED(x, column, at) finish(x, scale, has_bias, BIAS_AT(column), ADDED_AT(at))
