// Winograd's convolution on GPUs, 3 x 3 kernels and stride 1: tiles of 4 x 4 outputs by 36 products per channel and filter where a plain
// sum has 144. Between the transforms here stands one batched product, a matrix per element of a tile. Neighbouring work-items take
// neighbouring tiles, so that what is wide (36 values for 16 of the image) is read and written in whole lines. SCALES as in transforms.cl.
#pragma OPENCL FP_CONTRACT ON

#ifndef INPUT_GRAD
#define INPUT_GRAD 0  // 1: weights are mirrored
#endif
#ifndef QUADS
#define QUADS 0  // 1: four neighbours of a row of the image are one aligned vector of floats
#endif
#ifndef ITEMS
#define ITEMS 64  // most work-items of a group
#endif

// Where a tile lies: its image, and the first output it makes.
#define TILE_PLACE                                                                                \
  const int image = tile / (high * wide), place = tile - image * high * wide, down = place / wide; \
  const int y0 = down * 4, x0 = (place - down * wide) * 4;

#if PART == 1 || PART == 5
__constant float scales[6][6] = SCALES;
#endif

#if PART == 1
// u[element][weight] of n pairs of filter and channel, in the order of the weights; a work-item per pair.
__kernel void winograd_weights(__global const W_T* restrict w, __global float* restrict u, int n) {
  const int i = get_global_id(0);
  if (i >= n) return;
  float taps[3][3], half_way[3][6];
#pragma unroll
  for (int k = 0; k < 9; ++k) taps[k / 3][k % 3] = W_LOAD(w, (size_t)i * 9 + (INPUT_GRAD ? 8 - k : k));
#pragma unroll
  for (int r = 0; r < 3; ++r) {
#define D(k) taps[r][k]
#define R(k) half_way[r][k]
    WEIGHT_TRANSFORM(float, D, R)
#undef D
#undef R
  }
#pragma unroll
  for (int s = 0; s < 6; ++s) {
    float column[6];
#define D(k) half_way[k][s]
#define R(k) column[k]
    WEIGHT_TRANSFORM(float, D, R)
#undef D
#undef R
#pragma unroll
    for (int r = 0; r < 6; ++r) u[(r * 6 + s) * n + i] = column[r] * scales[r][s];
  }
}
#endif

#if PART == 2
// v[element][channel][tile] of the input; tiles from N high wide to `span` are zero. Work-items: tiles, channels.
__kernel void winograd_inputs(__global const X_T* restrict x, __global float* restrict v, int N, int C, int H, int W, int high, int wide,
                              int span, int pad_h, int pad_w) {
  const int tile = get_global_id(0), c = get_global_id(1), step = C * span;
  if (tile >= span || c >= C) return;
  TILE_PLACE
  __global const X_T* plane = x + ((size_t)image * C + c) * H * W;
  float values[6][6];
#pragma unroll
  for (int r = 0; r < 6; ++r) {
    const int py = y0 - pad_h + r, at = py * W + x0 - pad_w, there = image < N && py >= 0 && py < H;
    float row[6];
#if QUADS
    const float4 middle = there ? *(__global const float4*)(plane + at + 1) : (float4)(0);
    row[0] = there && x0 > 0 ? plane[at] : 0;
    row[1] = middle.x, row[2] = middle.y, row[3] = middle.z, row[4] = middle.w;
    row[5] = there && x0 + 4 < W ? plane[at + 5] : 0;
#else
#pragma unroll
    for (int s = 0; s < 6; ++s) row[s] = there && x0 - pad_w + s >= 0 && x0 - pad_w + s < W ? X_LOAD(plane, at + s) : 0;
#endif
#define D(k) row[k]
#define R(k) values[r][k]
    INPUT_TRANSFORM(float, D, R)
#undef D
#undef R
  }
#pragma unroll
  for (int s = 0; s < 6; ++s) {
    float column[6];
#define D(k) values[k][s]
#define R(k) column[k]
    INPUT_TRANSFORM(float, D, R)
#undef D
#undef R
#pragma unroll
    for (int r = 0; r < 6; ++r) v[(r * 6 + s) * step + c * span + tile] = column[r];
  }
}
#endif

