// What the CPU kernels of convolutions share: explicit vectors, and the tiles of registers they multiply in.
#pragma OPENCL FP_CONTRACT ON

#ifndef REAL
#define REAL float  // of inputs and sums; narrower inputs are widened before
#endif
#ifndef Y_T  // of the result
#define Y_T float
#define Y_STORE(p, i, x) ((p)[i] = (x))
#endif
#ifndef VW
#define VW 4  // lanes of a vector
#endif
#ifndef NV
#define NV 4  // vectors of a micro tile
#endif
#ifndef MR
#define MR 6  // rows of a micro tile; MR * NV sums, NV columns and one weight fit the registers
#endif
#ifndef NT
#define NT 4  // micro tiles side by side: a row of weights fetched once serves all of them
#endif
#ifndef ADDED_T  // one value per value of the result
#define ADDED_T float
#define ADDED_LOAD(p, i) ((p)[i])
#endif
#ifndef ADDED
#define ADDED 0  // 1: there are such values
#endif
#ifndef BIAS
#define BIAS 0  // 1: add bias[channel]
#endif
#ifndef RELU_OUT
#define RELU_OUT 0  // 1: negative results become zero
#endif

#define PASTE(a, b) a##b
#define EXPAND(a, b) PASTE(a, b)
// Vectors at any element, as lvalues. vload and vstore would say it better, but PoCL 3 calls them instead of inlining them,
// and a call empties every register; for the same reason least() and most() stand where min() and max() could.
#define VECTOR(space, p) (((space Loose*)(p))->v)
#define V EXPAND(REAL, VW)
#define Q EXPAND(REAL, 4)
#define NR (VW * NV)     // columns of a micro tile
#define STRIP (NT * NR)  // columns of a work-group

typedef struct __attribute__((packed)) {
  V v;
} Loose;
typedef struct __attribute__((packed)) {
  Q v;
} LooseQuad;
#define QUAD(space, p) (((space LooseQuad*)(p))->v)
// A function, not a macro: LLVM for x86 cuts vectors of 16 lanes into halves, which then do not fit the registers, unless a function
// that takes or gives one was called.
static inline V zeros(void) { return (V)((REAL)0); }
#define ZERO zeros()
#if ADDED
#define ADDED_AT(at) ((REAL)ADDED_LOAD(added, at))
#else
#define ADDED_AT(at) ((REAL)0)
#endif

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

static inline V finished(V v, REAL bias) {
#if BIAS
  v += bias;
#endif
#if RELU_OUT
  v = v < ZERO ? ZERO : v;
#endif
  return v;
}
