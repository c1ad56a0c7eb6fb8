// What matrix products share: the operands' dtypes and where a finished value comes from. epilogue() itself is generated.
#ifndef A_T
#define A_T float  // left operand
#define A_LOAD(p, i) ((p)[i])
#define B_T float  // right operand
#define B_LOAD(p, i) ((p)[i])
#define C_T float  // result
#define C_STORE(p, i, x) (p)[i] = (x)
#define BIAS_T float  // one value per column of the result
#define BIAS_LOAD(p, i) ((p)[i])
#define INDEX int  // long where an offset does not fit an int
#endif

// The operands, Operands.end, and Matmul.strides(): batches are numbered i0 * batch1 + i1, and operands have a stride for each.
#define IN_POINTERS __global const A_T* restrict a, __global const B_T* restrict b
#define END_POINTERS __global const BIAS_T* restrict bias, __global const ADDED_T* restrict added, __global C_T* restrict c
#define BATCH_NUMBERS const int batch1, const long a0_stride, const long a1_stride, const long b0_stride, const long b1_stride
// Moves all of them to a batch.
#define OFFSETS(batch)                                              \
  a += (batch) / batch1 * a0_stride + (batch) % batch1 * a1_stride; \
  b += (batch) / batch1 * b0_stride + (batch) % batch1 * b1_stride; \
  added += (batch) * m * n;                                         \
  c += (batch) * m * n;

#pragma OPENCL FP_CONTRACT ON  // c += a * b is one instruction; fma() is slower where the hardware lacks it, and on PoCL

#define BIAS_AT(column) (has_bias ? (REAL)BIAS_LOAD(bias, column) : (REAL)0)
#define FINISHED(x, column, at) epilogue(x, scale, has_bias, BIAS_AT(column), ADDED_AT(at))
