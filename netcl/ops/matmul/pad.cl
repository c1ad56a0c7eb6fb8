// An operand in lines that start at multiples of 16 bytes, and in another dtype if need be: zeros beyond each line's values.
// Operands: X the operand as it is (X_T X_LOAD), Y as it becomes (Y_T Y_STORE).

// A work-item writes four values of one of `all` lines; stacks of `lines` lines are numbered over two axes with a stride each.
__kernel void pad_lines(__global const X_T* restrict x, __global Y_T* restrict y, const int width, const int wide, const int lines,
                        const int batch1, const long x0_stride, const long x1_stride, const long first, const long all) {
  const long line = get_global_id(1);
  const int place = get_global_id(0) * 4;
  if (line >= all || place >= wide) return;
  const long batch = line / lines, to = first + line * wide + place;
  x += batch / batch1 * x0_stride + batch % batch1 * x1_stride + (line - batch * lines) * width + place;
  for (int i = 0; i < 4; ++i) Y_STORE(y, to + i, place + i < width ? (float)X_LOAD(x, i) : 0.0f);
}
