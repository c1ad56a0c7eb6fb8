// The layers of a decoder for a few tokens in one launch, after codes.cl, mma.cl (IN_LOCAL 1), whose fragments it uses, and results.cl. The
// products of a layer are phases:
//   3: z = norm(y) w_next' + bias      0: h = y + inside w_out'      1: f = act(norm(h) w_gate') * (norm(h) w_up')      2: y = h + f w_down'
// ATTEND 0: phases 0, 1, 2 and, if there is a next projection, 3; x is the first y, and `inside` is given. With LAYERS 0, phase 3 alone.
// ATTEND 1 (after attend.cl): LAYERS layers of 3, the attention of z, 0, 1, 2. Layers are numbered by their attention, so their own
// projection is phase 3 of the layer before.
// A work-group per compute unit takes strips of each product in turn, and its WARPS warps a share of the columns each.
// Results lie in `made`, each at a place of its own: groups wait for what they read (results.cl), and must run at the same time. Weights do not
// depend on what came before: copies into a warp's ring of STAGES pieces (EACH runs of 32 columns) run on across the waits.
//   BULK  1: one instruction copies a piece, for columns of whole pieces; 0: 16 bytes a lane
//   STAGED_WORDS  words of local memory for activations, of whole pieces for all warps
//   LAYER_POINTERS  of all layers, which KEEP_POINTERS puts into `table`
//   ATTENTION_POINTERS ATTENTION_NUMBERS  `inside` and z, or what attend.cl needs; from there ROTARY      MOST_TOKENS  no fewer than the tokens
//   MOST_RUNS  runs of 32 columns of the widest product      HELD  quads of a normed row that a work-item holds      EPS NEXT_EPS  of the norms
// From codes.cl: LOW HIGH MIN SCALES WORDS RECORD; from ptx.cl: LOCAL_AT COPY_16 COPIES_COMMIT COPIES_WAIT BARRIER_INIT BARRIERS_BEGIN COPY_BULK MMA_FRESH MMA_FLOAT16; from the
// launch: SPLIT KINDS as in mma.cl, X_T X_QUAD X_LOAD X_STORE, NORM_T NORM_QUAD, BIAS_T BIAS_LOAD; epilogue() is generated.
#undef PLUS  // no kind is plain here
#define PLUS(sum, scale, c) fma(scale, c, sum)
#define ITEMS (WARPS * 32)
#define HELD_RUNS 4  // that a warp loads before it multiplies
#define PIECE (EACH / PER_RECORD * RECORD)
#define COPIES ((PIECE / 16 + 31) / 32)  // of a lane, for a piece
// In local memory the halves of every other pair of code lines (64 bytes) are exchanged, so that the lanes of a warp read all 32 banks.
#define EXCHANGED (!BULK && WORDS % 4 == 0 && !HIGH)
#define WARP_BARRIER() __asm__ volatile("bar.warp.sync -1;" ::: "memory")
#define AT_ONCE 4  // quads of an item that wait for memory together
#define OF_PHASE(p, a, b, c, d) ((p) == 0 ? (a) : (p) == 1 ? (b) : (p) == 2 ? (c) : (d))
#define PIECES(columns) (((columns) + 32 * EACH * WARPS - 1) / (32 * EACH * WARPS))  // of a warp, for a strip; beyond its end weights are 0
#define POINTERS (8 + 4 * ATTEND)
// Of a layer, in the order of LAYER_POINTERS.
#define OF_LAYER(layer, i, type) ((__global type*)table[(layer) * POINTERS + (i)])
#define NORM_OF(layer) OF_LAYER(layer, 0, const NORM_T)
#define BIAS_OF(layer) OF_LAYER(layer, 2, const BIAS_T)
#define MLP_NORM_OF(layer) OF_LAYER(layer, 4, const NORM_T)
#define WEIGHTS_OF(layer, phase, gate) \
  ((phase) == 3 ? OF_LAYER((layer) + 1, 1, const uchar) : OF_LAYER(layer, (phase) == 0 ? 3 : (phase) == 2 ? 7 : (gate) ? 5 : 6, const uchar))
