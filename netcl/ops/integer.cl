// y = a b' for matrices of 8-bit integers, a of M x K and b of N x K, summed in int32. A work-item computes RM x RN sums, four terms at a
// time. A_T and B_T are char or uchar, A4 and B4 vectors of four of them. Rows and columns beyond the last repeat it and are not stored.
#ifndef A_T
#define A_T char
#define A4 char4
#define B_T char
#define B4 char4
#endif
#ifndef RM
#define RM 4
#define RN 4
#endif
#if defined(cl_khr_integer_dot_product) || defined(__opencl_c_integer_dot_product_input_4x8bit)
#define DOT4(a, b) ((int)dot(a, b))
#else
#define DOT4(a, b) ((int)(a).x * (b).x + (int)(a).y * (b).y + (int)(a).z * (b).z + (int)(a).w * (b).w)
#endif

__kernel void integer_dot(__global const A_T* restrict a, __global const B_T* restrict b, __global int* restrict y, const int M, const int N,
                          const int K) {
  const int n0 = get_global_id(0) * RN, m0 = get_global_id(1) * RM;
  if (n0 >= N || m0 >= M) return;
  int sum[RM][RN];
  for (int i = 0; i < RM; ++i)
    for (int j = 0; j < RN; ++j) sum[i][j] = 0;
  for (int k = 0; k + 4 <= K; k += 4) {
    A4 left[RM];
    B4 right[RN];
    for (int i = 0; i < RM; ++i) left[i] = vload4(0, a + (long)min(m0 + i, M - 1) * K + k);
    for (int j = 0; j < RN; ++j) right[j] = vload4(0, b + (long)min(n0 + j, N - 1) * K + k);
    for (int i = 0; i < RM; ++i)
      for (int j = 0; j < RN; ++j) sum[i][j] += DOT4(left[i], right[j]);
  }
  for (int i = 0; i < RM && m0 + i < M; ++i)
    for (int j = 0; j < RN && n0 + j < N; ++j) {
      for (int k = K & ~3; k < K; ++k) sum[i][j] += (int)a[(long)(m0 + i) * K + k] * (int)b[(long)(n0 + j) * K + k];
      y[(long)(m0 + i) * N + n0 + j] = sum[i][j];
    }
}
