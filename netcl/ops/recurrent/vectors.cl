// Vectors of VW units, in memory of any alignment; of the last of them only n lanes exist.
#ifndef VW
#define VW 4
#endif
#define V JOIN(REAL, VW)
typedef struct __attribute__((packed)) { V v; } packed_vector;
typedef union { V v; REAL e[VW]; } lanes;
// Functions, not macros: see vectors.cl of products.
static inline V load_global(__global const REAL* p) { return ((__global const packed_vector*)p)->v; }
static inline V load_some(__global const REAL* p, const int n) {
  lanes x;
  x.v = (V)(0);
  for (int i = 0; i < n; ++i) x.e[i] = p[i];
  return x.v;
}
static inline void store_some(const V v, __global REAL* p, const int n) {
  lanes x;
  x.v = v;
  for (int i = 0; i < n; ++i) p[i] = x.e[i];
}
#define GET(p, n) ((n) < VW ? load_some(p, n) : load_global(p))
#define PUT(x, p, n)                                  \
  do {                                                \
    if ((n) < VW) store_some(x, p, n);                \
    else ((__global packed_vector*)(p))->v = (x);     \
  } while (0)
