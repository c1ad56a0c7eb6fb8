// Attention on GPUs: a work-group of TX x TY takes ROWS = RY * TY queries (in the gradient of keys and values: keys) and walks the other
// side in blocks of COLUMNS = RX * TX.
//
// Each work-item holds RY x RX scores in registers and, of the result, RY rows of every TX-th column. The head is read in chunks of CHUNK
// elements, so local memory does not depend on its size; no matrix of all scores exists.
// Operand X: queries, keys, values, results and gradients (X_T X_LOAD X_STORE); M: mask (M_T M_LOAD); S: sums and logarithms (S_T S_LOAD
// S_STORE).

#ifndef REAL  // the type arithmetic is done in
#define REAL float
#endif
#ifndef TX  // work-items along a row of scores
#define TX 16
#endif
#ifndef TY  // work-items along a column of scores
#define TY 16
#endif
#ifndef RX  // scores of a work-item along a row
#define RX 2
#endif
#ifndef RY  // and along a column
#define RY 4
#endif
#ifndef CHUNK  // elements of a head in local memory at a time; a multiple of TX
#define CHUNK 64
#endif
#ifndef CHUNKS  // chunks of the largest head
#define CHUNKS 1
#endif
#ifndef PART  // 1: forward, 2: the gradient of queries, 3: of keys and values; each is a program of its own, compiled when needed
#define PART 1
#endif
#ifndef MASK  // 0: none, 1: true where a key takes part, 2: added to the scores
#define MASK 0
#endif

#pragma OPENCL FP_CONTRACT ON

#define ROWS (RY * TY)
#define COLUMNS (RX * TX)
#define OWN (CHUNK / TX)  // columns of a chunk that a work-item holds
#define LOWEST ((real)(-INFINITY))
#define SIZED __attribute__((reqd_work_group_size(TX, TY, 1)))
#define SYNC barrier(CLK_LOCAL_MEM_FENCE)

typedef REAL real;

// One side of a product, transposed, rows one apart from a power of two so that neighbours lie in different banks; then the scores.
#define MEMORY                                  \
  __local real left[CHUNK * (ROWS + 1)];        \
  __local real right[CHUNK * (COLUMNS + 1)];    \
  __local real scores[ROWS * (COLUMNS + 1)];

// ---- tiles

// into[d][row] = rows first .. first + count of x, elements from .. from + CHUNK; what lies beyond reads as 0.
static inline void load_transposed(__local real* into, __global const X_T* x, const int count, const int first, const int n, const int from,
                                   const int depth) {
  const int lane = get_local_id(1) * TX + get_local_id(0);
  for (int e = lane; e < count * CHUNK; e += TX * TY) {
    const int row = e / CHUNK, d = e % CHUNK;
    const int there = first + row < n && from + d < depth;
    into[d * (count + 1) + row] = there ? (real)X_LOAD(x, (long)(first + row) * depth + from + d) : (real)0;
  }
}

// s += rows of a times rows of b, over the whole head.
static inline void products(real s[RY][RX], __local real* left, __local real* right, __global const X_T* a, const int first_a, const int n_a,
                            __global const X_T* b, const int first_b, const int n_b, const int depth) {
  const int tx = get_local_id(0), ty = get_local_id(1);
  for (int y = 0; y < RY; ++y)
    for (int x = 0; x < RX; ++x) s[y][x] = 0;
  for (int from = 0; from < depth; from += CHUNK) {
    SYNC;
    load_transposed(left, a, ROWS, first_a, n_a, from, depth);
    load_transposed(right, b, COLUMNS, first_b, n_b, from, depth);
    SYNC;
    for (int d = 0; d < CHUNK; ++d) {
      real l[RY], r[RX];
      for (int y = 0; y < RY; ++y) l[y] = left[d * (ROWS + 1) + ty + y * TY];
      for (int x = 0; x < RX; ++x) r[x] = right[d * (COLUMNS + 1) + tx + x * TX];
      for (int y = 0; y < RY; ++y)
        for (int x = 0; x < RX; ++x) s[y][x] += l[y] * r[x];
    }
  }
}

