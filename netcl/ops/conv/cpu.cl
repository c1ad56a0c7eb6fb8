// Convolution on CPU devices: a work-group is one work-item, vectors are explicit.
//
// panel    a strip of STRIP output pixels; the patches under them are unfolded, a block of KC rows at a time, into a
//          panel in local memory, and multiplied by MR rows of weights at a time, read in place by scalar broadcast.
// direct   one output row of one channel at a time: for groups with few filters, where a panel would serve too few rows.
// depth    groups of one channel: taps are offsets into lines in local memory, which are split by remainders modulo the stride.
// Weight gradients have the same two forms, with pixels as the summed dimension.
// Operands X W Y and arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#ifndef PART
#define PART 0  // 1: only forward and input gradient, 2: only the weight gradient; a program compiles what it needs
#endif
#ifndef KC
#define KC 512  // rows of a panel
#define ROWS 96  // most rows a work-group makes: their sums wait in local memory between panels; a multiple of MR
#endif
#define AHEAD 18  // terms of a sum by which an input gradient fetches weights: each channel's lie in another page, which no hardware foresees
#ifndef PACKED_W
#define PACKED_W 0  // 1: weights were packed by pack_weights: one stream that every core fetches ahead, not one per row
#endif
#define PACKED_QUADS (PACKED_W && MR % 4 == 0 && VW == 4)  // narrow vectors multiply by a lane of another, wide ones by a broadcast load
#ifndef ROOM
#define ROOM 4096  // elements of the lines that conv_depth copies, and of its sums
#define TAPS 64  // most taps of its kernels
#define EARLY 0  // 1: conv_depth finishes sums before it cuts them into lines: nothing is added, and they are stored as they are
#endif

#define VIEWED 1024  // most elements of one channel that the taps of a strip may see to be copied at once
#define VIEW_WIDEST (VW > 4 ? 256 : 16)  // most outputs of a line: narrow vectors copy long lines faster from where they are
#define TILE (KC * NR)   // elements of a panel's tile
#define CHANNELS 8       // planes walked together while packing: enough to hide the cost of a run, few enough for the TLB

// ---- packing

// Pixels of a strip that are neighbours in one row of one image and in one micro tile.
typedef struct {
  int count;
  int at[STRIP], size[STRIP];  // column of the strip, number of pixels
  int y[STRIP], x[STRIP];      // input coordinates, before the tap's offset
  int image[STRIP];
} Runs;

static inline void find_runs(Runs* runs, int first, int pixels, int width, Axis h, Axis w) {
  const int plane = h.outs * w.outs;
  runs->count = 0;
  for (int i = 0; i < pixels;) {
    const int p = first + i, image = p / plane, rest = p - image * plane, row = rest / w.outs, column = rest - row * w.outs;
    const int n = least(least(w.outs - column, pixels - i), width - i % width);
    const int k = runs->count++;
    runs->at[k] = i;
    runs->size[k] = n;
    runs->y[k] = row * h.in_step + h.first;
    runs->x[k] = column * w.in_step + w.first;
    runs->image[k] = image;
    i += n;
  }
}

static inline void clear(__local REAL* to, int to_step, int rows, int n) {
  if (n <= 0) return;
  for (int c = 0; c < rows; ++c, to += to_step)
    for (int i = 0; i < n; ++i) to[i] = 0;
}

// Copies n elements of each of several planes; nothing beyond them is touched, the last vector overlaps the one before.
static inline void copy(__local REAL* to, int to_step, __global const REAL* from, int plane, int in_step, int rows, int n) {
  for (int c = 0; c < rows; ++c, to += to_step, from += plane) {
    int i = 0;
    if (in_step == 1 && n >= VW) {
      for (; i + VW <= n; i += VW) VECTOR(__local, to + i) = VECTOR(__global const, from + i);
      if (i < n) VECTOR(__local, to + n - VW) = VECTOR(__global const, from + n - VW);
      continue;
    }
    if (in_step == 2)
      for (; i + VW < n; i += VW) {
        const V low = VECTOR(__global const, from + 2 * i), high = VECTOR(__global const, from + 2 * i + VW);
        VECTOR(__local, to + i) = (V)(low.even, high.even);
      }
    if (in_step == 1 && n >= 4) {
      for (; i + 4 <= n; i += 4) QUAD(__local, to + i) = QUAD(__global const, from + i);
      if (i < n) QUAD(__local, to + n - 4) = QUAD(__global const, from + n - 4);
      continue;
    }
    for (; i < n; ++i) to[i] = from[i * in_step];
  }
}

