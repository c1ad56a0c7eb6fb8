// The cells of recurrent layers, for one value (SIMT kernels) or a vector of units (kernels for CPUs) at a time. A file that follows this
// one multiplies the rows of row_of() by weights; know() loads what a cell needs beside these sums, finish() computes the cell and
// stores its results. Memory, T steps and B rows: gx (T, B, GATES, HIDDEN), y (T, B, WIDTH), saved (T, B, KEPT, HIDDEN), dg as gx.
// The caller defines REAL, V (REAL or a vector of it), GET(p, n) and PUT(x, p, n) for the first n lanes of a vector, and EXP_BELOW.
#define TANH_CELL 0
#define RELU_CELL 1
#define LSTM_CELL 2
#define GRU_CELL 3
#define FORWARD 0        // h (t - 1) times weight_hh, then the cell
#define PROJECT 1        // what the cell gives times weight_hr
#define BACKWARD 2       // dg (t + 1) times weight_hh, then the gradient of the cell
#define BACK_WIDTH 3     // with a projection: the same product, the gradient of h
#define BACK_PROJECT 4   // and that times weight_hr, then the gradient of the cell
#ifndef PART
#define PART FORWARD
#define KIND LSTM_CELL
#define HIDDEN 4
#define WIDTH HIDDEN  // of h: HIDDEN, or less with a projection
#endif
// Bits of `flags`.
#define REVERSED 1  // from the last step to the first
#define LENGTHS 2   // row b has lengths[b] steps; results of the others are 0
#define INITIAL 4   // there is an h0, and for an LSTM a c0
#define BIASED 8    // a GRU has a bias of the recurrent half
#define GIVEN_Y 16  // gradients that come in: of y, of the last h, of the last c
#define GIVEN_H 32
#define GIVEN_C 64
#ifndef POLLS  // 1: groups wait for each other's results, which are SENTINEL before they are there
#define POLLS 0
#endif
#define PROJECTED (WIDTH != HIDDEN)
#define GATES (KIND == LSTM_CELL ? 4 : KIND == GRU_CELL ? 3 : 1)
#define KEPT (KIND == LSTM_CELL ? 5 : KIND == GRU_CELL ? 4 : 1)
#if PART == FORWARD
#define COLUMN_GATES GATES                    // columns of the product for each unit
#define UNITS HIDDEN                          // units that are computed
#define DEPTH WIDTH                           // terms of a sum
#define WEIGHT_AT(unit, gate, k) (((long)(gate) * HIDDEN + (unit)) * WIDTH + (k))
#define ALONG_K 1                             // values along k lie side by side; else those of units
#elif PART == PROJECT
#define COLUMN_GATES 1
#define UNITS WIDTH
#define DEPTH HIDDEN
#define WEIGHT_AT(unit, gate, k) ((long)(unit) * HIDDEN + (k))
#define ALONG_K 1
#else
#define COLUMN_GATES 1
#define UNITS (PART == BACK_WIDTH ? WIDTH : HIDDEN)
#define DEPTH (PART == BACK_PROJECT ? WIDTH : GATES * HIDDEN)
#define WEIGHT_AT(unit, gate, k) ((long)(k) * UNITS + (unit))
#define ALONG_K 0
#endif
#define SENTINEL 0xffffffffu

typedef struct {
  __global const REAL *gx, *bias, *h0, *c0, *gy, *gh, *gc;
  __global const int* lengths;
  __global REAL *y, *saved, *hn, *cn, *full, *dg, *dx, *dhp, *dh0, *carry;
  int T, B, flags;
} Memory;
#define HAS(flag) (m.flags & (flag))

// Sigmoids and tanh as ratios of a number and 1 + e, so that two of them take one division.
static inline V sigmoid_top(const V x, V* below) {
  const V e = EXP_BELOW(-fabs(x));
  *below = 1 + e;
  return x < (V)(0) ? e : (V)(1);
}
static inline V tanh_top(const V x, V* below) {
  const V e = EXP_BELOW(-2 * fabs(x));
  *below = 1 + e;
  return 1 - e;
}
static inline V tanh_end(const V x, const V ratio) {  // of x near 0 the difference loses digits
#ifdef WIDE
  return tanh(x);
#else
  const V a = fabs(x), s = x * x;
  return copysign(a < (V)(0.125f) ? a * (1 + s * (-0.33333334f + s * (0.13333334f - s * 0.053968254f))) : ratio, x);
#endif
}
static inline V tanh_of(const V x) {
  V below;
  const V top = tanh_top(x, &below);
  return tanh_end(x, top / below);
}
static inline void sigmoids_of(const V x, const V y, V* p, V* q) {
  V a, b;
  const V s = sigmoid_top(x, &a), t = sigmoid_top(y, &b), r = 1 / (a * b);
  *p = s * b * r;
  *q = t * a * r;
}
static inline void sigmoid_and_tanh_of(const V x, const V y, V* p, V* q) {
  V a, b;
  const V s = sigmoid_top(x, &a), t = tanh_top(y, &b), r = 1 / (a * b);
  *p = s * b * r;
  *q = tanh_end(y, t * a * r);
}

