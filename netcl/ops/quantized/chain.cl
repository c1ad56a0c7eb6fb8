// The layers of a decoder for a few tokens in one launch, after codes.cl, mma.cl (IN_LOCAL 1), whose fragments it uses, and barrier.cl. The
// products of a layer are phases:
//   3: z = norm(y) w_next' + bias      0: h = y + inside w_out'      1: f = act(norm(h) w_gate') * (norm(h) w_up')      2: y = h + f w_down'
// ATTEND 0: phases 0, 1, 2 and, if there is a next projection, 3; x is the first y, and `inside` is given. ATTEND 1 (after attend.cl): LAYERS
// layers of 3, the attention of z, 0, 1, 2. Layers are numbered by their attention, so their own projection is phase 3 of the layer before.
// A work-group per compute unit has TEAMS teams of WARPS warps, which take strips of each product in turn. Before a product
// all groups wait for each other, but weights do not depend on what came before: copies into a team's ring of STAGES pieces (CHUNK records
// each) run on across the waits.
// Groups must therefore run at the same time. After LIMIT readings in vain a group sets `late` and gives up: all that it stores is NaN then.
//   STAGED_WORDS  words of local memory for activations      LAYER_POINTERS  of all layers, which KEEP_POINTERS puts into `table`
//   ATTENTION_POINTERS ATTENTION_NUMBERS  `inside`, and what attend.cl needs; from there ROTARY      MOST_TOKENS  no fewer than the tokens
//   MOST_RUNS  runs of 32 columns of the widest product      HELD  quads of a normed row that a work-item holds      EPS NEXT_EPS  of the norms
// From codes.cl: LOW HIGH MIN SCALES WORDS RECORD; from ptx.cl: LOCAL_AT COPY_16 COPIES_COMMIT COPIES_WAIT MMA_FRESH MMA_FLOAT16; from the
// launch: SPLIT KINDS as in mma.cl, X_T X_QUAD X_LOAD X_STORE, NORM_T NORM_QUAD, BIAS_T BIAS_LOAD; finish() is generated.
#define ITEMS (TEAMS * WARPS * 32)
#define TEAM_ITEMS (WARPS * 32)
#define PIECE (CHUNK * RECORD)
#define COPIES ((PIECE / 16 + TEAM_ITEMS - 1) / TEAM_ITEMS)  // of an item, for a piece
// In local memory the halves of every other pair of code lines (64 bytes) are exchanged, so that the lanes of a warp read all 32 banks.
#define EXCHANGED (WORDS % 4 == 0 && !HIGH)
#define TEAM_BARRIER() __asm__ volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM_ITEMS) : "memory")
#define EACH (SCALES ? 8 : CHUNK / WARPS)  // runs that a warp loads at a time: of a record, or its share of a piece
#define AT_ONCE 8  // loads of an item that wait for memory together
#define OF_PHASE(p, a, b, c, d) ((p) == 0 ? (a) : (p) == 1 ? (b) : (p) == 2 ? (c) : (d))
#define STRIP_RECORDS(columns) ((columns) / 32 / PER_RECORD)
#define POINTERS (8 + 4 * ATTEND)
// Of a layer, in the order of LAYER_POINTERS.
#define OF_LAYER(layer, i, type) ((__global type*)table[(layer) * POINTERS + (i)])
#define NORM_OF(layer) OF_LAYER(layer, 0, const NORM_T)
#define BIAS_OF(layer) OF_LAYER(layer, 2, const BIAS_T)
#define MLP_NORM_OF(layer) OF_LAYER(layer, 4, const NORM_T)
#define WEIGHTS_OF(layer, phase, gate) \
  ((phase) == 3 ? OF_LAYER((layer) + 1, 1, const uchar) : OF_LAYER(layer, (phase) == 0 ? 3 : (phase) == 2 ? 7 : (gate) ? 5 : 6, const uchar))
#define LAST_PHASE (ATTEND || !next ? 2 : 3)  // of the last layer

// Four activations, from column 4 * quad of a token on, as fragments.
static inline void put_quad(__local uint4* staged, const int quad, const int token, const float4 f) {
  const int run = quad / 8, j = quad % 8, t = SPREAD ? j % 4 : j / 2, part = SPREAD ? j / 4 : j % 2;
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
  UNROLL for (int i = 0; i < TEAMS * WARPS; ++i) sum += part[i];
  barrier(CLK_LOCAL_MEM_FENCE);
  return sum;
}