#define PROJECTS (ATTEND || !LAYERS)  // 1: begins with phase 3
#define LAST_PHASE (ATTEND || !next ? 2 : 3)  // of the last layer
// Results of a layer in `made`: h, f, y, then the projection before its attention, the attention, and its parts.
#define MADE_F (tokens * width)
#define MADE_Y (MADE_F + tokens * inner)
#define MADE_Z (MADE_Y + tokens * width)
#define MADE_INSIDE (MADE_Z + tokens * next)
#define MADE_PARTS (MADE_INSIDE + tokens * attended)
#define MADE_OF(layer) (made + (size_t)(layer) * (MADE_PARTS + PART_WORDS(tokens)))
#if ATTEND
#define RESULT_OF_PROJECTION 0
#define GIVEN_INSIDE 0
#else
#define PART_WORDS(tokens) 0
#define RESULT_OF_PROJECTION (phase == 3 ? z : 0)
#define GIVEN_INSIDE inside
#endif

// Four activations, from column 4 * quad of a token on, as fragments.
static inline void put_quad(__local uint4* staged, const uint quad, const int token, const float4 f) {
  const uint run = quad / 8, j = quad % 8, t = SPREAD ? j % 4 : j / 2, part = SPREAD ? j / 4 : j % 2;
  UNROLL for (int rest = 0; rest <= SPLIT; ++rest)
    ((__local uint2*)(staged + (run * KINDS + token * (1 + SPLIT) + rest) * 4 + t))[part] = halves_of(f, rest);
}

