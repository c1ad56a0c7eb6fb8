// Attention on GPUs: a work-group of TX x TY work-items takes ROWS = RY * TY queries (in the gradient of keys and values: keys) and walks
// the other side in blocks of COLUMNS = RX * TX.
//
// Each work-item holds RY x RX scores in registers and, of the result, RY rows of OWN elements of every chunk. The head is read in chunks
// of CHUNK elements, so local memory does not depend on its size; no matrix of all scores exists. Local memory is read and written in
// quads of four elements, which lie permuted within a row so that work-items side by side find theirs in different banks.
// Operands: X queries, keys, values, results and gradients; M mask; S sums and logarithms. Where rows are whole quads, X_QUAD(p) reads one
// and X_QUAD_STORE(p, v) writes one.

#ifndef TX
#define TX 16  // work-items along a row of scores; a power of two, at least 8
#define TY 8  // work-items along a column of scores; a power of two, at least 4
#define RX 4  // scores of a work-item along a row; a multiple of 4
#define RY 8  // and along a column; at most TX
#define CHUNK 64  // elements of a head in local memory at a time; a multiple of 32 and of 4 * TX
#define CHUNKS 1  // chunks of the largest head
#define DEPTH 64  // the head sizes
#define DEPTH_V 64
#endif
#ifndef APART  // groups until another one runs on the same unit; about as many as a large device has units
#define APART 128
#endif
#define ITEMS (TX * TY)
#define ROWS (RY * TY)
#define COLUMNS (RX * TX)
#define OWN (CHUNK / TX)  // elements of a chunk that a work-item holds
#define QUADS (CHUNK / 4)
#define SCORE_QUADS (COLUMNS / 4)
#define LOADERS (ITEMS / QUADS)  // rows that are read at a time
#define LEFT_LOADS (ROWS / LOADERS)
#define RIGHT_LOADS (COLUMNS / LOADERS)
#define QUAD_LOOP _Pragma("unroll 2")  // over quads of a product, whose loads and multiplications the compiler may mix
#define SYNC barrier(CLK_LOCAL_MEM_FENCE)

typedef JOIN(REAL, 4) real4;

// Where a quad of a work-item's first row or column lies: in the left operand's tile quads of row r are moved to quad ^ (r & 3), in the
// right one's to quad ^ (r / 4 & 7), among the scores to quad ^ (r % 2 * 4). Its other rows and columns are found a fixed step on.
#define LEFT_AT(quad) ((ROW_FROM + ty % 4) * QUADS + ((quad) ^ (ty & 3)))
#define RIGHT_AT(quad) (tx * 4 * QUADS + ((quad) ^ (tx & 7)))
#define SCORE_AT(quad) ((ROW_FROM + ty % 4) * SCORE_QUADS + ((quad) ^ (ty % 2 * 4)))

#define LANE ((int)(get_local_id(0) & (ITEMS - 1)))
// Eight work-items across and four down are neighbours: they read the fewest distinct words of both tiles, two of them at a time the same.
// Which neighbours have nothing to do under a causal mask differs between groups that run together, so that every scheduler has work.
#define PLACE                                                                                            \
  const int wave = (LANE / 32 + GROUP / APART) % (ITEMS / 32), tx = wave % (TX / 8) * 8 + LANE / 2 % 8;  \
  const int ty = wave / (TX / 8) * 4 + LANE % 2 + LANE % 32 / 16 * 2;
#define ROW(y) (ty / 4 * (4 * RY) + ty % 4 + 4 * (y))
#define COLUMN_STEP(x) ((x) / 4 * (4 * TX) + (x) % 4)
#define COLUMN(x) (tx * 4 + COLUMN_STEP(x))
// The first and last row and column of the 32 neighbours of a work-item.
#define ROW_FROM (ty / 4 * (4 * RY))
#define ROW_TO (ROW_FROM + 4 * RY - 1)
#define COLUMN_FROM (tx / 8 * 32)
#define COLUMN_TO (COLUMN_FROM + 31 + (RX / 4 - 1) * 4 * TX)

// The scores' place serves sums over the work-items of a row as well: the parts of each row, then NOTES of what came of them.
#define STEP (ROWS + 4)
#define NOTES (QUADS * STEP)
#define MEMORY                            \
  __local real4 left[ROWS * QUADS];       \
  __local real4 right[COLUMNS * QUADS];   \
  __local real4 scores[ROWS * SCORE_QUADS];