#if PART == 3
// y from sums[element][filter][tile]. Work-items: tiles, filters.
__kernel void winograd_outputs(__global const float* restrict sums, __global const B_T* restrict bias, __global Y_T* restrict y, int N, int M,
                               int OH, int OW, int high, int wide, int span) {
  const int tile = get_global_id(0), m = get_global_id(1), step = M * span;
  if (tile >= N * high * wide || m >= M) return;
  TILE_PLACE
  float half_way[4][6];
#pragma unroll
  for (int s = 0; s < 6; ++s) {
    float column[6];
#pragma unroll
    for (int r = 0; r < 6; ++r) column[r] = sums[(r * 6 + s) * step + m * span + tile];
#define D(k) column[k]
#define R(k) half_way[k][s]
    OUTPUT_TRANSFORM(float, D, R)
#undef D
#undef R
  }
  const float add = BIAS_OF(m);
  __global Y_T* plane = y + ((size_t)image * M + m) * OH * OW;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float row[4];
#define D(k) half_way[r][k]
#define R(k) row[k]
    OUTPUT_TRANSFORM(float, D, R)
#undef D
#undef R
    if (y0 + r >= OH) continue;
    const int at = (y0 + r) * OW + x0;
#if QUADS
    *(__global float4*)(plane + at) = (float4)(finished(row[0], add), finished(row[1], add), finished(row[2], add), finished(row[3], add));
#else
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if (x0 + s < OW) Y_STORE(plane, at + s, finished(row[s], add));
#endif
  }
}
#endif

#if PART == 4
// d[element][filter][tile] of the gradient of the outputs; tiles from N high wide to `span` are zero. Work-items: tiles, filters.
__kernel void winograd_output_grads(__global const W_T* restrict dy, __global float* restrict d, int N, int M, int OH, int OW, int high, int wide,
                                    int span) {
  const int tile = get_global_id(0), m = get_global_id(1), step = M * span;
  if (tile >= span || m >= M) return;
  TILE_PLACE
  __global const W_T* plane = dy + ((size_t)image * M + m) * OH * OW;
  float values[4][6];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int at = (y0 + r) * OW + x0, there = image < N && y0 + r < OH;
    float row[4];
#if QUADS
    const float4 four = there ? *(__global const float4*)(plane + at) : (float4)(0);
    row[0] = four.x, row[1] = four.y, row[2] = four.z, row[3] = four.w;
#else
#pragma unroll
    for (int s = 0; s < 4; ++s) row[s] = there && x0 + s < OW ? W_LOAD(plane, at + s) : 0;
#endif
#define D(k) row[k]
#define R(k) values[r][k]
    OUTPUT_GRAD_TRANSFORM(float, D, R)
#undef D
#undef R
  }
#pragma unroll
  for (int s = 0; s < 6; ++s) {
    float column[6];
#define D(k) values[k][s]
#define R(k) column[k]
    OUTPUT_GRAD_TRANSFORM(float, D, R)
#undef D
#undef R
#pragma unroll
    for (int r = 0; r < 6; ++r) d[(r * 6 + s) * step + m * span + tile] = column[r];
  }
}
#endif

#if PART == 5
// dw of n pairs of filter and channel from du[element][pair]; a work-item per pair. Nine values of a pair are no vector: they are turned
// in local memory, so that neighbours write neighbours.
__kernel void winograd_weight_grads(__global const float* restrict du, __global Y_T* restrict dw, int n) {
  __local float turned[ITEMS * 9];
  const int t = get_local_id(0), items = get_local_size(0), begin = get_group_id(0) * items, i = begin + t;
  if (i < n) {
    float half_way[3][6];
#pragma unroll
    for (int s = 0; s < 6; ++s) {
      float column[6];
#pragma unroll
      for (int r = 0; r < 6; ++r) column[r] = du[(r * 6 + s) * n + i] * scales[r][s];
#define D(k) column[k]
#define R(k) half_way[k][s]
      WEIGHT_GRAD_TRANSFORM(float, D, R)
#undef D
#undef R
    }
#pragma unroll
    for (int r = 0; r < 3; ++r) {
#define D(k) half_way[r][k]
#define R(k) turned[t * 9 + r * 3 + (k)]
      WEIGHT_GRAD_TRANSFORM(float, D, R)
#undef D
#undef R
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  const int values = min(items, n - begin) * 9;
  for (int k = t; k < values; k += items) Y_STORE(dw, (size_t)begin * 9 + k, turned[k]);
}
#endif
