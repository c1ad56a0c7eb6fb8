// Winograd's convolution with 3 x 3 kernels and stride 1: tiles of OUT x OUT outputs from TILE x TILE inputs by TILE^2
// multiplications per channel and filter instead of 9 OUT^2. Between the transforms stands one product per element of a tile.
// OUT 2 is as accurate as the plain sum; OUT 4 saves more and loses about a digit.

#ifndef REAL
#define REAL float  // of transformed values and sums
#endif
#ifndef X_T  // the gathered input (forward: x; input gradient: dy)
#define X_T float
#define X_LOAD(p, i) ((p)[i])
#endif
#ifndef W_T  // weights
#define W_T float
#define W_LOAD(p, i) ((p)[i])
#endif
#ifndef B_T  // bias
#define B_T float
#define B_LOAD(p, i) ((p)[i])
#endif
#ifndef Y_T  // the result
#define Y_T float
#define Y_STORE(p, i, x) ((p)[i] = (x))
#endif
#ifndef INPUT_GRAD
#define INPUT_GRAD 0  // 1: weights are read mirrored, their two channel axes exchanged
#endif
#ifndef BIAS
#define BIAS 0  // 1: add bias[channel]
#endif
#ifndef RELU_OUT
#define RELU_OUT 0  // 1: negative results become zero
#endif
#ifndef OUT
#define OUT 2  // outputs of a tile along an axis: 2 or 4
#endif
#define TILE (OUT + 2)

#if OUT == 2
__constant REAL INPUTS[4][4] = {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}};
__constant REAL WEIGHTS[4][3] = {{1, 0, 0}, {(REAL)0.5, (REAL)0.5, (REAL)0.5}, {(REAL)0.5, (REAL)-0.5, (REAL)0.5}, {0, 0, 1}};
__constant REAL OUTPUTS[2][4] = {{1, 1, 1, 0}, {0, 1, -1, -1}};
#else
__constant REAL INPUTS[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
__constant REAL WEIGHTS[6][3] = {{(REAL)1 / 4, 0, 0},
                                 {(REAL)-1 / 6, (REAL)-1 / 6, (REAL)-1 / 6},
                                 {(REAL)-1 / 6, (REAL)1 / 6, (REAL)-1 / 6},
                                 {(REAL)1 / 24, (REAL)1 / 12, (REAL)1 / 6},
                                 {(REAL)1 / 24, (REAL)-1 / 12, (REAL)1 / 6},
                                 {0, 0, 1}};
__constant REAL OUTPUTS[4][6] = {{1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
#endif

// u[element][filter][channel] of the weights; a work-item per filter and channel.
__kernel void winograd_weights(__global const W_T* restrict w, __global REAL* restrict u, int M, int C) {
  const int i = get_global_id(0);
  if (i >= M * C) return;
  const int m = i / C, c = i - m * C;
  REAL half_way[TILE][3];
  for (int r = 0; r < TILE; ++r)
    for (int s = 0; s < 3; ++s) {
      REAL sum = 0;
      for (int k = 0; k < 3; ++k) {
        const int at = INPUT_GRAD ? (2 - k) * 3 + 2 - s : k * 3 + s;
        sum += WEIGHTS[r][k] * W_LOAD(w, (size_t)(INPUT_GRAD ? c * M + m : i) * 9 + at);
      }
      half_way[r][s] = sum;
    }
  for (int r = 0; r < TILE; ++r)
    for (int s = 0; s < TILE; ++s) {
      REAL sum = 0;
      for (int k = 0; k < 3; ++k) sum += WEIGHTS[s][k] * half_way[r][k];
      u[((size_t)(r * TILE + s) * M + m) * C + c] = sum;
    }
}

// v[element][channel][tile] of the input; a work-item per channel and tile.
__kernel void winograd_inputs(__global const X_T* restrict x, __global REAL* restrict v, int N, int C, int H, int W, int high, int wide,
                              int pad_h, int pad_w) {
  const int tiles = N * high * wide, i = get_global_id(0);
  if (i >= C * tiles) return;
  const int c = i / tiles, p = i - c * tiles, image = p / (high * wide), place = p - image * high * wide;
  const int y0 = place / wide * OUT - pad_h, x0 = place % wide * OUT - pad_w;
  __global const X_T* plane = x + ((size_t)image * C + c) * H * W;
  REAL tile[TILE][TILE], half_way[TILE][TILE];
  for (int r = 0; r < TILE; ++r)
    for (int s = 0; s < TILE; ++s) {
      const int py = y0 + r, px = x0 + s;
      tile[r][s] = py >= 0 && py < H && px >= 0 && px < W ? X_LOAD(plane, py * W + px) : (REAL)0;
    }
  for (int r = 0; r < TILE; ++r)
    for (int s = 0; s < TILE; ++s) {
      REAL sum = 0;
      for (int k = 0; k < TILE; ++k) sum += INPUTS[r][k] * tile[k][s];
      half_way[r][s] = sum;
    }
  for (int r = 0; r < TILE; ++r)
    for (int s = 0; s < TILE; ++s) {
      REAL sum = 0;
      for (int k = 0; k < TILE; ++k) sum += INPUTS[s][k] * half_way[r][k];
      v[((size_t)(r * TILE + s) * C + c) * tiles + p] = sum;
    }
}

// y from products[element][filter][tile]; a work-item per filter and tile.
__kernel void winograd_outputs(__global const REAL* restrict products, __global const B_T* restrict bias, __global Y_T* restrict y, int N, int M,
                               int OH, int OW, int high, int wide) {
  const int tiles = N * high * wide, i = get_global_id(0);
  if (i >= M * tiles) return;
  const int m = i / tiles, p = i - m * tiles, image = p / (high * wide), place = p - image * high * wide;
  const int y0 = place / wide * OUT, x0 = place % wide * OUT;
  REAL half_way[OUT][TILE];
  for (int s = 0; s < TILE; ++s) {
    REAL column[TILE];
    for (int k = 0; k < TILE; ++k) column[k] = products[((size_t)(k * TILE + s) * M + m) * tiles + p];
    for (int r = 0; r < OUT; ++r) {
      REAL sum = 0;
      for (int k = 0; k < TILE; ++k) sum += OUTPUTS[r][k] * column[k];
      half_way[r][s] = sum;
    }
  }
  for (int r = 0; r < OUT; ++r)
    for (int s = 0; s < OUT; ++s) {
      if (y0 + r >= OH || x0 + s >= OW) continue;
      REAL sum = 0;
#if BIAS
      sum = B_LOAD(bias, m);
#endif
      for (int k = 0; k < TILE; ++k) sum += OUTPUTS[s][k] * half_way[r][k];
#if RELU_OUT
      sum = sum < 0 ? 0 : sum;
#endif
      Y_STORE(y, (((size_t)image * M + m) * OH + y0 + r) * OW + x0 + s, sum);
    }
}
