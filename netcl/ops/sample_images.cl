// Values of images at the points of a grid. The gradient of the images scatters, one plane per work-item, in order; that of the grid gathers.
// Operands: X what is read, D gradients that come in, G coordinates, Y what is written.

// Options, as one argument: how an image is read is decided while running, so that a dtype has one program.
#define LINEAR(how) ((how) & 1)  // else the nearest pixel
#define ALIGN(how) ((how) & 2)   // corners of input and output are pixel centers
#define BORDER(how) ((how) & 4)  // outside a grid's image lies its border, else zeros

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
