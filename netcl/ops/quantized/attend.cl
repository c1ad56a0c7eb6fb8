// The attention of chain.cl: a token's queries over the cache of a layer, to which its key and value are added.
//   KEY_HEADS  heads of keys      SHARING  queries that share one      ROWS  of them that a group takes, a divisor
//   DEPTH  elements of a head, a power of two from 32 to 256
//   ROTARY  elements of a head that are rotated by the token's position      HEAD_NORM  1: RMS norms of queries and keys, with HEAD_EPS
// Groups take rows of queries and, of long caches, ranges of positions: the group of the first one combines them. The warps of a group take
// keys in turn; LANES lanes multiply a key, and every such part of a warp has sums of its own until the end.
// From results.cl: what groups leave for each other; from ptx.cl: FROM_LANE; from the launch: WARPS, X_T X_QUAD X_LOAD X_STORE, NORM_T NORM_LOAD, P_T (lengths).
#define LANES (DEPTH / 8)  // of a key, eight elements each
#define SLOTS (WARPS * (32 / LANES))  // keys that a group multiplies at a time
#define BLOCKS (SHARING / ROWS)
#define COUPLES ((DEPTH + 63) / 64)  // of elements that are rotated together, of a lane
#define KEYS 2  // that a lane waits for together: more take registers from the products
#define LEAST_RANGE 64  // positions
#define PART (DEPTH + 4)  // words of what a unit leaves of a row: sums, best score, total
#define PART_WORDS(tokens) (UNITS(tokens) * ROWS * PART)
#define RANGES 4  // whose parts wait for memory together
#define LOWEST -1e30f  // below all scores

static inline float of_lane(const float x, const int from) {
  uint bits;
  FROM_LANE(bits, as_uint(x), from);
  return as_float(bits);
}
static inline float eight_products(__local const float4* a, const float4* b) {
  const float4 both = a[0] * b[0] + a[1] * b[1];
  return both.x + both.y + both.z + both.w;
}

// What a unit takes: block `block` of all queries, and positions `from` to `to`, one of `ranges`. A token sees `seen` old positions.
typedef struct { int block, pair, range, ranges, from, to, seen; } share;
#define UNITS(tokens) (BLOCKS_OF(tokens) * max(1, (int)get_num_groups(0) / BLOCKS_OF(tokens)))
#define BLOCKS_OF(tokens) ((tokens) * KEY_HEADS * BLOCKS)

static inline share share_of(const int unit, __local const int* seen_of, const int tokens, const int positions, const int window) {
  const int blocks = BLOCKS_OF(tokens), block = unit % blocks, range = unit / blocks, pair = block / BLOCKS, seen = seen_of[pair / KEY_HEADS];
  const int first = window ? max(0, seen + 1 - window) : 0, old = min(seen, positions);
  const int ranges = clamp((old - first + LEAST_RANGE - 1) / LEAST_RANGE, 1, UNITS(tokens) / blocks), length = (old - first + ranges - 1) / ranges;
  const share s = {block, pair, range, ranges, first + range * length, min(first + (range + 1) * length, old), seen};
  return s;
}

