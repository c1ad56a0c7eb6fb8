// Attention on the matrix units of NVIDIA GPUs from compute capability 8.0: a warp of 32 lanes takes 16 queries (in the gradient of keys
// and values: keys), a work-group WARPS times as many, and walks the other side in blocks of COLUMNS.
//
// Rows and blocks lie in local memory; scores and sums are fragments in registers (ptx.cl), and scores become the left operand of the
// second product where they are: within a fragment the keys of a sum may come in any order. With TERMS 2, float32 is split into two TF32.
// matmul/ptx.cl: LOCAL_AT, COPY_16, COPIES_COMMIT, COPIES_WAIT, FRAGMENTS, FRAGMENTS_TURNED, WORD, FROM_LANE, MMA_TF32.
// Operands: X queries, keys, values, results and gradients; M mask; S sums and logarithms.
#ifndef WARPS
#define WARPS 4
#define COLUMNS 32  // keys (queries) of a block: 16, or a multiple of 32
#define BUCKET 64  // values of a row in local memory: 32, 64 or 128
#define DEPTH BUCKET  // the head sizes; rows are multiples of 16 bytes
#define DEPTH_V BUCKET
#define MMA MMA_TF32  // how the units multiply: float16, bfloat16 or TF32
#define SIZE 4  // bytes of a value: 2, or 4 for TF32
#define TERMS 1  // 1: float32 is rounded to TF32. 2: it is split into two, three products
#endif
#ifndef PAIR  // two values of 16 bits
#define PAIR pair_bfloat16
#endif

#define ITEMS (WARPS * 32)
#define ROWS (WARPS * 16)
#define VALUES (16 / SIZE)                // of a copy
#define FRAGMENT (32 / SIZE)              // values along k of a fragment
#define STEPS(depth) (((depth) + FRAGMENT - 1) / FRAGMENT)
#define SLICE 4                           // fragments along k whose products are summed by the units alone
#define TOGETHER (COLUMNS < 32 ? 2 : 4)   // fragments of the result that are summed at a time
#define WIDTH(depth) (((depth) + 31) / 32 * 4)  // fragments across a result
#define SCORES (COLUMNS / 8)              // fragments across a block
#define LINE (BUCKET * SIZE)              // bytes of a row in local memory
// Pieces of 16 bytes are permuted within a line, so that eight lines' pieces of one column lie in different banks.
#define PERMUTED(line) (LINE == 64 ? (line) / 2 % 4 : (line) % 8)
#define LANES const int lane = get_local_id(0) % 32, warp = get_local_id(0) / 32, quad = lane / 4, place = lane % 4;

#if STRIDED && SIZE == 2  // an int holds it, because tensors have less than 2^31 elements, and takes fewer registers where rows are far apart
typedef int place_t;
#else
typedef long place_t;
#endif

// Copies `lines` rows of x from `first` on, each `depth` long and `step` apart, to line `to` of local memory; zeros beyond the last of
// `count` rows.
INLINE void copy_lines(const uint base, const int to, __global const X_T* x, const int step, const int first, const int count,
                       const int lines, const int depth) {
  const int pieces = STEPS(depth) * 2;
  EACH for (int i = 0; i < (lines * pieces + ITEMS - 1) / ITEMS; ++i) {
    const int at = get_local_id(0) + i * ITEMS, line = at / pieces, piece = at % pieces;
    if (lines * pieces % ITEMS != 0 && line >= lines) continue;
    const int there = first + line < count && piece * VALUES < depth;
    COPY_16(base + (to + line) * LINE + (piece ^ PERMUTED(line)) * 16, (ulong)(x + (there ? (place_t)(first + line) * step + piece * VALUES : 0)),
            there ? 16 : 0);
  }
}