static inline void share_scores(__local real* scores, real s[RY][RX]) {
  SYNC;
  for (int y = 0; y < RY; ++y)
    for (int x = 0; x < RX; ++x) scores[(get_local_id(1) + y * TY) * (COLUMNS + 1) + get_local_id(0) + x * TX] = s[y][x];
  SYNC;
}

// result += scores times COLUMNS rows of b.
static inline void gather(real result[RY][CHUNKS * OWN], __local real* scores, __local real* right, __global const X_T* b, const int first,
                          const int n, const int depth) {
  const int tx = get_local_id(0), ty = get_local_id(1);
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    if (c * CHUNK < depth) {
      SYNC;
      load_transposed(right, b, COLUMNS, first, n, c * CHUNK, depth);
      SYNC;
      for (int t = 0; t < COLUMNS; ++t) {
        real p[RY];
        for (int y = 0; y < RY; ++y) p[y] = scores[(ty + y * TY) * (COLUMNS + 1) + t];
        for (int o = 0; o < OWN; ++o) {
          const real value = right[(tx + o * TX) * (COLUMNS + 1) + t];
          for (int y = 0; y < RY; ++y) result[y][c * OWN + o] += p[y] * value;
        }
      }
    }
  }
}

static inline void clear(real result[RY][CHUNKS * OWN]) {
  for (int y = 0; y < RY; ++y)
    for (int o = 0; o < CHUNKS * OWN; ++o) result[y][o] = 0;
}

static inline void store_rows(__global X_T* out, real result[RY][CHUNKS * OWN], const real scale[RY], const int first, const int n,
                              const int depth) {
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
    for (int o = 0; o < OWN; ++o) {
      const int d = c * CHUNK + get_local_id(0) + o * TX;
      for (int y = 0; y < RY; ++y) {
        const int row = first + get_local_id(1) + y * TY;
        if (row < n && d < depth) X_STORE(out, (long)row * depth + d, result[y][c * OWN + o] * scale[y]);
      }
    }
}

// The score of query i and key j under the mask; -infinity beyond the last ones.
static inline real masked(const real s, __global const M_T* mask, const int by_query, const int by_key, const int i, const int j, const int n,
                          const int m, const int causal) {
  if (i >= n || j >= m || (causal && j > i)) return LOWEST;
#if MASK == 1
  return M_LOAD(mask, (long)i * by_query + (long)j * by_key) ? s : LOWEST;
#elif MASK == 2
  return s + (real)M_LOAD(mask, (long)i * by_query + (long)j * by_key);
#else
  return s;
#endif
}

// The maximum (or sum) over the TX work-items of a row.
static inline real row_max(__local real* shared, const int row) {
  real most = shared[row * (COLUMNS + 1)];
  for (int x = 1; x < TX; ++x) most = fmax(most, shared[row * (COLUMNS + 1) + x]);
  return most;
}

static inline real row_sum(__local real* shared, const int row) {
  real sum = 0;
  for (int x = 0; x < TX; ++x) sum += shared[row * (COLUMNS + 1) + x];
  return sum;
}

static inline void share_column(__local real* shared, const real value[RY]) {
  SYNC;
  for (int y = 0; y < RY; ++y) shared[(get_local_id(1) + y * TY) * (COLUMNS + 1) + get_local_id(0)] = value[y];
  SYNC;
}

static inline real safe_logarithm(const real logarithm) { return logarithm == LOWEST ? (real)INFINITY : logarithm; }

// ---- kernels; heads: of the queries, sharing: query heads that share a head of keys and values

static inline int key_head(const int head, const int heads, const int sharing) { return head / heads * (heads / sharing) + head % heads / sharing; }

