// Convolutions with 3x3 kernels and stride 1 on CPU devices, by Winograd's F(4 x 4, 3 x 3): tiles of 4 x 4 outputs from 36 products
// instead of 144. A work-group is one work-item; the lanes of a vector are tiles, STRIP neighbours at a time, across lines and images.
// The transformed inputs of a strip wait in a room of global memory that the group keeps to itself, small enough for the second cache;
// there every block of MR filters meets them: 36 small products in registers, then the way back to pixels. Products never leave the caches.
// Where there are few tiles, a block's weights are FRESH: transformed by the group that multiplies with them, and never seen by memory.
// SCALES as in transforms.cl, operand Y as in ends.cl.
#ifndef PART
#define PART 0  // 1: only the transform of weights, 2: only the convolution
#define FRESH 0  // 1: the convolution transforms weights itself
#define DEPTH 64  // channels for which it does at a time, a multiple of CHANNELS
#endif
#define PARTS 36
#define APART 16  // elements between the parts of transformed values: at a power of two they would share a line of the first cache

#define CHANNELS 16  // whose weights are turned before they are transformed
#define F JOIN(REAL, MR)
typedef struct __attribute__((packed)) { F v; } LooseFilters;

// n values of each of MR filters, side by side by value, to_step apart; a filter beyond the last is the last.
static inline void turn(REAL* to, int to_step, __global const REAL* from, int step, int filters, int n) {
  for (int f = 0; f < MR; f += 4) {
    __global const REAL *a = from + (size_t)least(f, filters - 1) * step, *b = from + (size_t)least(f + 1, filters - 1) * step;
    __global const REAL *c = from + (size_t)least(f + 2, filters - 1) * step, *d = from + (size_t)least(f + 3, filters - 1) * step;
    REAL* at = to + f;
    int i = 0;
    for (; i + 4 <= n; i += 4, at += 4 * to_step) {
      const Q p = QUAD(__global const, a + i), q = QUAD(__global const, b + i), r = QUAD(__global const, c + i), s = QUAD(__global const, d + i);
      PUT_TURNED(__private, at, to_step, p, q, r, s)
    }
    for (; i < n; ++i, at += to_step) QUAD(__private, at) = (Q)(a[i], b[i], c[i], d[i]);
  }
}

// u[part][channel][filter] of the block that begins with filter m, for up to CHANNELS channels from the first on; `part` elements lie
// between the parts. back: for an input gradient, mirrored, channels and filters of w exchanged.
static inline void transform_weights(__global REAL* u, __global const REAL* w, int m, int M, int C, int first, int channels, size_t part,
                                     int back) {
  const REAL scales[6][6] = SCALES;
  REAL turned[CHANNELS * 9 * MR] __attribute__((aligned(64)));
  if (back)
    for (int c = 0; c < channels; ++c) turn(turned + (c * 9 + 8) * MR, -MR, w + ((size_t)(first + c) * M + m) * 9, 9, M - m, 9);
  else
    turn(turned, MR, w + ((size_t)m * C + first) * 9, C * 9, M - m, channels * 9);
  const REAL* from = turned;
  for (int c = 0; c < channels; ++c, u += MR, from += 9 * MR) {
    F half_way[6][3];
    UNROLL for (int s = 0; s < 3; ++s) {
#define GIVEN(k) *(const F*)(from + (k * 3 + s) * MR)
      WEIGHT_TRANSFORM(F, GIVEN, HALF_COLUMN)
#undef GIVEN
    }
    UNROLL for (int r = 0; r < 6; ++r) {
      F row[6];
      WEIGHT_TRANSFORM(F, HALF_ROW, ROW)
      UNROLL for (int s = 0; s < 6; ++s) ((__global LooseFilters*)(u + (r * 6 + s) * part))->v = row[s] * scales[r][s];
    }
  }
}

#if PART != 2

// u[block of MR filters][part][channel][filter]; a work-group per block of filters and CHANNELS channels.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void winograd_cpu_weights(__global const REAL* restrict w, __global REAL* restrict u,
                                                                                 int M, int C, int back) {
  const int block = get_group_id(0), first = get_group_id(1) * CHANNELS;
  const size_t part = (size_t)C * MR + APART;
  transform_weights(u + block * PARTS * part + first * MR, w, block * MR, M, C, first, least(CHANNELS, C - first), part, back);
}

#endif
#if PART != 1

#define LINE (4 * STRIP)  // of a strip: four pixels of every tile

