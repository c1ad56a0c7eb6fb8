// Convolutions of groups of few channels and filters (depthwise ones above all) on GPUs: registers and the first cache, no local memory.
//
// A work-item makes PX neighbouring columns times ROWS rows of one plane of the result. It goes down the rows, loads each row of the
// input once, and keeps its sums in registers. With QUADS the widths are multiples of four and rows are loaded in fours: each is inside
// the image or outside it as a whole. Numbers that the compiler must know are macros: taps, strides, and the padding at the TOP and LEFT.
// Callers give X_QUAD, W_QUAD and Y_QUAD, which read and write four values, and for PART 2 LOW, HIGH, ROW_LOW and ROW_HIGH: the first and
// last columns and rows of the input that a result needs, relative to its own.
// Operands X W Y and arguments of CONV_NUMBERS (ends.cl): N C H W M OH OW KH KW, and the options in lower case.
#pragma OPENCL FP_CONTRACT ON

#ifndef PART
#define PART 1  // 1: forward, and the input gradient at stride 1; 2: the input gradient at other strides; 3: the weight gradient
#endif
#ifndef TAPS_H
#define TAPS_H 3
#define TAPS_W 3
#define STEP_H 1
#define STEP_W 1
#define TOP 1
#define LEFT 1
#define CHANNELS 1  // of a group of the input
#define ROWS 7
#define QUADS 0
#endif
#ifndef ITEMS
#define ITEMS 128  // of a work-group of the weight gradient; a multiple of 8
#endif
#define PX 4

#if PART == 2  // the columns of the input that PX columns of the result need, and the rows, counted from their own
#define FROM LOW
#define SPAN (HIGH - LOW + 1)
#define FOURS 0
#else
#define FROM (-(LEFT + 3) / 4 * 4)
#define SPAN ((PX - 1) * STEP_W + TAPS_W - LEFT - FROM)
#define FOURS QUADS
#endif

// Row `row` of a plane of height x width, from column `from` on; zeros outside.
#define LOAD_WINDOW(window, plane, row, height, width, from)                                                         \
  {                                                                                                                  \
    const int inside = (row) >= 0 && (row) < (height);                                                               \
    __global const X_T* line = (plane) + (long)(row) * (width);                                                      \
    if (FOURS) {                                                                                                     \
      _Pragma("unroll") for (int i = 0; i < SPAN; i += 4) {                                                          \
        const int at = (from) + i;                                                                                   \
        const float4 four = inside && at >= 0 && at < (width) ? X_QUAD(line + at) : (float4)(0);                     \
        window[i] = four.x, window[i + 1] = four.y, window[i + 2] = four.z, window[i + 3] = four.w;                  \
      }                                                                                                              \
    } else {                                                                                                         \
      _Pragma("unroll") for (int i = 0; i < SPAN; ++i) {                                                             \
        const int at = (from) + i;                                                                                   \
        window[i] = inside && at >= 0 && at < (width) ? X_LOAD(line, at) : 0.0f;                                     \
      }                                                                                                              \
    }                                                                                                                \
  }

#if PART != 3
#if INPUT_GRAD
#define WEIGHTS_OF(c) (((size_t)group * C + (c)) * M + m)
#else
#define WEIGHTS_OF(c) (((size_t)group * M + m) * C + (c))
#endif
#if INPUT_GRAD && PART == 1
#define TAP(tap) (TAPS_H * TAPS_W - 1 - (tap))  // the kernel turned by half a turn
#else
#define TAP(tap) (tap)
#endif

// Which plane and which of its strips of PX columns and `high` rows: filter m of a group of an image.
#define PLACE(high)                                                                                                  \
  const int across = (OW + PX - 1) / PX, down = (OH + (high)-1) / (high), id = get_global_id(0);                     \
  const int column = id % across, strip = id / across % down, plane = id / across / down;                            \
  if (plane >= N * groups * M) return;                                                                               \
  const int m = plane % M, group = plane / M % groups, filter = plane % (groups * M);                                \
  __global const X_T* planes = x + (size_t)(plane / M) * C * H * W;                                                  \
  float weights[CHANNELS][TAPS_H * TAPS_W];                                                                          \
  _Pragma("unroll") for (int c = 0; c < CHANNELS; ++c) _Pragma("unroll") for (int tap = 0; tap < TAPS_H * TAPS_W; ++tap) \
      weights[c][tap] = W_LOAD(w, WEIGHTS_OF(c) * (TAPS_H * TAPS_W) + TAP(tap));

