// The sums that are gradients of weight and bias, in parts. Macros of norm.cl and rows.cl: X_T Z_T M_T M_LOAD M_STORE VEC GROUP SIZED SHARED
// SHARED_PASS LANE.

#ifndef COLUMNS  // 1: the span is 1 and neighbouring channels make a vector
#define COLUMNS 0
#endif

#if !COLUMNS
SIZED __kernel void sum_parts(__global const X_T* g, __global const Z_T* x, __global const M_T* means, __global const M_T* rstds,
                              __global M_T* firsts, __global M_T* seconds, const int chunk, const int parts, const int per_image,
                              const int shared_by, const int images, const int channels, const int span) {
  SHARED
  const int row = get_global_id(0) / GROUP;
  if (row >= parts * channels) return;
  const int from = row / channels * chunk, to = min(from + chunk, images);
  const pair sums = channel_sums(g, x, means, rstds, row % channels, channels, span, from, to, per_image, shared_by SHARED_PASS);
  if (LANE == 0) {
    M_STORE(firsts, row, sums.x);
    M_STORE(seconds, row, sums.y);
  }
}
#else
// Statistics per image (layer norm: per_image = 1) or per column (batch norm: per_image = 0).
SIZED __kernel void sum_parts(__global const X_T* g, __global const Z_T* x, __global const M_T* means, __global const M_T* rstds,
                              __global M_T* firsts, __global M_T* seconds, const int chunk, const int parts, const int per_image,
                              const int shared_by, const int images, const int channels, const int span) {
  const int blocks = (channels + VEC - 1) / VEC;
  const int part = get_global_id(0) / blocks, column = get_global_id(0) % blocks * VEC, left = channels - column;
  if (part >= parts) return;
  const int to = min((part + 1) * chunk, images);
  const vec column_means = per_image ? (vec)(0) : M_lanes(means, column, left);
  const vec column_rstds = per_image ? (vec)(0) : M_lanes(rstds, column, left);
  vec first = 0, second = 0;
  for (int image = part * chunk; image < to; ++image) {
    const vec mean = per_image ? (vec)(M_LOAD(means, image)) : column_means;
    const vec rstd = per_image ? (vec)(M_LOAD(rstds, image)) : column_rstds;
    const vec gi = X_lanes(g, (long)image * channels + column, left);
    first += gi;
    second += gi * (Z_lanes(x, (long)image * channels + column, left) - mean) * rstd;
  }
  M_store_lanes(firsts, (long)part * channels + column, left, first);
  M_store_lanes(seconds, (long)part * channels + column, left, second);
}
#endif

__kernel void join_sums(__global const M_T* part_firsts, __global const M_T* part_seconds, __global M_T* firsts, __global M_T* seconds,
                        const int parts, const int channels) {
  const int c = get_global_id(0);
  if (c >= channels) return;
  real first = 0, second = 0;
  for (int part = 0; part < parts; ++part) {
    first += M_LOAD(part_firsts, part * channels + c);
    second += M_LOAD(part_seconds, part * channels + c);
  }
  M_STORE(firsts, c, first);
  M_STORE(seconds, c, second);
}