// The row of one tap for one run, for several channels: zero where the tap falls outside the image.
static inline void gather(__local REAL* to, int to_step, __global const REAL* planes, int H, int W, int y, int x, int in_step, int rows, int n) {
  int lo = n, hi = n;
  if (y >= 0 && y < H) {
    lo = first_inside(x, in_step, n);
    hi = most(lo, end_inside(x, in_step, W, n));
  }
  clear(to, to_step, rows, lo);
  copy(to + lo, to_step, planes + y * W + x + lo * in_step, H * W, in_step, rows, hi - lo);
  clear(to + hi, to_step, rows, n - hi);
}

// ---- forward and input gradient

#if PART != 2

// What the taps of a strip see of one channel, with zeros around, so that every row of the panel is a copy without questions: the lines of
// one image that are needed, or all lines of several. For inputs of which no pixel is skipped.
typedef struct {
  int images, high, wide;  // how many images, and what is seen of each
  int low_y, low_x;        // input coordinates of its corner
  int from_x, to_x;        // its columns that lie inside the image
  int at[STRIP];           // where the first tap of each run begins
} View;

static inline int view_of(View* view, const Runs* runs, int H, int W, Axis h, Axis v) {
  const int last = runs->count - 1, one = runs->image[0] == runs->image[last];
  if (v.outs > VIEW_WIDEST || v.in_step != 1 || h.in_step != 1 || h.taps * v.taps == 0) return 0;
  const int low = one ? runs->y[0] : h.first, high = one ? runs->y[last] : h.first + h.outs - 1;
  const int reach_y = (h.taps - 1) * h.step, reach_x = (v.taps - 1) * v.step;
  view->images = runs->image[last] - runs->image[0] + 1;
  view->high = high - low + 1 + (reach_y < 0 ? -reach_y : reach_y);
  view->wide = v.outs + (reach_x < 0 ? -reach_x : reach_x);
  view->low_y = low + least(0, reach_y);
  view->low_x = v.first + least(0, reach_x);
  view->from_x = most(0, -view->low_x);
  view->to_x = most(view->from_x, least(view->wide, W - view->low_x));
  if (view->images * view->high * view->wide > VIEWED) return 0;
  for (int k = 0; k <= last; ++k)
    view->at[k] = ((runs->image[k] - runs->image[0]) * view->high + runs->y[k] - view->low_y) * view->wide + runs->x[k] - view->low_x;
  return 1;
}

// What is seen of one channel; lines and columns outside the image were zero before and stay so.
static inline void look(REAL* seen, __global const REAL* x, size_t image_step, const View* view, int H, int W) {
  for (int image = 0; image < view->images; ++image, x += image_step)
    for (int row = most(0, -view->low_y); row < least(view->high, H - view->low_y); ++row) {
      __global const REAL* from = x + (view->low_y + row) * W + view->low_x;
      REAL* to = seen + (image * view->high + row) * view->wide;
      int i = view->from_x;
      for (; i + VW <= view->to_x; i += VW) VECTOR(__private, to + i) = VECTOR(__global const, from + i);
      for (; i + 4 <= view->to_x; i += 4) QUAD(__private, to + i) = QUAD(__global const, from + i);
      for (; i < view->to_x; ++i) to[i] = from[i];
    }
}

// The row of one tap, for one channel.
static inline void copy_runs(__local REAL* to, const REAL* seen, const View* view, const Runs* runs) {
  for (int k = 0; k < runs->count; ++k) {
    const REAL* from = seen + view->at[k];
    __local REAL* d = to + runs->at[k] / NR * TILE + runs->at[k] % NR;
    const int n = runs->size[k];
    int i = 0;
    for (; i + VW <= n; i += VW) VECTOR(__local, d + i) = VECTOR(__private const, from + i);
    for (; i + 4 <= n; i += 4) QUAD(__local, d + i) = QUAD(__private const, from + i);
    for (; i < n; ++i) d[i] = from[i];
  }
}