// d += a b for fragments side by side.
INLINE void multiply(float d[TOGETHER][4], const uint a[4], uint b[TOGETHER][2]) {
#if TERMS == 2
  uint a_high[4], a_low[4], high[TOGETHER][2], low[TOGETHER][2];
  EACH for (int e = 0; e < 4; ++e) split_tf32(a[e], &a_high[e], &a_low[e]);
  EACH for (int i = 0; i < TOGETHER; ++i)
    EACH for (int e = 0; e < 2; ++e) split_tf32(b[i][e], &high[i][e], &low[i][e]);
  EACH for (int i = 0; i < TOGETHER; ++i) MMA(d[i], a_low, high[i][0], high[i][1]);
  EACH for (int i = 0; i < TOGETHER; ++i) MMA(d[i], a_high, low[i][0], low[i][1]);
  EACH for (int i = 0; i < TOGETHER; ++i) MMA(d[i], a_high, high[i][0], high[i][1]);
#elif SIZE == 4
  uint left[4];
  EACH for (int e = 0; e < 4; ++e) left[e] = tf32_bits(as_float(a[e]));
  EACH for (int i = 0; i < TOGETHER; ++i) MMA(d[i], left, tf32_bits(as_float(b[i][0])), tf32_bits(as_float(b[i][1])));
#else
  EACH for (int i = 0; i < TOGETHER; ++i) MMA(d[i], a, b[i][0], b[i][1]);
#endif
}

#define FRESH(d)                            \
  float d[TOGETHER][4];                     \
  EACH for (int i = 0; i < TOGETHER; ++i)   \
    EACH for (int e = 0; e < 4; ++e) d[i][e] = 0;
#define ADD_FRESH(sums, j, d)               \
  EACH for (int i = 0; i < TOGETHER; ++i)   \
    EACH for (int e = 0; e < 4; ++e) sums[(j) + i][e] += d[i][e];

// Where the lane's first pieces lie: of the left operand, of the right one along its lines, of the right one across them.
typedef struct {
  uint left[4], along[4], across[8];
} Places;

INLINE Places places_of(const uint base) {
  LANES
  Places own;
  EACH for (int i = 0; i < 4; ++i) {
    own.left[i] = base + (warp * 16 + lane % 16) * LINE + ((i * 2 + lane / 16) ^ PERMUTED(lane % 16)) * 16;
    own.along[i] = base + (lane % 8 + lane / 16 * 8) * LINE + ((i * 2 + lane / 8 % 2) ^ PERMUTED(lane % 8)) * 16;
  }
  EACH for (int i = 0; i < 8; ++i)
#if SIZE == 4
    own.across[i] = base + (place * 2 + i % 2) * LINE + ((i / 2 * 2 + quad / 4) ^ (place * 2 + i % 2)) * 16 + quad % 4 * 4;
#else
    own.across[i] = base + lane % 16 * LINE + ((i + lane / 16) ^ PERMUTED(lane % 16)) * 16;
#endif
  return own;
}

// scores = 16 lines of `rows` times the lines of `block`, both counted from the start of local memory: products along both.
INLINE void products(float scores[SCORES][4], const Places* own, const int rows, const int block, const int steps) {
  EACH for (int j = 0; j < SCORES; ++j)
    EACH for (int e = 0; e < 4; ++e) scores[j][e] = 0;
  EACH for (int s0 = 0; s0 < steps; s0 += SLICE) {
    uint a[SLICE][4];
    EACH for (int s = 0; s < SLICE; ++s)
      if (s0 + s < steps) FRAGMENTS(a[s][0], a[s][1], a[s][2], a[s][3], own->left[s] + rows * LINE + s0 * 32);
    EACH for (int j = 0; j < SCORES; j += TOGETHER) {
      FRESH(fresh)
      EACH for (int s = 0; s < SLICE; ++s) {
        if (s0 + s >= steps) continue;
        uint b[TOGETHER][2];
        EACH for (int i = 0; i < TOGETHER; i += 2)
          FRAGMENTS(b[i][0], b[i][1], b[i + 1][0], b[i + 1][1], own->along[s] + (block + (j + i) * 8) * LINE + s0 * 32);
        multiply(fresh, a[s], b);
      }
      ADD_FRESH(scores, j, fresh)
    }
  }
}

