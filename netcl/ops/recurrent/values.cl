// A vector of one value: work-items that compute a cell each.
#define V REAL
#define GET(p, n) (*(p))
#define PUT(x, p, n) (*(p) = (x))
#ifndef EXP_BELOW
#define EXP_BELOW(x) exp(x)
#endif
