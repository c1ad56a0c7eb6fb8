// Attention of a few new positions over a cache of keys and values that lies in memory already, and the write of the new ones into it.
//
// A work-group takes ROWS queries that share a head of keys, and RANGE positions of the cache; scores wait in local memory. How many
// positions are filled is read on the device, so that one recorded launch serves every length. With SPLITS the sums of the ranges are
// combined by a second kernel. With CODED the cache holds int8 and a scale (S_T, S_LOAD, S_STORE) for each head and position. New positions
// are rounded first and read from the cache like the others, so a result does not depend on which call wrote a position. PUTS 0: a kernel
// before this one rounds them, because several work-groups read them. Callers give the types X_T, P_T (lengths) and Y_T with X_LOAD, X_STORE
// and Y_STORE, X_LANES(p), which reads VW values, and PART: 1 for the attention, 2 for the combination, 3 to round new positions.
// With PACKED and without CODED, heads of queries and keys can be normalized (HEAD_NORM 1: RMS norm with EPS and weights N_T N_LOAD) and then
// rotated by their positions (ROTARY: so many elements of a head, 0 for none). NEW is the number of new positions then, else 0.
#pragma OPENCL FP_CONTRACT ON

#ifndef ITEMS
#define ITEMS 64  // of a work-group: 1 or a multiple of 32
#define RANGE 256
#define ROWS 1
#define DEPTH 64  // elements of a head; a multiple of VW
#define DEPTH_V 64
#define VW 4
#define MATES 4  // work-items that share a key
#define KEYS 4
#define REAL float  // what scores and sums are kept in
#define SPLITS 0
#define PACKED 0
#define CODED 0
#define PUTS 1
#define NEW 0
#define FOURS 0
#define MORE_POINTERS
#endif
// A work-item waits for several loads together: those of KEYS keys or BATCH values; of a CPU, four parts of one.
#if ITEMS == 1
#define KEY_LOADS _Pragma("unroll 4")
#define VALUE_LOADS KEY_LOADS
#define BATCH 1
#define EACH_RESULT(r, d) for (int r = 0; r < rows; ++r) for (int d = 0; d < DEPTH_V; ++d)
#else
#define VALUE_LOADS
#define BATCH 8
#define EACH_RESULT(r, d) for (int i = l, r, d; r = i / DEPTH_V, d = i % DEPTH_V, r < rows; i += ITEMS)
#endif
#define TEAMS (ITEMS < ROWS ? ITEMS : ROWS)  // queries whose scores are summed at a time
#define TEAM (ITEMS / TEAMS < 32 ? ITEMS / TEAMS : 32)
// Elements before the query of a row, between new positions of keys and values, and before those of a head. PACKED: one tensor holds
// queries, keys and values side by side, (sequence, position, head, element).
#if PACKED
#define WIDE (H + 2 * G)
#define QUERY_ROW(b, h, t) (((size_t)(b) * T + (t)) * WIDE + (h))
#define RESULT_ROW(b, h, t) (((b) * T + (t)) * H + (h))
#define KEY_STEP (WIDE * DEPTH)
#define VALUE_STEP KEY_STEP
#define NEW_KEYS (((size_t)b * T * WIDE + H + head % G) * DEPTH)
#define NEW_VALUES (((size_t)b * T * WIDE + H + G + head % G) * DEPTH)
#else
#define QUERY_ROW(b, h, t) (((size_t)(b) * H + (h)) * T + (t))
#define RESULT_ROW(b, h, t) (((b) * H + (h)) * T + (t))
#define KEY_STEP DEPTH
#define VALUE_STEP DEPTH_V
#define NEW_KEYS ((size_t)head * T * DEPTH)
#define NEW_VALUES ((size_t)head * T * DEPTH_V)
#endif
#define CHUNKS (DEPTH_V / VW)
#define PARTS (ITEMS > CHUNKS ? ITEMS / CHUNKS : 1)  // of the positions, when values are added up
#if ITEMS > 1 && KEYS * ITEMS > PARTS * DEPTH_V
#define SUMS (KEYS * ITEMS)  // of a query, in local memory
#else
#define SUMS (PARTS * DEPTH_V)
#endif

#if VW == 1
typedef REAL lanes;
#define DOT(v) (v)
#else
typedef JOIN(REAL, VW) lanes;
#if VW == 4
#define DOT(v) ((v).x + (v).y + (v).z + (v).w)
#elif VW == 8
#define DOT(v) dot((v).lo + (v).hi, (JOIN(REAL, 4))(1))
#else
#define DOT(v) dot((v).lo.lo + (v).lo.hi + (v).hi.lo + (v).hi.hi, (JOIN(REAL, 4))(1))
#endif
#endif