// sums += scores times the lines of `block`: products across them.
INLINE void gather(float sums[][4], const Places* own, float scores[SCORES][4], const int block, const int width) {
  EACH for (int s0 = 0; s0 < COLUMNS / FRAGMENT; s0 += SLICE)
    EACH for (int j = 0; j < width; j += TOGETHER) {
      FRESH(fresh)
      EACH for (int s1 = 0; s1 < SLICE; ++s1) {
        const int s = s0 + s1;
        if (s >= COLUMNS / FRAGMENT) continue;
        uint a[4], b[TOGETHER][2];
#if SIZE == 4
        // Scores 2t and 2t + 1 of a row are given as the values t and t + 4: the lines of b come in the same order.
        EACH for (int e = 0; e < 4; ++e) a[e] = as_uint(scores[s][e / 2 + e % 2 * 2]);
        EACH for (int i = 0; i < TOGETHER; ++i)
          EACH for (int e = 0; e < 2; ++e)
            WORD(b[i][e], own->across[(j + i) % 4 * 2 + e] + (block + s * 8) * LINE + (j + i) / 4 * 128);
#else
        EACH for (int e = 0; e < 4; ++e) a[e] = PAIR(scores[s * 2 + e / 2][e % 2 * 2], scores[s * 2 + e / 2][e % 2 * 2 + 1]);
        EACH for (int i = 0; i < TOGETHER; i += 2)
          FRAGMENTS_TURNED(b[i][0], b[i][1], b[i + 1][0], b[i + 1][1],
                           own->across[(j + i) % 8] + (block + s * 16) * LINE + (j + i) / 8 * 128);
#endif
        multiply(fresh, a, b);
      }
      ADD_FRESH(sums, j, fresh)
    }
}

// Parts of a value that is not finite are not that value: scores that hold one are computed again, plainly. x and y: the rows and columns.
INLINE void recompute(float scores[SCORES][4], __global const X_T* x, const int step_x, const int row, const int rows,
                      __global const X_T* y, const int step_y, const int column, const int columns, const int depth) {
#if TERMS == 2
  float test = 0;
  EACH for (int j = 0; j < SCORES; ++j)
    EACH for (int e = 0; e < 4; ++e) test += scores[j][e] * 0.0f;
  if (!any_lane(!(test == 0.0f))) return;
  EACH for (int j = 0; j < SCORES; ++j)
    EACH for (int e = 0; e < 4; ++e) {
      const long i = min(row + e / 2 * 8, rows - 1), k = min(column + j * 8 + e % 2, columns - 1);
      float sum = 0;
      _Pragma("unroll 1") for (int d = 0; d < depth; ++d) sum += (float)X_LOAD(x, i * step_x + d) * (float)X_LOAD(y, k * step_y + d);
      scores[j][e] = sum;
    }
#endif
}

// Over the four lanes of a row.
INLINE float across(float x, const int largest) {
  LANES
  EACH for (int apart = 1; apart < 4; apart *= 2) {
    uint bits;
    FROM_LANE(bits, as_uint(x), lane ^ apart);
    x = largest ? fmax(x, as_float(bits)) : x + as_float(bits);
  }
  return x;
}

INLINE void store_sums(__global X_T* out, const int step, float sums[][4], const float factors[2], const int row, const int rows,
                       const int depth) {
  LANES
  EACH for (int j = 0; j < (depth + 7) / 8; ++j)
    EACH for (int r = 0; r < 2; ++r) {
      const int column = j * 8 + place * 2;
      if (row + r * 8 >= rows || column >= depth) continue;
      const float low = sums[j][2 * r] * factors[r], high = sums[j][2 * r + 1] * factors[r];
#if SIZE == 4
      *(__global float2*)(out + (long)(row + r * 8) * step + column) = (float2)(low, high);
#else
      *(__global uint*)(out + (long)(row + r * 8) * step + column) = PAIR(low, high);
#endif
    }
}

INLINE void clear(float sums[][4], const int width) {
  EACH for (int j = 0; j < width; ++j)
    EACH for (int e = 0; e < 4; ++e) sums[j][e] = 0;
}

#define MEMORY(lines)                                                             \
  __local uchar memory[(lines) * LINE] __attribute__((aligned(128)));             \
  const uint base = LOCAL_AT(memory);                                             \
  const Places own_places = places_of(base), *own = &own_places;
#define ARRIVED COPIES_WAIT(0); barrier(CLK_LOCAL_MEM_FENCE)

