// The kernels: run(), of the file before this one, over the steps s0 .. s1. A group has `rows` rows of the batch and `units` blocks of
// units. Of what a part does not read or write, the arguments are any tensors.
#ifndef ITEMS  // of a work-group
#define ITEMS 1
#endif
#ifdef LOCAL_VALUES
#define SHARED __local REAL shared[LOCAL_VALUES] __attribute__((aligned(16)));
#else
#define SHARED __local REAL* shared = 0;
#endif

#if PART < BACKWARD
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void forward(
    __global const REAL* weight, __global const REAL* gx, __global const REAL* bias, __global const REAL* h0, __global const REAL* c0,
    __global const int* lengths, __global REAL* y, __global REAL* saved, __global REAL* hn, __global REAL* cn, __global REAL* full,
    __global int* late, const int T, const int B, const int s0, const int s1, const int rows, const int units, const int flags) {
  SHARED
  Memory m;
  m.gx = gx, m.bias = bias, m.h0 = h0, m.c0 = c0, m.lengths = lengths, m.y = y, m.saved = saved, m.hn = hn, m.cn = cn, m.full = full;
  m.T = T, m.B = B, m.flags = flags;
  run(m, weight, late, s0, s1, rows, units, shared);
}
#else
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void backward(
    __global const REAL* weight, __global const REAL* gy, __global const REAL* gh, __global const REAL* gc, __global const REAL* h0,
    __global const REAL* c0, __global const int* lengths, __global const REAL* y, __global const REAL* saved, __global REAL* dg,
    __global REAL* dx, __global REAL* dhp, __global REAL* dh0, __global REAL* carry, __global REAL* full, __global int* late,
    const int T, const int B, const int s0, const int s1, const int rows, const int units, const int flags) {
  SHARED
  Memory m;
  m.gy = gy, m.gh = gh, m.gc = gc, m.h0 = h0, m.c0 = c0, m.lengths = lengths, m.y = (__global REAL*)y, m.saved = (__global REAL*)saved;
  m.dg = dg, m.dx = dx, m.dhp = dhp, m.dh0 = dh0, m.carry = carry, m.full = full, m.T = T, m.B = B, m.flags = flags;
  run(m, weight, late, s0, s1, rows, units, shared);
}
#endif
