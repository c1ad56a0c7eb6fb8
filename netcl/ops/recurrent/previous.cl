// h of the step before each, (T, B, WIDTH): what the gradient of weight_hh is multiplied by. `flags` as in cell.cl.
__kernel void previous(__global const REAL* y, __global const REAL* h0, __global const int* lengths, __global REAL* out, const int T,
                       const int B, const int flags) {
  const long i = get_global_id(0), row = i / WIDTH;
  if (row >= (long)T * B) return;
  const int t = row / B, b = row % B, k = i % WIDTH, end = (flags & 2) ? clamp(lengths[b], 1, T) : T;
  if (t == ((flags & 1) ? end - 1 : 0)) out[i] = (flags & 4) ? h0[(long)b * WIDTH + k] : 0;
  else out[i] = t < end ? y[i + ((flags & 1) ? 1 : -1) * (long)B * WIDTH] : 0;
}