#define EACH_SCORE EACH for (int y = 0; y < RY; ++y) EACH for (int x = 0; x < RX; ++x)
// The scores s times their scale, under the mask where a block is `partial`; rows and columns are of a query and a key each.
#define SCALE_AND_MASK(partial, query, key)                                                              \
  EACH_SCORE s[y][x] *= scale * LOG2_E;                                                                  \
  if (partial) {                                                                                         \
    EACH_SCORE s[y][x] = masked(s[y][x], mask_here, by_query, by_key, query, key, n, m, causal);         \
  }

// ---- tiles

// Four elements of a row from x on, of which `there` exist; others read as 0.
INLINE real4 quad_of(__global const X_T* x, const int there) {
#ifdef X_QUAD
  real4 quad = (real4)(0);
  if (there > 0) quad = X_QUAD(x);
  return quad;
#else
  real e[4];
  EACH for (int i = 0; i < 4; ++i) e[i] = i < there ? (real)X_LOAD(x, i) : (real)0;
  return (real4)(e[0], e[1], e[2], e[3]);
#endif
}

// Tiles are fetched into registers before work-items wait for each other, and kept in local memory after it. Of the left one every
// LOADERS-th row falls to a work-item, of the right one fours of them: so that all its places are fixed steps apart.
#define LEFT_ROW(i) ((i) * LOADERS)
#define RIGHT_ROW(i) ((i) / 4 * (4 * LOADERS) + (i) % 4)

// `step`: the distance of rows in memory.
INLINE void fetch_left(real4 held[LEFT_LOADS], __global const X_T* x, const int step, const int first, const int n, const int from,
                       const int depth) {
  const int start = first + LANE / QUADS, d = from + 4 * (LANE % QUADS);
  x += (long)start * step + d;
  EACH for (int i = 0; i < LEFT_LOADS; ++i) held[i] = quad_of(x + LEFT_ROW(i) * step, start + LEFT_ROW(i) < n ? depth - d : 0);
}

INLINE void fetch_right(real4 held[RIGHT_LOADS], __global const X_T* x, const int step, const int first, const int n, const int from,
                        const int depth) {
  const int start = first + 4 * (LANE / QUADS), d = from + 4 * (LANE % QUADS);
  x += (long)start * step + d;
  EACH for (int i = 0; i < RIGHT_LOADS; ++i) held[i] = quad_of(x + RIGHT_ROW(i) * step, start + RIGHT_ROW(i) < n ? depth - d : 0);
}

INLINE void keep_left(__local real4* left, const real4 held[LEFT_LOADS]) {
  const int start = LANE / QUADS, quad = LANE % QUADS;
  EACH for (int i = 0; i < LEFT_LOADS; ++i) left[start * QUADS + LEFT_ROW(i) * QUADS + (quad ^ ((start + LEFT_ROW(i)) & 3))] = held[i];
}

INLINE void keep_right(__local real4* right, const real4 held[RIGHT_LOADS]) {
  const int start = LANE / QUADS, quad = LANE % QUADS;
  EACH for (int i = 0; i < RIGHT_LOADS; ++i)
    right[4 * start * QUADS + RIGHT_ROW(i) * QUADS + (quad ^ ((start + RIGHT_ROW(i) / 4) & 7))] = held[i];
}

// s += rows of the left tile times rows of the right one.
INLINE void multiply(real s[RY][RX], __local const real4* left, __local const real4* right) {
  PLACE
  QUAD_LOOP for (int q = 0; q < QUADS; ++q) {
    __local const real4* from_a = left + LEFT_AT(q);
    __local const real4* from_b = right + RIGHT_AT(q);
    real4 b[RX];
    EACH for (int x = 0; x < RX; ++x) b[x] = from_b[COLUMN_STEP(x) * QUADS];
    EACH for (int y = 0; y < RY; ++y) {
      const real4 a = from_a[4 * y * QUADS];
      EACH for (int x = 0; x < RX; ++x) s[y][x] += a.x * b[x].x;
      EACH for (int x = 0; x < RX; ++x) s[y][x] += a.y * b[x].y;
      EACH for (int x = 0; x < RX; ++x) s[y][x] += a.z * b[x].z;
      EACH for (int x = 0; x < RX; ++x) s[y][x] += a.w * b[x].w;
    }
  }
}

