// Pooling of images, with LINE_OF of images.cl. Gradients gather: a pixel asks the windows that hold it, so nothing is added concurrently.
// CPUs with planes for every core do better by pool_planes.cl.
// Operands: X what is read, Y what is written, I places of the largest values.

// Of a pooling; images have H x W pixels, results OH x OW.
#define SIZE_NUMBERS                                                                                                  \
  int planes, int H, int W, int OH, int OW, int kernel_h, int kernel_w, int stride_h, int stride_w, int pad_h, int pad_w, \
  int dilation_h, int dilation_w, int how, int span

// Options, as one argument: decided while running, so that a dtype has one program.
#define ADAPTIVE(how) ((how) & 1)   // windows divide the image evenly; kernel, stride, padding and dilation are not read
#define COUNT_PAD(how) ((how) & 2)  // padding counts when averaging

typedef struct {
  int first, end, step;  // the pixels of a window that lie in the image
  int count;             // how many pixels an average divides by
} Window;

static inline Window window(int out, int size, int outs, int kernel_size, int stride, int pad, int dilation, int how) {
  Window w;
  if (ADAPTIVE(how)) {
    w.first = (int)((long)out * size / outs);
    w.end = (int)(((long)(out + 1) * size + outs - 1) / outs);
    w.step = 1;
    w.count = w.end - w.first;
    return w;
  }
  const int first = out * stride - pad, end = first + (kernel_size - 1) * dilation + 1;
  w.first = first >= 0 ? first : first + (dilation - 1 - first) / dilation * dilation;
  w.end = end < size ? end : size;
  w.step = dilation;
  w.count = COUNT_PAD(how) ? (end < size + pad ? end : size + pad) - first : w.end - w.first;
  return w;
}

#define WINDOW_Y(o) window(o, H, OH, kernel_h, stride_h, pad_h, dilation_h, how)
#define WINDOW_X(o) window(o, W, OW, kernel_w, stride_w, pad_w, dilation_w, how)

// Largest value of each window and its place in the plane; the first of equals, and NaN before all.
__kernel void pool_max(__global const X_T* restrict x, __global Y_T* restrict y, __global I_T* restrict places, SIZE_NUMBERS) {
  LINE_OF(OH, OW)
  __global const X_T* plane = x + (size_t)(line / OH) * H * W;
  const Window rows = WINDOW_Y(line % OH);
  for (int o = begin; o < end; ++o) {
    const Window columns = WINDOW_X(o);
    int place = rows.first * W + columns.first;
    X_REAL best = X_LOAD(plane, place);
    for (int r = rows.first; r < rows.end; r += rows.step)
      for (int c = columns.first; c < columns.end; c += columns.step) {
        const X_REAL value = X_LOAD(plane, r * W + c);
        if ((value > best || value != value) && best == best) {
          best = value;
          place = r * W + c;
        }
      }
    Y_STORE(y, (size_t)line * OW + o, best);
    I_STORE(places, (size_t)line * OW + o, place);
  }
}

__kernel void pool_average(__global const X_T* restrict x, __global Y_T* restrict y, SIZE_NUMBERS) {
  LINE_OF(OH, OW)
  __global const X_T* plane = x + (size_t)(line / OH) * H * W;
  const Window rows = WINDOW_Y(line % OH);
  for (int o = begin; o < end; ++o) {
    const Window columns = WINDOW_X(o);
    X_REAL sum = 0;
    for (int r = rows.first; r < rows.end; ++r)
      for (int c = columns.first; c < columns.end; ++c) sum += X_LOAD(plane, r * W + c);
    Y_STORE(y, (size_t)line * OW + o, sum / (rows.count * columns.count));
  }
}

// The windows that hold a pixel: at most this first one and the ones up to, not including, the last.
static inline int first_window(int pixel, int size, int outs, int kernel_size, int stride, int pad, int dilation, int how) {
  if (ADAPTIVE(how)) return (int)((long)pixel * outs / size);
  const int before = pixel + pad - (kernel_size - 1) * dilation;
  return before <= 0 ? 0 : (before + stride - 1) / stride;
}

static inline int end_window(int pixel, int size, int outs, int kernel_size, int stride, int pad, int dilation, int how) {
  if (ADAPTIVE(how)) return (int)(((long)(pixel + 1) * outs + size - 1) / size);
  const int end = (pixel + pad) / stride + 1;
  return end < outs ? end : outs;
}

#define FIRST_Y(p) first_window(p, H, OH, kernel_h, stride_h, pad_h, dilation_h, how)
#define END_Y(p) end_window(p, H, OH, kernel_h, stride_h, pad_h, dilation_h, how)
#define FIRST_X(p) first_window(p, W, OW, kernel_w, stride_w, pad_w, dilation_w, how)
#define END_X(p) end_window(p, W, OW, kernel_w, stride_w, pad_w, dilation_w, how)

__kernel void pool_max_grad(__global const X_T* restrict dy, __global const I_T* restrict places, __global Y_T* restrict dx, SIZE_NUMBERS) {
  LINE_OF(H, W)
  const int row = line % H;
  const size_t plane = (size_t)(line / H) * OH * OW;
  const int first = FIRST_Y(row), last = END_Y(row);
  for (int p = begin; p < end; ++p) {
    X_REAL sum = 0;
    for (int r = first; r < last; ++r)
      for (int c = FIRST_X(p); c < END_X(p); ++c)
        if (I_LOAD(places, plane + r * OW + c) == row * W + p) sum += X_LOAD(dy, plane + r * OW + c);
    Y_STORE(dx, (size_t)line * W + p, sum);
  }
}

__kernel void pool_average_grad(__global const X_T* restrict dy, __global Y_T* restrict dx, SIZE_NUMBERS) {
  LINE_OF(H, W)
  const int row = line % H;
  const size_t plane = (size_t)(line / H) * OH * OW;
  const int first = FIRST_Y(row), last = END_Y(row);
  for (int p = begin; p < end; ++p) {
    X_REAL sum = 0;
    for (int r = first; r < last; ++r) {
      const int rows = WINDOW_Y(r).count;
      for (int c = FIRST_X(p); c < END_X(p); ++c) sum += X_LOAD(dy, plane + r * OW + c) / (rows * WINDOW_X(c).count);
    }
    Y_STORE(dx, (size_t)line * W + p, sum);
  }
}
