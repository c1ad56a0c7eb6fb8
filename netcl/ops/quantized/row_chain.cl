// Several products of one token in one launch on CPUs, those of chain.cl, all in float32. Follows neon.cl or runs.cl; their macros, and
//   FOLLOWED  1: there is a next product      PLAIN ASM AHEAD DOTS  as in those      BIAS_T BIAS_LOAD  from the launch
// Activations are records of 32 columns. Without NEON, a record holds 32 floats; with DOTS, 32 codes, the sum of each half and a scale.
#if ASM != 2
#define X_RECORD (DOTS ? 64 : 128)
#define QUAD_AT(n, j) (((__global const float4*)record)[j])
#define CODES_AT(n) record
#define COUNT_AT(n, i) ((__global const int*)record)[8 + (i)]
#define SCALE_AT(n) ((__global const float*)record)[10]
static inline void put_record(__global char* record, const float4* f, const int t) {
#if DOTS
  ((__global float*)record)[10] = put_codes(f, record, (__global int*)record + 8);
#else
  UNROLL for (int j = 0; j < 8; ++j) ((__global float4*)record)[j] = f[j];
#endif
}

// The products of 32 rows with a token.
static inline void row_sums(__global const uchar* w, __global const char* x, const int row0, const int rows, const int runs, float4* f) {
  for (int strip = 0; strip < 2 && row0 + 16 * strip < rows; ++strip) {
    __global const uchar* own = w + (size_t)(row0 / 16 + strip) * (runs / PER_RECORD) * RECORD;
    FLOATS acc[1] = {(FLOATS)(0.0f)};
    for (int run = 0; run < runs; ++run) {
      __global const uchar* p = own + (size_t)(run / PER_RECORD) * RECORD;
      __global const char* record = x + (size_t)run * X_RECORD;
      FETCH_AHEAD(p, run)
      ADD_RUN(acc, p, run, 0)
    }
    UNROLL for (int i = 0; i < 4; ++i) f[4 * strip + i] = ((const float4*)acc)[i];
  }
}
#endif

// A work-item's share of the units from `first` on, at least one.
#define SHARED_UNITS(count, first) max(1, ((count) - (first)) / items)

// Atomic numbers that all work-items share:
//   add_to  adds with acquire and release, and returns the number before      current  reads with acquire
//   take_units  takes the next SHARED_UNITS of a phase, and returns the first
#if ASM == 2
static inline int add_to(__global int* number, const int more) {
  int old, sum, failed;
  __asm__ volatile("2:\n\tldaxr %w0, [%3]\n\tadd %w1, %w0, %w4\n\tstlxr %w2, %w1, [%3]\n\tcbnz %w2, 2b"
                   : "=&r"(old), "=&r"(sum), "=&r"(failed) : "r"(number), "r"(more) : "memory");
  return old;
}

static inline int current(__global const int* number) {
  int value;
  __asm__ volatile("yield\n\tldar %w0, [%1]" : "=r"(value) : "r"(number) : "memory");
  return value;
}