// s = rows of a times rows of b over the whole head; `fresh` unless a one-chunk `a` lies in the left tile already, `idle` where no score
// of these neighbours is wanted. Leaves the last chunk of b in the right tile.
INLINE void products(real s[RY][RX], __local real4* left, __local real4* right, __global const X_T* a, const int step_a, const int first_a,
                     const int n_a, __global const X_T* b, const int step_b, const int first_b, const int n_b, const int depth,
                     const int fresh, const int idle) {
  EACH_SCORE s[y][x] = 0;
  for (int from = 0; from < (CHUNKS == 1 ? 1 : depth); from += CHUNK) {
    real4 held_a[LEFT_LOADS], held[RIGHT_LOADS];
    if (CHUNKS > 1 || fresh) fetch_left(held_a, a, step_a, first_a, n_a, from, depth);
    fetch_right(held, b, step_b, first_b, n_b, from, depth);
    SYNC;
    if (CHUNKS > 1 || fresh) keep_left(left, held_a);
    keep_right(right, held);
    SYNC;
    if (!idle) multiply(s, left, right);
  }
}

INLINE void share_scores(__local real4* scores, real s[RY][RX]) {
  PLACE
  __local real4* to = scores + SCORE_AT(tx);
  EACH for (int y = 0; y < RY; ++y)
    EACH for (int x = 0; x < RX; x += 4)
      to[4 * y * SCORE_QUADS + x / 4 * TX] = (real4)(s[y][x], s[y][x + 1], s[y][x + 2], s[y][x + 3]);
}

// result += columns begin .. end of the scores times as many rows of the right tile.
#define TAKE(factor, i)                                                \
  EACH for (int o = 0; o < OWN; o += 4) {                              \
    result[y][chunk * OWN + o] += (factor) * b[o / 4][i].x;            \
    result[y][chunk * OWN + o + 1] += (factor) * b[o / 4][i].y;        \
    result[y][chunk * OWN + o + 2] += (factor) * b[o / 4][i].z;        \
    result[y][chunk * OWN + o + 3] += (factor) * b[o / 4][i].w;        \
  }
INLINE void accumulate(real result[RY][CHUNKS * OWN], const int chunk, __local const real4* scores, __local const real4* right,
                       const int begin, const int end) {
  PLACE
  QUAD_LOOP for (int t = begin / 4; t < (end + 3) / 4; ++t) {
    __local const real4* from_p = scores + SCORE_AT(t);
    __local const real4* from_b = right + 4 * t * QUADS + (tx ^ (t & 7));
    real4 b[OWN / 4][4];
    EACH for (int o = 0; o < OWN; o += 4)
      EACH for (int i = 0; i < 4; ++i) b[o / 4][i] = from_b[i * QUADS + o / 4 * TX];
    EACH for (int y = 0; y < RY; ++y) {
      const real4 p = from_p[4 * y * SCORE_QUADS];
      TAKE(p.x, 0)
      TAKE(p.y, 1)
      TAKE(p.z, 2)
      TAKE(p.w, 3)
    }
  }
}

// A chunk of b into the right tile, once nobody reads what it holds.
INLINE void replace(__local real4* right, __global const X_T* b, const int step, const int first, const int n, const int from,
                    const int depth) {
  real4 held[RIGHT_LOADS];
  fetch_right(held, b, step, first, n, from, depth);
  SYNC;
  keep_right(right, held);
}

// result += scores times COLUMNS rows of b, whose first chunk lies in the right tile.
INLINE void gather(real result[RY][CHUNKS * OWN], __local const real4* scores, __local real4* right, __global const X_T* b, const int step,
                   const int first, const int n, const int depth, const int begin, const int end) {
  EACH for (int c = 0; c < CHUNKS; ++c) {
    if (c * CHUNK < depth) {
      if (c > 0) replace(right, b, step, first, n, c * CHUNK, depth);
      SYNC;
      accumulate(result, c, scores, right, begin, end);
    }
  }
}

INLINE void clear(real result[RY][CHUNKS * OWN]) {
  EACH for (int y = 0; y < RY; ++y)
    EACH for (int o = 0; o < CHUNKS * OWN; ++o) result[y][o] = 0;
}

#define HELD(i) result[y][c * OWN + o + (i)]