// to[group][block of MR filters][term][filter] from w[group][filter][term]; work-groups: blocks, groups.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack_weights(__global const REAL* restrict w, __global REAL* restrict to, int M,
                                                                         int terms) {
  const int m = get_group_id(0) * MR, all = (M + MR - 1) / MR * MR;
  w += (size_t)get_group_id(1) * M * terms;
  to += ((size_t)get_group_id(1) * all + m) * terms;
  for (int k = 0; k < terms; ++k)
    for (int i = 0; i < MR; ++i) to[(size_t)k * MR + i] = w[(size_t)least(m + i, M - 1) * terms + k];
}

// MR rows of weights times `vectors` vectors of columns, added to acc; weight_at: places of an input gradient's weights.
static inline void multiply(V acc[MR][NV], __global const REAL* a[MR], __local const int* weight_at, __local const REAL* columns, int depth,
                            const int vectors) {
  for (int k = 0; k < depth; ++k, columns += NR) {
    V b[NV];
    UNROLL for (int j = 0; VW > 4 && j < NR; j += 16) FETCH_AHEAD(columns + 8 * NR + j);  // wide tiles do not fit the first cache
#if INPUT_GRAD
    FETCH_AHEAD(a[0] + weight_at[k + AHEAD]);
    FETCH_AHEAD(a[MR - 1] + weight_at[k + AHEAD]);
#endif
    UNROLL for (int j = 0; j < NV; ++j)
      if (j < vectors) b[j] = VECTOR(__local const, columns + j * VW);
#if PACKED_QUADS
    REAL packed[MR];
    UNROLL for (int i = 0; i < MR; i += 4) QUAD(__private, packed + i) = QUAD(__global const, a[0] + k * MR + i);
#endif
    UNROLL for (int i = 0; i < MR; ++i) {
#if PACKED_QUADS
      const V weight = (V)(packed[i]);
#else
      const V weight = (V)(PACKED_W ? a[0][k * MR + i] : a[i][INPUT_GRAD ? weight_at[k] : k]);
#endif
      UNROLL for (int j = 0; j < NV; ++j)
        if (j < vectors) acc[i][j] += weight * b[j];
    }
  }
}