#if PART == 1
SIZED __kernel void attention(READ_POINTERS, __global X_T* out, __global S_T* logarithms, CALL_NUMBERS, O_NUMBERS, Q_NUMBERS, K_NUMBERS,
                              V_NUMBERS) {
  MEMORY(ROWS + 2 * COLUMNS)
  LANES
  const int keys = ROWS, values = keys + COLUMNS;
  HEAD_OF_GROUP
  const int from = first + warp * 16, row = from + quad;
  float sums[WIDTH(DEPTH_V)][4], most[2] = {LOWEST, LOWEST}, total[2] = {0, 0};
  clear(sums, WIDTH(DEPTH_V));
  copy_lines(base, 0, q, STEP_OF(q, DEPTH), first, n, ROWS, DEPTH);
  copy_lines(base, keys, k, STEP_OF(k, DEPTH), 0, m, COLUMNS, DEPTH);
  COPIES_COMMIT();
  const int end = causal ? min(m, first + ROWS) : m;
  for (int j = 0; j < end; j += COLUMNS) {
    ARRIVED;
    copy_lines(base, values, v, STEP_OF(v, DEPTH_V), j, m, COLUMNS, DEPTH_V);
    COPIES_COMMIT();
    const int busy = from < n && (!causal || j <= from + 15);
    float s[SCORES][4];
    if (busy) {
      products(s, own, 0, keys, STEPS(DEPTH));
      recompute(s, q, STEP_OF(q, DEPTH), row, n, k, STEP_OF(k, DEPTH), j + place * 2, m, DEPTH);
      EACH for (int x = 0; x < SCORES; ++x)
        EACH for (int e = 0; e < 4; ++e) s[x][e] *= scale * LOG2_E;
      if (MASK || j + COLUMNS > m || (causal && j + COLUMNS > from + 1)) {
        EACH for (int x = 0; x < SCORES; ++x)
          EACH for (int e = 0; e < 4; ++e)
            s[x][e] = masked(s[x][e], mask_here, by_query, by_key, row + e / 2 * 8, j + x * 8 + place * 2 + e % 2, n, m, causal);
      }
      EACH for (int r = 0; r < 2; ++r) {
        float higher = most[r], sum = 0;
        EACH for (int x = 0; x < SCORES; ++x) higher = fmax(higher, fmax(s[x][2 * r], s[x][2 * r + 1]));
        higher = across(higher, 1);
        const float safe = higher == LOWEST ? 0.0f : higher, keep = POWER(most[r] - safe);
        most[r] = higher;
        EACH for (int x = 0; x < SCORES; ++x)
          EACH for (int e = 2 * r; e < 2 * r + 2; ++e) {
            s[x][e] = POWER(s[x][e] - safe);
            sum += s[x][e];
          }
        total[r] = total[r] * keep + sum;
        EACH for (int x = 0; x < WIDTH(DEPTH_V); ++x)
          EACH for (int e = 2 * r; e < 2 * r + 2; ++e) sums[x][e] *= keep;
      }
    }
    ARRIVED;
    if (j + COLUMNS < end) copy_lines(base, keys, k, STEP_OF(k, DEPTH), j + COLUMNS, m, COLUMNS, DEPTH);
    COPIES_COMMIT();
    if (busy) gather(sums, own, s, values, WIDTH(DEPTH_V));
  }
  COPIES_WAIT(0);
  EACH for (int r = 0; r < 2; ++r) {
    const float all = across(total[r], 0);
    total[r] = all == 0 ? 0.0f : 1 / all;
    if (place == 0 && row + r * 8 < n) S_STORE(logarithms, (long)head * n + row + r * 8, (most[r] + log2(all)) * LN_2);
  }
  store_sums(out + START(o, head, heads), o_row, sums, total, row, n, DEPTH_V);
}

#elif PART == 2

// The sum of gradient times result of each row, less the gradient that arrives through the logarithm.
INLINE void row_deltas(float less[2], __global const X_T* g, const int step_g, __global const X_T* out, const int step_out,
                       __global const S_T* through, __global S_T* delta, const int has_through, const int row, const int n) {
  LANES
  EACH for (int r = 0; r < 2; ++r) {
    const int here = min(row + r * 8, n - 1);
    const long at_g = (long)here * step_g, at_out = (long)here * step_out;
    float sum = 0;
    for (int d = place; d < DEPTH_V; d += 4) sum += (float)X_LOAD(g, at_g + d) * (float)X_LOAD(out, at_out + d);
    less[r] = across(sum, 0) - (has_through ? (float)S_LOAD(through, here) : 0.0f);
    if (place == 0 && row + r * 8 < n) S_STORE(delta, here, less[r]);
  }
}

