// Where products on CPUs end: whole vectors of a row, and what does not fill one. Defined for dtypes that are not converted value by value:
// BIAS_LANES(p), ADDED_LANES(p): vectors of operands as REAL; C_LANES(x, p): stores one of the result.
#ifdef ADDED_LANES
#define ADDED_VECTOR(at) ADDED_LANES(added + (at))
#else
#define ADDED_VECTOR(at) ((V)(0))
#endif
#if defined(C_LANES) && defined(BIAS_LANES) && (defined(ADDED_LANES) || !ADDED)
#define WHOLE_VECTORS 1  // are stored as such
#else
#define WHOLE_VECTORS 0
#endif

// Ends and stores `width` values from a column on, at most VW.
static inline void end_line(const REAL* line, const int width, const int column, const INDEX at, __global const BIAS_T* bias,
                            const int has_bias, __global const ADDED_T* added, const REAL scale, __global C_T* c) {
  REAL ended[VW] __attribute__((aligned(64))), shifts[VW] __attribute__((aligned(64))), adds[VW] __attribute__((aligned(64)));
  for (int j = 0; j < VW; ++j) {
    ended[j] = j < width ? line[j] : 0;
    shifts[j] = j < width ? BIAS_AT(column + j) : 0;
    adds[j] = j < width ? ADDED_AT(at + j) : 0;
  }
  P_STORE(epilogue(P_LOAD(ended), scale, has_bias, P_LOAD(shifts), P_LOAD(adds)), ended);
  for (int j = 0; j < width; ++j) C_STORE(c, at + j, ended[j]);
}
