// y = a b' for matrices of 8-bit integers, a of M x K and b of N x K, summed in int32. The first axis of ids holds the tiles of N and the
// products; left matrices repeat after LEFTS of them. Work-groups of SIDE x SIDE items compute TILE x TILE sums, with DEPTH words of four
// terms of both operands in local memory. The sums of an item are SIDE rows and columns apart: neighbors read and store neighboring words.
// A and B are char or uchar, DP4A is NVIDIA's instruction for four terms. Rows beyond the last repeat it and are not stored.
#define DEPTH 16
#define EACH (TILE / SIDE)
#define FOUR(type) JOIN(type, 4)
#ifdef DP4A
static inline int dot4(FOUR(A) a, FOUR(B) b) {
  int sum;
  __asm__(DP4A : "=r"(sum) : "r"(as_uint(a)), "r"(as_uint(b)));
  return sum;
}
#elif __OPENCL_C_VERSION__ >= 300 && defined(__opencl_c_integer_dot_product_input_4x8bit)
#define dot4(a, b) ((int)dot(a, b))
#else
#define dot4(a, b) ((int)(a).x * (b).x + (int)(a).y * (b).y + (int)(a).z * (b).z + (int)(a).w * (b).w)
#endif
#define TERM(p, k) ((k) < K ? (p)[k] : 0)
#define WORD(type, p, k) ((k) + 4 <= K ? vload4(0, (p) + (k)) : (FOUR(type))(TERM(p, k), TERM(p, k + 1), TERM(p, k + 2), 0))

__kernel void integer_dot(__global const A* restrict a, __global const B* restrict b, __global int* restrict y, const int M, const int N,
                          const int K, const int LEFTS) {
  __local FOUR(A) left[DEPTH][TILE + 1];
  __local FOUR(B) right[DEPTH][TILE + 1];
  const int s = get_local_id(0), t = get_local_id(1), tiles = (N + TILE - 1) / TILE, batch = get_group_id(0) / tiles;
  const int n0 = get_group_id(0) % tiles * TILE, m0 = get_group_id(1) * TILE;
  a += (long)(batch % LEFTS) * M * K;
  b += (long)batch * N * K;
  y += (long)batch * M * N;
  int sum[EACH][EACH];
  for (int i = 0; i < EACH; ++i)
    for (int j = 0; j < EACH; ++j) sum[i][j] = 0;
  for (int k = 0; k < K; k += 4 * DEPTH) {
    for (int at = t * SIDE + s; at < DEPTH * TILE; at += SIDE * SIDE) {
      const int word = at % DEPTH, row = at / DEPTH;
      left[word][row] = WORD(A, a + (long)min(m0 + row, M - 1) * K, k + 4 * word);
      right[word][row] = WORD(B, b + (long)min(n0 + row, N - 1) * K, k + 4 * word);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int word = 0; word < DEPTH; ++word)
      for (int i = 0; i < EACH; ++i)
        for (int j = 0; j < EACH; ++j) sum[i][j] += dot4(left[word][t + SIDE * i], right[word][s + SIDE * j]);
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  for (int i = 0; i < EACH; ++i)
    for (int j = 0; j < EACH; ++j) {
      const int m = m0 + t + SIDE * i, n = n0 + s + SIDE * j;
      if (m < M && n < N) y[(long)m * N + n] = sum[i][j];
    }
}
