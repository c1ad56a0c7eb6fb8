// Images at other resolutions and under grids of coordinates. Gradients gather: an input pixel asks the outputs that read it;
// only the input gradient of an arbitrary grid scatters, one plane per work-item, in order.

#ifndef REAL
#define REAL float  // of coordinates, weights and sums
#endif
#ifndef X_T  // what is read
#define X_T float
#define X_LOAD(p, i) ((p)[i])
#endif
#ifndef D_T  // gradients that come in
#define D_T float
#define D_LOAD(p, i) ((p)[i])
#endif
#ifndef G_T  // coordinates
#define G_T float
#define G_LOAD(p, i) ((p)[i])
#endif
#ifndef Y_T  // what is written
#define Y_T float
#define Y_STORE(p, i, x) ((p)[i] = (x))
#endif
// Options, as one argument: how an image is read is decided while running, so that a dtype has one program.
#define LINEAR(how) ((how) & 1)  // else the nearest pixel
#define ALIGN(how) ((how) & 2)   // corners of input and output are pixel centres
#define BORDER(how) ((how) & 4)  // outside a grid's image lies its border, else zeros

// Which pixels an output reads along one axis, and the share of the second.
typedef struct {
  int low, high;
  REAL share;
} Place;

static inline Place place_of(int out, int size, REAL step, int how) {
  Place at;
  if (LINEAR(how)) {
    REAL where = ALIGN(how) ? out * step : (out + (REAL)0.5) * step - (REAL)0.5;
    where = where < 0 ? 0 : where;
    at.low = (int)where;
    at.low = at.low < size - 1 ? at.low : size - 1;
    at.high = at.low < size - 1 ? at.low + 1 : at.low;
    at.share = where - at.low;
  } else {
    at.low = (int)((float)out * (float)step);
    at.low = at.low < size - 1 ? at.low : size - 1;
    at.high = at.low;
    at.share = 0;
  }
  return at;
}

// Steps come as two floats whose sum is exact enough for double.
#define STEP(a) ((REAL)a##_step + (REAL)a##_rest)

__kernel void resample(__global const X_T* restrict x, __global Y_T* restrict y, int planes, int H, int W, int OH, int OW, float y_step,
                       float y_rest, float x_step, float x_rest, int how, int span) {
  const int spans = (OW + span - 1) / span, i = get_global_id(0);
  if (i >= planes * OH * spans) return;
  const int line = i / spans, begin = (i - line * spans) * span, end = begin + span < OW ? begin + span : OW;
  const Place v = place_of(line % OH, H, STEP(y), how);
  __global const X_T* plane = x + (size_t)(line / OH) * H * W;
  for (int o = begin; o < end; ++o) {
    const Place h = place_of(o, W, STEP(x), how);
    REAL value = X_LOAD(plane, v.low * W + h.low);
    if (LINEAR(how)) {
      const REAL above = (1 - h.share) * value + h.share * X_LOAD(plane, v.low * W + h.high);
      const REAL below = (1 - h.share) * X_LOAD(plane, v.high * W + h.low) + h.share * X_LOAD(plane, v.high * W + h.high);
      value = (1 - v.share) * above + v.share * below;
    }
    Y_STORE(y, (size_t)line * OW + o, value);
  }
}

// The outputs that may read a pixel: one more on either side than the inverse of place_of says, since it rounds.
static inline int first_reader(int pixel, int size, int outs, REAL step, int how) {
  if (pixel == 0 || step <= 0) return 0;
  const REAL low = LINEAR(how) && !ALIGN(how) ? (pixel - (REAL)0.5) / step - (REAL)0.5 : (pixel - LINEAR(how)) / step;
  return low > 1 ? (int)low - 1 : 0;
}

static inline int end_reader(int pixel, int size, int outs, REAL step, int how) {
  if (pixel == size - 1 || step <= 0) return outs;
  const REAL high = LINEAR(how) && !ALIGN(how) ? (pixel + (REAL)1.5) / step - (REAL)0.5 : (pixel + 1) / step;
  return high + 2 < outs ? (int)high + 2 : outs;
}

static inline REAL weight_of(int out, int pixel, int size, REAL step, int how) {
  const Place at = place_of(out, size, step, how);
  return (at.low == pixel ? 1 - at.share : 0) + (at.high == pixel ? at.share : 0);
}

__kernel void resample_grad(__global const D_T* restrict dy, __global Y_T* restrict dx, int planes, int H, int W, int OH, int OW, float y_step,
                            float y_rest, float x_step, float x_rest, int how, int span) {
  const int spans = (W + span - 1) / span, i = get_global_id(0);
  if (i >= planes * H * spans) return;
  const int line = i / spans, begin = (i - line * spans) * span, end = begin + span < W ? begin + span : W, row = line % H;
  const size_t plane = (size_t)(line / H) * OH * OW;
  const int first = first_reader(row, H, OH, STEP(y), how), last = end_reader(row, H, OH, STEP(y), how);
  for (int p = begin; p < end; ++p) {
    const int left = first_reader(p, W, OW, STEP(x), how), right = end_reader(p, W, OW, STEP(x), how);
    REAL sum = 0;
    for (int r = first; r < last; ++r) {
      const REAL down = weight_of(r, row, H, STEP(y), how);
      if (down == 0) continue;
      for (int c = left; c < right; ++c) {
        const REAL across = weight_of(c, p, W, STEP(x), how);
        if (across != 0) sum += down * across * D_LOAD(dy, plane + r * OW + c);
      }
    }
    Y_STORE(dx, (size_t)line * W + p, sum);
  }
}

