// Images at other resolutions, with LINE_OF of images.cl. The gradient gathers: an input pixel sums over the outputs that read it.
// Operands: X what is read (X_T X_LOAD), Y what is written (Y_T Y_STORE).

// Options, as one argument: how an image is read is decided while running, so that a dtype has one program.
#define LINEAR(how) ((how) & 1)  // else the nearest pixel
#define ALIGN(how) ((how) & 2)   // corners of input and output are pixel centres

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

// Of a resampling; steps come as two floats whose sum is exact enough for double.
#define SIZE_NUMBERS \
  int planes, int H, int W, int OH, int OW, float y_step, float y_rest, float x_step, float x_rest, int how, int span
#define STEP(a) ((REAL)a##_step + (REAL)a##_rest)

__kernel void resample(__global const X_T* restrict x, __global Y_T* restrict y, SIZE_NUMBERS) {
  LINE_OF(OH, OW)
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

__kernel void resample_grad(__global const X_T* restrict dy, __global Y_T* restrict dx, SIZE_NUMBERS) {
  LINE_OF(H, W)
  const int row = line % H;
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
        if (across != 0) sum += down * across * X_LOAD(dy, plane + r * OW + c);
      }
    }
    Y_STORE(dx, (size_t)line * W + p, sum);
  }
}
