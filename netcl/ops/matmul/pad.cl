// An operand in lines that start at multiples of 16 bytes, and in another dtype if need be: zeros beyond each line's values.
// Operands: X the operand as it is (X_T X_LOAD), Y as it becomes (Y_T Y_STORE).

// A work-item writes one of `total` values; stacks of `lines` lines are numbered over two axes with a stride each.
__kernel void pad_lines(__global const X_T* restrict x, __global Y_T* restrict y, const int width, const int wide, const int lines,
                        const int batch1, const long x0_stride, const long x1_stride, const long first, const long total) {
  const long at = get_global_id(0);
  if (at >= total) return;
  const long line = at / wide, batch = line / lines;
  const int place = (int)(at - line * wide), inside = (int)(line - batch * lines);
  x += batch / batch1 * x0_stride + batch % batch1 * x1_stride;
  const float value = place < width ? (float)X_LOAD(x, (long)inside * width + place) : 0.0f;
  Y_STORE(y, first + at, value);
}