INLINE void store_rows(__global X_T* out, const int step, real result[RY][CHUNKS * OWN], const real scale[RY], const int first,
                       const int n, const int depth) {
  PLACE
  EACH for (int c = 0; c < CHUNKS; ++c)
    EACH for (int o = 0; o < OWN; o += 4) {
      const int d = c * CHUNK + 4 * (tx + o / 4 * TX);
      EACH for (int y = 0; y < RY; ++y) {
        const int row = first + ROW(y);
        const long at = (long)row * step + d;
#ifdef X_QUAD_STORE
        if (row < n && d < depth) X_QUAD_STORE(out + at, (real4)(HELD(0), HELD(1), HELD(2), HELD(3)) * scale[y]);
#else
        EACH for (int i = 0; i < 4; ++i)
          if (row < n && d + i < depth) X_STORE(out, at + i, HELD(i) * scale[y]);
#endif
      }
    }
}

#if PART == 1
INLINE void share_parts(__local real* parts, const real value[RY]) {
  PLACE
  EACH for (int y = 0; y < RY; ++y) parts[tx * STEP + ROW(y)] = value[y];
}

SIZED __kernel void attention(READ_POINTERS, __global X_T* out, __global S_T* logarithms, CALL_NUMBERS, O_NUMBERS, Q_NUMBERS, K_NUMBERS,
                              V_NUMBERS) {
  MEMORY
  PLACE
  __local real* parts = (__local real*)scores;
  HEAD_OF_GROUP
  real s[RY][RX], result[RY][CHUNKS * OWN], sum[RY], own[RY], most = LOWEST;
  clear(result);
  EACH for (int y = 0; y < RY; ++y) sum[y] = 0;
  if (CHUNKS == 1) {
    real4 held_a[LEFT_LOADS];
    fetch_left(held_a, q, STEP_OF(q, DEPTH), first, n, 0, DEPTH);
    keep_left(left, held_a);
  }
  real4 held[RIGHT_LOADS];
  const int end = causal ? min(m, first + ROWS) : m;
  for (int j = 0; j < end; j += COLUMNS) {
    const int idle = causal && j + COLUMN_FROM > first + ROW_TO;
    products(s, left, right, q, STEP_OF(q, DEPTH), first, n, k, STEP_OF(k, DEPTH), j, m, DEPTH, 0, idle);
    fetch_right(held, v, STEP_OF(v, DEPTH_V), j, m, 0, DEPTH_V);
    SCALE_AND_MASK(MASK || j + COLUMNS > m || (causal && j + COLUMNS > first + 1), first + ROW(y), j + COLUMN(x))
    EACH for (int y = 0; y < RY; ++y) {
      own[y] = s[y][0];
      EACH for (int x = 1; x < RX; ++x) own[y] = fmax(own[y], s[y][x]);
    }
    share_parts(parts, own);
    SYNC;
    if (LANE < ROWS) {
      real higher = most;
      for (int x = 0; x < TX; ++x) higher = fmax(higher, parts[x * STEP + LANE]);
      const real safe = higher == LOWEST ? (real)0 : higher;
      parts[NOTES + LANE] = safe;
      parts[NOTES + ROWS + LANE] = POWER(most - safe);
      most = higher;
    }
    SYNC;
    EACH for (int y = 0; y < RY; ++y) {
      const real safe = parts[NOTES + ROW(y)], keep = parts[NOTES + ROWS + ROW(y)];
      sum[y] *= keep;
      EACH for (int x = 0; x < RX; ++x) {
        s[y][x] = POWER(s[y][x] - safe);
        sum[y] += s[y][x];
      }
      EACH for (int o = 0; o < CHUNKS * OWN; ++o) result[y][o] *= keep;
    }
    SYNC;
    share_scores(scores, s);
    keep_right(right, held);
    const int seen = causal ? min(COLUMNS, first + ROW_TO - j + 1) : COLUMNS;
    gather(result, scores, right, v, STEP_OF(v, DEPTH_V), j, m, DEPTH_V, 0, seen);
  }
  SYNC;
  share_parts(parts, sum);
  SYNC;
  if (LANE < ROWS) {
    real all = 0;
    for (int x = 0; x < TX; ++x) all += parts[x * STEP + LANE];
    parts[NOTES + LANE] = all == 0 ? (real)0 : 1 / all;
    if (first + LANE < n) S_STORE(logarithms, (long)head * n + first + LANE, (most + log2(all)) * LN_2);
  }
  SYNC;
  EACH for (int y = 0; y < RY; ++y) own[y] = parts[NOTES + ROW(y)];
  store_rows(out + START(o, head, heads), o_row, result, own, first, n, DEPTH_V);
}

