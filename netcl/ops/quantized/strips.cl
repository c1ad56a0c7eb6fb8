// y = x w' + bias for a few rows of x (tokens) at a time; macros of codes.cl, and
//   NB  tokens at once      SLICES  work-items that share the columns of a vector's rows; 1: a work-group is one work-item, of V rows
//   DOTS  1: x is int8 with a scale per 32 and a sum per 16, from round_activations: integer dot products, which is llama.cpp's arithmetic
//   AHEAD, LEVEL  prefetch so many bytes ahead, into this level of cache; 0: not at all
// With SLICES a work-group does one strip: 16 / V items for its rows times SLICES. Lanes are rows, so nothing is added across lanes.
// Dot products multiply unsigned by signed bytes with AVX-512 (ASM 1), signed by signed ones with NEON (ASM 2): codes below 128 are both.
// PLAIN LOW OFFSET, and what decode.cl defines (with SLICES above 1 only), as in codes.cl. From the launch: X_T X_QUAD(p), BIAS_T BIAS_LOAD,
// Y_T Y_STORE.
#define QUAD_OF(n, column) NORMED(X_QUAD(x + at[n] * 32 + (column)), stats[min(t0 + n, tokens - 1)], column)
// r = start + the sum over four words of u of the products of their bytes with those of x, for each lane.
#if ASM == 1
#define DOT_4(r, start, u, x)                                                                                     \
  __asm__("vmovdqa64 %1, %0\n\tvpdpbusd (%2)%{1to16%}, %3, %0\n\tvpdpbusd 4(%2)%{1to16%}, %4, %0\n\t"             \
          "vpdpbusd 8(%2)%{1to16%}, %5, %0\n\tvpdpbusd 12(%2)%{1to16%}, %6, %0"                                   \
          : "=&v"(r) : "v"(start), "r"(x), "v"((u)[0]), "v"((u)[1]), "v"((u)[2]), "v"((u)[3]))
#elif ASM == 2
// sdot as a number: PoCL 3 compiles for ARMv8.0 and drops an instruction that this lacks without an error. Registers become numbers by
// symbols: the assembler sees n and the name of a register, and nv7 is 7.
#define NUMBERED \
  ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n\t.set nv\\n,\\n\n\t.endr\n\t"
#define SDOT(u, lane) ".word 0x4f80e000 | (n%6 << 16) | (n%" #u " << 5) | n%0 | " lane "\n\t"
#define DOT_QUARTER(r, start, u, x, rows)                                                                               \
  {                                                                                                                     \
    const int4 s_ = (start).rows, u0_ = (u)[0].rows, u1_ = (u)[1].rows, u2_ = (u)[2].rows, u3_ = (u)[3].rows;           \
    int4 r_;                                                                                                            \
    __asm__(NUMBERED "mov %0.16b, %1.16b\n\t" SDOT(2, "0") SDOT(3, "0x200000") SDOT(4, "0x800") SDOT(5, "0x200800")     \
            : "=&w"(r_) : "w"(s_), "w"(u0_), "w"(u1_), "w"(u2_), "w"(u3_), "w"(*(__global const int4*)(x)));            \
    (r).rows = r_;                                                                                                      \
  }
#if V == 4
#define DOT_4(r, start, u, x) DOT_QUARTER(r, start, u, x, xyzw)
#else
#define DOT_4(r, start, u, x)                                                      \
  DOT_QUARTER(r, start, u, x, s0123) DOT_QUARTER(r, start, u, x, s4567)            \
  DOT_QUARTER(r, start, u, x, s89ab) DOT_QUARTER(r, start, u, x, scdef)
#endif
#endif

// Activations as int8: q, the scale of each 32, the sum of each 16. A work-item does up to 8 runs of 32 columns of a token.
__kernel void round_activations(__global const X_T* x, __global char* q, __global float* scales, __global int* sums, const int columns) {
  const int runs = columns / 32, share = (runs + 7) / 8, token = get_global_id(0) / share, begin = get_global_id(0) % share * 8;
  for (int run = begin; run < min(begin + 8, runs); ++run) {
    const size_t at = (size_t)token * runs + run;
    float4 f[8];
    int4 codes[8], total[2] = {(int4)(0), (int4)(0)};
    UNROLL for (int j = 0; j < 8; ++j) f[j] = X_QUAD(x + at * 32 + 4 * j);
    scales[at] = round_run(f, codes);
    UNROLL for (int j = 0; j < 8; ++j) {
      *(__global char4*)(q + at * 32 + 4 * j) = CODES_AS_CHARS(codes[j]);
      total[j / 4] += codes[j];
    }
    sums[2 * at] = total[0].x + total[0].y + total[0].z + total[0].w;
    sums[2 * at + 1] = total[1].x + total[1].y + total[1].z + total[1].w;
  }
}

