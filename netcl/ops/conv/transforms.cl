// Winograd's transforms F(4 x 4, 3 x 3) along one axis, as macros of a type T (a scalar or a vector) and of macros D and R: D(k) is read,
// R(k) is assigned, and all of D is read before R is written. winograd.py brings P1 P2 P3 and Q1 Q2 Q3, powers of the points p and q,
// PQ_SUM and PQ_PRODUCT of their squares, and SCALES. The points p and -p share the even and the odd half of their polynomials: with
// fused multiply-adds a transform of inputs takes twelve.

// What a pass mostly reads and writes: a row or a column by itself, or row r or column s of what is transformed along one axis.
#define ROW(k) row[k]
#define COLUMN(k) column[k]
#define HALF_ROW(k) half_way[r][k]
#define HALF_COLUMN(k) half_way[k][s]

// Six values from six inputs: B' d.
#define INPUT_TRANSFORM(T, D, R)                              \
  {                                                           \
    const T even_p = D(4) - Q2 * D(2);                        \
    const T even_q = D(4) - P2 * D(2);                        \
    const T odd_p = D(3) - Q2 * D(1);                         \
    const T odd_q = D(3) - P2 * D(1);                         \
    const T first = D(4) - PQ_SUM * D(2) + PQ_PRODUCT * D(0); \
    const T last = D(5) - PQ_SUM * D(3) + PQ_PRODUCT * D(1);  \
    R(0) = first;                                             \
    R(1) = even_p + P1 * odd_p;                               \
    R(2) = even_p - P1 * odd_p;                               \
    R(3) = even_q + Q1 * odd_q;                               \
    R(4) = even_q - Q1 * odd_q;                               \
    R(5) = last;                                              \
  }

// Six values from three weights; the divisors of G, those of both axes in one factor, are SCALES and come last.
#define WEIGHT_TRANSFORM(T, D, R)      \
  {                                    \
    const T even_p = D(0) + P2 * D(2); \
    const T even_q = D(0) + Q2 * D(2); \
    const T odd = D(1), last = D(2);   \
    R(0) = D(0);                       \
    R(1) = even_p + P1 * odd;          \
    R(2) = even_p - P1 * odd;          \
    R(3) = even_q + Q1 * odd;          \
    R(4) = even_q - Q1 * odd;          \
    R(5) = last;                       \
  }

// Four outputs from six products: A' d.
#define OUTPUT_TRANSFORM(T, D, R)                      \
  {                                                    \
    const T sum_p = D(1) + D(2), less_p = D(1) - D(2); \
    const T sum_q = D(3) + D(4), less_q = D(3) - D(4); \
    const T first = D(0) + (sum_p + sum_q);            \
    const T last = D(5) + (P3 * less_p + Q3 * less_q); \
    R(0) = first;                                      \
    R(1) = P1 * less_p + Q1 * less_q;                  \
    R(2) = P2 * sum_p + Q2 * sum_q;                    \
    R(3) = last;                                       \
  }

// Six values from the gradients of four outputs: A d.
#define OUTPUT_GRAD_TRANSFORM(T, D, R)     \
  {                                        \
    const T even_p = D(0) + P2 * D(2);     \
    const T even_q = D(0) + Q2 * D(2);     \
    const T odd_p = P1 * D(1) + P3 * D(3); \
    const T odd_q = Q1 * D(1) + Q3 * D(3); \
    const T first = D(0), last = D(3);     \
    R(0) = first;                          \
    R(1) = even_p + odd_p;                 \
    R(2) = even_p - odd_p;                 \
    R(3) = even_q + odd_q;                 \
    R(4) = even_q - odd_q;                 \
    R(5) = last;                           \
  }

// The gradients of three weights from those of six values, which SCALES have multiplied: G' d.
#define WEIGHT_GRAD_TRANSFORM(T, D, R)                 \
  {                                                    \
    const T sum_p = D(1) + D(2), less_p = D(1) - D(2); \
    const T sum_q = D(3) + D(4), less_q = D(3) - D(4); \
    const T first = D(0) + (sum_p + sum_q);            \
    const T last = D(5) + (P2 * sum_p + Q2 * sum_q);   \
    R(0) = first;                                      \
    R(1) = P1 * less_p + Q1 * less_q;                  \
    R(2) = last;                                       \
  }
