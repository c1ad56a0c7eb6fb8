// Convolution on CPU devices with filters in the lanes of vectors and pixels by scalar broadcast: for few filters and few channels, where
// unfolding patches into a panel costs as much as the product. Nothing is unfolded: a tap is an offset into rows copied with their rim.
// Some pixels of a row times NV vectors of filters are one tile of registers.
// Arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#ifndef PART
#define PART 0  // 1: only forward and input gradient, 2: only the weight gradient
#endif
#ifndef PX2
#define PX0 4  // pixels of a tile: three widths to choose from, ascending
#define PX1 5
#define PX2 6
#endif
#ifndef STAGED
#define STAGED 128  // most results of a filter that are stored together: at least two tiles
#endif
#ifndef IN_STEP
#define IN_STEP 1  // distance of the inputs of neighbouring pixels: the stride
#endif
#ifndef TAP_STEP
#define TAP_STEP 1  // distance of the inputs of neighbouring taps: the dilation
#define ACROSS 3  // taps of a kernel row
#define TALL 3  // kernel rows whose gradients are summed together: TALL * ACROSS * NV sums fit the registers
#define TURNED 8192  // elements of the gradients a work-group turns
#endif
#ifndef ROOM
#define ROOM 8192  // elements of the rows a work-group copies
#endif

// Sums of several pixels (or weights), filters side by side, turned: a line for every filter, `wide` apart.
static inline void put(__local REAL* lines, const REAL* sums, int wide, int filters, int pixels) {
  int f = 0;
  for (; f + 4 <= filters; f += 4, lines += 4 * wide) {
    const REAL* from = sums + f;
    int i = 0;
    for (; i + 4 <= pixels; i += 4, from += 4 * NR) {
      const Q a = QUAD(__private const, from), b = QUAD(__private const, from + NR);
      const Q c = QUAD(__private const, from + 2 * NR), d = QUAD(__private const, from + 3 * NR);
      PUT_TURNED(__local, lines + i, wide, a, b, c, d)
    }
    for (; i < pixels; ++i, from += NR)
      for (int e = 0; e < 4; ++e) lines[e * wide + i] = from[e];
  }
  for (; f < filters; ++f, lines += wide)
    for (int i = 0; i < pixels; ++i) lines[i] = sums[i * NR + f];
}

#if PART != 2
// packed[group][block of filters][channel][tap][filter], zero where there is no filter. Work-groups: groups * blocks * channels.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack_filters(
    __global const REAL* restrict w, __global REAL* restrict packed, int C, int M, int taps, int blocks) {
  const int i = get_group_id(0);
  const int c = i % C, block = i / C % blocks, group = i / C / blocks;
  __global REAL* to = packed + (size_t)i * taps * NR;
  for (int f = 0; f < NR; ++f) {
    const int m = block * NR + f;
    __global const REAL* from = w + (INPUT_GRAD ? ((size_t)group * C + c) * M + m : ((size_t)group * M + m) * C + c) * taps;
    for (int t = 0; t < taps; ++t) to[t * NR + f] = m < M ? from[t] : 0;
  }
}

// The sums of PX pixels of a row and NR filters over all channels and some rows of the kernel. One function per width: a new image size is
// no reason to compile.
#define TILE(PX)                                                                                                                        \
  static inline void JOIN(tile_, PX)(REAL* sums, __local const REAL* pixels, __global const REAL* weights, int C, int rows, int KW,   \
                                       int channel, int line, int step, int taps) {                                                     \
    V acc[PX][NV];                                                                                                                      \
    EACH_SUM(PX) acc[i][j] = ZERO;                                                                                                      \
    for (int c = 0; c < C; ++c)                                                                                                         \
      for (int r = 0; r < rows; ++r) {                                                                                                  \
        __local const REAL* p = pixels + c * channel + r * line;                                                                        \
        __global const REAL* w = weights + (c * taps + r * KW) * NR;                                                                    \
        for (int s = 0; s < KW; ++s, p += step, w += NR) ADD_PRODUCTS(PX, p[i * IN_STEP], VECTOR(__global const, w + j * VW))           \
      }                                                                                                                                 \
    EACH_SUM(PX) VECTOR(__private, sums + i * NR + j * VW) = acc[i][j];                                                                 \
  }
TILE(PX0)
TILE(PX1)
TILE(PX2)

