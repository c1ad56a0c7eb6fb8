// Rotary position embedding: every pair of elements of a row is turned by an angle that grows with the row's position.
// A work-item turns one pair in all rows that share its position, so its sine and cosine are computed once.
// Operand X: rows (X_T X_LOAD X_STORE); P: positions (P_T P_LOAD).

#ifndef INTERLEAVED
#define INTERLEAVED 0  // 1: pairs of neighbours, 0: an element of the first half with one of the second
#define POSITIONS 0  // 0: offset, offset + 1, ..; 1: from a tensor
#endif

typedef REAL real;

// x is (outer, heads, n, depth); positions are (n) or (outer, n): by_outer is 0 or n. Heads from `turned` on are copied.
__kernel void rope(__global const X_T* x, __global const P_T* positions, __global const REAL* frequencies, __global X_T* y, const int outer,
                   const int heads, const int n, const int depth, const int by_outer, const int offset, const int direction,
                   const int turned) {
  const int pairs = depth / 2;
  const int at = get_global_id(0) % pairs, row = get_global_id(0) / pairs % n, o = get_global_id(0) / pairs / n;
  if (o >= outer) return;
#if POSITIONS
  const real position = (real)P_LOAD(positions, o * by_outer + row);
#else
  const real position = (real)(offset + row);
#endif
  const real angle = position * frequencies[at], c = cos(angle), s = direction * sin(angle);
  const int one = INTERLEAVED ? 2 * at : at, other = INTERLEAVED ? one + 1 : at + pairs;
  for (int h = 0; h < heads; ++h) {
    const long start = (((long)o * heads + h) * n + row) * depth;
    const real a = X_LOAD(x, start + one), b = X_LOAD(x, start + other);
    X_STORE(y, start + one, h < turned ? a * c - b * s : a);
    X_STORE(y, start + other, h < turned ? a * s + b * c : b);
  }
}