#elif PART == 2

// The sum of gradient times result of each row, less the gradient that arrives through the logarithm; kept in the notes.
INLINE void row_deltas(__local real* parts, __global const X_T* g, const int step_g, __global const X_T* out, const int step_out,
                       __global const S_T* through, __global S_T* delta, const int has_through, const int first, const int n,
                       const int depth) {
  const int quad = LANE % QUADS;
  for (int row = LANE / QUADS; row < ROWS; row += ITEMS / QUADS) {
    real4 sum = (real4)(0);
    if (first + row < n)
      for (int d = 4 * quad; d < depth; d += CHUNK)
        sum += quad_of(g + (long)(first + row) * step_g + d, depth - d) * quad_of(out + (long)(first + row) * step_out + d, depth - d);
    parts[quad * STEP + row] = sum.x + sum.y + sum.z + sum.w;
  }
  SYNC;
  if (LANE < ROWS) {
    const int row = first + LANE;
    real sum = has_through && row < n ? -(real)S_LOAD(through, row) : (real)0;
    for (int x = 0; x < QUADS; ++x) sum += parts[x * STEP + LANE];
    parts[NOTES + LANE] = sum;
    if (row < n) S_STORE(delta, row, sum);
  }
  SYNC;
}

SIZED __kernel void attention_query_grad(__global const X_T* g, READ_POINTERS, __global const S_T* logarithms, __global S_T* delta,
                                         __global const X_T* forward, __global const S_T* through, __global X_T* out, const int has_through,
                                         CALL_NUMBERS, O_NUMBERS, G_NUMBERS, Q_NUMBERS, K_NUMBERS, V_NUMBERS, F_NUMBERS) {
  MEMORY
  PLACE
  __local real* parts = (__local real*)scores;
  HEAD_OF_GROUP
  const long row = (long)head * n;
  g += FROM(g, head, heads, n, DEPTH_V);
  forward += FROM(f, head, heads, n, DEPTH_V);
  real s[RY][RX], sums[RY][CHUNKS * OWN], less[RY], safe[RY];
  row_deltas(parts, g, STEP_OF(g, DEPTH_V), forward, STEP_OF(f, DEPTH_V), through + row, delta + row, has_through, first, n, DEPTH_V);
  EACH for (int y = 0; y < RY; ++y) {
    less[y] = parts[NOTES + ROW(y)];
    safe[y] = safe_logarithm(S_LOAD(logarithms, row + min(first + ROW(y), n - 1)));
  }
  clear(sums);
  const int end = causal ? min(m, first + ROWS) : m;
  for (int j = 0; j < end; j += COLUMNS) {
    const int idle = causal && j + COLUMN_FROM > first + ROW_TO;
    products(s, left, right, g, STEP_OF(g, DEPTH_V), first, n, v, STEP_OF(v, DEPTH_V), j, m, DEPTH_V, 1, idle);
    share_scores(scores, s);
    products(s, left, right, q, STEP_OF(q, DEPTH), first, n, k, STEP_OF(k, DEPTH), j, m, DEPTH, 1, idle);
    SCALE_AND_MASK(MASK || j + COLUMNS > m || (causal && j + COLUMNS > first + 1), first + ROW(y), j + COLUMN(x))
    EACH for (int y = 0; y < RY; ++y)
      EACH for (int x = 0; x < RX; x += 4) {
        const real4 d = scores[SCORE_AT(tx) + 4 * y * SCORE_QUADS + x / 4 * TX] - less[y];
        s[y][x] = POWER(s[y][x] - safe[y]) * d.x;
        s[y][x + 1] = POWER(s[y][x + 1] - safe[y]) * d.y;
        s[y][x + 2] = POWER(s[y][x + 2] - safe[y]) * d.z;
        s[y][x + 3] = POWER(s[y][x + 3] - safe[y]) * d.w;
      }
    share_scores(scores, s);
    if (CHUNKS > 1) replace(right, k, STEP_OF(k, DEPTH), j, m, 0, DEPTH);
    const int seen = causal ? min(COLUMNS, first + ROW_TO - j + 1) : COLUMNS;
    gather(sums, scores, right, k, STEP_OF(k, DEPTH), j, m, DEPTH, 0, seen);
  }
  EACH for (int y = 0; y < RY; ++y) less[y] = scale;
  store_rows(out + START(o, head, heads), o_row, sums, less, first, n, DEPTH);
}