// pixels: width of a tile, PX0, PX1 or PX2. Results wait until they fill lines of memory: planes lie a power of two apart as often as not,
// and pieces of as many lines would drive each other out of the cache. Work-groups: blocks of lines of an image, groups; strides only forward.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_filters(
    __global const REAL* restrict x, __global const REAL* restrict packed, END_POINTERS, CONV_NUMBERS, int lines, int pixels, REAL scale) {
  __local REAL seen[ROOM] __attribute__((aligned(64)));
  __local REAL staged[NR * STAGED] __attribute__((aligned(64)));
  const int parts = (OW + STAGED - 1) / STAGED, part = (OW + parts - 1) / parts;  // pixels of a row that are staged at a time,
  const int together = most(1, STAGED / OW), held = part * together;              // rows, and pixels in all
  const int pieces = (OH + lines - 1) / lines, image = get_group_id(0) / pieces, group = get_group_id(1);
  const int first = (get_group_id(0) - image * pieces) * lines, end = least(OH, first + lines), taps = KH * KW;
  const Axis h = axis_of(OH, KH, stride_h, pad_h, dilation_h, 0), v = axis_of(OW, KW, stride_w, pad_w, dilation_w, 0);
  const int reach_y = (KH - 1) * h.step, reach_x = (KW - 1) * v.step, low_x = v.first + least(0, reach_x);
  const int top = most(0, first * h.in_step + h.first + least(0, reach_y));
  const int high = most(0, least(H, (end - 1) * h.in_step + h.first + most(0, reach_y) + 1) - top);
  const int wide = (most(OW, pixels) - 1) * IN_STEP + (KW - 1) * dilation_w + 1, plane = OH * OW;
  for (int c = 0; c < C; ++c)
    copy_lines(seen + c * high * wide, x + ((((size_t)image * groups + group) * C + c) * H + top) * W, high, W, low_x, wide);

  for (int f = 0, block = 0; f < M; f += NR, ++block) {
    __global const REAL* weights = packed + (size_t)(group * ((M + NR - 1) / NR) + block) * C * taps * NR;
    const size_t planes = (((size_t)image * groups + group) * M + f) * plane;
    const int filters = least(NR, M - f);
    REAL sums[PX2 * NR];
    for (int row = first; row < end; ++row) {
      const int at = row * h.in_step + h.first, before = (row - first) % together;  // the line of the first tap; rows that wait
      int r = 0, rows = KH;
      while (r < KH && (at + r * h.step < 0 || at + r * h.step >= H)) ++r, --rows;
      while (rows > 0 && (at + (r + rows - 1) * h.step < 0 || at + (r + rows - 1) * h.step >= H)) --rows;
      for (int from = 0; from < OW; from += part) {
        const int begin = least(from, OW - part), stop = begin + part;  // the last part and the last tile overlap those before
        for (int column = begin; column < stop; column += pixels) {
          const int place = part < pixels ? begin : least(column, stop - pixels);
          __local const REAL* p = seen + (at + r * h.step - top) * wide + place * IN_STEP + v.first - low_x;
          __global const REAL* b = weights + r * KW * NR;
          if (pixels == PX0)
            JOIN(tile_, PX0)(sums, p, b, C, rows, KW, high * wide, h.step * wide, v.step, taps);
          else if (pixels == PX1)
            JOIN(tile_, PX1)(sums, p, b, C, rows, KW, high * wide, h.step * wide, v.step, taps);
          else
            JOIN(tile_, PX2)(sums, p, b, C, rows, KW, high * wide, h.step * wide, v.step, taps);
          put(staged + before * OW + place - begin, sums, held, filters, least(pixels, part));
        }
        for (int i = 0; i < filters && (before + 1 == together || row + 1 == end); ++i)
          store_line(added, y, planes + (size_t)i * plane + (size_t)(row - before) * OW + begin, staged + i * held, before * OW + part,
                     BIAS_OF(group * M + f + i), scale);
      }
    }
  }
}
#endif

#if PART != 1
// Lines of the planes of dy with the filters of a pixel side by side, zero where there is no filter.
static inline void turn_lines(__local REAL* to, __global const REAL* dy, int plane, int filters, int pixels) {
  int f = 0;
  for (; f + 4 <= filters; f += 4, dy += 4 * (size_t)plane) {
    int i = 0;
    for (; i + 4 <= pixels; i += 4) {
      const Q a = QUAD(__global const, dy + i), b = QUAD(__global const, dy + plane + i);
      const Q c = QUAD(__global const, dy + 2 * (size_t)plane + i), d = QUAD(__global const, dy + 3 * (size_t)plane + i);
      PUT_TURNED(__local, to + i * NR + f, NR, a, b, c, d)
    }
    for (; i < pixels; ++i)
      for (int e = 0; e < 4; ++e) to[i * NR + f + e] = dy[e * (size_t)plane + i];
  }
  for (; f < NR; ++f, dy += plane)
    for (int i = 0; i < pixels; ++i) to[i * NR + f] = f < filters ? dy[i] : 0;
}

