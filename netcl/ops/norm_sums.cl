// The sums that are gradients of weight and bias, in parts. Operands X Z K M, as in norm.cl.

// With COLUMNS, statistics are per image (layer norm: per_image = 1) or per column (batch norm: per_image = 0).
SIZED __kernel void sum_parts(__global const X_T* g, __global const K_T* kept, __global const Z_T* x, __global const M_T* means,
                              __global const M_T* rstds, __global M_T* firsts, __global M_T* seconds, const int chunk, const int parts,
                              const int per_image, const int shared_by, const int images, const int channels, const int span) {
#if !COLUMNS
  SHARED
  const int row = get_global_id(0) / GROUP;
  const int from = row / channels * chunk, to = min(from + chunk, images);
  const pair sums = channel_sums(g, kept, x, means, rstds, row % channels, channels, span, from, to, per_image, shared_by SHARED_PASS);
  if (LANE == 0) {
    M_STORE(firsts, row, sums.x);
    M_STORE(seconds, row, sums.y);
  }
#else
  const int strips = (channels + VEC * STRIP - 1) / (VEC * STRIP);
  const int part = get_global_id(0) / strips, column = get_global_id(0) % strips * VEC * STRIP;
  if (part >= parts) return;
  const int count = min((channels - column + VEC - 1) / VEC, STRIP), to = min((part + 1) * chunk, images);
  vec first[STRIP], second[STRIP], mean[STRIP], rstd[STRIP];
  for (int s = 0; s < count; ++s) {
    first[s] = second[s] = 0;
    mean[s] = per_image ? (vec)(0) : M_lanes(means, column + s * VEC, channels - column - s * VEC);
    rstd[s] = per_image ? (vec)(0) : M_lanes(rstds, column + s * VEC, channels - column - s * VEC);
  }
#if STRIP == 1  // a work-item with one column would wait for each load
#pragma unroll 4
#endif
  for (int image = part * chunk; image < to; ++image) {
    const long start = (long)image * channels + column;
    const vec row_mean = per_image ? (vec)(M_LOAD(means, image)) : (vec)(0), row_rstd = per_image ? (vec)(M_LOAD(rstds, image)) : (vec)(0);
    for (int s = 0; s < count; ++s) {
      const int left = channels - column - s * VEC;
      const vec gi = X_lanes(g, start + s * VEC, left), d = Z_lanes(x, start + s * VEC, left);
      first[s] += gi;
      second[s] += gi * (per_image ? (d - row_mean) * row_rstd : (d - mean[s]) * rstd[s]);
    }
  }
  for (int s = 0; s < count; ++s) {
    const long at = (long)part * channels + column + s * VEC;
    M_store_lanes(firsts, at, channels - column - s * VEC, first[s]);
    M_store_lanes(seconds, at, channels - column - s * VEC, second[s]);
  }
#endif
}

#define TILE (LOCAL > 16 ? 16 : 1)  // vectors of neighbouring columns that a work-group joins

// Joins parts: rows of (parts, channels), either of two such matrices by turns. The work-items above a column share its parts.
SIZED __kernel void join_sums(__global const M_T* part_firsts, __global const M_T* part_seconds, __global M_T* firsts, __global M_T* seconds,
                              const int parts, const int channels) {
  const int item = get_local_id(0), second = get_group_id(0) % 2;
  const int column = (get_group_id(0) / 2 * TILE + item % TILE) * VEC, left = channels - column;
  __global const M_T* from = second ? part_seconds : part_firsts;
  vec sum = 0;
  if (left > 0) {
#pragma unroll 8
    for (int part = item / TILE; part < parts; part += LOCAL / TILE) sum += M_lanes(from, (long)part * channels + column, left);
  }
#if LOCAL > TILE
  __local vec sums[LOCAL];
  sums[item] = sum;
  for (int step = LOCAL / 2; step >= TILE; step /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item < step) sums[item] += sums[item + step];
  }
  sum = sums[item];
#endif
  if (item < TILE && left > 0) M_store_lanes(second ? seconds : firsts, column, left, sum);
}