// ---- grids

typedef struct {
  int low;     // pixel before the coordinate
  REAL share;  // of the pixel after it
  REAL slope;  // of the coordinate in pixels with respect to the grid's value; zero where it was clipped
} Spot;

static inline Spot spot_of(REAL value, int size, int how) {
  Spot s;
  REAL at = ALIGN(how) ? (value + 1) / 2 * (size - 1) : ((value + 1) * size - 1) / 2;
  s.slope = ALIGN(how) ? (REAL)(size - 1) / 2 : (REAL)size / 2;
  const REAL low = BORDER(how) ? 0 : -2, high = BORDER(how) ? size - 1 : size + 1;
  if (!(at > low) || at >= high) {  // NaN is clipped as well
    at = at >= high ? high : low;
    s.slope = 0;
  }
  if (LINEAR(how)) {
    s.low = (int)floor(at);
    s.share = at - s.low;
  } else {
    s.low = (int)rint(at);
    s.share = 0;
    s.slope = 0;
  }
  return s;
}

static inline REAL pixel_of(__global const X_T* plane, int row, int column, int H, int W) {
  return row >= 0 && row < H && column >= 0 && column < W ? X_LOAD(plane, row * W + column) : (REAL)0;
}

// A work-item: one point of a grid, for all channels.
__kernel void sample_grid(__global const X_T* restrict x, __global const G_T* restrict grid, __global Y_T* restrict y, int N, int C, int H, int W,
                          int points, int how) {
  const int i = get_global_id(0);
  if (i >= N * points) return;
  const int image = i / points, point = i - image * points;
  const Spot h = spot_of(G_LOAD(grid, 2 * (size_t)i), W, how), v = spot_of(G_LOAD(grid, 2 * (size_t)i + 1), H, how);
  for (int c = 0; c < C; ++c) {
    __global const X_T* plane = x + ((size_t)image * C + c) * H * W;
    REAL value = pixel_of(plane, v.low, h.low, H, W);
    if (LINEAR(how))
      value = (1 - v.share) * ((1 - h.share) * value + h.share * pixel_of(plane, v.low, h.low + 1, H, W)) +
              v.share * ((1 - h.share) * pixel_of(plane, v.low + 1, h.low, H, W) + h.share * pixel_of(plane, v.low + 1, h.low + 1, H, W));
    Y_STORE(y, ((size_t)image * C + c) * points + point, value);
  }
}

__kernel void sample_grid_grid_grad(__global const D_T* restrict dy, __global const X_T* restrict x, __global const G_T* restrict grid,
                                    __global Y_T* restrict dgrid, int N, int C, int H, int W, int points, int how) {
  const int i = get_global_id(0);
  if (i >= N * points) return;
  const int image = i / points, point = i - image * points;
  const Spot h = spot_of(G_LOAD(grid, 2 * (size_t)i), W, how), v = spot_of(G_LOAD(grid, 2 * (size_t)i + 1), H, how);
  REAL across = 0, down = 0;
  for (int c = 0; LINEAR(how) && c < C; ++c) {
    __global const X_T* plane = x + ((size_t)image * C + c) * H * W;
    const REAL a = pixel_of(plane, v.low, h.low, H, W), b = pixel_of(plane, v.low, h.low + 1, H, W);
    const REAL d = pixel_of(plane, v.low + 1, h.low, H, W), e = pixel_of(plane, v.low + 1, h.low + 1, H, W);
    const REAL g = D_LOAD(dy, ((size_t)image * C + c) * points + point);
    across += g * ((1 - v.share) * (b - a) + v.share * (e - d));
    down += g * ((1 - h.share) * (d - a) + h.share * (e - b));
  }
  Y_STORE(dgrid, 2 * (size_t)i, h.slope == 0 ? 0 : across * h.slope);
  Y_STORE(dgrid, 2 * (size_t)i + 1, v.slope == 0 ? 0 : down * v.slope);
}

static inline void add_to(__global REAL* plane, int row, int column, int H, int W, REAL value) {
  if (row >= 0 && row < H && column >= 0 && column < W) plane[row * W + column] += value;
}

// A work-item: one plane of the gradient; no other touches it.
__kernel void sample_grid_grad(__global const D_T* restrict dy, __global const G_T* restrict grid, __global REAL* restrict dx, int N, int C, int H,
                               int W, int points, int how) {
  const int i = get_global_id(0);
  if (i >= N * C) return;
  const int image = i / C;
  __global REAL* plane = dx + (size_t)i * H * W;
  for (int p = 0; p < H * W; ++p) plane[p] = 0;
  for (int p = 0; p < points; ++p) {
    const size_t at = 2 * ((size_t)image * points + p);
    const Spot h = spot_of(G_LOAD(grid, at), W, how), v = spot_of(G_LOAD(grid, at + 1), H, how);
    const REAL g = D_LOAD(dy, (size_t)i * points + p);
    add_to(plane, v.low, h.low, H, W, g * (1 - v.share) * (1 - h.share));
    if (!LINEAR(how)) continue;
    add_to(plane, v.low, h.low + 1, H, W, g * (1 - v.share) * h.share);
    add_to(plane, v.low + 1, h.low, H, W, g * v.share * (1 - h.share));
    add_to(plane, v.low + 1, h.low + 1, H, W, g * v.share * h.share);
  }
}