// Tiles of a strip that are neighbours in one line of one image, and where their pixels lie.
typedef struct {
  int count;
  int top[STRIP], bottom[STRIP];            // lines of the patch that lie inside the image
  int begin[STRIP], end[STRIP];             // columns of the strip's line that lie inside the image: four of each tile,
  int begin_after[STRIP], end_after[STRIP]; // and the four that come after them
  size_t source[STRIP];                     // of the strip's column 0 in x, for line 0 of the patch and channel 0
  int at[STRIP], high[STRIP], wide[STRIP];  // of the outputs: first column, lines, columns
  size_t result[STRIP];                     // of the outputs in y, for filter 0
} Runs;

static inline void find_runs(Runs* runs, int first, int tiles, int C, int H, int W, int M, int OH, int OW, int high, int wide, int pad_h,
                             int pad_w) {
  runs->count = 0;
  for (int i = 0; i < tiles;) {
    const int p = first + i, image = p / (high * wide), row = p / wide % high, column = p % wide;
    const int n = least(wide - column, tiles - i), k = runs->count++, at = 4 * i;
    const int y = 4 * row - pad_h, x = 4 * column - pad_w - at;  // the input's coordinates where the patch and the line begin
    runs->top[k] = most(0, -y);
    runs->bottom[k] = least(6, H - y);
    runs->begin[k] = most(at, -x);
    runs->end[k] = least(at + 4 * n, W - x);
    runs->begin_after[k] = most(at, -x - 4);
    runs->end_after[k] = least(at + 4 * n, W - x - 4);
    runs->source[k] = (size_t)image * C * H * W + (ptrdiff_t)y * W + x;
    runs->at[k] = at;
    runs->high[k] = least(4, OH - 4 * row);
    runs->wide[k] = least(4 * n, OW - 4 * column);
    runs->result[k] = (size_t)image * M * OH * OW + (size_t)(4 * row) * OW + 4 * column;
    i += n;
  }
}

// Copies begin .. end; nothing else is touched, the last vector overlaps the one before.
#define COPY(to_space, to, from_space, from, begin, end)                                                                        \
  {                                                                                                                             \
    int i = (begin);                                                                                                            \
    const int n = (end);                                                                                                        \
    if (n - i >= VW) {                                                                                                          \
      for (; i + VW < n; i += VW) VECTOR(to_space, (to) + i) = VECTOR(from_space, (from) + i);                                  \
      VECTOR(to_space, (to) + n - VW) = VECTOR(from_space, (from) + n - VW);                                                    \
    } else if (n - i >= VW / 2 && VW > 8) {                                                                                     \
      HALF(to_space, (to) + i) = HALF(from_space, (from) + i);                                                                  \
      HALF(to_space, (to) + n - VW / 2) = HALF(from_space, (from) + n - VW / 2);                                                \
    } else if (n - i >= 4) {                                                                                                    \
      QUAD(to_space, (to) + i) = QUAD(from_space, (from) + i);                                                                  \
      QUAD(to_space, (to) + n - 4) = QUAD(from_space, (from) + n - 4);                                                          \
    } else                                                                                                                      \
      for (; i < n; ++i) (to)[i] = (from)[i];                                                                                   \
  }
typedef struct __attribute__((packed)) {
  JOIN(REAL, 8) v;
} LooseHalf;
#define HALF(space, p) (((space LooseHalf*)(p))->v)

static inline V load_local(__local const REAL* p) { return *(__local const V*)p; }
static inline V load_room(__global const REAL* p) { return *(__global const V*)p; }
// Between lines of pixels and vectors of tiles. FOUR: the pixels of a tile from two vectors that hold two columns of tiles each.
#define FOUR(p, q, i, j) p.s##i, p.s##j, q.s##i, q.s##j
#if VW == 16
#define COLUMN_0 s048c
#define COLUMN_1 s159d
#define COLUMN_2 s26ae
#define COLUMN_3 s37bf
#define LOW_TILES(p, q) FOUR(p, q, 0, 8), FOUR(p, q, 1, 9), FOUR(p, q, 2, a), FOUR(p, q, 3, b)
#define HIGH_TILES(p, q) FOUR(p, q, 4, c), FOUR(p, q, 5, d), FOUR(p, q, 6, e), FOUR(p, q, 7, f)
#elif VW == 8
#define COLUMN_0 s04
#define COLUMN_1 s15
#define COLUMN_2 s26
#define COLUMN_3 s37
#define LOW_TILES(p, q) FOUR(p, q, 0, 4), FOUR(p, q, 1, 5)
#define HIGH_TILES(p, q) FOUR(p, q, 2, 6), FOUR(p, q, 3, 7)
#else
#define COLUMN_0 s0
#define COLUMN_1 s1
#define COLUMN_2 s2
#define COLUMN_3 s3
#define LOW_TILES(p, q) FOUR(p, q, 0, 2)
#define HIGH_TILES(p, q) FOUR(p, q, 1, 3)
#endif
static inline V columns_01(V a, V b) { return (V)(a.COLUMN_0, b.COLUMN_0, a.COLUMN_1, b.COLUMN_1); }
static inline V columns_23(V a, V b) { return (V)(a.COLUMN_2, b.COLUMN_2, a.COLUMN_3, b.COLUMN_3); }
static inline V lows(V a, V b) { return (V)(a.lo, b.lo); }
static inline V highs(V a, V b) { return (V)(a.hi, b.hi); }