static inline int length_of(const Memory m, const int b) { return HAS(LENGTHS) ? clamp(m.lengths[b], 1, m.T) : m.T; }
static inline int first_of(const Memory m, const int b) { return HAS(REVERSED) ? length_of(m, b) - 1 : 0; }
static inline int last_of(const Memory m, const int b) { return HAS(REVERSED) ? 0 : length_of(m, b) - 1; }
// The time of the step that is computed as number s.
static inline int time_of(const Memory m, const int s) { return (HAS(REVERSED) != 0) == (PART >= BACKWARD) ? s : m.T - 1 - s; }
static inline long at_row(const Memory m, const int t, const int b) { return (long)t * m.B + b; }
#define EARLIER(t) ((t) + (HAS(REVERSED) ? 1 : -1))
#define LATER(t) ((t) - (HAS(REVERSED) ? 1 : -1))

// The row that is multiplied by the weights in step s, or 0 for zeros.
static inline __global const REAL* row_of(const Memory m, const int s, const int b) {
  const int t = time_of(m, s);
#if PART == BACKWARD || PART == BACK_WIDTH
  if (s == m.T) return m.dg + at_row(m, first_of(m, b), b) * DEPTH;
#endif
  if (t >= length_of(m, b)) return 0;
#if PART == FORWARD
  if (t == first_of(m, b)) return HAS(INITIAL) ? m.h0 + (long)b * DEPTH : 0;
  return m.y + at_row(m, EARLIER(t), b) * DEPTH;
#elif PART == PROJECT
  return m.full + at_row(m, t, b) * DEPTH;
#elif PART == BACK_PROJECT
  return m.dhp + at_row(m, t, b) * DEPTH;
#else
  return t == last_of(m, b) ? 0 : m.dg + at_row(m, LATER(t), b) * DEPTH;
#endif
}

// Stores what other groups wait for.
static inline void publish(__global REAL* p, const V x, const int n) {
#if POLLS
  *(volatile __global float*)p = as_uint(x) == SENTINEL ? as_float(0x7fffffffu) : x;
#else
  PUT(x, p, n);
#endif
}

// What a cell needs beside the sums: x, the inputs of its gates or what forward kept; before, the cell or h of the step before it; up, the
// gradient from above; carry, that of the step after it.
typedef struct { V x[5], before, up, carry; } Known;

// By a pointer: Oclgrind has no functions that return structures.
static inline void know(Known* k, const Memory m, const int s, const int b, const int u, const int n) {
  const int t = time_of(m, s), first = first_of(m, b);
  const V zero = (V)(0);
  for (int i = 0; i < 5; ++i) k->x[i] = zero;
  k->before = k->up = k->carry = zero;
  if (s == m.T) {
#if PART == BACKWARD && KIND == GRU_CELL
    k->carry = GET(m.carry + (long)b * HIDDEN + u, n);
#endif
    return;
  }
  if (t >= length_of(m, b)) return;
#if PART == FORWARD
  for (int i = 0; i < GATES; ++i) k->x[i] = GET(m.gx + (at_row(m, t, b) * GATES + i) * HIDDEN + u, n);
#if KIND == GRU_CELL
  if (HAS(BIASED)) {
    for (int i = 0; i < 2; ++i) k->x[i] += GET(m.bias + i * HIDDEN + u, n);
    k->x[3] = GET(m.bias + 2 * HIDDEN + u, n);
  }
#endif
#elif PART == BACKWARD || PART == BACK_PROJECT
  for (int i = 0; i < KEPT; ++i) k->x[i] = GET(m.saved + (at_row(m, t, b) * KEPT + i) * HIDDEN + u, n);
#if KIND == LSTM_CELL || KIND == GRU_CELL
  if (t != last_of(m, b)) k->carry = GET(m.carry + (long)b * HIDDEN + u, n);
  else if (KIND == LSTM_CELL && HAS(GIVEN_C)) k->carry = GET(m.gc + (long)b * HIDDEN + u, n);
#endif
#endif
#if PART == FORWARD || PART == BACKWARD || PART == BACK_PROJECT
#if KIND == LSTM_CELL
  if (t != first) k->before = GET(m.saved + (at_row(m, EARLIER(t), b) * KEPT + 4) * HIDDEN + u, n);
  else if (HAS(INITIAL)) k->before = GET(m.c0 + (long)b * HIDDEN + u, n);
#elif KIND == GRU_CELL
  if (t != first) k->before = GET(m.y + at_row(m, EARLIER(t), b) * HIDDEN + u, n);
  else if (HAS(INITIAL)) k->before = GET(m.h0 + (long)b * HIDDEN + u, n);
#endif
#endif
#if PART == BACKWARD || PART == BACK_WIDTH
  if (HAS(GIVEN_Y)) k->up = GET(m.gy + at_row(m, t, b) * WIDTH + u, n);
  if (HAS(GIVEN_H) && t == last_of(m, b)) k->up += GET(m.gh + (long)b * WIDTH + u, n);
#endif
}