// The sum over a work-group, which all items get.
static inline float sum_of_group(float sum, __local float* part, const int item) {
  UNROLL for (int step = 16; step; step /= 2) {
    float other;
    __asm__ volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(other) : "f"(sum), "r"(step));
    sum += other;
  }
  if (item % 32 == 0) part[item / 32] = sum;
  barrier(CLK_LOCAL_MEM_FENCE);
  sum = 0.0f;
  UNROLL for (int i = 0; i < WARPS; ++i) sum += part[i];
  barrier(CLK_LOCAL_MEM_FENCE);
  return sum;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void strips_chain(LAYER_POINTERS ATTENTION_POINTERS __global const X_T* x, __global X_T* y, __global float* made, __global int* late,
                  const int attended, const int width, const int inner, const int next, const int tokens, const int biased ATTENTION_NUMBERS) {
  __local uchar rings[WARPS * STAGES * PIECE] __attribute__((aligned(128)));
  __local uint4 staged[STAGED_WORDS / 4];
  __local float sums[2 * 2 * WARPS * KINDS * 16];
  __local float part[WARPS];
  __local ulong table[(LAYERS + 1) * POINTERS];
  __local int lost;
#if SUMMED
  __local uint2 summed[MOST_RUNS / 8 * KINDS * 4];
#endif
#if ATTEND
  __local float2 turns[MOST_TOKENS * (ROTARY / 2 + 1)];
  __local int seen_of[MOST_TOKENS];
#endif
  const int item = get_local_id(0), lane = item % 32, warp = item / 32, g = lane / 4, t = lane % 4;
  const int groups = get_num_groups(0), group = get_group_id(0);
  __local uchar* ring = rings + warp * STAGES * PIECE;
  const uint ring_at = LOCAL_AT(ring);
  uint turn = 0;  // how often the ring was used up, modulo 2
#if BULK
  __local ulong barriers[WARPS * STAGES];
  const uint barriers_at = LOCAL_AT(barriers + warp * STAGES);
  if (item < WARPS * STAGES) BARRIER_INIT(LOCAL_AT(barriers + item), 1);
  BARRIERS_BEGIN();
#define COPY_PIECE(slot) \
  if (lane == 0) COPY_BULK(ring_at + (slot) * PIECE, load_from, PIECE, barriers_at + (slot) * 8);
#define AWAIT_PIECE() await(barriers_at + slot * 8, turn)
#else
  uint places[COPIES];  // in a piece, of what this lane copies
  UNROLL for (int i = 0; i < COPIES; ++i) {
    const uint at = (lane + i * 32) * 16, in_record = at % RECORD;
    places[i] = EXCHANGED && in_record >= AT_CODES ? at - in_record + AT_CODES + ((in_record - AT_CODES) ^ (((in_record - AT_CODES) >> 2) & 32)) : at;
  }
#define COPY_PIECE(slot)                                                                                                     \
  UNROLL for (int i_ = 0; i_ < COPIES; ++i_)                                                                                \
    if (PIECE % 512 == 0 || i_ < COPIES - 1 || lane < PIECE % 512 / 16)                                                     \
      COPY_16(ring_at + (slot) * PIECE + places[i_], load_from + i_ * 512, i_ * 512 < load_bytes ? 16 : 0);
#define AWAIT_PIECE() COPIES_WAIT(STAGES - 1)
#endif
  if (item == 0) {
    lost = 0;
    KEEP_POINTERS
  }
  barrier(CLK_LOCAL_MEM_FENCE);

  // What is loaded next, by each warp for itself: strip `load_part` (0 or, of the gate, 0 and 1) of unit `load_unit` of a phase of a layer has
  // `load_left` more pieces, and `load_bytes` from the first byte of this lane on.
  int load_layer = -PROJECTS, load_phase = PROJECTS ? 2 : -1, load_unit = 0, load_units = 0, load_part = 1, load_left = 0, load_bytes = 0;
  __global const uchar* load_from = 0;
#define LOADED (load_layer == LAYERS || (load_layer == LAYERS - 1 && load_phase > LAST_PHASE))
#define NEXT_STRIP()                                                                                                        \
  {                                                                                                                         \
    load_part ^= 1;                                                                                                         \
    if (load_phase != 1 || !load_part) load_part = 0, load_unit += groups;                                                  \
    while (load_unit >= load_units && !LOADED) {                                                                            \
      if (++load_phase == 4) load_phase = 0, ++load_layer;                                                                  \
      load_unit = group;                                                                                                    \
      load_units = (OF_PHASE(load_phase, width, inner, width, next) + 15) / 16;                                             \
    }                                                                                                                       \
    if (!LOADED) {                                                                                                          \
      const int columns_ = OF_PHASE(load_phase, attended, width, inner, width), strip_ = columns_ / 32 / PER_RECORD * RECORD; \
      load_left = PIECES(columns_);                                                                                         \
      load_bytes = strip_ - warp * load_left * PIECE - lane * 16;                                                           \
      load_from = WEIGHTS_OF(load_layer, load_phase, !load_part) + ((size_t)(load_unit + 1) * strip_ - load_bytes);         \
    }                                                                                                                       \
  }
#define LOAD_PIECE(slot)                                                                                                    \
  {                                                                                                                         \
    if (load_left) {                                                                                                        \
      COPY_PIECE(slot)                                                                                                      \
      load_from += PIECE;                                                                                                   \
      load_bytes -= PIECE;                                                                                                  \
      if (--load_left == 0) NEXT_STRIP()                                                                                    \
    }                                                                                                                       \
    if (!BULK) COPIES_COMMIT();                                                                                             \
  }

  NEXT_STRIP()
  for (int i = 0; i < STAGES; ++i) LOAD_PIECE(i)

#if ATTEND
  for (int i = item; i < tokens * (ROTARY / 2); i += ITEMS) {
    const float angle = (int)lengths[i / (ROTARY / 2)] * frequencies[i % (ROTARY / 2)];
    turns[i] = (float2)(cos(angle), sin(angle));
  }
  if (item < tokens) seen_of[item] = (int)lengths[item];
  barrier(CLK_LOCAL_MEM_FENCE);
#endif

  int slot = 0;
  for (int layer = -PROJECTS, phase = PROJECTS ? 3 : 0;;) {
    const int columns = OF_PHASE(phase, attended, width, inner, width), rows = OF_PHASE(phase, width, inner, width, next);
    const int units = (rows + 15) / 16, pieces = PIECES(columns), tall = phase == 1 ? 2 : 1, quads = columns / 4, all_quads = pieces * WARPS * EACH * 8;
    const int whose = layer + (phase == 3);  // the layer whose attention is next
    __global const float* now = whose ? MADE_OF(whose - 1) + MADE_Y : 0;  // y so far, if it is not x
    __global const float* from = OF_PHASE(phase, ATTEND ? MADE_OF(layer) + MADE_INSIDE : 0, MADE_OF(layer), MADE_OF(layer) + MADE_F, now);
    __global const float* added = phase == 0 ? now : MADE_OF(layer);
    __global float* to = OF_PHASE(phase, MADE_OF(layer), MADE_OF(layer) + MADE_F, MADE_OF(layer) + MADE_Y, ATTEND ? MADE_OF(whose) + MADE_Z : 0);
    __global X_T* result = phase == 2 && layer == LAYERS - 1 ? y : RESULT_OF_PROJECTION;
    __global const X_T* given = phase == 3 ? x : GIVEN_INSIDE;  // if there is no `from`
    if (group < units) {
      float4 factors[HELD];  // of the norm
      if (phase % 2) {
        __global const NORM_T* norm = phase == 1 ? MLP_NORM_OF(layer) : NORM_OF(whose);
        UNROLL for (int i = 0; i < HELD; ++i) factors[i] = NORM_QUAD(norm + min(item + i * ITEMS, quads - 1) * 4);
      }
      for (int token = 0; token < tokens; ++token) {
#define QUADS_OF(quads_, count_, first_)                                                                                    \
  if (from) AWAIT_QUADS(quads_, count_, from + (size_t)token * columns, first_, quads, late, &lost)                         \
  else UNROLL for (int i_ = 0; i_ < (count_); ++i_) quads_[i_] = X_QUAD(given + (size_t)token * columns + min((first_) + i_ * ITEMS, quads - 1) * 4);
        if (phase % 2) {  // RMS norm, then fragments
          float4 row[HELD];
          float sum = 0.0f;
          QUADS_OF(row, HELD, item)
          UNROLL for (int i = 0; i < HELD; ++i) sum += item + i * ITEMS < quads ? dot(row[i], row[i]) : 0.0f;
          sum = 1.0f / sqrt(sum_of_group(sum, part, item) / columns + (phase == 1 ? EPS : NEXT_EPS));
          UNROLL for (int i = 0; i < HELD; ++i)
            if (item + i * ITEMS < all_quads) put_quad(staged, item + i * ITEMS, token, row[i] * sum * factors[i]);
          continue;
        }
        for (int base = 0; base < all_quads; base += AT_ONCE * ITEMS) {  // so many loads wait for memory together
          const int first = base + item;
          float4 some[AT_ONCE];
          QUADS_OF(some, AT_ONCE, first)
          if (!token && !base) barrier(CLK_LOCAL_MEM_FENCE);  // the product or the attention before has read local memory
          UNROLL for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * ITEMS < all_quads) put_quad(staged, first + i * ITEMS, token, some[i]);
        }
      }
#if SUMMED
      barrier(CLK_LOCAL_MEM_FENCE);
      for (int i = item; i < pieces * WARPS * 4 * KINDS; i += ITEMS)
        sum_groups(summed + i, staged + ((i / 4 / KINDS * 8 + i % 4) * KINDS + i / 4 % KINDS) * 4);
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    int half_of = 0;  // of the sums
    for (int unit = group; unit < units; unit += groups, half_of ^= 1) {
      const int place = (item + ITEMS - unit / groups % WARPS * 32) % ITEMS, token = place / 16, row = place % 16;  // among the results
      const int stores = place < 16 * tokens && unit * 16 + row < rows;
      const size_t at = (size_t)token * rows + unit * 16 + row;
      float more = 0.0f;  // what is added to the item's result
      if (stores && phase % 2 == 0) more = added ? peek(added + at) : X_LOAD(x, at);
      else if (stores && phase == 3 && biased) more = BIAS_LOAD(BIAS_OF(whose), unit * 16 + row);
      for (int m = 0; m < tall; ++m) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        __local const uint4* activations = staged + (warp * pieces * EACH * KINDS + g % KINDS) * 4 + t;
#if SUMMED
        __local const uint2* sums_of_groups = summed + (warp * pieces * KINDS + g % KINDS) * 4 + t;
#endif
        for (int n = 0; n < pieces; ++n) {
          AWAIT_PIECE();
          WARP_BARRIER();
          __local const uchar* p = ring + slot * PIECE + g * 4;
          head hd;
#if SCALES
          hold_head(&hd, p, g, t);
#endif
#if SUMMED
          add_minimums(acc, &hd, *sums_of_groups);
          sums_of_groups += KINDS * 4;
#endif
          UNROLL for (int from = 0; from < EACH; from += HELD_RUNS) {
            held runs[HELD_RUNS];
            uint4 inputs[HELD_RUNS];
            UNROLL for (int u = 0; u < HELD_RUNS; ++u) {
              __local const uchar* record = p + (from + u) / PER_RECORD * RECORD;
              __local const uchar* codes = record + AT_CODES + (from + u) % PER_RECORD * WORDS * 64;
              hold(&runs[u], record, codes + ((LANE_AT ^ (EXCHANGED ? (t & 2) << 4 : 0)) - g * 4), codes + LOW * 64 + g * 4);
              inputs[u] = activations[u * KINDS * 4];
            }
            activations += HELD_RUNS * KINDS * 4;
            if (from == EACH - HELD_RUNS) {
              WARP_BARRIER();
              LOAD_PIECE(slot)
              slot = slot == STAGES - 1 ? 0 : slot + 1;
              turn ^= slot == 0;
            }
            UNROLL for (int u = 0; u < HELD_RUNS; ++u) {
              const uint4 b = inputs[u];
              float total[2][4];
              if (MIN && !SUMMED) {
                const uint ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
                MMA_FRESH(total[0], ones, b.x, b.y);
                if (PER_RUN == 2) MMA_FRESH(total[1], ones, b.z, b.w);
                else MMA_FLOAT16(total[0], ones, b.z, b.w);
              }
              ADD_PRODUCTS(acc, runs[u], hd, b, (from + u) * PER_RUN, part_of)
            }
          }
        }
        UNROLL for (int i = 0; i < 4; ++i)
          if (2 * t + i % 2 < KINDS) sums[(((half_of * 2 + m) * WARPS + warp) * KINDS + 2 * t + i % 2) * 16 + 2 * g + i / 2] = acc[i];
      }
      barrier(CLK_LOCAL_MEM_FENCE);
      if (!stores) continue;
      float both[2] = {0.0f, 0.0f};
      UNROLL for (int m = 0; m < 2; ++m) {
        if (m >= tall) continue;
        float rest = 0.0f;
        UNROLL for (int j = 0; j < WARPS; ++j) {
          __local const float* from = sums + (((half_of * 2 + m) * WARPS + j) * KINDS + token * (1 + SPLIT)) * 16 + row;
          both[m] += from[0];
          if (SPLIT) rest += from[16];
        }
        both[m] += rest * (1.0f / 2048);
      }
      if (phase % 2 == 0 && added) more = await_result(more, added + at, late, &lost);
      const float value = phase == 1 ? epilogue(both[0], 1.0f, 0, 0.0f, 0.0f) * both[1] : both[0] + more;
      if (to) publish(to + at, value);
      if (result) X_STORE(result, at, value);
    }
    if (layer == LAYERS - 1 && phase == LAST_PHASE) break;
    if (phase < 3) {
      ++phase;
      continue;
    }
    phase = 0, ++layer;
#if ATTEND
    attend(MADE_OF(layer) + MADE_Z, MADE_OF(layer) + MADE_INSIDE, OF_LAYER(layer, 8, X_T), OF_LAYER(layer, 9, X_T),
           OF_LAYER(layer, 10, const NORM_T), OF_LAYER(layer, 11, const NORM_T), seen_of, turns, MADE_OF(layer) + MADE_PARTS, late, &lost,
           (__local float*)staged, tokens, positions, window, scale);
#endif
  }
  COPIES_WAIT(0);
}