#if PART == 1
SIZED __kernel void attention(__global const X_T* q, __global const X_T* k, __global const X_T* v, __global const M_T* mask,
                              __global X_T* out, __global S_T* logarithms, const REAL scale, const int causal, const int n, const int m,
                              const int depth, const int depth_v, const int heads, const int sharing, const int by_batch, const int by_head,
                              const int by_query, const int by_key) {
  MEMORY
  const int head = get_group_id(1), first = get_group_id(0) * ROWS, tx = get_local_id(0), ty = get_local_id(1);
  const long kv = (long)key_head(head, heads, sharing) * m;
  __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;
  real s[RY][RX], result[RY][CHUNKS * OWN], most[RY], sum[RY], own[RY];
  clear(result);
  for (int y = 0; y < RY; ++y) {
    most[y] = LOWEST;
    sum[y] = 0;
  }
  const int end = causal ? min(m, first + ROWS) : m;
  for (int j = 0; j < end; j += COLUMNS) {
    products(s, left, right, q + (long)head * n * depth, first, n, k + kv * depth, j, m, depth);
    for (int y = 0; y < RY; ++y) {
      own[y] = LOWEST;
      for (int x = 0; x < RX; ++x) {
        s[y][x] = masked(s[y][x] * scale, mask_here, by_query, by_key, first + ty + y * TY, j + tx + x * TX, n, m, causal);
        own[y] = fmax(own[y], s[y][x]);
      }
    }
    share_column(scores, own);
    for (int y = 0; y < RY; ++y) {
      const real higher = fmax(most[y], row_max(scores, ty + y * TY));
      const real safe = higher == LOWEST ? (real)0 : higher;
      const real keep = exp(most[y] - safe);
      most[y] = higher;
      sum[y] *= keep;
      for (int x = 0; x < RX; ++x) {
        s[y][x] = exp(s[y][x] - safe);
        sum[y] += s[y][x];
      }
      for (int o = 0; o < CHUNKS * OWN; ++o) result[y][o] *= keep;
    }
    share_scores(scores, s);
    gather(result, scores, right, v + kv * depth_v, j, m, depth_v);
  }
  share_column(scores, sum);
  for (int y = 0; y < RY; ++y) {
    const int row = first + ty + y * TY;
    const real all = row_sum(scores, ty + y * TY);
    own[y] = all == 0 ? (real)0 : 1 / all;
    if (tx == 0 && row < n) S_STORE(logarithms, (long)head * n + row, most[y] + log(all));
  }
  store_rows(out + (long)head * n * depth_v, result, own, first, n, depth_v);
}

#elif PART == 2

// The sum of gradient times result of each row, less the gradient that arrives through the logarithm.
__kernel void attention_delta(__global const X_T* g, __global const X_T* out, __global const S_T* through, __global S_T* delta,
                              const int has_through, const int rows, const int depth) {
  const int row = get_global_id(0);
  if (row >= rows) return;
  __global const X_T* gr = g + (long)row * depth;
  __global const X_T* xr = out + (long)row * depth;
  real sum = 0;
  for (int d = 0; d < depth; ++d) sum += X_LOAD(gr, d) * X_LOAD(xr, d);
  S_STORE(delta, row, has_through ? sum - S_LOAD(through, row) : sum);
}

