// The products of a run of 32 columns of V rows with NB tokens, added to acc[NB]; macros of codes.cl and round.cl, and
//   AHEAD, LEVEL  prefetch so many bytes ahead, into this level of cache; 0: not at all
//   DOTS  1: activations are int8 codes with a scale per 32 and a sum per 16: integer dot products, which is llama.cpp's arithmetic
// Dot products multiply unsigned by signed bytes with AVX-512 (ASM 1), signed by signed ones with NEON (ASM 2): codes below 128 are both.
// The next file defines, for token n: with DOTS CODES_AT(n), its 32 codes, SCALE_AT(n), and COUNT_AT(n, i), the sum of 16 codes; without
// DOTS QUAD_AT(n, j), the columns 4j to 4j + 3. PLAIN MIN LOW OFFSET as in codes.cl.
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

#if PLAIN
#define ADD_RUN(acc, p, run, first)                                                                                    \
  UNROLL for (int j = 0; j < 8; ++j) {                                                                                 \
    const FLOATS f0 = PLAIN_VALUES(p, 4 * j, first), f1 = PLAIN_VALUES(p, 4 * j + 1, first);                           \
    const FLOATS f2 = PLAIN_VALUES(p, 4 * j + 2, first), f3 = PLAIN_VALUES(p, 4 * j + 3, first);                       \
    UNROLL for (int n = 0; n < NB; ++n) {                                                                              \
      const float4 four = QUAD_AT(n, j);                                                                               \
      acc[n] += f0 * four.x + f1 * four.y + f2 * four.z + f3 * four.w;                                                 \
    }                                                                                                                  \
  }
#else
#if DOTS
#define GROUP_PARTS(part, total, u, g, end)                                                                            \
  UNROLL for (int n = 0; n < NB; ++n) {                                                                                \
    const int count = PER_RUN == 2 ? COUNT_AT(n, g) : COUNT_AT(n, 0) + COUNT_AT(n, 1);                                 \
    INTS sum = (INTS)(-SUBTRACTED * count), next;                                                                      \
    UNROLL for (int j = 4 * (g); j < (end); j += 4, sum = next) { DOT_4(next, sum, u + j, CODES_AT(n) + 4 * j); }      \
    part[n] = TO_FLOAT(sum) * SCALE_AT(n);                                                                             \
    total[n] = SCALE_AT(n) * (float)count;                                                                             \
  }
#else
#define GROUP_PARTS(part, total, u, g, end)                                                                            \
  UNROLL for (int n = 0; n < NB; ++n) part[n] = (FLOATS)(0.0f), total[n] = 0.0f;                                       \
  UNROLL for (int j = 4 * (g); j < (end); ++j) {                                                                       \
    const FLOATS f0 = UNIT(u[j], 0), f1 = UNIT(u[j], 1), f2 = UNIT(u[j], 2), f3 = UNIT(u[j], 3);                       \
    UNROLL for (int n = 0; n < NB; ++n) {                                                                              \
      const float4 four = QUAD_AT(n, j);                                                                               \
      part[n] += f0 * four.x + f1 * four.y + f2 * four.z + f3 * four.w;                                                \
      if (MIN) total[n] += four.x + four.y + four.z + four.w;                                                          \
    }                                                                                                                  \
  }
#endif
#define ADD_RUN(acc, p, run, first)                                                                                    \
  INTS words[WORDS], u[8];                                                                                             \
  WORDS_OF(words, p, (run) % PER_RECORD, first)                                                                        \
  UNROLL for (int j = 0; j < 8; ++j) u[j] = FLIPPED && DOTS ? FOUR_CODES(words, j) ^ (int)0x80808080 : FOUR_CODES(words, j); \
  UNROLL for (int g = 0; g < PER_RUN; ++g) {                                                                           \
    const int group = (run) % PER_RECORD * PER_RUN + g, end = PER_RUN == 2 ? 4 * g + 4 : 8;                            \
    const FLOATS scale = GROUP_SCALE(p, group, first), minimum = MIN ? GROUP_MIN(p, group, first) : (FLOATS)(0.0f);    \
    FLOATS part[NB];                                                                                                   \
    float total[NB];                                                                                                   \
    GROUP_PARTS(part, total, u, g, end)                                                                                \
    UNROLL for (int n = 0; n < NB; ++n) acc[n] += MIN ? scale * part[n] + minimum * total[n] : scale * part[n];        \
  }
#endif
#if AHEAD
#define FETCH_AHEAD(p, run)                                                                                            \
  UNROLL for (int i = 0; i < RECORD / PER_RECORD; i += 64)                                                             \
    __builtin_prefetch((p) + AHEAD + (run) % PER_RECORD * (RECORD / PER_RECORD) + i, 0, LEVEL);
#else
#define FETCH_AHEAD(p, run)
#endif
