// The triangles of matrices. Zero is all bits zero in every dtype, so the element is any type of the right size.
#ifndef T  // the element: uchar, ushort, uint or ulong, by its bytes
#define T uint
#endif

__kernel void triangle(__global const T* restrict src, __global T* restrict dst, const long n, const long rows, const long columns,
                       const long diagonal, const int upper, const long chunk) {
  const long begin = get_global_id(0) * chunk, end = min(begin + chunk, n);
  for (long i = begin; i < end; ++i) {
    const long above = i % columns - i / columns % rows - diagonal;
    dst[i] = (upper ? above >= 0 : above <= 0) ? src[i] : (T)0;
  }
}