SIZED __kernel void attention_query_grad(__global const X_T* g, __global const X_T* q, __global const X_T* k, __global const X_T* v,
                                         __global const M_T* mask, __global const S_T* logarithms, __global const S_T* delta,
                                         __global X_T* out, const REAL scale, const int causal, const int n, const int m, const int depth,
                                         const int depth_v, const int heads, const int sharing, const int by_batch, const int by_head,
                                         const int by_query, const int by_key) {
  MEMORY
  const int head = get_group_id(1), first = get_group_id(0) * ROWS, tx = get_local_id(0), ty = get_local_id(1);
  const long kv = (long)key_head(head, heads, sharing) * m, row = (long)head * n;
  __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;
  real s[RY][RX], dp[RY][RX], result[RY][CHUNKS * OWN], scales[RY];
  clear(result);
  const int end = causal ? min(m, first + ROWS) : m;
  for (int j = 0; j < end; j += COLUMNS) {
    products(s, left, right, q + row * depth, first, n, k + kv * depth, j, m, depth);
    products(dp, left, right, g + row * depth_v, first, n, v + kv * depth_v, j, m, depth_v);
    for (int y = 0; y < RY; ++y) {
      const int i = first + ty + y * TY;
      const real safe = safe_logarithm(S_LOAD(logarithms, row + min(i, n - 1))), less = S_LOAD(delta, row + min(i, n - 1));
      for (int x = 0; x < RX; ++x) {
        const real score = masked(s[y][x] * scale, mask_here, by_query, by_key, i, j + tx + x * TX, n, m, causal);
        s[y][x] = exp(score - safe) * (dp[y][x] - less);
      }
    }
    share_scores(scores, s);
    gather(result, scores, right, k + kv * depth, j, m, depth);
  }
  for (int y = 0; y < RY; ++y) scales[y] = scale;
  store_rows(out + row * depth, result, scales, first, n, depth);
}

#else

// Rows of scores are keys here, columns are queries.
SIZED __kernel void attention_key_grad(__global const X_T* g, __global const X_T* q, __global const X_T* k, __global const X_T* v,
                                       __global const M_T* mask, __global const S_T* logarithms, __global const S_T* delta,
                                       __global X_T* out_k, __global X_T* out_v, const REAL scale, const int causal, const int n, const int m,
                                       const int depth, const int depth_v, const int heads, const int sharing, const int by_batch,
                                       const int by_head, const int by_query, const int by_key) {
  MEMORY
  const int kv_head = get_group_id(1), first = get_group_id(0) * ROWS, kv_heads = heads / sharing, tx = get_local_id(0), ty = get_local_id(1);
  const long kv = (long)kv_head * m;
  real s[RY][RX], dp[RY][RX], result_k[RY][CHUNKS * OWN], result_v[RY][CHUNKS * OWN], scales[RY];
  clear(result_k);
  clear(result_v);
  for (int r = 0; r < sharing; ++r) {
    const int head = kv_head / kv_heads * heads + kv_head % kv_heads * sharing + r;
    const long row = (long)head * n;
    __global const M_T* mask_here = mask + (long)(head / heads) * by_batch + (long)(head % heads) * by_head;
    for (int i = causal ? first : 0; i < n; i += COLUMNS) {
      products(s, left, right, k + kv * depth, first, m, q + row * depth, i, n, depth);
      products(dp, left, right, v + kv * depth_v, first, m, g + row * depth_v, i, n, depth_v);
      for (int x = 0; x < RX; ++x) {
        const int query = i + tx + x * TX;
        const real safe = safe_logarithm(S_LOAD(logarithms, row + min(query, n - 1))), less = S_LOAD(delta, row + min(query, n - 1));
        for (int y = 0; y < RY; ++y) {
          const real score = masked(s[y][x] * scale, mask_here, by_query, by_key, query, first + ty + y * TY, n, m, causal);
          s[y][x] = exp(score - safe);
          dp[y][x] = s[y][x] * (dp[y][x] - less);
        }
      }
      share_scores(scores, s);
      gather(result_v, scores, right, g + row * depth_v, i, n, depth_v);
      share_scores(scores, dp);
      gather(result_k, scores, right, q + row * depth, i, n, depth);
    }
  }
  for (int y = 0; y < RY; ++y) scales[y] = scale;
  store_rows(out_k + kv * depth, result_k, scales, first, m, depth);
  for (int y = 0; y < RY; ++y) scales[y] = 1;
  store_rows(out_v + kv * depth_v, result_v, scales, first, m, depth_v);
}
#endif