// All units of a group.
static inline void attend(__global const float* z, __global float* inside, __global X_T* keys, __global X_T* values,
                          __global const NORM_T* query_norm, __global const NORM_T* key_norm, __local const int* seen_of,
                          __local const float2* turns, __global float* parts, __global int* late, volatile __local int* lost,
                          __local float* room, const int tokens, const int positions, const int window, const float scale) {
  __local float* query = room;  // queries, then the new key and value
  __local float* tops = query + (ROWS + 2) * DEPTH;
  __local float* totals = tops + WARPS * ROWS;
  __local float* factors = totals + WARPS * ROWS;
  __local float* bests = factors + WARPS * ROWS;
  __local float* sums = bests + 4 * ROWS;
  const int item = get_local_id(0), lane = item % 32, warp = item / 32, part = lane % LANES, slot = warp * (32 / LANES) + lane / LANES;
  for (int unit = get_group_id(0); unit < UNITS(tokens); unit += get_num_groups(0)) {
    const share s = share_of(unit, seen_of, tokens, positions, window);
    if (s.range >= s.ranges) continue;
    const int token = s.pair / KEY_HEADS, head = s.pair % KEY_HEADS, newest = s.range == s.ranges - 1 && s.seen < positions;
    const size_t at = (size_t)s.pair * positions * DEPTH;  // of the cache
    float4 key[KEYS][2], add[KEYS][2];
#define LOAD_KEYS(i0)                                                                                                      \
  UNROLL for (int u_ = 0; u_ < KEYS; ++u_) {                                                                               \
    const size_t near_ = at + (size_t)max(min((i0) + u_ * SLOTS + slot, s.to - 1), 0) * DEPTH + part * 8;                    \
    UNROLL for (int j_ = 0; j_ < 2; ++j_) key[u_][j_] = X_QUAD(keys + near_ + 4 * j_), add[u_][j_] = X_QUAD(values + near_ + 4 * j_); \
  }
    __global const float* row = z + (size_t)token * KEY_HEADS * (SHARING + 2) * DEPTH;
    LOAD_KEYS(s.from)
    barrier(CLK_LOCAL_MEM_FENCE);  // the product before has read its activations, or the unit before its sums
    for (int r = warp; r < ROWS + 2; r += WARPS) {
      const int of_z = r < ROWS ? s.block % (KEY_HEADS * BLOCKS) * ROWS + r : KEY_HEADS * (SHARING + r - ROWS) + head;
      __global const float* own = row + of_z * DEPTH;
      float x[COUPLES], y[COUPLES], norm = r < ROWS ? scale : 1.0f;
      for (int tries = 0, more = 1; more;) {
        UNROLL for (int j = 0; j < COUPLES; ++j) {
          const int couple = min(lane + 32 * j, DEPTH / 2 - 1), turned = r <= ROWS && couple < ROTARY / 2;
          x[j] = peek(own + (turned ? couple : 2 * couple));
          y[j] = peek(own + (turned ? couple + ROTARY / 2 : 2 * couple + 1));
        }
        more = 0;
        UNROLL for (int j = 0; j < COUPLES; ++j) more |= is_missing(x[j]) || is_missing(y[j]);
        more = more && keeps_waiting(&tries, late, lost);
      }
#if HEAD_NORM
      __global const NORM_T* weights = r < ROWS ? query_norm : key_norm;
      float squares = 0.0f;
      UNROLL for (int j = 0; j < COUPLES; ++j) squares += lane + 32 * j < DEPTH / 2 ? x[j] * x[j] + y[j] * y[j] : 0.0f;
      UNROLL for (int apart = 16; apart; apart /= 2) squares += of_lane(squares, lane ^ apart);
      if (r <= ROWS) norm *= 1.0f / sqrt(squares / DEPTH + HEAD_EPS);
#endif
      UNROLL for (int j = 0; j < COUPLES; ++j) {
        const int couple = min(lane + 32 * j, DEPTH / 2 - 1), turned = r <= ROWS && couple < ROTARY / 2;
        const int one = turned ? couple : 2 * couple, other = turned ? couple + ROTARY / 2 : 2 * couple + 1;
        const float2 turn = turned ? turns[token * (ROTARY / 2) + couple] : (float2)(1.0f, 0.0f);
        float a = x[j] * norm, b = y[j] * norm;
#if HEAD_NORM
        if (r <= ROWS) a *= NORM_LOAD(weights, one), b *= NORM_LOAD(weights, other);
#endif
        query[r * DEPTH + one] = a * turn.x - b * turn.y;
        query[r * DEPTH + other] = a * turn.y + b * turn.x;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (newest && s.block % BLOCKS == 0 && item < DEPTH) {
      X_STORE(keys, at + (size_t)s.seen * DEPTH + item, query[ROWS * DEPTH + item]);
      X_STORE(values, at + (size_t)s.seen * DEPTH + item, query[(ROWS + 1) * DEPTH + item]);
    }
    float top[ROWS], total[ROWS];
    float4 sum[ROWS][2];
    UNROLL for (int r = 0; r < ROWS; ++r) {  // the first slot begins with the new position
      __local const float4* new_key = (__local const float4*)(query + ROWS * DEPTH + part * 8);
      __local const float4* new_value = (__local const float4*)(query + (ROWS + 1) * DEPTH + part * 8);
      const float4 both[2] = {new_key[0], new_key[1]};
      float score = eight_products((__local const float4*)(query + r * DEPTH + part * 8), both);
      UNROLL for (int apart = LANES / 2; apart; apart /= 2) score += of_lane(score, lane ^ apart);
      const int counts = newest && slot == 0;
      top[r] = counts ? score : LOWEST;
      total[r] = counts;
      UNROLL for (int j = 0; j < 2; ++j) sum[r][j] = counts ? new_value[j] : (float4)(0.0f);
    }
    for (int i0 = s.from; i0 < s.to;) {
      UNROLL for (int r = 0; r < ROWS; ++r) {
        float score[KEYS], best = top[r];
        UNROLL for (int u = 0; u < KEYS; ++u) {
          score[u] = eight_products((__local const float4*)(query + r * DEPTH + part * 8), key[u]);
          UNROLL for (int apart = LANES / 2; apart; apart /= 2) score[u] += of_lane(score[u], lane ^ apart);
          if (i0 + u * SLOTS + slot < s.to) best = fmax(best, score[u]);
        }
        const float kept = exp(top[r] - best);
        total[r] *= kept;
        UNROLL for (int j = 0; j < 2; ++j) sum[r][j] *= kept;
        UNROLL for (int u = 0; u < KEYS; ++u) {
          const float share = i0 + u * SLOTS + slot < s.to ? exp(score[u] - best) : 0.0f;
          total[r] += share;
          UNROLL for (int j = 0; j < 2; ++j) sum[r][j] += share * add[u][j];
        }
        top[r] = best;
      }
      i0 += SLOTS * KEYS;
      if (i0 < s.to) { LOAD_KEYS(i0) }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {  // the parts of a warp, then the warps
      float best = top[r];
      UNROLL for (int apart = LANES; apart < 32; apart *= 2) best = fmax(best, of_lane(best, lane ^ apart));
      const float kept = exp(top[r] - best);
      float all[9] = {total[r], sum[r][0].x, sum[r][0].y, sum[r][0].z, sum[r][0].w, sum[r][1].x, sum[r][1].y, sum[r][1].z, sum[r][1].w};
      UNROLL for (int i = 0; i < 9; ++i) {
        all[i] *= kept;
        UNROLL for (int apart = LANES; apart < 32; apart *= 2) all[i] += of_lane(all[i], lane ^ apart);
      }
      if (lane < LANES) {
        UNROLL for (int i = 0; i < 8; ++i) sums[(warp * ROWS + r) * DEPTH + part * 8 + i] = all[1 + i];
        tops[warp * ROWS + r] = best;
        totals[warp * ROWS + r] = all[0];
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item < WARPS * ROWS) {  // the factors of the warps
      float best = LOWEST;
      UNROLL for (int w = 0; w < WARPS; ++w) best = fmax(best, tops[w * ROWS + item % ROWS]);
      factors[item] = exp(tops[item] - best);
      bests[item % ROWS] = best;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < ROWS * DEPTH; i += WARPS * 32) {
      const int r = i / DEPTH, d = i % DEPTH;
      const float best = bests[r];
      float all = 0.0f, result = 0.0f;
      UNROLL for (int w = 0; w < WARPS; ++w) {
        all += factors[w * ROWS + r] * totals[w * ROWS + r];
        result += factors[w * ROWS + r] * sums[(w * ROWS + r) * DEPTH + d];
      }
      if (s.ranges == 1) publish(inside + ((size_t)s.block * ROWS + r) * DEPTH + d, all == 0.0f ? 0.0f : result / all);
      else {
        __global float* to_parts = parts + ((size_t)unit * ROWS + r) * PART;
        publish(to_parts + d, result);
        if (d == 0) publish(to_parts + DEPTH, best), publish(to_parts + DEPTH + 1, all);
      }
    }
    for (int i = item; s.ranges > 1 && s.range == 0 && i < ROWS * DEPTH; i += WARPS * 32) {
      const int r = i / DEPTH, d = i % DEPTH;
      float best = LOWEST, all = 0.0f, result = 0.0f;
      for (int j0 = 0; j0 < s.ranges; j0 += RANGES) {
        float of_range[RANGES][3];
        for (int tries = 0, more = 1; more;) {
          UNROLL for (int j = 0; j < RANGES; ++j) {
            __global const float* from = parts + ((size_t)(s.block + min(j0 + j, s.ranges - 1) * BLOCKS_OF(tokens)) * ROWS + r) * PART;
            of_range[j][0] = peek(from + DEPTH);
            of_range[j][1] = peek(from + DEPTH + 1);
            of_range[j][2] = peek(from + d);
          }
          more = 0;
          UNROLL for (int j = 0; j < RANGES; ++j) UNROLL for (int k = 0; k < 3; ++k) more |= is_missing(of_range[j][k]);
          more = more && keeps_waiting(&tries, late, lost);
        }
        UNROLL for (int j = 0; j < RANGES; ++j) {
          if (j0 + j >= s.ranges) continue;
          const float top = fmax(best, of_range[j][0]), kept = exp(best - top), share = exp(of_range[j][0] - top);
          all = all * kept + share * of_range[j][1];
          result = result * kept + share * of_range[j][2];
          best = top;
        }
      }
      publish(inside + ((size_t)s.block * ROWS + r) * DEPTH + d, all == 0.0f ? 0.0f : result / all);
    }
  }
}
