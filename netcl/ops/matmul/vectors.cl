// Vectors of the type sums are kept in, in memory of any alignment.
#ifndef VW  // lanes of a vector
#define VW 4
#endif
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define V JOIN(REAL, VW)
#define QUAD JOIN(REAL, 4)
// PoCL 3 does not inline vload and vstore on every machine, and a call in the inner loop spills
// every register; a packed structure is standard and becomes one instruction.
typedef struct __attribute__((packed)) { V v; } packed_vector;
typedef struct __attribute__((packed)) { QUAD v; } packed_quad;
#define G_LOAD(p) (((__global const packed_vector*)(p))->v)
#define G_STORE(x, p) ((__global packed_vector*)(p))->v = (x)
#define QUAD_LOAD(p) (((__global const packed_quad*)(p))->v)
#define QUAD_STORE(x, p) ((__local packed_quad*)(p))->v = (x)
#define L_LOAD(p) (*(__local const V*)(p))  // panels and tiles are aligned
#define L_STORE(x, p) *(__local V*)(p) = (x)
#define P_STORE(x, p) *(V*)(p) = (x)
#define V_RELU_OF(x) select(x, (V)(0), (x) < (V)(0))