// One row of PX sums.
#define STORE_ROW(row, sums)                                                                                         \
  if ((row) < OH) {                                                                                                  \
    const size_t at = (size_t)plane * OH * OW + (size_t)(row) * OW + column * PX;                                    \
    if (QUADS) {                                                                                                     \
      Y_QUAD(y + at, (float4)(FINISHED(sums[0], filter, at), FINISHED(sums[1], filter, at + 1),                      \
                              FINISHED(sums[2], filter, at + 2), FINISHED(sums[3], filter, at + 3)));                \
    } else {                                                                                                         \
      _Pragma("unroll") for (int j = 0; j < PX; ++j) if (column * PX + j < OW) Y_STORE(y, at + j, FINISHED(sums[j], filter, at + j)); \
    }                                                                                                                \
  }
#endif

#if PART == 1
__kernel void conv_narrow(__global const X_T* restrict x, __global const W_T* restrict w, END_POINTERS, CONV_NUMBERS, const REAL scale) {
  PLACE(ROWS)
  const int from = column * PX * STEP_W + FROM, first = strip * ROWS;
#if STEP_H == 1  // sums[TAPS_H - 1] is complete with the row at hand, sums[0] begins with it
  float sums[TAPS_H][PX];
  UNROLL for (int i = 0; i < TAPS_H * PX; ++i) sums[i / PX][i % PX] = 0;
#pragma unroll TAPS_H
  for (int r = 0; r < ROWS + TAPS_H - 1; ++r) {
    UNROLL for (int c = 0; c < CHANNELS; ++c) {
      float window[SPAN + 3];
      LOAD_WINDOW(window, planes + (size_t)c * H * W, first + r - TOP, H, W, from)
      UNROLL for (int tap = 0; tap < TAPS_H * TAPS_W; ++tap)
        UNROLL for (int j = 0; j < PX; ++j) sums[tap / TAPS_W][j] += window[j * STEP_W + tap % TAPS_W - LEFT - FROM] * weights[c][tap];
    }
    if (r >= TAPS_H - 1) STORE_ROW(first + r - (TAPS_H - 1), sums[TAPS_H - 1])
    UNROLL for (int i = TAPS_H - 1; i > 0; --i)
      UNROLL for (int j = 0; j < PX; ++j) sums[i][j] = sums[i - 1][j];
    UNROLL for (int j = 0; j < PX; ++j) sums[0][j] = 0;
  }
#else
  for (int r = 0; r < ROWS; ++r) {
    float sums[PX] = {0, 0, 0, 0};
    UNROLL for (int c = 0; c < CHANNELS; ++c)
      UNROLL for (int i = 0; i < TAPS_H; ++i) {
        float window[SPAN + 3];
        LOAD_WINDOW(window, planes + (size_t)c * H * W, (first + r) * STEP_H + i - TOP, H, W, from)
        UNROLL for (int k = 0; k < TAPS_W; ++k)
          UNROLL for (int j = 0; j < PX; ++j) sums[j] += window[j * STEP_W + k - LEFT - FROM] * weights[c][i * TAPS_W + k];
      }
    STORE_ROW(first + r, sums)
  }
#endif
}
#endif

#if PART == 2
// Which taps reach a pixel depends on its remainder by the stride: STEP_H rows at once, so that the compiler knows all of them.
__kernel void narrow_input_grad(__global const X_T* restrict x, __global const W_T* restrict w, END_POINTERS, CONV_NUMBERS,
                                const REAL scale) {
  PLACE(ROWS * STEP_H)
  for (int r = 0; r < ROWS; ++r) {
    const int row = strip * ROWS + r;
    float sums[STEP_H][PX];
    UNROLL for (int i = 0; i < STEP_H * PX; ++i) sums[i / PX][i % PX] = 0;
    UNROLL for (int c = 0; c < CHANNELS; ++c)
      UNROLL for (int d = ROW_LOW; d <= ROW_HIGH; ++d) {
        float window[SPAN + 3];
        LOAD_WINDOW(window, planes + (size_t)c * H * W, row + d, H, W, column * (PX / STEP_W) + FROM)
        UNROLL for (int p = 0; p < STEP_H; ++p) {
          const int i = p + TOP - STEP_H * d;
          if (i >= 0 && i < TAPS_H)
            UNROLL for (int j = 0; j < PX; ++j)
              UNROLL for (int k = 0; k < TAPS_W; ++k)
                if ((j + LEFT - k) % STEP_W == 0) sums[p][j] += window[(j + LEFT - k) / STEP_W - FROM] * weights[c][i * TAPS_W + k];
        }
      }
    UNROLL for (int p = 0; p < STEP_H; ++p) STORE_ROW(row * STEP_H + p, sums[p])
  }
}
#endif

