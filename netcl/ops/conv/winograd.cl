// Winograd's convolution on GPUs, 3 x 3 kernels and stride 1: tiles of 4 x 4 outputs by 36 products per channel and filter where a plain
// sum has 144. Between the transforms here stands one batched product, a matrix per element of a tile. Neighbouring work-items take
// neighbouring tiles, so that what is wide (36 values for 16 of the image) is read and written in whole lines. What a product reads is
// made in one launch: the second axis counts planes of channels, then whatever else there is. SCALES as in transforms.cl, X W Y as in ends.cl.
#pragma OPENCL FP_CONTRACT ON

#ifndef INPUT_GRAD
#define INPUT_GRAD 0  // 1: weights are mirrored
#define ITEMS 64  // most work-items of a group
#endif
#ifndef QUADS
#define QUADS 0  // 1: four neighbours of a row of outputs are one aligned vector of floats
#endif
#ifndef INPUT_QUADS
#define INPUT_QUADS 0  // 1: the same of inputs, where a tile begins one before
#endif

// Where a tile lies: its image, and the first output it makes.
#define TILE_PLACE                                                                                 \
  const int image = tile / (high * wide), place = tile - image * high * wide, down = place / wide; \
  const int y0 = down * 4, x0 = (place - down * wide) * 4;

// The second axis of a transform to 36 values; `store` takes the value in row r and column s.
#define TRANSFORM_COLUMNS(TRANSFORM, store)             \
  _Pragma("unroll") for (int s = 0; s < 6; ++s) {       \
    float column[6];                                    \
    TRANSFORM(float, HALF_COLUMN, COLUMN)               \
    _Pragma("unroll") for (int r = 0; r < 6; ++r) store \
  }

#if PART == 1 || PART == 4
__constant float scales[6][6] = SCALES;
#endif

#if PART == 1 || PART == 3
// A tile of plane c: 36 values, `step` apart. Tiles that no image has are zero.
static inline void input_tile(__global const X_T* x, __global float* v, const int step, const int tile, const int c,
                              const int N, const int C, const int H, const int W, const int high, const int wide, const int pad_h,
                              const int pad_w) {
  TILE_PLACE
  __global const X_T* plane = x + ((size_t)image * C + c) * H * W;
  float half_way[6][6];
  UNROLL for (int r = 0; r < 6; ++r) {
    const int py = y0 - pad_h + r, at = py * W + x0 - pad_w, there = image < N && py >= 0 && py < H;
    float row[6];
#if INPUT_QUADS
    const float4 middle = there ? *(__global const float4*)(plane + at + 1) : (float4)(0);
    row[0] = there && x0 > 0 ? plane[at] : 0;
    row[1] = middle.x, row[2] = middle.y, row[3] = middle.z, row[4] = middle.w;
    row[5] = there && x0 + 4 < W ? plane[at + 5] : 0;
#else
    UNROLL for (int s = 0; s < 6; ++s) row[s] = there && x0 - pad_w + s >= 0 && x0 - pad_w + s < W ? X_LOAD(plane, at + s) : 0;
#endif
    INPUT_TRANSFORM(float, ROW, HALF_ROW)
  }
  TRANSFORM_COLUMNS(INPUT_TRANSFORM, v[(r * 6 + s) * step] = column[r];)
}
#endif

#if PART == 1
// 36 values, n apart, from the nine weights of a pair of filter and channel.
static inline void weight_pair(__global const W_T* w, __global float* u, const int n) {
  float taps[3][3], half_way[3][6];
  UNROLL for (int k = 0; k < 9; ++k) taps[k / 3][k % 3] = W_LOAD(w, INPUT_GRAD ? 8 - k : k);
  UNROLL for (int r = 0; r < 3; ++r) {
#define GIVEN(k) taps[r][k]
    WEIGHT_TRANSFORM(float, GIVEN, HALF_ROW)
#undef GIVEN
  }
  TRANSFORM_COLUMNS(WEIGHT_TRANSFORM, u[(r * 6 + s) * n] = column[r] * scales[r][s];)
}

// v[element][channel][tile] of the input, `span` tiles, and u[element][pair] of n pairs of filter and channel, in the order of the weights.
// Work-items: tiles; channels, then rows of `span` pairs.
__kernel void winograd_sources(__global const X_T* restrict x, __global const W_T* restrict w, __global float* restrict v,
                               __global float* restrict u, int N, int C, int H, int W, int high, int wide, int span, int pad_h, int pad_w,
                               int n) {
  const int tile = get_global_id(0), c = get_global_id(1), pair = (c - C) * span + tile;
  if (tile >= span) return;
  if (c < C) input_tile(x, v + c * span + tile, C * span, tile, c, N, C, H, W, high, wide, pad_h, pad_w);
  else if (pair < n) weight_pair(w + (size_t)pair * 9, u + pair, n);
}
#endif