SIZED __kernel void attention_query_grad(__global const X_T* g, READ_POINTERS, __global const S_T* logarithms, __global S_T* delta,
                                         __global const X_T* forward, __global const S_T* through, __global X_T* out, const int has_through,
                                         CALL_NUMBERS, O_NUMBERS, G_NUMBERS, Q_NUMBERS, K_NUMBERS, V_NUMBERS, F_NUMBERS) {
  MEMORY(2 * ROWS + 2 * COLUMNS)
  LANES
  const int upstream = ROWS, keys = upstream + ROWS, values = keys + COLUMNS;
  HEAD_OF_GROUP
  const int from = first + warp * 16, row = from + quad;
  const long start = (long)head * n;
  g += FROM(g, head, heads, n, DEPTH_V);
  forward += FROM(f, head, heads, n, DEPTH_V);
  copy_lines(base, 0, q, STEP_OF(q, DEPTH), first, n, ROWS, DEPTH);
  copy_lines(base, upstream, g, STEP_OF(g, DEPTH_V), first, n, ROWS, DEPTH_V);
  copy_lines(base, keys, k, STEP_OF(k, DEPTH), 0, m, COLUMNS, DEPTH);
  copy_lines(base, values, v, STEP_OF(v, DEPTH_V), 0, m, COLUMNS, DEPTH_V);
  COPIES_COMMIT();
  float sums[WIDTH(DEPTH)][4], less[2], safe[2];
  clear(sums, WIDTH(DEPTH));
  row_deltas(less, g, STEP_OF(g, DEPTH_V), forward, STEP_OF(f, DEPTH_V), through + start, delta + start, has_through, row, n);
  EACH for (int r = 0; r < 2; ++r) safe[r] = safe_logarithm(S_LOAD(logarithms, start + min(row + r * 8, n - 1)));
  const int end = causal ? min(m, first + ROWS) : m;
  for (int j = 0; j < end; j += COLUMNS) {
    ARRIVED;
    const int busy = from < n && (!causal || j <= from + 15);
    float s[SCORES][4], d[SCORES][4];
    if (busy) products(d, own, upstream, values, STEPS(DEPTH_V));
    barrier(CLK_LOCAL_MEM_FENCE);
    if (j + COLUMNS < end) copy_lines(base, values, v, STEP_OF(v, DEPTH_V), j + COLUMNS, m, COLUMNS, DEPTH_V);
    if (busy) {
      recompute(d, g, STEP_OF(g, DEPTH_V), row, n, v, STEP_OF(v, DEPTH_V), j + place * 2, m, DEPTH_V);
      products(s, own, 0, keys, STEPS(DEPTH));
      recompute(s, q, STEP_OF(q, DEPTH), row, n, k, STEP_OF(k, DEPTH), j + place * 2, m, DEPTH);
      const int partial = MASK || j + COLUMNS > m || (causal && j + COLUMNS > from + 1);
      EACH for (int x = 0; x < SCORES; ++x)
        EACH for (int e = 0; e < 4; ++e) {
          float score = s[x][e] * (scale * LOG2_E);
          if (partial) score = masked(score, mask_here, by_query, by_key, row + e / 2 * 8, j + x * 8 + place * 2 + e % 2, n, m, causal);
          s[x][e] = POWER(score - safe[e / 2]) * (d[x][e] - less[e / 2]);
        }
      gather(sums, own, s, keys, WIDTH(DEPTH));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (j + COLUMNS < end) copy_lines(base, keys, k, STEP_OF(k, DEPTH), j + COLUMNS, m, COLUMNS, DEPTH);
    COPIES_COMMIT();
  }
  COPIES_WAIT(0);
  EACH for (int r = 0; r < 2; ++r) less[r] = scale;
  store_sums(out + START(o, head, heads), o_row, sums, less, row, n, DEPTH);
}

#else

// Rows of scores are keys here, columns are queries.
SIZED __kernel void attention_key_grad(__global const X_T* g, READ_POINTERS, __global const S_T* logarithms, __global const S_T* delta,
                                       __global X_T* out_k, __global X_T* out_v, CALL_NUMBERS, DK_NUMBERS, DV_NUMBERS, G_NUMBERS, Q_NUMBERS,
                                       K_NUMBERS, V_NUMBERS) {
  MEMORY(2 * ROWS + 2 * COLUMNS)
  LANES
  const int values = ROWS, queries = values + ROWS, upstream = queries + COLUMNS;
  const int2 where = head_and_block(0);
  const int kv_head = where.x, first = where.y * ROWS, from = first + warp * 16, row = from + quad, kv_heads = heads / sharing;
  k += FROM(k, kv_head, kv_heads, m, DEPTH);
  v += FROM(v, kv_head, kv_heads, m, DEPTH_V);
  float sums_k[WIDTH(DEPTH)][4], sums_v[WIDTH(DEPTH_V)][4], factors[2];
  clear(sums_k, WIDTH(DEPTH));
  clear(sums_v, WIDTH(DEPTH_V));
  copy_lines(base, 0, k, STEP_OF(k, DEPTH), first, m, ROWS, DEPTH);
  copy_lines(base, values, v, STEP_OF(v, DEPTH_V), first, m, ROWS, DEPTH_V);
  const int begin = causal ? first / COLUMNS * COLUMNS : 0;
  for (int r = 0; r < sharing; ++r) {
    const int head = kv_head / kv_heads * heads + kv_head % kv_heads * sharing + r;
    const long start = (long)head * n;
    __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;
    __global const X_T *q_here = q + FROM(q, head, heads, n, DEPTH), *g_here = g + FROM(g, head, heads, n, DEPTH_V);
    __global const S_T *logarithms_here = logarithms + start, *delta_here = delta + start;
    if (begin < n) {
      copy_lines(base, queries, q_here, STEP_OF(q, DEPTH), begin, n, COLUMNS, DEPTH);
      copy_lines(base, upstream, g_here, STEP_OF(g, DEPTH_V), begin, n, COLUMNS, DEPTH_V);
    }
    COPIES_COMMIT();
    for (int i = begin; i < n; i += COLUMNS) {
      ARRIVED;
      const int busy = from < m && (!causal || i + COLUMNS > from), partial = MASK || i + COLUMNS > n || from + 16 > m || (causal && i < from + 15);
      float s[SCORES][4], d[SCORES][4];
      if (busy) {
        products(s, own, 0, queries, STEPS(DEPTH));
        recompute(s, k, STEP_OF(k, DEPTH), row, m, q_here, STEP_OF(q, DEPTH), i + place * 2, n, DEPTH);
        EACH for (int x = 0; x < SCORES; ++x)
          EACH for (int e = 0; e < 4; ++e) {
            const int query = i + x * 8 + place * 2 + e % 2;
            float score = s[x][e] * (scale * LOG2_E);
            if (partial) score = masked(score, mask_here, by_query, by_key, query, row + e / 2 * 8, n, m, causal);
            s[x][e] = POWER(score - safe_logarithm(S_LOAD(logarithms_here, min(query, n - 1))));
          }
        gather(sums_v, own, s, upstream, WIDTH(DEPTH_V));
        products(d, own, values, upstream, STEPS(DEPTH_V));
        recompute(d, v, STEP_OF(v, DEPTH_V), row, m, g_here, STEP_OF(g, DEPTH_V), i + place * 2, n, DEPTH_V);
        EACH for (int x = 0; x < SCORES; ++x)
          EACH for (int e = 0; e < 4; ++e)
            d[x][e] = s[x][e] * (d[x][e] - S_LOAD(delta_here, min(i + x * 8 + place * 2 + e % 2, n - 1)));
      }
      barrier(CLK_LOCAL_MEM_FENCE);
      if (i + COLUMNS < n) copy_lines(base, upstream, g_here, STEP_OF(g, DEPTH_V), i + COLUMNS, n, COLUMNS, DEPTH_V);
      if (busy) gather(sums_k, own, d, queries, WIDTH(DEPTH));
      barrier(CLK_LOCAL_MEM_FENCE);
      if (i + COLUMNS < n) copy_lines(base, queries, q_here, STEP_OF(q, DEPTH), i + COLUMNS, n, COLUMNS, DEPTH);
      COPIES_COMMIT();
    }
  }
  COPIES_WAIT(0);
  EACH for (int r = 0; r < 2; ++r) factors[r] = scale;
  store_sums(out_k + START(dk, kv_head, kv_heads), dk_row, sums_k, factors, row, m, DEPTH);
  EACH for (int r = 0; r < 2; ++r) factors[r] = 1;
  store_sums(out_v + START(dv, kv_head, kv_heads), dv_row, sums_v, factors, row, m, DEPTH_V);
}
#endif