__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1)))
void strips_chain(LAYER_POINTERS ATTENTION_POINTERS __global const X_T* x, __global X_T* h, __global X_T* f, __global X_T* y,
                  __global X_T* z, __global uint* waits, __global int* late, const int attended, const int width, const int inner,
                  const int next, const int tokens, const int biased ATTENTION_NUMBERS) {
  __local uchar rings[TEAMS * STAGES * PIECE] __attribute__((aligned(128)));
  __local uint4 staged[STAGED_WORDS / 4];
  __local float all_sums[TEAMS * 2 * 2 * WARPS * KINDS * 16];
  __local float part[TEAMS * WARPS];
  __local ulong table[(LAYERS + 1) * POINTERS];
  __local int lost;
#if SUMMED
  __local uint2 summed[MOST_RUNS / 8 * KINDS * 4];
#endif
#if ATTEND
  __local float2 turns[MOST_TOKENS * (ROTARY / 2 + 1)];
  __local int seen_of[MOST_TOKENS];
#endif
  const int item = get_local_id(0), lane = item % 32, g = lane / 4, t = lane % 4;
  const int team = item / TEAM_ITEMS, mate = item % TEAM_ITEMS, warp = mate / 32;
  const int groups = get_num_groups(0), group = get_group_id(0), teams = groups * TEAMS, own = group + team * groups;
  __local uchar* ring = rings + team * STAGES * PIECE;
  __local float* sums = all_sums + team * 2 * 2 * WARPS * KINDS * 16;
  const uint ring_at = LOCAL_AT(ring);
  uint places[COPIES];  // in a piece, of what this item copies
  UNROLL for (int i = 0; i < COPIES; ++i) {
    const uint at = (mate + i * TEAM_ITEMS) * 16, in_record = at % RECORD;
    places[i] = EXCHANGED && in_record >= AT_CODES ? at - in_record + AT_CODES + ((in_record - AT_CODES) ^ (((in_record - AT_CODES) >> 2) & 32)) : at;
  }
  uint side = 0;
  if (item == 0) {
    lost = 0;
    side = side_of(waits);
    KEEP_POINTERS
  }
  barrier(CLK_LOCAL_MEM_FENCE);

  // What is loaded next: piece `load_piece` of strip `load_part` (0 or, of the gate, 0 and 1) of unit `load_unit` of a phase of a layer.
  int load_layer = -ATTEND, load_phase = ATTEND ? 2 : -1, load_unit = 0, load_units = 0, load_part = 0, load_piece = 0, load_records = 0;
  __global const uchar* load_from = 0;
#define LOADED (load_layer == LAYERS || (load_layer == LAYERS - 1 && load_phase > LAST_PHASE))
#define BEGIN_STRIP() load_from = WEIGHTS_OF(load_layer, load_phase, !load_part) + (size_t)load_unit * load_records * RECORD;
#define NEXT_UNIT()                                                                                                         \
  while (load_unit >= load_units && !LOADED) {                                                                              \
    if (++load_phase == 4) load_phase = 0, ++load_layer;                                                                    \
    load_unit = own;                                                                                                        \
    load_units = OF_PHASE(load_phase, width, inner, width, next) / 16;                                                      \
    load_records = STRIP_RECORDS(OF_PHASE(load_phase, attended, width, inner, width));                                      \
  }
#define LOAD_PIECE(slot)                                                                                                    \
  if (!LOADED) {                                                                                                            \
    const int count_ = min(CHUNK, load_records - load_piece * CHUNK) * (RECORD / 16);                                       \
    const uint to_ = ring_at + (slot) * PIECE;                                                                              \
    __global const uchar* from_ = load_from + (size_t)load_piece * PIECE;                                                   \
    UNROLL for (int i_ = 0; i_ < COPIES; ++i_)                                                                              \
      if (mate + i_ * TEAM_ITEMS < count_) COPY_16(to_ + places[i_], from_ + (mate + i_ * TEAM_ITEMS) * 16, 16);            \
    if (++load_piece * CHUNK >= load_records) {                                                                             \
      load_piece = 0;                                                                                                       \
      if (load_phase == 1 && !load_part) load_part = 1;                                                                     \
      else {                                                                                                                \
        load_part = 0;                                                                                                      \
        load_unit += teams;                                                                                                 \
        NEXT_UNIT()                                                                                                         \
      }                                                                                                                     \
      if (!LOADED) { BEGIN_STRIP() }                                                                                        \
    }                                                                                                                       \
  }                                                                                                                         \
  COPIES_COMMIT();

  NEXT_UNIT()
  if (!LOADED) { BEGIN_STRIP() }
  for (int i = 0; i < STAGES - 1; ++i) { LOAD_PIECE(i) }

#if ATTEND
  for (int i = item; i < tokens * (ROTARY / 2); i += ITEMS) {
    const float angle = (int)lengths[i / (ROTARY / 2)] * frequencies[i % (ROTARY / 2)];
    turns[i] = (float2)(cos(angle), sin(angle));
  }
  if (item < tokens) seen_of[item] = (int)lengths[item];
  barrier(CLK_LOCAL_MEM_FENCE);
#endif

  int slot = 0, filling = STAGES - 1, first = 1;
  for (int layer = -ATTEND, phase = ATTEND ? 3 : 0;; first = 0) {
    const int columns = OF_PHASE(phase, attended, width, inner, width), rows = OF_PHASE(phase, width, inner, width, next);
    const int units = rows / 16, records = STRIP_RECORDS(columns), tall = phase == 1 ? 2 : 1, quads = columns / 4;
    __global const X_T* now = layer + (phase == 3) > 0 || (phase == 3 && !ATTEND) ? y : x;  // y so far
    __global const X_T* from = OF_PHASE(phase, inside, h, f, now);
    __global const X_T* added = phase == 0 ? now : h;
    __global X_T* to = OF_PHASE(phase, h, f, y, z);
    float4 factors[HELD];  // of the norm: they do not depend on what the groups wait for
    if (phase % 2) {
      __global const NORM_T* norm = phase == 1 ? MLP_NORM_OF(layer) : NORM_OF(layer + 1);
      UNROLL for (int i = 0; i < HELD; ++i) factors[i] = NORM_QUAD(norm + min(item + i * ITEMS, quads - 1) * 4);
    }
    if (!first) {
      wait_for_all(waits, side, late, &lost);
      side ^= 1;
    }
    if (group < units) {
      for (int token = 0; token < tokens; ++token, from += columns) {
        if (phase % 2) {  // RMS norm, then fragments
          float4 row[HELD];
          float sum = 0.0f;
          UNROLL for (int i = 0; i < HELD; ++i) {
            const int quad = item + i * ITEMS;
            row[i] = quad < quads ? X_QUAD(from + quad * 4) : (float4)(0.0f);
            sum += dot(row[i], row[i]);
          }
          sum = 1.0f / sqrt(sum_of_group(sum, part, item) / columns + (phase == 1 ? EPS : NEXT_EPS));
          UNROLL for (int i = 0; i < HELD; ++i)
            if (item + i * ITEMS < quads) put_quad(staged, item + i * ITEMS, token, row[i] * sum * factors[i]);
          continue;
        }
        for (int first = item; first < quads; first += AT_ONCE * ITEMS) {  // so many loads wait for memory together
          float4 some[AT_ONCE];
          UNROLL for (int i = 0; i < AT_ONCE; ++i) some[i] = X_QUAD(from + min(first + i * ITEMS, quads - 1) * 4);
          UNROLL for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * ITEMS < quads) put_quad(staged, first + i * ITEMS, token, some[i]);
        }
      }
#if SUMMED
      barrier(CLK_LOCAL_MEM_FENCE);
      for (int i = item; i < columns / 256 * 4 * KINDS; i += ITEMS)
        sum_groups(summed + i, staged + ((i / 4 / KINDS * 8 + i % 4) * KINDS + i / 4 % KINDS) * 4);
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    int waiting = -1, half_of = 0;
// The results of a unit: the sums of all warps are in half `half_` of `sums`.
#define PLACE_OF(unit) ((mate + TEAM_ITEMS - (unit) / teams % WARPS * 32) % TEAM_ITEMS)  // of an item among the results of a unit
#define STORE_UNIT(half_, unit_)                                                                                            \
  if (PLACE_OF(unit_) < 16 * tokens) {                                                                                      \
    const int token_ = PLACE_OF(unit_) / 16, row_ = PLACE_OF(unit_) % 16;                                                   \
    float both_[2] = {0.0f, 0.0f};                                                                                          \
    UNROLL for (int m_ = 0; m_ < 2; ++m_) {                                                                                 \
      if (m_ >= tall) continue;                                                                                             \
      float rest_ = 0.0f;                                                                                                   \
      UNROLL for (int j_ = 0; j_ < WARPS; ++j_) {                                                                           \
        __local const float* at_ = sums + ((((half_) * 2 + m_) * WARPS + j_) * KINDS + token_ * (1 + SPLIT)) * 16 + row_;   \
        both_[m_] += at_[0];                                                                                                \
        if (SPLIT) rest_ += at_[16];                                                                                        \
      }                                                                                                                     \
      both_[m_] += rest_ * (1.0f / 2048);                                                                                   \
    }                                                                                                                       \
    const float value_ = phase == 1 ? finish(both_[0], 1.0f, 0, 0.0f, 0.0f) * both_[1] : both_[0] + more;                   \
    X_STORE(to, (size_t)token_ * rows + unit_ * 16 + row_, lost ? NAN : value_);                                            \
  }
    float more = 0.0f, next_more = 0.0f;  // what is added to the item's result of unit `waiting`, and of the next one
    for (int unit = own; unit < units; unit += teams) {
      const int place = PLACE_OF(unit), column = unit * 16 + place % 16;
      if (phase % 2 == 0 && place < 16 * tokens) next_more = X_LOAD(added, (size_t)(place / 16) * rows + column);
      else if (phase == 3 && biased) next_more = BIAS_LOAD(BIAS_OF(layer + 1), column);
      for (int m = 0; m < tall; ++m) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int base = 0; base < records; base += CHUNK) {
          COPIES_WAIT(STAGES - 2);
          TEAM_BARRIER();
          LOAD_PIECE(filling)
          filling = filling == STAGES - 1 ? 0 : filling + 1;
          if (waiting >= 0) {
            STORE_UNIT(half_of ^ 1, waiting)
            waiting = -1;
          }
          __local const uchar* piece = ring + slot * PIECE;
          const int count = min(CHUNK, records - base);
          slot = slot == STAGES - 1 ? 0 : slot + 1;
#if SCALES
          for (int record = warp; record < count; record += WARPS) {
            __local const uchar* p = piece + record * RECORD + g * 4;
            head hd;
            hold_head(&hd, p, g, t);
#if SUMMED
            add_minimums(acc, &hd, summed[((base + record) * KINDS + g % KINDS) * 4 + t]);
#endif
#else
          {
            head hd;
#endif
            held runs[EACH];
            uint4 inputs[EACH];
            UNROLL for (int u = 0; u < EACH; ++u) {  // all loads first; beyond the end the last run, whose factors are 0
#if SCALES
              __local const uchar* codes = p + AT_CODES + u * WORDS * 64;
              const int run = (base + record) * 8 + u;
#else
              const int run = base + min(warp + u * WARPS, count - 1);
              __local const uchar* p = piece + (run - base) * RECORD + g * 4;
              __local const uchar* codes = p + AT_CODES;
#endif
              hold(&runs[u], p, codes + ((LANE_AT ^ (EXCHANGED ? (t & 2) << 4 : 0)) - g * 4), codes + LOW * 64 + g * 4);
              inputs[u] = staged[(run * KINDS + g % KINDS) * 4 + t];
            }
            UNROLL for (int u = 0; u < EACH; ++u) {
              const uint4 b = inputs[u];
              const float counted = SCALES || warp + u * WARPS < count ? 1.0f : 0.0f;
              float total[2][4];
              if (MIN && !SUMMED) {
                const uint ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
                MMA_FRESH(total[0], ones, b.x, b.y);
                if (PER_RUN == 2) MMA_FRESH(total[1], ones, b.z, b.w);
                else MMA_FLOAT16(total[0], ones, b.z, b.w);
              }
              uint a[2][4];
              weights_of(a[0], &runs[u], 0, t);
              weights_of(a[1], &runs[u], 1, t);
              float c[4];
              MMA_FRESH(c, a[0], b.x, b.y);
              if (PER_RUN == 1) MMA_FLOAT16(c, a[1], b.z, b.w);
              UNROLL for (int part_of = 0; part_of < PER_RUN; ++part_of) {
                if (part_of) MMA_FRESH(c, a[1], b.z, b.w);
                FACTORS(by, low, runs[u], hd, u * PER_RUN + part_of)
                const float2 factor = by * counted, lowest = low * counted;
                UNROLL for (int i = 0; i < 4; ++i) {
                  acc[i] = fma(i < 2 ? factor.x : factor.y, c[i], acc[i]);
                  if (MIN && !SUMMED) acc[i] = fma(i < 2 ? lowest.x : lowest.y, total[part_of][i], acc[i]);
                }
              }
            }
          }
        }
        UNROLL for (int i = 0; i < 4; ++i)
          if (2 * t + i % 2 < KINDS) sums[(((half_of * 2 + m) * WARPS + warp) * KINDS + 2 * t + i % 2) * 16 + 2 * g + i / 2] = acc[i];
      }
      waiting = unit;
      more = next_more;
      half_of ^= 1;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (waiting >= 0) { STORE_UNIT(half_of ^ 1, waiting) }
    if (layer == LAYERS - 1 && phase == LAST_PHASE) break;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) arrive(waits);
    if (phase < 3) {
      ++phase;
      continue;
    }
    phase = 0, ++layer;
#if ATTEND
    wait_for_all(waits, side, late, &lost);
    side ^= 1;
    attend(z, inside, OF_LAYER(layer, 8, X_T), OF_LAYER(layer, 9, X_T), OF_LAYER(layer, 10, const NORM_T), OF_LAYER(layer, 11, const NORM_T),
           seen_of, turns, parts, waits + 1, lost, (__local float*)staged, tokens, positions, window, scale);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) arrive(waits);
#endif
  }
  COPIES_WAIT(0);
}