#if CODED
#define CACHE_T char
#if VW == 1
#define KEPT_LANES(p) ((REAL)(*(p)))
#else
#define KEPT_LANES(p) JOIN(convert_, JOIN(REAL, VW))(JOIN(vload, VW)(0, p))
#endif
#define READ(old, kept, fresh) KEPT_LANES(kept)
#define SCALED(scales, i, x) ((x) * (REAL)S_LOAD(scales, i))
#define LARGER(a, b) ((b) > (a) || isnan(b) ? (b) : (a))  // fmax drops NaN
// A position as int8 and the scale, which is NaN if a value is; all items of a work-group call it together.
inline void put_position(__global char* to, __global S_T* scale, __global const X_T* x, int depth, int l, __local REAL* found) {
  REAL most = 0;
  for (int d = l; d < depth; d += ITEMS) {
    const REAL size = fabs((REAL)X_LOAD(x, d));
    most = LARGER(most, size);
  }
  found[l] = most;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = 0; i < ITEMS; ++i) most = LARGER(most, found[i]);
  barrier(CLK_LOCAL_MEM_FENCE);
  const REAL inverse = most > 0 ? 127 / most : 0;
  for (int d = l; d < depth; d += ITEMS) to[d] = convert_char_sat(rint((REAL)X_LOAD(x, d) * inverse));
  if (l == 0) S_STORE(scale, 0, most / 127);
}
#define PUT_POSITION(i)                                                                                                           \
  {                                                                                                                               \
    const size_t at = (size_t)head * L + seen + (i);                                                                              \
    put_position(keys + at * DEPTH, key_scales + at, k + NEW_KEYS + (size_t)(i) * KEY_STEP, DEPTH, l, found);                     \
    put_position(values + at * DEPTH_V, value_scales + at, v + NEW_VALUES + (size_t)(i) * VALUE_STEP, DEPTH_V, l, found);         \
  }
#else
#define CACHE_T X_T
#define READ(old, kept, fresh) X_LANES((old) ? (__global const X_T*)(kept) : (fresh))
#define SCALED(scales, i, x) (x)
#endif