// rows: filters per work-group.
// Work-groups: strips of pixels, blocks of rows, groups times classes of pixels.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_panel(
    __global const REAL* restrict x, __global const REAL* restrict w, END_POINTERS, CONV_NUMBERS, int rows, const REAL scale) {
  __local REAL panel[NT * TILE] __attribute__((aligned(64)));
  __local REAL sums[ROWS * STRIP] __attribute__((aligned(64)));
#if INPUT_GRAD
  __local int weight_at[KC + AHEAD];
#endif
  GROUP_AND_AXES(get_group_id(2))
  const int taps = h.taps * v.taps, all_taps = KH * KW, first = get_group_id(0) * STRIP;
  const int pixels = least(STRIP, N * h.outs * v.outs - first);
  if (pixels <= 0) return;
  const int row_first = get_group_id(1) * rows, row_end = least(M, row_first + rows);

  Runs runs;
  find_runs(&runs, first, pixels, NR, h, v);
  size_t place[STRIP];  // of each pixel in y, for filter 0 of the group
  for (int k = 0; k < runs.count; ++k) {
    const int row = ((first + runs.at[k]) / v.outs) % h.outs, column = (first + runs.at[k]) % v.outs;
    size_t to = ((size_t)runs.image[k] * groups + group) * M * OH * OW + (size_t)(h.out_first + row * h.out_step) * OW;
    to += v.out_first + column * v.out_step;
    for (int i = 0; i < runs.size[k]; ++i) place[runs.at[k] + i] = to + i * v.out_step;
  }

  View view;
  REAL seen[VIEWED];
  const int viewed = view_of(&view, &runs, H, W, h, v);
  for (int i = 0; viewed && i < view.images * view.high * view.wide; ++i) seen[i] = 0;

  const int block = taps > 0 ? KC / taps : C;
  for (int c0 = 0; c0 < C; c0 += block) {
    const int channels = least(block, C - c0), depth = channels * taps;
    const int is_first = c0 == 0, is_last = c0 + block >= C;
    for (int c = 0; viewed && c < channels; ++c) {
      look(seen, x + (((size_t)runs.image[0] * groups + group) * C + c0 + c) * H * W, (size_t)groups * C * H * W, &view, H, W);
      __local REAL* to = panel + c * taps * NR;
      for (int r = 0; r < h.taps; ++r)
        for (int t = 0; t < v.taps; ++t, to += NR) copy_runs(to, seen + r * h.step * view.wide + t * v.step, &view, &runs);
    }
    for (int c = 0; !viewed && c < channels; c += CHANNELS)
      for (int k = 0; k < runs.count; ++k) {
        __global const REAL* planes = x + (((size_t)runs.image[k] * groups + group) * C + c0 + c) * H * W;
        __local REAL* to = panel + runs.at[k] / NR * TILE + runs.at[k] % NR + c * taps * NR;
        for (int r = 0; r < h.taps; ++r)
          for (int s = 0; s < v.taps; ++s)
            gather(to + (r * v.taps + s) * NR, taps * NR, planes, H, W, runs.y[k] + r * h.step, runs.x[k] + s * v.step, v.in_step,
                   least(CHANNELS, channels - c), runs.size[k]);
      }
    for (int j = pixels; j < (pixels + NR - 1) / NR * NR; ++j)  // the rest of the last tile, so that nothing unset is read
      clear(panel + j / NR * TILE + j % NR, NR, depth, 1);
#if INPUT_GRAD
    for (int c = 0; c < channels; ++c)
      for (int t = 0; t < taps; ++t) {
        const int r = h.w_first + t / v.taps * h.w_step, s = v.w_first + t % v.taps * v.w_step;
        weight_at[c * taps + t] = c * M * all_taps + r * KW + s;
      }
    for (int k = depth; k < depth + AHEAD; ++k) weight_at[k] = 0;
    __global const REAL* weights = w + ((size_t)group * C + c0) * M * all_taps;
    const size_t weight_row = all_taps;
#else
    __global const REAL* weights = w + ((size_t)group * (PACKED_W ? (M + MR - 1) / MR * MR : M) * C + c0 * (PACKED_W ? MR : 1)) * taps;
    const size_t weight_row = (size_t)C * taps;
    __local const int* weight_at = 0;
#endif

    for (int m = row_first; m < row_end; m += MR)
      for (int tile = 0; tile * NR < pixels; ++tile) {
        __global const REAL* a[MR];
        V acc[MR][NV];
        __local REAL* kept = sums + (m - row_first) * STRIP + tile * NR;
        UNROLL for (int i = 0; i < MR; ++i) a[i] = PACKED_W ? weights + m * weight_row : weights + least(m + i, M - 1) * weight_row;
        EACH_SUM(MR) acc[i][j] = ZERO;
        if (!is_first) EACH_SUM(MR) acc[i][j] = VECTOR(__local const, kept + i * STRIP + j * VW);

        __local const REAL* columns = panel + tile * TILE;
        if (pixels - tile * NR > VW) multiply(acc, a, weight_at, columns, depth, NV);
        else multiply(acc, a, weight_at, columns, depth, 1);

        if (!is_last) {
          EACH_SUM(MR) VECTOR(__local, kept + i * STRIP + j * VW) = acc[i][j];
          continue;
        }
        const int at = tile * NR, n = least(NR, pixels - at);
        const int whole = n == NR && place[at + n - 1] - place[at] == NR - 1;
        UNROLL for (int i = 0; i < MR; ++i) {
          if (m + i >= row_end) break;
          const size_t plane = (size_t)(m + i) * OH * OW;
          const REAL add = BIAS_OF(group * M + m + i);
#if VECTORS_KNOWN
          if (whole) {
            UNROLL for (int j = 0; j < NV; ++j) {
              const size_t to = place[at] + plane + j * VW;
              Y_LANES(epilogue(acc[i][j], scale, BIAS, (V)(add), ADDED_VECTOR(to)), y + to);
            }
            continue;
          }
#endif
          REAL lanes[NR], adds[VW];
          UNROLL for (int j = 0; j < NV; ++j) VECTOR(__private, lanes + j * VW) = acc[i][j];
          for (int j = 0; j < n; j += VW) {
            const int some = least(VW, n - j);
            const size_t* to = place + at + j;
#if VECTORS_KNOWN
            if (some == VW && to[VW - 1] - to[0] == VW - 1) {
              Y_LANES(epilogue(VECTOR(__private const, lanes + j), scale, BIAS, (V)(add), ADDED_VECTOR(to[0] + plane)), y + to[0] + plane);
              continue;
            }
#endif
            for (int k = 0; k < VW; ++k) adds[k] = k < some ? ADDED_AT(to[k] + plane) : 0;
            VECTOR(__private, lanes + j) = epilogue(VECTOR(__private const, lanes + j), scale, BIAS, (V)(add), VECTOR(__private const, adds));
            for (int k = 0; k < some; ++k) Y_STORE(y, to[k] + plane, lanes[j + k]);
          }
        }
      }
  }
}