// Six columns of a patch's line, tiles as lanes: four of each tile, and the first two of the four after them.
static inline void columns_of(V d[6], __local const REAL* four, __local const REAL* after) {
  const V a = load_local(four), b = load_local(four + VW), c = load_local(four + 2 * VW), e = load_local(four + 3 * VW);
  const V low_01 = columns_01(a, b), low_23 = columns_23(a, b), high_01 = columns_01(c, e), high_23 = columns_23(c, e);
  d[0] = lows(low_01, high_01);
  d[1] = highs(low_01, high_01);
  d[2] = lows(low_23, high_23);
  d[3] = highs(low_23, high_23);
  const V low_45 = columns_01(load_local(after), load_local(after + VW));
  const V high_45 = columns_01(load_local(after + 2 * VW), load_local(after + 3 * VW));
  d[4] = lows(low_45, high_45);
  d[5] = highs(low_45, high_45);
}
#define ROOM_PART(k) *(__global V*)(to + (k * 6 + s) * part)

// One channel of a strip: its lines, side by side by tile, then transformed. `part` elements lie between the parts of a value.
static inline void transform_inputs(__global REAL* room, __local REAL* lines, __global const REAL* x, const Runs* runs, int W, size_t part,
                                    int vectors) {
  for (int k = 0; k < runs->count; ++k)
    for (int r = runs->top[k]; r < runs->bottom[k]; ++r) {
      __global const REAL* from = x + runs->source[k] + r * W;
      __local REAL *four = lines + r * LINE, *after = four + 6 * LINE;
      COPY(__local, four, __global const, from, runs->begin[k], runs->end[k])
      from += 4;
      COPY(__local, after, __global const, from, runs->begin_after[k], runs->end_after[k])
    }
  for (int t = 0; t < vectors; ++t) {
    V half_way[6][6];
    __local const REAL* four = lines + t * 4 * VW;
    UNROLL for (int r = 0; r < 6; ++r) {
      V row[6];
      columns_of(row, four + r * LINE, four + (6 + r) * LINE);
      INPUT_TRANSFORM(V, ROW, HALF_ROW)
    }
    __global REAL* to = room + t / NV * PARTS * part + t % NV * VW;
    UNROLL for (int s = 0; s < 6; ++s) {
      INPUT_TRANSFORM(V, HALF_COLUMN, ROOM_PART)
    }
  }
}

// MR filters times NR tiles, over some channels: the first, or added to what there is.
static inline void multiply(__local REAL* products, __global const REAL* u, __global const REAL* v, int channels, int is_first) {
  V acc[MR][NV];
  EACH_SUM(MR) acc[i][j] = ZERO;
#if FRESH
  if (!is_first) EACH_SUM(MR) acc[i][j] = load_local(products + i * STRIP + j * VW);
#endif
  for (int c = 0; c < channels; ++c, u += MR, v += NR) ADD_PRODUCTS(MR, u[i], load_room(v + j * VW))
  EACH_SUM(MR) *(__local V*)(products + i * STRIP + j * VW) = acc[i][j];
}