#if PART == 1
// B, G: sequences and heads of keys; H: heads of queries; T: new positions; L: positions of the cache. window: how many a query sees, 0 for
// all. The cache holds `lengths[b]` positions before the call. Work-groups: ranges, heads of keys of all sequences, blocks of queries.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void cached_attention(
    __global const X_T* restrict q, __global const X_T* restrict k, __global const X_T* restrict v, __global CACHE_T* restrict keys,
    __global CACHE_T* restrict values, MORE_POINTERS __global const P_T* restrict lengths, __global Y_T* restrict out,
    __global REAL* restrict sums, int H, int G, int T, int L, int window, int ranges, const REAL scale, const REAL cap) {
  __local REAL scores[ROWS][RANGE] __attribute__((aligned(16))), query[ROWS + NEW][DEPTH] __attribute__((aligned(16)));
  __local REAL added[ROWS][SUMS] __attribute__((aligned(16))), found[ITEMS], most[ROWS], total[ROWS];
  const int l = get_local_id(0), range = get_group_id(0), head = get_group_id(1), first = get_group_id(2) * ROWS;
  const int b = head / G, sharing = H / G, rows = min(ROWS, sharing * T - first), seen = (int)lengths[b];
  const int from = range * RANGE, to = min(min(seen + T, L), from + RANGE);
  __global CACHE_T* own_keys = keys + (size_t)head * L * DEPTH;
  __global CACHE_T* own_values = values + (size_t)head * L * DEPTH_V;
  __global const X_T* new_keys = k + NEW_KEYS;
  __global const X_T* new_values = v + NEW_VALUES;

#if NEW  // queries, then new keys
  __local REAL squares[(ROWS + NEW) * 8];
#define HEAD_FACTOR  /* the weights of row r's norm as `by`, its inverse root mean square as `sum` */ \
  __global const N_T* by = r < ROWS ? query_norm : key_norm;                                       \
  REAL sum = 0;                                                                                    \
  for (int j = 0; j < 8; ++j) sum += squares[r * 8 + j];                                           \
  sum = 1 / sqrt(sum / DEPTH + (REAL)EPS);
#define TAKEN(r) (q + ((r) < ROWS ? QUERY_ROW(b, head % G * sharing + (min(r, rows - 1) + first) / T, (min(r, rows - 1) + first) % T) * DEPTH \
                                  : NEW_KEYS + (size_t)((r) - ROWS) * KEY_STEP))
  for (int i = l; i < (ROWS + NEW) * 8 * HEAD_NORM; i += ITEMS) {
    squares[i] = 0;
    for (int d = i % 8; d < DEPTH; d += 8) squares[i] += (REAL)X_LOAD(TAKEN(i / 8), d) * (REAL)X_LOAD(TAKEN(i / 8), d);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
#if ITEMS == 1  // all rows of a position share sines and cosines
  REAL cosines[NEW * (ROTARY / 2) + 4], sines[NEW * (ROTARY / 2) + 4];
  for (int i = 0; i < NEW * (ROTARY / 2); i += ROTARY % 8 ? 1 : 4) {
    JOIN(REAL, 4) angle = (JOIN(REAL, 4))(frequencies[i % (ROTARY / 2)]);
    if (ROTARY % 8 == 0) angle = vload4(0, frequencies + i % (ROTARY / 2));
    angle *= (REAL)(seen + i / (ROTARY / 2));
    vstore4(cos(angle), 0, cosines + i);
    vstore4(sin(angle), 0, sines + i);
  }
  for (int r = 0; r < ROWS + NEW; ++r) {
    __global const X_T* taken = TAKEN(r);
    const int turns = (r < ROWS ? (min(r, rows - 1) + first) % T : r - ROWS) * (ROTARY / 2);
    for (int d = 0; d < DEPTH; ++d) query[r][d] = X_LOAD(taken, d);
#if HEAD_NORM
    HEAD_FACTOR
    for (int d = 0; d < DEPTH; ++d) query[r][d] *= sum * N_LOAD(by, d);
#endif
    for (int pair = 0; pair < ROTARY / 2; ++pair) {
      const REAL x = query[r][pair], y = query[r][pair + ROTARY / 2], c = cosines[turns + pair], s = sines[turns + pair];
      query[r][pair] = x * c - y * s, query[r][pair + ROTARY / 2] = x * s + y * c;
    }
  }
#else
#define PAIRS ((ROWS + NEW) * (DEPTH / 2))
  UNROLL for (int i0 = 0; i0 < PAIRS; i0 += ITEMS) {  // beyond the last pair the last one again: loads wait together
    const int i = min(i0 + l, PAIRS - 1);
    const int r = i / (DEPTH / 2), pair = i % (DEPTH / 2), turns = pair < ROTARY / 2;
    const int one = turns ? pair : 2 * pair, other = turns ? pair + ROTARY / 2 : 2 * pair + 1;
    const int place = seen + (r < ROWS ? (min(r, rows - 1) + first) % T : r - ROWS);
    const REAL angle = turns ? place * frequencies[pair] : (REAL)0, c = cos(angle), s = sin(angle);
    REAL x = X_LOAD(TAKEN(r), one), y = X_LOAD(TAKEN(r), other);
#if HEAD_NORM
    HEAD_FACTOR
    x *= sum * N_LOAD(by, one), y *= sum * N_LOAD(by, other);
#endif
    query[r][one] = x * c - y * s, query[r][other] = x * s + y * c;
  }
#endif
#else
  for (int i = l; i < ROWS * DEPTH; i += ITEMS) {
    const int r = min(i / DEPTH, rows - 1) + first;
    query[i / DEPTH][i % DEPTH] = X_LOAD(q, QUERY_ROW(b, head % G * sharing + r / T, r % T) * DEPTH + i % DEPTH);
  }
#endif
  barrier(CLK_LOCAL_MEM_FENCE);
#if CODED
  for (int i = max(from, seen) - seen; PUTS && i < to - seen; ++i) PUT_POSITION(i)
  barrier(CLK_GLOBAL_MEM_FENCE);
#else
  if (first == 0)  // what is new; every work-group reads it from where it came
    for (int i = max(from, seen) - seen; i < to - seen; ++i) {
#if NEW
      for (int d = l; d < DEPTH; d += ITEMS) X_STORE(own_keys, (size_t)(seen + i) * DEPTH + d, query[ROWS + i][d]);
#else
      for (int d = l; d < DEPTH; d += ITEMS) X_STORE(own_keys, (size_t)(seen + i) * DEPTH + d, X_LOAD(new_keys, (size_t)i * KEY_STEP + d));
#endif
      for (int d = l; d < DEPTH_V; d += ITEMS) X_STORE(own_values, (size_t)(seen + i) * DEPTH_V + d, X_LOAD(new_values, (size_t)i * VALUE_STEP + d));
    }
#endif

#define PUT_SCORE(r, i, dot)                                                                                            \
  const int place = seen + (first + (r)) % T;                                                                           \
  REAL score = SCALED(key_scales, (size_t)head * L + (i), (dot) * scale);                                               \
  if (cap > 0) score = cap * tanh(score / cap);                                                                         \
  scores[r][(i) - from] = (i) <= place && (window == 0 || (i) > place - window) ? score : -INFINITY;
#if ITEMS == 1
  for (int i = from; i < to; ++i) {
    __global const CACHE_T* kept = own_keys + (size_t)i * DEPTH;
    __global const X_T* fresh = new_keys + (ptrdiff_t)(i - seen) * KEY_STEP;
    lanes dots[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) dots[r] = (lanes)(0);
// The products of all queries with a key.
#define ADD_DOTS(key) \
  KEY_LOADS for (int d = 0; d < DEPTH; d += VW) {                                                                            \
    const lanes part = key;                                                                                                  \
    _Pragma("unroll") for (int r = 0; r < ROWS; ++r) dots[r] += part * *(__local const lanes*)&query[r][d];                  \
  }
#if NEW
    if (i >= seen) ADD_DOTS(*(__local const lanes*)&query[ROWS + i - seen][d])
    else ADD_DOTS(X_LANES(kept + d))
#else
    ADD_DOTS(READ(i < seen, kept + d, fresh + d))
#endif
    UNROLL for (int r = 0; r < ROWS; ++r) { PUT_SCORE(r, i, DOT(dots[r])) }
  }
#else
#define EACH (DEPTH / VW / MATES)  // loads of a work-item for a key
  for (int i0 = from; i0 < to; i0 += KEYS * (ITEMS / MATES)) {
    lanes key[KEYS][EACH];
    UNROLL for (int u = 0; u < KEYS; ++u) {
      const int i = min(i0 + u * (ITEMS / MATES) + l / MATES, to - 1);
      __global const CACHE_T* kept = own_keys + (size_t)i * DEPTH;
      __global const X_T* fresh = new_keys + (ptrdiff_t)(i - seen) * KEY_STEP;
      UNROLL for (int j = 0; j < EACH; ++j) {
        const int d = (l % MATES + j * MATES) * VW;
#if NEW
        key[u][j] = i < seen ? X_LANES(kept + d) : *(__local const lanes*)&query[max(ROWS, ROWS + i - seen)][d];
#else
        key[u][j] = READ(i < seen, kept + d, fresh + d);
#endif
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      REAL dots[KEYS];
      UNROLL for (int u = 0; u < KEYS; ++u) dots[u] = 0;
      UNROLL for (int j = 0; j < EACH; ++j) {
        const lanes own = *(__local const lanes*)&query[r][(l % MATES + j * MATES) * VW];
        UNROLL for (int u = 0; u < KEYS; ++u) dots[u] += DOT(key[u][j] * own);
      }
      UNROLL for (int u = 0; u < KEYS; ++u) added[r][u * ITEMS + l] = dots[u];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int j = l; j < ROWS * KEYS * (ITEMS / MATES); j += ITEMS) {
      const int r = j / (KEYS * (ITEMS / MATES)), at = j % (KEYS * (ITEMS / MATES)), i = i0 + at;
      if (i >= to) continue;
      REAL dot_of_all = 0;
#if MATES % VW
      UNROLL for (int mate = 0; mate < MATES; ++mate) dot_of_all += added[r][at * MATES + mate];
#else
      UNROLL for (int mate = 0; mate < MATES; mate += VW) dot_of_all += DOT(*(__local const lanes*)&added[r][at * MATES + mate]);
#endif
      PUT_SCORE(r, i, dot_of_all)
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
#endif
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int r0 = 0; r0 < rows; r0 += TEAMS) {  // a team of work-items has a query
    const int r = min(r0 + l / TEAM, ROWS - 1), mate = l % TEAM, begin = l - mate, active = r0 + l / TEAM < rows && l < TEAM * TEAMS;
    REAL top = -INFINITY, sum = 0;
    for (int i = mate; i < (active ? to - from : 0); i += TEAM) top = fmax(top, scores[r][i]);
    found[l] = top;
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int i = 0; i < TEAM; ++i) top = fmax(top, found[min(begin + i, ITEMS - 1)]);
    barrier(CLK_LOCAL_MEM_FENCE);
#if FOURS  // exponentials four at a time: a single one is a call. ITEMS is 1, REAL is float, RANGE a multiple of 4
    int begun = 0;
    float4 four = (float4)(0.0f);
    for (; begun + 4 <= to - from && top > -INFINITY; begun += 4) {
      __local float4* part = (__local float4*)&scores[r][begun];
      *part = EXP_BELOW(*part - top);
      four += *part;
    }
    sum = four.x + four.y + four.z + four.w;
#else
    const int begun = 0;
#endif
    for (int i = begun + mate; i < (active ? to - from : 0); i += TEAM) {
      const REAL share = scores[r][i] == -INFINITY ? (REAL)0 : exp(scores[r][i] - top);  // NaN stays NaN
      scores[r][i] = share;
      sum += share;
    }
    found[l] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (active && mate == 0) {
      UNROLL for (int i = 1; i < TEAM; ++i) sum += found[l + i];
      most[r] = top;
      total[r] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  for (int chunk = l % CHUNKS; chunk < CHUNKS && l < PARTS * CHUNKS; chunk += ITEMS) {
    lanes sum[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) sum[r] = (lanes)(0);
    VALUE_LOADS for (int i0 = from + l / CHUNKS * (ITEMS > 1); i0 < to; i0 += PARTS * BATCH) {
      lanes part[BATCH];
      UNROLL for (int u = 0; u < BATCH; ++u) {  // beyond the end the last one, whose share is not counted
        const int i = min(i0 + u * PARTS, to - 1);
        __global const CACHE_T* kept = own_values + (size_t)i * DEPTH_V;
        __global const X_T* fresh = new_values + (ptrdiff_t)(i - seen) * VALUE_STEP;
        part[u] = SCALED(value_scales, (size_t)head * L + i, READ(i < seen, kept + chunk * VW, fresh + chunk * VW));
      }
      UNROLL for (int u = 0; u < BATCH; ++u)
        if (BATCH == 1 || i0 + u * PARTS < to)
          UNROLL for (int r = 0; r < ROWS; ++r) sum[r] += part[u] * scores[r][i0 + u * PARTS - from];
    }
    UNROLL for (int r = 0; r < ROWS; ++r) *(__local lanes*)&added[r][(ITEMS > 1 ? l / CHUNKS % PARTS : 0) * DEPTH_V + chunk * VW] = sum[r];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  EACH_RESULT(r, d) {
    const int at = RESULT_ROW(b, head % G * sharing + (first + r) / T, (first + r) % T);
    REAL sum = 0;
    for (int part = 0; part < PARTS; ++part) sum += added[r][part * DEPTH_V + d];
#if SPLITS
    out[((size_t)at * ranges + range) * DEPTH_V + d] = sum;
    if (d == 0) {
      sums[((size_t)at * ranges + range) * 2] = most[r];
      sums[((size_t)at * ranges + range) * 2 + 1] = total[r];
    }
#else
    Y_STORE(out, (size_t)at * DEPTH_V + d, total[r] == 0 ? (REAL)0 : sum / total[r]);
#endif
  }
}
#endif

#if PART == 2
// The sums of all ranges of a query as one.
__kernel void combine_ranges(__global const REAL* restrict parts, __global const REAL* restrict sums, __global Y_T* restrict out, int n,
                             int ranges) {
  const int i = get_global_id(0), row = i / DEPTH_V, d = i % DEPTH_V;
  if (i >= n) return;
  REAL top = -INFINITY, sum = 0, all = 0;
  for (int j = 0; j < ranges; ++j) top = fmax(top, sums[(row * ranges + j) * 2]);
  for (int j = 0; j < ranges; ++j) {
    const REAL factor = top == -INFINITY ? (REAL)0 : exp(sums[(row * ranges + j) * 2] - top);
    all += factor * sums[(row * ranges + j) * 2 + 1];
    sum += factor * parts[((size_t)row * ranges + j) * DEPTH_V + d];
  }
  Y_STORE(out, i, all == 0 ? (REAL)0 : sum / all);
}
#endif

#if PART == 3
// New positions as int8. Work-groups: new positions, heads of keys of all sequences.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void round_positions(
    __global const X_T* restrict k, __global const X_T* restrict v, __global CACHE_T* restrict keys, __global CACHE_T* restrict values,
    MORE_POINTERS __global const P_T* restrict lengths, int H, int G, int T, int L) {
  __local REAL found[ITEMS];
  const int l = get_local_id(0), head = get_group_id(1), b = head / G, seen = (int)lengths[b];
  if (seen + (int)get_group_id(0) < L) PUT_POSITION(get_group_id(0))
}
#endif