#if PART == 2
// y from sums[element][filter][tile]. Work-items: tiles, filters.
__kernel void winograd_outputs(__global const float* restrict sums, END_POINTERS, int N, int M, int OH, int OW, int high, int wide,
                               int span, REAL scale) {
  const int tile = get_global_id(0), m = get_global_id(1), step = M * span;
  if (tile >= N * high * wide) return;
  TILE_PLACE
  float half_way[4][6];
  UNROLL for (int s = 0; s < 6; ++s) {
    float column[6];
    UNROLL for (int r = 0; r < 6; ++r) column[r] = sums[(r * 6 + s) * step + m * span + tile];
    OUTPUT_TRANSFORM(float, COLUMN, HALF_COLUMN)
  }
  UNROLL for (int r = 0; r < 4; ++r) {
    float row[4];
    OUTPUT_TRANSFORM(float, HALF_ROW, ROW)
    if (y0 + r >= OH) continue;
    const size_t at = (((size_t)image * M + m) * OH + y0 + r) * OW + x0;
#if QUADS
    float4 four;
    four.x = FINISHED(row[0], m, at), four.y = FINISHED(row[1], m, at + 1);
    four.z = FINISHED(row[2], m, at + 2), four.w = FINISHED(row[3], m, at + 3);
    *(__global float4*)(y + at) = four;
#else
    UNROLL for (int s = 0; s < 4; ++s)
      if (x0 + s < OW) Y_STORE(y, at + s, FINISHED(row[s], m, at + s));
#endif
  }
}
#endif

#if PART == 3
// The gradients of a tile's outputs in plane m: 36 values, `step` apart. Tiles that no image has are zero.
static inline void output_grad_tile(__global const W_T* dy, __global float* d, const int step, const int tile, const int m,
                                    const int N, const int M, const int OH, const int OW, const int high, const int wide) {
  TILE_PLACE
  __global const W_T* plane = dy + ((size_t)image * M + m) * OH * OW;
  float half_way[4][6];
  UNROLL for (int r = 0; r < 4; ++r) {
    const int at = (y0 + r) * OW + x0, there = image < N && y0 + r < OH;
    float row[4];
#if QUADS
    const float4 four = there ? *(__global const float4*)(plane + at) : (float4)(0);
    row[0] = four.x, row[1] = four.y, row[2] = four.z, row[3] = four.w;
#else
    UNROLL for (int s = 0; s < 4; ++s) row[s] = there && x0 + s < OW ? W_LOAD(plane, at + s) : 0;
#endif
    OUTPUT_GRAD_TRANSFORM(float, ROW, HALF_ROW)
  }
  TRANSFORM_COLUMNS(OUTPUT_GRAD_TRANSFORM, d[(r * 6 + s) * step] = column[r];)
}

// v[element][part][channel][tile] of the input and d[element][part][filter][tile] of the outputs' gradient, `parts` times `depth` tiles.
// Work-items: tiles; channels, then filters.
__kernel void winograd_grad_sources(__global const X_T* restrict x, __global const W_T* restrict dy, __global float* restrict v,
                                    __global float* restrict d, int N, int C, int H, int W, int M, int OH, int OW, int high, int wide,
                                    int parts, int depth, int pad_h, int pad_w) {
  const int tile = get_global_id(0), c = get_global_id(1), part = tile / depth, m = c - C, span = parts * depth;
  if (tile >= span) return;
  if (c < C) input_tile(x, v + part * (C - 1) * depth + c * depth + tile, C * span, tile, c, N, C, H, W, high, wide, pad_h, pad_w);
  else output_grad_tile(dy, d + part * (M - 1) * depth + m * depth + tile, M * span, tile, m, N, M, OH, OW, high, wide);
}
#endif

#if PART == 4
// dw of n pairs of filter and channel from du[element][part][pair]; a work-item per pair. Nine values of a pair are no vector: they are
// turned in local memory, so that neighbours write neighbours.
__kernel void winograd_weight_grads(__global const float* restrict du, __global Y_T* restrict dw, int n, int parts) {
  __local float turned[ITEMS * 9];
  const int t = get_local_id(0), items = get_local_size(0), begin = get_group_id(0) * items, i = begin + t;
  if (i < n) {
    float sums[6][6] = {{0}}, half_way[3][6];
    for (int part = 0; part < parts; ++part)
      UNROLL for (int e = 0; e < 36; ++e) sums[e / 6][e % 6] += du[(e * parts + part) * n + i];
    UNROLL for (int s = 0; s < 6; ++s) {
#define GIVEN(k) (sums[k][s] * scales[k][s])
      WEIGHT_GRAD_TRANSFORM(float, GIVEN, HALF_COLUMN)
#undef GIVEN
    }
    UNROLL for (int r = 0; r < 3; ++r) {
#define MADE(k) turned[t * 9 + r * 3 + (k)]
      WEIGHT_GRAD_TRANSFORM(float, HALF_ROW, MADE)
#undef MADE
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  const int values = min(items, n - begin) * 9;
  for (int k = t; k < values; k += items) Y_STORE(dw, (size_t)begin * 9 + k, turned[k]);
}
#endif