// One output row of one filter after another, STRIP pixels at a time; work-groups: blocks of rows, 1, classes of pixels.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_direct(
    __global const REAL* restrict x, __global const REAL* restrict w, END_POINTERS, CONV_NUMBERS, int rows, const REAL scale) {
  AXES_OF(get_group_id(2))
  const int first = get_group_id(0) * rows, end = least(N * groups * M * h.outs, first + rows);
  for (int line = first; line < end; ++line) {
    const int row = line % h.outs, filter = line / h.outs % (groups * M), image = line / h.outs / (groups * M);
    const int group = filter / M, m = filter - group * M;
    __global const REAL* planes = x + ((size_t)image * groups + group) * C * H * W;
    const size_t to = ((size_t)image * groups * M + filter) * OH * OW + (size_t)(h.out_first + row * h.out_step) * OW + v.out_first;
    for (int column = 0; column < v.outs; column += STRIP) {
      const int n = least(STRIP, v.outs - column);
      REAL acc[STRIP];
      const REAL start = BIAS_OF(filter);
      for (int i = 0; i < STRIP; ++i) acc[i] = start;
      for (int c = 0; c < C; ++c)
        for (int r = 0; r < h.taps; ++r) {
          const int py = row * h.in_step + h.first + r * h.step;
          if (py < 0 || py >= H) continue;
          for (int s = 0; s < v.taps; ++s) {
            const int px = column * v.in_step + v.first + s * v.step;
            const int tap = (h.w_first + r * h.w_step) * KW + v.w_first + s * v.w_step;
            const REAL weight = w[(INPUT_GRAD ? ((size_t)group * C + c) * M + m : (size_t)filter * C + c) * KH * KW + tap];
            __global const REAL* from = planes + ((size_t)c * H + py) * W + px;
            int i = first_inside(px, v.in_step, n);
            const int stop = end_inside(px, v.in_step, W, n);
            if (v.in_step == 1)
              for (; i + VW <= stop; i += VW) VECTOR(__private, acc + i) += weight * VECTOR(__global const, from + i);
            for (; i < stop; ++i) acc[i] += weight * from[i * v.in_step];
          }
        }
      for (int i = 0; i < n; i += VW) {
        REAL adds[VW];
        for (int l = 0; l < VW; ++l) adds[l] = i + l < n ? ADDED_AT(to + (size_t)(column + i + l) * v.out_step) : 0;
        const V sums = VECTOR(__private const, acc + i);
        VECTOR(__private, acc + i) = epilogue(sums, scale, 0, ZERO, VECTOR(__private const, adds));  // which start at the bias
      }
      for (int i = 0; i < n; ++i) Y_STORE(y, to + (size_t)(column + i) * v.out_step, acc[i]);
    }
  }
}

// `vectors` vectors of sums of one channel over all taps, finished if EARLY.
static inline void depth_sums(__local REAL* to, __local const REAL* seen, __local const int* at, __global const REAL* w, int taps, REAL bias,
                              REAL scale, const int vectors) {
  V acc[NV];
  UNROLL for (int j = 0; j < NV; ++j) acc[j] = ZERO;
  for (int t = 0; t < taps; ++t) {
    __local const REAL* from = seen + at[t];
    const V weight = (V)(w[INPUT_GRAD ? taps - 1 - t : t]);
    UNROLL for (int j = 0; j < NV; ++j)
      if (j < vectors) acc[j] += weight * VECTOR(__local const, from + j * VW);
  }
  UNROLL for (int j = 0; j < NV; ++j)
    if (j < vectors) VECTOR(__local, to + j * VW) = EARLY ? epilogue(acc[j], scale, BIAS, (V)(bias), ZERO) : acc[j];
}

