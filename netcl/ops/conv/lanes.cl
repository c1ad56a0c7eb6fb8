// What the CPU kernels of convolutions share, beside ends.cl: explicit vectors, the tiles of registers they multiply in, what their ends
// read and write. Inputs are of the type of sums; narrower ones are widened before. Operand Y: as in ends.cl.
// Defined for dtypes that are not converted value by value: ADDED_LANES(p), a vector of what is added; Y_LANES(x, p), one is stored.
#pragma OPENCL FP_CONTRACT ON

#ifndef VW
#define VW 4  // lanes of a vector
#define NV 4  // vectors of a micro tile
#endif
#ifndef MR
#define MR 6  // rows of a micro tile; MR * NV sums, NV columns and one weight fit the registers
#endif
#ifndef NT
#define NT 4  // micro tiles side by side: a row of weights fetched once serves all of them
#endif
#ifndef ENDS
#define ENDS 0  // 1: there is a epilogue(): what follows the convolution
#define LATE 0  // 1: that is done as results are stored, where it needs their places or another dtype
#endif

// Vectors at any element, as lvalues. vload and vstore would say it better, but PoCL 3 calls them instead of inlining them,
// and a call empties every register; for the same reason least() and most() stand where min() and max() could.
#define VECTOR(space, p) (((space Loose*)(p))->v)
#define G_LOAD(p) VECTOR(__global const, p)
#define G_STORE(x, p) VECTOR(__global, p) = (x)
#define V JOIN(REAL, VW)
#define Q JOIN(REAL, 4)
#define NR (VW * NV)     // columns of a micro tile
#define STRIP (NT * NR)  // columns of a work-group

typedef struct __attribute__((packed)) { V v; } Loose;
typedef struct __attribute__((packed)) { Q v; } LooseQuad;
#define QUAD(space, p) (((space LooseQuad*)(p))->v)
// Four rows of four values, turned: four quads `step` apart, with one value of each row.
#define PUT_TURNED(space, to, step, a, b, c, d)                   \
  QUAD(space, to) = (Q)(a.x, b.x, c.x, d.x);                      \
  QUAD(space, (to) + (step)) = (Q)(a.y, b.y, c.y, d.y);           \
  QUAD(space, (to) + 2 * (step)) = (Q)(a.z, b.z, c.z, d.z);       \
  QUAD(space, (to) + 3 * (step)) = (Q)(a.w, b.w, c.w, d.w);
// A function, not a macro: LLVM for x86 cuts vectors of 16 lanes into halves, which then do not fit the registers, unless a function
// that takes or gives one was called.
static inline V zeros(void) { return (V)((REAL)0); }
#define ZERO zeros()
// For the sums of a register tile: acc[i][j] is of row i and vector j.
#define EACH_SUM(rows) UNROLL for (int i = 0; i < rows; ++i) UNROLL for (int j = 0; j < NV; ++j)
// Adds the products of a value for each row i and a vector for each j; these must not name a variable b or lanes.
#define ADD_PRODUCTS(rows, value, vector)                                    \
  {                                                                          \
    V b[NV];                                                                 \
    _Pragma("unroll") for (int j = 0; j < NV; ++j) b[j] = vector;            \
    _Pragma("unroll") for (int i = 0; i < rows; ++i) {                       \
      const V lanes = (V)(value);                                            \
      _Pragma("unroll") for (int j = 0; j < NV; ++j) acc[i][j] += lanes * b[j]; \
    }                                                                        \
  }
#ifdef ADDED_LANES
#define ADDED_VECTOR(at) ADDED_LANES(added + (at))
#else
#define ADDED_VECTOR(at) ZERO
#endif
#ifdef Y_LANES
#if !ADDED || defined(ADDED_LANES)
#define VECTORS_KNOWN 1  // results are stored vector by vector
#endif
#endif
#ifndef VECTORS_KNOWN
#define VECTORS_KNOWN 0
#endif

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

#if ENDS
// The first n of a vector of sums, finished and stored from y[at] on.
static inline void store_first(__global const ADDED_T* added, __global Y_T* y, size_t at, V sums, int n, REAL bias, REAL scale) {
#if VECTORS_KNOWN
  if (n == VW) {
    Y_LANES(epilogue(sums, scale, BIAS, (V)(bias), ADDED_VECTOR(at)), y + at);
    return;
  }
#endif
  REAL values[VW], adds[VW];
  for (int k = 0; k < VW; ++k) adds[k] = k < n ? ADDED_AT(at + k) : 0;
  VECTOR(__private, values) = epilogue(sums, scale, BIAS, (V)(bias), VECTOR(__private const, adds));
  for (int k = 0; k < n; ++k) Y_STORE(y, at + k, values[k]);
}

// The same of n sums of neighbouring pixels.
static inline void store_line(__global const ADDED_T* added, __global Y_T* y, size_t at, __local const REAL* from, int n, REAL bias,
                              REAL scale) {
  int i = 0;
#if VECTORS_KNOWN
  for (; n >= VW && i < n; i += VW) {
    const int k = least(i, n - VW);  // the last vector overlaps the one before
    store_first(added, y, at + k, VECTOR(__local const, from + k), VW, bias, scale);
  }
#endif
  for (; i < n; i += VW) {
    REAL sums[VW];
    for (int l = 0; l < VW; ++l) sums[l] = i + l < n ? from[i + l] : 0;
    store_first(added, y, at + i, VECTOR(__private const, sums), least(VW, n - i), bias, scale);
  }
}
#endif
