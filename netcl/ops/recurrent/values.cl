// A vector of one value: work-items that compute a cell each.
#define V REAL
#define GET(p, n) (*(p))
#define PUT(x, p, n) (*(p) = (x))