static inline int take_units(__global int* number, const int count, const int items) {
  int old, next, failed;
  __asm__ volatile("2:\n\tldaxr %w0, [%3]\n\tsub %w1, %w4, %w0\n\tsdiv %w1, %w1, %w5\n\tcmp %w1, #1\n\tcsinc %w1, %w1, wzr, gt\n\t"
                   "add %w1, %w1, %w0\n\tstlxr %w2, %w1, [%3]\n\tcbnz %w2, 2b"
                   : "=&r"(old), "=&r"(next), "=&r"(failed) : "r"(number), "r"(count), "r"(items) : "memory", "cc");
  return old;
}
#else
#define add_to(number, more) __atomic_fetch_add(number, more, __ATOMIC_ACQ_REL)
#define current(number) __atomic_load_n(number, __ATOMIC_ACQUIRE)
static inline int take_units(__global int* number, const int count, const int items) {
  int old = current(number);
  while (!__atomic_compare_exchange_n(number, &old, old + SHARED_UNITS(count, old), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
  return old;
}
#endif

// A phase is `count` units of work. Work-items take many neighboring units at first, which memory is fastest for, and fewer at the end. Then
// they wait for the units that others have taken. They need not run at the same time, since what one waits for has begun. Numbers of a
// phase: units taken, units done.
#define NUMBER(phase, which) (turns + (2 * (phase) + (which)) * 16)
#define EACH_UNIT(phase, count)                                                                                                      \
  for (int first; (first = take_units(NUMBER(phase, 0), count, items)) < (count); add_to(NUMBER(phase, 1), SHARED_UNITS(count, first))) \
    for (int unit = first; unit < first + SHARED_UNITS(count, first); ++unit)
#define WAIT_FOR(phase, count) while (current(NUMBER(phase, 1)) < (count)) {}

static inline void scale_rows(float4* f, __global const float* squares, const int columns, const float eps) {
  float total = 0.0f;
  for (int i = 0; i < columns / 32; ++i) total += squares[i];
  const float factor = 1.0f / sqrt(total / columns + eps);
  UNROLL for (int i = 0; i < 8; ++i) f[i] *= factor;
}

// 32 rows of a + b w' as y; also their records times `norm`, and the sum of their squares.
static inline void add_product(__global const float* a, __global const char* b, __global const uchar* w, __global float* y, const int unit,
                               const int rows, const int columns, const int makes, __global const float* norm, __global char* records,
                               __global float* squares) {
  float4 f[8], sum = (float4)(0.0f);
  row_sums(w, b, 32 * unit, rows, columns / 32, f);
  UNROLL for (int i = 0; i < 8; ++i) {
    f[i] += *(__global const float4*)(a + 32 * unit + 4 * i);
    *(__global float4*)(y + 32 * unit + 4 * i) = f[i];
    sum += f[i] * f[i];
    if (makes) f[i] *= *(__global const float4*)(norm + 32 * unit + 4 * i);
  }
  if (!makes) return;
  squares[unit] = sum.x + sum.y + sum.z + sum.w;
  put_record(records + (size_t)unit * X_RECORD, f, 0);
}

// chain.cl's products of one token, all in float32. `scratch` holds records of inside, h, the gate's result and y, then squares of h and y.
// `turns` is zero before and after.
__kernel void strips_chain(__global const uchar* w_out, __global const uchar* w_gate, __global const uchar* w_up, __global const uchar* w_down,
                           __global const uchar* w_next, __global const float* inside, __global const float* x, __global const float* norm,
                           __global const float* next_norm, __global const BIAS_T* bias, __global float* h, __global float* y,
                           __global float* z, __global char* scratch, __global int* turns, const int attended, const int width,
                           const int inner, const int next, const int biased, const float eps, const float next_eps) {
  const int items = get_num_groups(0);
  __global char* of_inside = scratch;
  __global char* of_h = of_inside + (size_t)(attended / 32) * X_RECORD;
  __global char* of_gated = of_h + (size_t)(width / 32) * X_RECORD;
  __global char* of_y = of_gated + (size_t)(inner / 32) * X_RECORD;
  __global float* h_squares = (__global float*)(of_y + (size_t)(width / 32) * X_RECORD);
  __global float* y_squares = h_squares + width / 32;
  EACH_UNIT(0, attended / 32) {
    float4 f[8];
    UNROLL for (int i = 0; i < 8; ++i) f[i] = *(__global const float4*)(inside + 32 * unit + 4 * i);
    put_record(of_inside + (size_t)unit * X_RECORD, f, 0);
  }
  WAIT_FOR(0, attended / 32)
  EACH_UNIT(1, width / 32) add_product(x, of_inside, w_out, h, unit, width, attended, 1, norm, of_h, h_squares);
  WAIT_FOR(1, width / 32)
  EACH_UNIT(2, inner / 32) {
    float4 f[8], g[8];
    row_sums(w_up, of_h, 32 * unit, inner, width / 32, f);
    row_sums(w_gate, of_h, 32 * unit, inner, width / 32, g);
    scale_rows(f, h_squares, width, eps);
    scale_rows(g, h_squares, width, eps);
    for (int i = 0; i < 8; ++i) f[i] *= epilogue(g[i], 1.0f, 0, (float4)(0.0f), (float4)(0.0f));
    put_record(of_gated + (size_t)unit * X_RECORD, f, 0);
  }
  WAIT_FOR(2, inner / 32)
  EACH_UNIT(3, width / 32) add_product(h, of_gated, w_down, y, unit, width, inner, FOLLOWED, next_norm, of_y, y_squares);
#if FOLLOWED
  WAIT_FOR(3, width / 32)
  EACH_UNIT(4, (next + 31) / 32) {
    float4 f[8];
    row_sums(w_next, of_y, 32 * unit, next, width / 32, f);
    scale_rows(f, y_squares, width, next_eps);
    for (int r = 0; r < min(32, next - 32 * unit); ++r)
      z[32 * unit + r] = ((const float*)f)[r] + (biased ? BIAS_LOAD(bias, 32 * unit + r) : 0.0f);
  }
#endif
  if (add_to(NUMBER(5, 0), 1) == items - 1)
    for (int phase = 0; phase < 5; ++phase) *NUMBER(phase, 0) = *NUMBER(phase, 1) = *NUMBER(5, 0) = 0;
}
