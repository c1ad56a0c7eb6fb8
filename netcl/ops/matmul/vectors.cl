// Vectors of the type sums are kept in, in memory of any alignment.
#ifndef VW  // lanes of a vector
#define VW 4
#endif
#define V JOIN(REAL, VW)
#define QUAD JOIN(REAL, 4)
// PoCL 3 does not inline vload and vstore on every machine, and a call in the inner loop spills
// every register; a packed structure is standard and becomes one instruction.
typedef struct __attribute__((packed)) { V v; } packed_vector;
typedef struct __attribute__((packed)) { QUAD v; } packed_quad;
// Functions, not macros: LLVM for x86 cuts vectors of 16 lanes into halves, which then do not fit the registers, unless a function that
// takes or gives one was called.
static inline V load_global(__global const REAL* p) { return ((__global const packed_vector*)p)->v; }
static inline V load_local(__local const REAL* p) { return *(__local const V*)p; }  // panels and tiles are aligned
#define G_LOAD(p) load_global(p)
#define L_LOAD(p) load_local(p)
#define G_STORE(x, p) ((__global packed_vector*)(p))->v = (x)
#define QUAD_LOAD(p) (((__global const packed_quad*)(p))->v)
#define QUAD_STORE(x, p) ((__local packed_quad*)(p))->v = (x)
#define L_STORE(x, p) *(__local V*)(p) = (x)
#define P_LOAD(p) (*(const V*)(p))
#define P_STORE(x, p) *(V*)(p) = (x)
