// The gradient of 3x3 weights on CPU devices by Winograd's F(4 x 4, 3 x 3): per channel, filter and tile 36 products instead of 144.
// The channels of a pixel lie side by side (channels_last of weights.cl), in x and in dy, so lanes are channels and nothing is shuffled.
// A work-group, one work-item, takes a BLOCK of filters and a share of the tiles: it transforms TILES of them at a time into a room of its
// own, and adds 36 products of matrices, filters x tiles x channels, to its part of the sums. SCALES as in transforms.cl.
#ifndef BLOCK
#define BLOCK 64  // filters of a work-group of winograd_grads, a multiple of MR and VW
#endif
#ifndef TILES
#define TILES 32
#endif
#define PARTS 36
#define APART 16  // elements between the parts of transformed values: at a power of two they would share a line of the first cache
#define SUMS(filters, across) ((size_t)(filters) * (across) + APART)  // elements of a part of the sums

static inline V load(__global const REAL* p) { return VECTOR(__global const, p); }
#define PIXEL(k) load(from + r * line + k * channels)
#define ROOM_PART(k) *(__global V*)(to + (k * 6 + s) * part)

// VW channels of one tile, whose `high` lines begin at `from`, `line` elements apart: a patch of x, or filters of dy.
#define TRANSFORM_TILE(name, high, TRANSFORM)                                                                            \
  static inline void name(__global REAL* to, size_t part, __global const REAL* from, size_t line, int channels) {        \
    V half_way[high][6];                                                                                                 \
    _Pragma("unroll") for (int r = 0; r < high; ++r) { TRANSFORM(V, PIXEL, HALF_ROW) }                                   \
    _Pragma("unroll") for (int s = 0; s < 6; ++s) { TRANSFORM(V, HALF_COLUMN, ROOM_PART) }                               \
  }
TRANSFORM_TILE(transform_patch, 6, INPUT_TRANSFORM)
TRANSFORM_TILE(transform_gradient, 4, OUTPUT_GRAD_TRANSFORM)

// MR filters times NR channels, over some tiles: the first, or added to what there is. Rows of channels are `wide` elements apart.
static inline void multiply(__global REAL* sums, __global const REAL* d, __global const REAL* v, int tiles, int wide, int is_first) {
  V acc[MR][NV];
  EACH_SUM(MR) acc[i][j] = ZERO;
  if (!is_first) EACH_SUM(MR) acc[i][j] = load(sums + (size_t)i * wide + j * VW);
  for (int t = 0; t < tiles; ++t, d += BLOCK, v += wide) ADD_PRODUCTS(MR, d[i], load(v + j * VW))
  EACH_SUM(MR) VECTOR(__global, sums + (size_t)i * wide + j * VW) = acc[i][j];
}

// sums[share][block][part][filter][channel] from x and dy, channels last, with as many lines and columns as tiles have. high, wide: tiles of
// an image; across: channels of a row of sums, a multiple of NR. Work-groups: blocks of filters, shares of the tiles.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void winograd_grads(__global const REAL* restrict x, __global const REAL* restrict dy,
                                                                           __global REAL* restrict sums, __global REAL* restrict rooms, int N,
                                                                           int C, int M, int high, int wide, int across) {
  const int block = get_group_id(0), share = get_group_id(1), blocks = get_num_groups(0), shares = get_num_groups(1), m = block * BLOCK;
  const long tiles = (long)N * high * wide;
  const int begin = (int)(tiles * share / shares), end = (int)(tiles * (share + 1) / shares);
  const size_t part = (size_t)TILES * across + APART, gradients = TILES * BLOCK + APART;
  const size_t line = (size_t)(4 * wide + 2) * C, dy_line = (size_t)(4 * wide) * M;
  __global REAL* v = rooms + (size_t)(share * blocks + block) * PARTS * (part + gradients);
  __global REAL* d = v + PARTS * part;
  sums += (size_t)(share * blocks + block) * PARTS * SUMS(BLOCK, across);
  for (int first = begin; first < end; first += TILES) {
    const int count = least(TILES, end - first);
    for (int t = 0; t < count; ++t) {
      const int p = first + t, image = p / (high * wide), row = p / wide % high, column = p % wide;
      __global const REAL* from = x + ((size_t)image * (4 * high + 2) + 4 * row) * line + (size_t)4 * column * C;
      for (int c = 0; c < across; c += VW) transform_patch(v + t * across + c, part, from + c, line, C);
      from = dy + ((size_t)image * 4 * high + 4 * row) * dy_line + (size_t)4 * column * M + m;
      for (int f = 0; f < BLOCK; f += VW) transform_gradient(d + t * BLOCK + f, gradients, from + f, dy_line, M);
    }
    for (int e = 0; e < PARTS; ++e)
      for (int f = 0; f < least(BLOCK, M - m); f += MR)
        for (int c = 0; c < across; c += NR)
          multiply(sums + e * SUMS(BLOCK, across) + (size_t)f * across + c, d + e * gradients + f, v + e * part + c, count, across,
                   first == begin);
  }
}

// dw from the sums of all shares, by blocks of `filters`; a work-group per filter.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void winograd_weight_grads(__global const REAL* restrict sums, __global REAL* restrict dw,
                                                                                  int C, int M, int across, int shares, int filters) {
  const int m = get_group_id(0), blocks = (M + filters - 1) / filters;
  const size_t part = SUMS(filters, across), step = blocks * PARTS * part;
  sums += m / filters * PARTS * part + (size_t)(m % filters) * across;
  const REAL scales[6][6] = SCALES;
  for (int c = 0; c < C; c += VW) {
    V half_way[3][6];
    UNROLL for (int s = 0; s < 6; ++s) {
      V column[6];
      UNROLL for (int k = 0; k < 6; ++k) {
        column[k] = ZERO;
        for (int share = 0; share < shares; ++share)
          column[k] += load(sums + share * step + (k * 6 + s) * part + c);
        column[k] *= scales[k][s];
      }
      WEIGHT_GRAD_TRANSFORM(V, COLUMN, HALF_COLUMN)
    }
    REAL lanes[9 * VW];
    UNROLL for (int r = 0; r < 3; ++r) {
      V row[3];
      WEIGHT_GRAD_TRANSFORM(V, HALF_ROW, ROW)
      UNROLL for (int k = 0; k < 3; ++k) VECTOR(__private, lanes + (r * 3 + k) * VW) = row[k];
    }
    __global REAL* to = dw + ((size_t)m * C + c) * 9;
    int l = 0;
    for (; l + 4 <= least(VW, C - c); l += 4) {
      const REAL* at = lanes + l;
      for (int tap = 0; tap < 8; tap += 4, at += 4 * VW) {
        const Q p = QUAD(__private const, at), q = QUAD(__private const, at + VW), r = QUAD(__private const, at + 2 * VW),
                s = QUAD(__private const, at + 3 * VW);
        PUT_TURNED(__global, to + l * 9 + tap, 9, p, q, r, s)
      }
      for (int k = 0; k < 4; ++k) to[(l + k) * 9 + 8] = at[k];
    }
    for (; l < least(VW, C - c); ++l)
      for (int tap = 0; tap < 9; ++tap) to[l * 9 + tap] = lanes[tap * VW + l];
  }
}
