// Lines of one plane into local memory, with zeros where they leave the image; columns from `low` on.
static inline void copy_lines(__local REAL* to, __global const REAL* from, int lines, int W, int low, int wide) {
  const int lo = least(wide, most(0, -low)), hi = most(lo, least(wide, W - low));
  for (int line = 0; line < lines; ++line, to += wide, from += W) {
    int i = 0;
    for (; i < lo; ++i) to[i] = 0;
    for (; i + VW <= hi; i += VW) VECTOR(__local, to + i) = VECTOR(__global const, from + low + i);
    for (; i + 4 <= hi; i += 4) QUAD(__local, to + i) = QUAD(__global const, from + low + i);
    for (; i < hi; ++i) to[i] = from[low + i];
    for (; i < wide; ++i) to[i] = 0;
  }
}

// The same for a window of the plane that may begin above the image and end below it.
static inline void copy_window(__local REAL* to, __global const REAL* plane, int H, int W, int top, int high, int low, int wide) {
  const int from = least(high, most(0, -top)), end = most(from, least(high, H - top));
  for (int i = 0; i < from * wide; ++i) to[i] = 0;
  copy_lines(to + from * wide, plane + (top + from) * W, end - from, W, low, wide);
  for (int i = end * wide; i < high * wide; ++i) to[i] = 0;
}