// Groups of one channel; an input gradient has stride 1 and the padding of a convolution with mirrored weights. A work-group makes `each`
// pieces of `lines` lines of a filter's plane. Sums run over all columns of the copied lines, so that short lines fill vectors, too.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_depth(
    __global const REAL* restrict x, __global const REAL* restrict w, END_POINTERS, CONV_NUMBERS, int lines, int each,
    const REAL scale) {
  __local REAL seen[ROOM] __attribute__((aligned(64)));
  __local REAL sums[ROOM] __attribute__((aligned(64)));
  __local int at[TAPS];  // of the taps in the lines
  const int pieces = (OH + lines - 1) / lines, first = get_group_id(0) * each, end = least(N * groups * M * pieces, first + each);
  const int rim = (KH - 1) * dilation_h / stride_h, pitch = OW + (KW - 1) * dilation_w / stride_w;
  for (int item = first, ready = 0; item < end; ++item) {
    const int plane = item / pieces, row = (item - plane * pieces) * lines, count = least(lines, OH - row);
    const int filter = plane % (groups * M), size = (count + rim) * pitch, all = (count - 1) * pitch + OW;
    __global const REAL* from = x + (size_t)(plane / M) * H * W;
    for (int phase = 0; phase < stride_h * stride_w; ++phase)
      for (int line = 0; line < count + rim; ++line)
        gather(seen + phase * size + line * pitch, 0, from, H, W, (row + line) * stride_h + phase / stride_w - pad_h,
               phase % stride_w - pad_w, stride_w, 1, pitch);
    for (int t = 0; ready != size && t < KH * KW; ++t) {
      const int down = t / KW * dilation_h, across = t % KW * dilation_w;
      at[t] = (down % stride_h * stride_w + across % stride_w) * size + down / stride_h * pitch + across / stride_w;
    }
    ready = size;
    const REAL add = BIAS_OF(filter);
    __global const REAL* weights = w + (size_t)filter * KH * KW;
    for (int i = 0; i < all; i += NR) {
      if (all - i > NR / 2) depth_sums(sums + i, seen + i, at, weights, KH * KW, add, scale, NV);
      else depth_sums(sums + i, seen + i, at, weights, KH * KW, add, scale, NV / 2);
    }
    for (int line = 0; line < count; ++line) {
      const size_t to = ((size_t)plane * OH + row + line) * OW;
#if EARLY
      __local const REAL* made = sums + line * pitch;
      int i = 0;
      for (; OW >= VW && i < OW; i += VW) VECTOR(__global, y + to + least(i, OW - VW)) = VECTOR(__local const, made + least(i, OW - VW));
      for (; OW >= 4 && i < OW; i += 4) QUAD(__global, y + to + least(i, OW - 4)) = QUAD(__local const, made + least(i, OW - 4));
      for (; i < OW; ++i) y[to + i] = made[i];
#else
      store_line(added, y, to, sums + line * pitch, OW, add, scale);
#endif
    }
  }
}
#endif

// ---- weight gradient

#if PART != 1
// Pixels become rows: panel[tile][pixel][column] from unfolded[column][pixel], in blocks of 4 x 4.
static inline void turn(__local REAL* panel, __local const REAL* unfolded, int pixels) {
  for (int j = 0; j < STRIP; j += 4)
    for (int p = 0; p < pixels; p += 4) {
      __local const REAL* from = unfolded + j * STRIP + p;
      const Q a = QUAD(__local const, from), b = QUAD(__local const, from + STRIP);
      const Q c = QUAD(__local const, from + 2 * STRIP), d = QUAD(__local const, from + 3 * STRIP);
      PUT_TURNED(__local, panel + j / NR * TILE + p * NR + j % NR, NR, a, b, c, d)
    }
}