// parts[split][group][block of filters][channel][tap][filter] += what some lines of an image give. The stride is a number here, not a
// macro: a compiler that knows it carries pixels from one round of the loop to the next, and runs out of registers.
static inline void add_lines(__global REAL* parts, __local const REAL* seen, __local const REAL* turned, int is_first, int KH, int line_step,
                             int tap_line, int stride, int lines, int OW) {
  for (int r = 0; r < KH; r += TALL) {
    V acc[TALL][ACROSS][NV];
    UNROLL for (int k = 0; k < TALL; ++k)
      UNROLL for (int s = 0; s < ACROSS; ++s)
        UNROLL for (int j = 0; j < NV; ++j) acc[k][s][j] = ZERO;
    __local const REAL* b = turned;
    for (int line = 0; line < lines; ++line) {
      __local const REAL* p[TALL];
      int at = 0;
      UNROLL for (int k = 0; k < TALL; ++k) p[k] = seen + line * line_step + least(r + k, KH - 1) * tap_line;
      for (int i = 0; i < OW; ++i, at += stride, b += NR) {
        V w[NV];
        UNROLL for (int j = 0; j < NV; ++j) w[j] = VECTOR(__local const, b + j * VW);
        UNROLL for (int k = 0; k < TALL; ++k)
          UNROLL for (int s = 0; s < ACROSS; ++s) {
            const V value = (V)(p[k][at + s * TAP_STEP]);
            UNROLL for (int j = 0; j < NV; ++j) acc[k][s][j] += value * w[j];
          }
      }
    }
    UNROLL for (int k = 0; k < TALL; ++k) {
      if (r + k >= KH) break;
      UNROLL for (int s = 0; s < ACROSS; ++s)
        UNROLL for (int j = 0; j < NV; ++j) {
          __global REAL* to = parts + ((r + k) * ACROSS + s) * NR + j * VW;
          if (is_first)
            VECTOR(__global, to) = acc[k][s][j];
          else
            VECTOR(__global, to) += acc[k][s][j];
        }
    }
  }
}

// Work-groups: splits of the blocks of lines of all images, blocks of filters, groups.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void filter_gradients(
    __global const REAL* restrict x, __global const REAL* restrict dy, __global REAL* restrict parts, CONV_NUMBERS, int lines) {
  __local REAL seen[ROOM] __attribute__((aligned(64)));
  __local REAL turned[TURNED] __attribute__((aligned(64)));
  const int pieces = (OH + lines - 1) / lines, all = N * pieces, splits = get_num_groups(0), split = get_group_id(0);
  const int begin = (int)((long)all * split / splits), end = (int)((long)all * (split + 1) / splits);
  const int f = get_group_id(1) * NR, group = get_group_id(2), filters = least(NR, M - f), plane = OH * OW;
  const int wide = (OW - 1) * stride_w + (ACROSS - 1) * TAP_STEP + 1;
  parts += ((size_t)(split * groups + group) * get_num_groups(1) + get_group_id(1)) * C * KH * ACROSS * NR;
  for (int at = begin; at < end; ++at) {
    const int image = at / pieces, first = (at - image * pieces) * lines, count = least(lines, OH - first);
    const int high = (count - 1) * stride_h + (KH - 1) * dilation_h + 1, low = first * stride_h - pad_h;
    for (int c = 0; c < C; ++c)
      copy_window(seen + c * high * wide, x + (((size_t)image * groups + group) * C + c) * H * W, H, W, low, high, -pad_w, wide);
    turn_lines(turned, dy + (((size_t)image * groups + group) * M + f) * plane + (size_t)first * OW, plane, filters, count * OW);
    for (int c = 0; c < C; ++c)
      add_lines(parts + (size_t)c * KH * ACROSS * NR, seen + c * high * wide, turned, at == begin, KH, stride_h * wide,
                dilation_h * wide, stride_w, count, OW);
  }
}

// dw[filter][weight] from parts, summed over the splits, some weights at a time. Work-groups: those, groups * blocks of filters.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void collect_filters(
    __global const REAL* restrict parts, __global REAL* restrict dw, int M, int blocks, int weights, int splits) {
  const int first = get_group_id(0) * STAGED, owner = get_group_id(1), n = get_num_groups(1);
  const int group = owner / blocks, f = (owner - group * blocks) * NR;
  const int count = least(STAGED, weights - first);
  __local REAL staged[NR * STAGED] __attribute__((aligned(64)));
  REAL sums[STAGED * NR];
  __global const REAL* from = parts + ((size_t)owner * weights + first) * NR;
  for (int i = 0; i < count * NR; i += VW) {
    V sum = VECTOR(__global const, from + i);
    for (int split = 1; split < splits; ++split) sum += VECTOR(__global const, from + (size_t)split * n * weights * NR + i);
    VECTOR(__private, sums + i) = sum;
  }
  put(staged, sums, STAGED, least(NR, M - f), count);
  dw += ((size_t)group * M + f) * weights + first;
  for (int k = 0; k < least(NR, M - f); ++k)
    for (int i = 0; i < count; ++i) dw[(size_t)k * weights + i] = staged[k * STAGED + i];
}
#endif