#else

// Rows of scores are keys here, columns are queries.
SIZED __kernel void attention_key_grad(__global const X_T* g, READ_POINTERS, __global const S_T* logarithms, __global const S_T* delta,
                                       __global X_T* out_k, __global X_T* out_v, CALL_NUMBERS, DK_NUMBERS, DV_NUMBERS, G_NUMBERS, Q_NUMBERS,
                                       K_NUMBERS, V_NUMBERS) {
  MEMORY
  PLACE
  const int2 where = head_and_block(0);
  const int kv_head = where.x, first = where.y * ROWS, kv_heads = heads / sharing;
  k += FROM(k, kv_head, kv_heads, m, DEPTH);
  v += FROM(v, kv_head, kv_heads, m, DEPTH_V);
  real s[RY][RX], result_k[RY][CHUNKS * OWN], result_v[RY][CHUNKS * OWN], scales[RY];
  clear(result_k);
  clear(result_v);
  for (int r = 0; r < sharing; ++r) {
    const int head = kv_head / kv_heads * heads + kv_head % kv_heads * sharing + r;
    const long row = (long)head * n;
    __global const X_T *q_here = q + FROM(q, head, heads, n, DEPTH), *g_here = g + FROM(g, head, heads, n, DEPTH_V);
    __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;
    for (int i = causal ? first : 0; i < n; i += COLUMNS) {
      const int idle = causal && i + COLUMN_TO < first + ROW_FROM, begin = causal ? max(0, first + ROW_FROM - i) : 0;
      products(s, left, right, k, STEP_OF(k, DEPTH), first, m, q_here, STEP_OF(q, DEPTH), i, n, DEPTH, 1, idle);
      SCALE_AND_MASK(MASK || i + COLUMNS > n || (causal && i < first + ROWS - 1), i + COLUMN(x), first + ROW(y))
      EACH for (int x = 0; x < RX; ++x) {
        const real safe = safe_logarithm(S_LOAD(logarithms, row + min(i + COLUMN(x), n - 1)));
        EACH for (int y = 0; y < RY; ++y) s[y][x] = POWER(s[y][x] - safe);
      }
      share_scores(scores, s);
      products(s, left, right, v, STEP_OF(v, DEPTH_V), first, m, g_here, STEP_OF(g, DEPTH_V), i, n, DEPTH_V, 1, idle);
      if (CHUNKS > 1) replace(right, g_here, STEP_OF(g, DEPTH_V), i, n, 0, DEPTH_V);
      gather(result_v, scores, right, g_here, STEP_OF(g, DEPTH_V), i, n, DEPTH_V, begin, COLUMNS);
      replace(right, q_here, STEP_OF(q, DEPTH), i, n, 0, DEPTH);
      EACH for (int x = 0; x < RX; x += 4) {
        real4 less;
        less.x = S_LOAD(delta, row + min(i + COLUMN(x), n - 1));
        less.y = S_LOAD(delta, row + min(i + COLUMN(x + 1), n - 1));
        less.z = S_LOAD(delta, row + min(i + COLUMN(x + 2), n - 1));
        less.w = S_LOAD(delta, row + min(i + COLUMN(x + 3), n - 1));
        EACH for (int y = 0; y < RY; ++y) {
          scores[SCORE_AT(tx) + 4 * y * SCORE_QUADS + x / 4 * TX] *= (real4)(s[y][x], s[y][x + 1], s[y][x + 2], s[y][x + 3]) - less;
        }
      }
      gather(result_k, scores, right, q_here, STEP_OF(q, DEPTH), i, n, DEPTH, begin, COLUMNS);
    }
  }
  EACH for (int y = 0; y < RY; ++y) scales[y] = scale;
  store_rows(out_k + START(dk, kv_head, kv_heads), dk_row, result_k, scales, first, m, DEPTH);
  EACH for (int y = 0; y < RY; ++y) scales[y] = 1;
  store_rows(out_v + START(dv, kv_head, kv_heads), dv_row, result_v, scales, first, m, DEPTH_V);
}
#endif