#if PART == FORWARD
static inline void finish(const Memory m, const int s, const int b, const int u, const int n, const Known k, const V* sum) {
  const int t = time_of(m, s);
  const long row = at_row(m, t, b);
  V keep[5], h;
#if KIND == LSTM_CELL
  sigmoids_of(k.x[0] + sum[0], k.x[1] + sum[1], &keep[0], &keep[1]);
  sigmoid_and_tanh_of(k.x[3] + sum[3], k.x[2] + sum[2], &keep[3], &keep[2]);
  keep[4] = keep[1] * k.before + keep[0] * keep[2];
  h = keep[3] * tanh_of(keep[4]);
#elif KIND == GRU_CELL
  sigmoids_of(k.x[0] + sum[0], k.x[1] + sum[1], &keep[0], &keep[1]);
  keep[3] = k.x[3] + sum[2];
  keep[2] = tanh_of(k.x[2] + keep[0] * keep[3]);
  h = keep[2] + keep[1] * (k.before - keep[2]);
#else
  h = k.x[0] + sum[0];
  h = keep[0] = KIND == TANH_CELL ? tanh_of(h) : (h <= (V)(0) ? (V)(0) : h);
#endif
  const int in = t < length_of(m, b);
  if (!in) {
    h = (V)(0);
    for (int i = 0; i < KEPT; ++i) keep[i] = (V)(0);
  }
  if (PROJECTED) PUT(h, m.full + row * HIDDEN + u, n);
  else publish(m.y + row * WIDTH + u, h, n);
  for (int i = 0; i < KEPT; ++i) PUT(keep[i], m.saved + (row * KEPT + i) * HIDDEN + u, n);
  if (in && t == last_of(m, b)) {
    if (!PROJECTED) PUT(h, m.hn + (long)b * WIDTH + u, n);
    if (KIND == LSTM_CELL) PUT(keep[KEPT - 1], m.cn + (long)b * HIDDEN + u, n);
  }
}
#elif PART == PROJECT
static inline void finish(const Memory m, const int s, const int b, const int u, const int n, const Known k, const V* sum) {
  const int t = time_of(m, s);
  PUT(sum[0], m.y + at_row(m, t, b) * WIDTH + u, n);
  if (t == last_of(m, b)) PUT(sum[0], m.hn + (long)b * WIDTH + u, n);
}
#elif PART == BACK_WIDTH
static inline void finish(const Memory m, const int s, const int b, const int u, const int n, const Known k, const V* sum) {
  if (s == m.T) PUT(sum[0], m.dh0 + (long)b * WIDTH + u, n);
  else PUT(sum[0] + k.up, m.dhp + at_row(m, time_of(m, s), b) * WIDTH + u, n);
}
#else
static inline void finish(const Memory m, const int s, const int b, const int u, const int n, const Known k, const V* sum) {
  const int t = time_of(m, s);
  const long row = at_row(m, t, b);
  V dg[4], dh = sum[0] + k.up;
#if KIND == GRU_CELL
  dh += k.carry;
#endif
  if (s == m.T) {
    PUT(dh, m.dh0 + (long)b * WIDTH + u, n);
    return;
  }
#if KIND == LSTM_CELL
  const V i = k.x[0], f = k.x[1], g = k.x[2], o = k.x[3], tc = tanh_of(k.x[4]), dc = k.carry + dh * o * (1 - tc * tc);
  dg[0] = dc * g * i * (1 - i);
  dg[1] = dc * k.before * f * (1 - f);
  dg[2] = dc * i * (1 - g * g);
  dg[3] = dh * tc * o * (1 - o);
  const V carry = dc * f;
#if PART == BACK_PROJECT
  PUT(o * tc, m.full + row * HIDDEN + u, n);
#endif
#elif KIND == GRU_CELL
  const V r = k.x[0], z = k.x[1], c = k.x[2], dn = dh * (1 - z) * (1 - c * c), carry = dh * z;
  dg[0] = dn * k.x[3] * r * (1 - r);
  dg[1] = dh * (k.before - c) * z * (1 - z);
  dg[2] = dn * r;
#else
  dg[0] = KIND == TANH_CELL ? dh * (1 - k.x[0] * k.x[0]) : (k.x[0] > (V)(0) ? dh : (V)(0));
#endif
  const int in = t < length_of(m, b);
  for (int j = 0; j < GATES; ++j) publish(m.dg + (row * GATES + j) * HIDDEN + u, in ? dg[j] : (V)(0), n);
#if KIND == GRU_CELL
  for (int j = 0; j < 3; ++j) PUT(in ? (j == 2 ? dn : dg[j]) : (V)(0), m.dx + (row * 3 + j) * HIDDEN + u, n);
#endif
#if KIND == LSTM_CELL || KIND == GRU_CELL
  if (in) PUT(carry, m.carry + (long)b * HIDDEN + u, n);
#endif
}
#endif
