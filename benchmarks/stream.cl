// Reads `count` vectors of 64 bytes per work-group of ITEMS work-items, and nothing else: the rate that packed weights are compared with.
#ifndef ITEMS
#define ITEMS 1
#endif
__kernel void stream(__global const uint4* from, __global uint* to, const int count) {
  __global const uint4* p = from + (size_t)get_group_id(0) * count * 4;
  uint4 a = (uint4)(0), b = a, c = a, d = a;
  for (int i = get_local_id(0); i < count * 4; i += 4 * ITEMS) {
    a ^= p[i];
    b ^= p[i + ITEMS];
    c ^= p[i + 2 * ITEMS];
    d ^= p[i + 3 * ITEMS];
  }
  a ^= b ^ c ^ d;
  to[get_global_id(0)] = a.x ^ a.y ^ a.z ^ a.w;
}