__kernel void strips_product(__global const uchar* w, __global const X_T* x, __global const float* scales, __global const int* sums,
                             EXTRA_POINTERS ADDED_POINTERS __global const BIAS_T* bias, __global Y_T* y, const int rows, const int columns,
                             const int tokens, const int biased) {
  const int item = SLICES > 1 ? get_local_id(0) : get_group_id(0) % PARTS;
  const int strip = SLICES > 1 ? get_group_id(0) : get_group_id(0) / PARTS;
  const int first = item % PARTS * V, slice = SLICES > 1 ? item / PARTS : 0, runs = columns / 32;
#if SLICES > 1
  __local float shared[SLICES * 16 * NB] __attribute__((aligned(16)));
  __local float gates[GATED ? 16 * NB : 1];
#endif
#if NORM
  __local float2 stats[8];
  row_statistics(x, tokens, columns, item, shared, stats);
#endif
  for (int pass = 0; pass < tokens * (1 + GATED); pass += NB) {  // GATED: all tokens by one pass with the gate, then by one with w
    const int t0 = GATED ? 0 : pass;
    __global const uchar* begin = (GATED && !pass ? GATE : w) + (size_t)strip * (runs / PER_RECORD) * RECORD;
    FLOATS acc[NB];
    size_t at[NB];
    UNROLL for (int n = 0; n < NB; ++n) acc[n] = (FLOATS)(0.0f), at[n] = (size_t)min(t0 + n, tokens - 1) * runs;
    for (int run = slice; run < runs; run += SLICES) {
      __global const uchar* p = begin + (size_t)(run / PER_RECORD) * RECORD;
#if AHEAD
      UNROLL for (int i = 0; i < RECORD / PER_RECORD; i += 64)
        __builtin_prefetch(p + AHEAD + run % PER_RECORD * (RECORD / PER_RECORD) + i, 0, LEVEL);
#endif
#if PLAIN
      UNROLL for (int j = 0; j < 8; ++j) {
        const FLOATS f0 = PLAIN_VALUES(p, 4 * j, first), f1 = PLAIN_VALUES(p, 4 * j + 1, first);
        const FLOATS f2 = PLAIN_VALUES(p, 4 * j + 2, first), f3 = PLAIN_VALUES(p, 4 * j + 3, first);
        UNROLL for (int n = 0; n < NB; ++n) {
          const float4 four = QUAD_OF(n, run * 32 + 4 * j);
          acc[n] += f0 * four.x + f1 * four.y + f2 * four.z + f3 * four.w;
        }
      }
#else
      INTS words[WORDS], u[8];
      WORDS_OF(words, p, run % PER_RECORD, first)
      UNROLL for (int j = 0; j < 8; ++j) u[j] = FLIPPED && DOTS ? FOUR_CODES(words, j) ^ (int)0x80808080 : FOUR_CODES(words, j);
      UNROLL for (int g = 0; g < PER_RUN; ++g) {
        const int group = run % PER_RECORD * PER_RUN + g, end = PER_RUN == 2 ? 4 * g + 4 : 8;
        const FLOATS scale = GROUP_SCALE(p, group, first), minimum = MIN ? GROUP_MIN(p, group, first) : (FLOATS)(0.0f);
        FLOATS part[NB];
        float total[NB];
#if DOTS
        UNROLL for (int n = 0; n < NB; ++n) {
          const size_t i = at[n] + run;
          const int count = PER_RUN == 2 ? sums[2 * i + g] : sums[2 * i] + sums[2 * i + 1];
          INTS sum = (INTS)(-SUBTRACTED * count), next;
          UNROLL for (int j = 4 * g; j < end; j += 4, sum = next) { DOT_4(next, sum, u + j, x + i * 32 + 4 * j); }
          part[n] = TO_FLOAT(sum) * scales[i];
          total[n] = scales[i] * (float)count;
        }
#else
        UNROLL for (int n = 0; n < NB; ++n) part[n] = (FLOATS)(0.0f), total[n] = 0.0f;
        UNROLL for (int j = 4 * g; j < end; ++j) {
          const FLOATS f0 = UNIT(u[j], 0), f1 = UNIT(u[j], 1), f2 = UNIT(u[j], 2), f3 = UNIT(u[j], 3);
          UNROLL for (int n = 0; n < NB; ++n) {
            const float4 four = QUAD_OF(n, run * 32 + 4 * j);
            part[n] += f0 * four.x + f1 * four.y + f2 * four.z + f3 * four.w;
            if (MIN) total[n] += four.x + four.y + four.z + four.w;
          }
        }
#endif
        UNROLL for (int n = 0; n < NB; ++n) acc[n] += MIN ? scale * part[n] + minimum * total[n] : scale * part[n];
      }
#endif
    }
#if SLICES > 1
    UNROLL for (int n = 0; n < NB; ++n) *(__local FLOATS*)(shared + (slice * NB + n) * 16 + first) = acc[n];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < 16 * NB; i += PARTS * SLICES) {
      float sum = 0.0f;
      for (int s = 0; s < SLICES; ++s) sum += shared[s * 16 * NB + i];
      const int row = strip * 16 + i % 16, token = t0 + i / 16;
      if (row >= rows || token >= tokens) continue;
      const size_t place = (size_t)token * rows + row;
      if (!GATED) Y_STORE(y, place, FINISHED(sum, row, place));
      else if (!pass) gates[i] = GATED_VALUE(sum, 1.0f, row);
      else Y_STORE(y, place, gates[i] * (sum + (biased ? BIAS_LOAD(bias, row) : 0.0f)));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#else
    UNROLL for (int n = 0; n < NB; ++n) STORE_ROWS(acc[n], t0 + n)
#endif
  }
}