#if PART == 3
#define LOAD_GRADIENT(into, row)                                                                                     \
  {                                                                                                                  \
    __global const W_T* line = gradient + (long)(row) * OW;                                                          \
    if ((row) >= OH) {                                                                                               \
      _Pragma("unroll") for (int j = 0; j < PX; ++j) into[j] = 0;                                                    \
    } else if (QUADS) {                                                                                              \
      const float4 four = W_QUAD(line);                                                                              \
      into[0] = four.x, into[1] = four.y, into[2] = four.z, into[3] = four.w;                                        \
    } else {                                                                                                         \
      _Pragma("unroll") for (int j = 0; j < PX; ++j) into[j] = column * PX + j < OW ? W_LOAD(line, j) : 0.0f;         \
    }                                                                                                                \
  }

// Work-groups: pairs of a filter and a channel of its group, times splits of the batch; each split writes its own copy of the result.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void narrow_weight_grad(
    __global const X_T* restrict x, __global const W_T* restrict dy, __global Y_T* restrict dw, CONV_NUMBERS, int splits) {
  __local float shared[TAPS_H * TAPS_W][ITEMS / 8 + 1];
  const int l = get_local_id(0), pairs = groups * M * C, pair = get_group_id(0) % pairs, split = get_group_id(0) / pairs;
  const int filter = pair / C, channel = filter / M * C + pair % C;
  const int across = (OW + PX - 1) / PX, strips = across * ((OH + ROWS - 1) / ROWS);
  const int share = (N + splits - 1) / splits, images = min(N - split * share, share);
  float sums[TAPS_H * TAPS_W];
  UNROLL for (int tap = 0; tap < TAPS_H * TAPS_W; ++tap) sums[tap] = 0;
  for (int unit = l; unit < images * strips; unit += ITEMS) {
    const int image = split * share + unit / strips, column = unit % strips % across, first = unit % strips / across * ROWS;
    __global const X_T* plane = x + ((size_t)image * groups * C + channel) * H * W;
    __global const W_T* gradient = dy + ((size_t)image * groups * M + filter) * OH * OW + column * PX;
    const int from = column * PX * STEP_W + FROM;
#if STEP_H == 1
    float held[TAPS_H][PX];  // rows of dy: held[i] meets tap i of the row at hand
    UNROLL for (int i = 0; i < TAPS_H * PX; ++i) held[i / PX][i % PX] = 0;
#pragma unroll TAPS_H
    for (int r = 0; r < ROWS + TAPS_H - 1; ++r) {
      UNROLL for (int i = TAPS_H - 1; i > 0; --i)
        UNROLL for (int j = 0; j < PX; ++j) held[i][j] = held[i - 1][j];
      LOAD_GRADIENT(held[0], r < ROWS ? first + r : OH)
      float window[SPAN + 3];
      LOAD_WINDOW(window, plane, first + r - TOP, H, W, from)
      UNROLL for (int tap = 0; tap < TAPS_H * TAPS_W; ++tap)
        UNROLL for (int j = 0; j < PX; ++j) sums[tap] += window[j * STEP_W + tap % TAPS_W - LEFT - FROM] * held[tap / TAPS_W][j];
    }
#else
    for (int r = 0; r < ROWS; ++r) {
      float held[PX];
      LOAD_GRADIENT(held, first + r)
      UNROLL for (int i = 0; i < TAPS_H; ++i) {
        float window[SPAN + 3];
        LOAD_WINDOW(window, plane, (first + r) * STEP_H + i - TOP, H, W, from)
        UNROLL for (int k = 0; k < TAPS_W; ++k)
          UNROLL for (int j = 0; j < PX; ++j) sums[i * TAPS_W + k] += window[j * STEP_W + k - LEFT - FROM] * held[j];
      }
    }
#endif
  }
  for (int turn = 0; turn < 8; ++turn) {  // eight work-items after each other into one column, then the columns
    if (l % 8 == turn)
      UNROLL for (int tap = 0; tap < TAPS_H * TAPS_W; ++tap) shared[tap][l / 8] = (turn ? shared[tap][l / 8] : 0.0f) + sums[tap];
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  for (int tap = l; tap < TAPS_H * TAPS_W; tap += ITEMS) {
    float sum = 0;
    for (int i = 0; i < ITEMS / 8; ++i) sum += shared[tap][i];
    Y_STORE(dw, ((size_t)split * pairs + pair) * (TAPS_H * TAPS_W) + tap, sum);
  }
}
#endif