// A panel holds KC pixels (rows) of STRIP columns; columns run over channels first, then taps. dy is read in place.
// Work-groups: strips of columns, blocks of filters, groups times splits; each split sums its own range of pixels into
// its own copy of the result.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_panel_weights(
    __global const REAL* restrict x, __global const REAL* restrict dy, __global Y_T* restrict dw, CONV_NUMBERS, int rows, int splits) {
  __local REAL panel[NT * TILE] __attribute__((aligned(64)));
  __local REAL unfolded[STRIP * STRIP] __attribute__((aligned(64)));
  __local REAL sums[ROWS * STRIP] __attribute__((aligned(64)));
  const int group = get_group_id(2) / splits, split = get_group_id(2) - group * splits;
  const Axis h = axis_of(OH, KH, stride_h, pad_h, dilation_h, 0), v = axis_of(OW, KW, stride_w, pad_w, dilation_w, 0);
  const int taps = KH * KW, plane = OH * OW, all = N * plane;
  const int first = get_group_id(0) * STRIP, columns = least(STRIP, C * taps - first);
  const int row_first = get_group_id(1) * rows, row_end = least(M, row_first + rows);
  const int share = (all + splits - 1) / splits, begin = least(all, split * share), end = least(all, begin + share);
  Runs runs;
  for (int i = 0; i < STRIP * STRIP; ++i) unfolded[i] = 0;
  for (int i = 0; i < (row_end - row_first + MR - 1) / MR * MR * STRIP; ++i) sums[i] = 0;

  for (int p0 = begin; p0 < end; p0 += KC) {
    const int depth = least(KC, end - p0);
    for (int p = 0; p < depth; p += STRIP) {
      const int pixels = least(STRIP, depth - p);
      find_runs(&runs, p0 + p, pixels, STRIP, h, v);
      for (int column = 0; column < columns;) {
        const int tap = (first + column) / C, c = first + column - tap * C, r = tap / KW, s = tap - r * KW;
        const int channels = least(least(CHANNELS, C - c), columns - column);
        for (int k = 0; k < runs.count; ++k)
          gather(unfolded + column * STRIP + runs.at[k], STRIP, x + (((size_t)runs.image[k] * groups + group) * C + c) * H * W, H, W,
                 runs.y[k] + r * h.step, runs.x[k] + s * v.step, v.in_step, channels, runs.size[k]);
        column += channels;
      }
      turn(panel + p * NR, unfolded, pixels);
    }

    for (int m = row_first; m < row_end; m += MR)
      for (int tile = 0; tile * NR < columns; ++tile) {
        V acc[MR][NV];
        __local REAL* kept = sums + (m - row_first) * STRIP + tile * NR;
        EACH_SUM(MR) acc[i][j] = VECTOR(__local const, kept + i * STRIP + j * VW);
        __local const REAL* b_row = panel + tile * TILE;
        for (int p = p0; p < p0 + depth;) {
          const int image = p / plane, pixel = p - image * plane, n = least(plane - pixel, p0 + depth - p);
          __global const REAL* a[MR];
          UNROLL for (int i = 0; i < MR; ++i) a[i] = dy + (((size_t)image * groups + group) * M + least(m + i, M - 1)) * plane + pixel;
          for (int k = 0; k < n; ++k, b_row += NR) ADD_PRODUCTS(MR, a[i][k], VECTOR(__local const, b_row + j * VW))
          p += n;
        }
        EACH_SUM(MR) VECTOR(__local, kept + i * STRIP + j * VW) = acc[i][j];
      }
  }

  __global Y_T* result = dw + (size_t)split * groups * M * C * taps;
  for (int m = row_first; m < row_end; ++m)
    for (int j = 0; j < columns; ++j) {
      const int tap = (first + j) / C, c = first + j - tap * C;
      Y_STORE(result, (((size_t)group * M + m) * C + c) * taps + tap, sums[(m - row_first) * STRIP + j]);
    }
}

// One weight after another: the pixels it met, row by row. Work-groups: blocks of weights.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void conv_direct_weights(
    __global const REAL* restrict x, __global const REAL* restrict dy, __global Y_T* restrict dw, CONV_NUMBERS, int rows, int splits) {
  const int first = get_group_id(0) * rows, end = least(groups * M * C * KH * KW, first + rows);
  for (int weight = first; weight < end; ++weight) {
    const int s = weight % KW, r = weight / KW % KH, c = weight / (KW * KH) % C, filter = weight / (KW * KH * C), group = filter / M;
    const int px = s * dilation_w - pad_w, py = r * dilation_h - pad_h;
    const int lo = first_inside(px, stride_w, OW), hi = end_inside(px, stride_w, W, OW);
    V wide = ZERO;
    REAL sum = 0;
    for (int image = 0; image < N; ++image)
      for (int row = 0; row < OH; ++row) {
        const int line = row * stride_h + py;
        if (line < 0 || line >= H) continue;
        __global const REAL* from = x + ((((size_t)image * groups + group) * C + c) * H + line) * W + px;
        __global const REAL* by = dy + (((size_t)image * groups * M + filter) * OH + row) * OW;
        int i = lo;
        if (stride_w == 1)
          for (; i + VW <= hi; i += VW) wide += VECTOR(__global const, from + i) * VECTOR(__global const, by + i);
        for (; i < hi; ++i) sum += from[i * stride_w] * by[i];
      }
    REAL lanes[VW];
    VECTOR(__private, lanes) = wide;
    for (int i = 0; i < VW; ++i) sum += lanes[i];
    Y_STORE(dw, weight, sum);
  }
}
#endif
