// C = A B for row-major matrices: the kernel that build_matmul_kernel hands out. A work-group does one TILE x TILE block of C.
// Operand X: all three.
#ifndef TILE
#define TILE 16
#endif

__kernel __attribute__((reqd_work_group_size(TILE, TILE, 1)))
void matmul(__global const X_T* restrict A, __global const X_T* restrict B, __global X_T* restrict C, const int M, const int N,
            const int K) {
  __local X_REAL a[TILE][TILE], b[TILE][TILE];
  const int x = get_local_id(0), y = get_local_id(1), across = (N + TILE - 1) / TILE;
  // Blocks are counted through both axes of the launch, so a global size of (N, M) and one of (M, N) mean the same.
  const int block = get_group_id(1) * get_num_groups(0) + get_group_id(0);
  const int row = block / across * TILE + y, column = block % across * TILE + x;
  X_REAL sum = 0;
  for (int k0 = 0; k0 < K; k0 += TILE) {
    a[y][x] = row < M && k0 + x < K ? X_LOAD(A, (long)row * K + k0 + x) : (X_REAL)0;
    b[y][x] = column < N && k0 + y < K ? X_LOAD(B, (long)(k0 + y) * N + column) : (X_REAL)0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < TILE; ++k) sum += a[y][k] * b[k][x];
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  if (row < M && column < N) X_STORE(C, (long)row * N + column, sum);
}