// One filter of a strip, from products to four lines of pixels, and from there to y.
static inline void transform_outputs(__global const ADDED_T* added, __global Y_T* y, __local REAL* lines, __local const REAL* products,
                                     const Runs* runs, int vectors, int OW, REAL add, REAL scale) {
  for (int t = 0; t < vectors; ++t) {
    V half_way[4][6];
    UNROLL for (int s = 0; s < 6; ++s) {
#define GIVEN(k) load_local(products + (k * 6 + s) * (MR * STRIP) + t * VW)
      OUTPUT_TRANSFORM(V, GIVEN, HALF_COLUMN)
#undef GIVEN
    }
    UNROLL for (int r = 0; r < 4; ++r) {
      V row[4];
      OUTPUT_TRANSFORM(V, HALF_ROW, ROW)
#if !LATE
      UNROLL for (int k = 0; k < 4; ++k) row[k] = epilogue(row[k], scale, BIAS, (V)(add), ZERO);
#endif
      __local V* to = (__local V*)(lines + r * LINE + t * 4 * VW);
      const V low_01 = lows(row[0], row[1]), low_23 = lows(row[2], row[3]);
      const V high_01 = highs(row[0], row[1]), high_23 = highs(row[2], row[3]);
      to[0] = (V)(LOW_TILES(low_01, low_23));
      to[1] = (V)(HIGH_TILES(low_01, low_23));
      to[2] = (V)(LOW_TILES(high_01, high_23));
      to[3] = (V)(HIGH_TILES(high_01, high_23));
    }
  }
  for (int k = 0; k < runs->count; ++k)
    for (int r = 0; r < runs->high[k]; ++r) {
      const size_t at = runs->result[k] + (size_t)r * OW;
      __local const REAL* from = lines + r * LINE + runs->at[k];
#if LATE
      store_line(added, y, at, from, runs->wide[k], add, scale);
#else
      COPY(__global, y + at, __local const, from, 0, runs->wide[k])
#endif
    }
}

// u: the transformed weights, or FRESH ones as they are; C, H, W: of x; M, OH, OW: of y; high, wide: tiles of an image. The items, a strip
// times MR filters each, are dealt out evenly; a group that goes on with the same strip transforms it once.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void winograd_cpu(
    __global const REAL* restrict x, __global const REAL* restrict u, __global REAL* restrict rooms, END_POINTERS, int N, int C, int H,
    int W, int M, int OH, int OW, int high, int wide, int pad_h, int pad_w, int back, REAL scale) {
  __local REAL products[PARTS * MR * STRIP] __attribute__((aligned(64)));
  __local REAL lines[12 * LINE] __attribute__((aligned(64)));
  __local REAL outs[4 * LINE] __attribute__((aligned(64)));
  const int tiles = N * high * wide, strips = (tiles + STRIP - 1) / STRIP, blocks = (M + MR - 1) / MR;
  const int group = get_group_id(0), groups = get_num_groups(0);
  const int first = (int)((long)strips * blocks * group / groups), end = (int)((long)strips * blocks * (group + 1) / groups);
  const int depth = FRESH ? DEPTH : C;
  const size_t part = (size_t)C * NR + APART, weights = (size_t)depth * MR + APART;
  __global REAL* room = rooms + (size_t)group * PARTS * (NT * part + (FRESH ? weights : 0));
  Runs runs;
  int ready = -1, used = NT;  // micro tiles of a strip that hold tiles: the last strip may be short
  for (int item = first; item < end; ++item) {
    const int strip = item / blocks, m = (item - strip * blocks) * MR;
    if (strip != ready) {
      const int there = least(STRIP, tiles - strip * STRIP);
      used = (there + NR - 1) / NR;
      find_runs(&runs, strip * STRIP, there, C, H, W, M, OH, OW, high, wide, pad_h, pad_w);
      for (int i = 0; i < 12 * LINE; ++i) lines[i] = 0;  // what lies outside of the image stays so for every channel
      for (int c = 0; c < C; ++c) transform_inputs(room + c * NR, lines, x + (size_t)c * H * W, &runs, W, part, used * NV);
      ready = strip;
    }
    for (int c = 0; c < C; c += depth) {
      const int channels = least(depth, C - c);
#if FRESH
      __global REAL* at = room + PARTS * NT * part;
      for (int k = 0; k < channels; k += CHANNELS)
        transform_weights(at + k * MR, u, m, M, C, c + k, least(CHANNELS, channels - k), weights, back);
#else
      __global const REAL* at = u + (size_t)(m / MR) * PARTS * weights;
#endif
      for (int e = 0; e < PARTS; ++e)
        for (int t = 0; t < used; ++t)
          multiply(products + e * MR * STRIP + t * NR, at + e * weights, room + (t * PARTS + e) * part + c * NR, channels, c == 0);
    }
    for (int i = 0; i < least(MR, M - m); ++i) {
      const REAL add = BIAS_OF(m + i);
      const size_t plane = (size_t)(m + i) * OH * OW;
      transform_outputs(added + plane, y + plane, outs, products + i * STRIP, &runs, used * NV, OW, add, scale);
    }
  }
}

#endif
