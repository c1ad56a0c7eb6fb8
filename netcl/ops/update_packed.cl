// Updates whose averages m and v are kept in 8 bits: a code per element and a scale, the largest magnitude, per PACK elements.
//
// Codes are logarithmic above 2^-OCTAVES and linear below: code k of LEVELS stands for (2^(OCTAVES * k / LEVELS) - 1) / (2^OCTAVES - 1).
// m has a sign and 127 levels, v has 255. Rounding is random between the two nearest codes, so that an average also follows changes smaller
// than a step; the random number is a hash of the parameter, the gradient and the index, so equal steps give equal codes.
//
// A work-group computes PACK elements at a time. As in update.cl: LOCAL, BUFFERS, GIVEN, SCALARS, GUARD, BIND, NUMBERS, LINES, and LOADS
// and STORES, which leave m and v out.

#define PACK 256
#define EACH (PACK / LOCAL)

element level_value(element k, element octaves, element levels) {
  return (exp2(k * (octaves / levels)) - 1) / (exp2(octaves) - 1);
}

element unpacked(uchar code, element scale, int sign) {
  const element size = sign ? level_value(code & 127, 16, 127) : level_value(code, 32, 255);
  return sign && code > 127 ? -size * scale : size * scale;
}

uint drawn_bits(uint x) {  // the finalizer of MurmurHash3
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

uchar packed(element value, element scale, int sign, uint bits) {
  const element octaves = sign ? 16 : 32, levels = sign ? 127 : 255;
  const element x = scale > 0 ? fmin(fabs(value) / scale, (element)1) : 0;
  const element k = fmin(fmax(floor(log2(1 + x * (exp2(octaves) - 1)) * (levels / octaves)), (element)0), levels - 1);
  const element low = level_value(k, octaves, levels), gap = level_value(k + 1, octaves, levels) - low;
  const int code = (int)k + ((element)(bits >> 8) * (element)0x1p-24f * gap < x - low);
  return sign ? code + (value < 0 ? 128 : 0) : max(code, x > 0 ? 1 : 0);
}

__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void update(BUFFERS, __global const long* blocks GIVEN SCALARS) {
  __local element most[2][LOCAL];
  GUARD
  __global const long* block = blocks + 3 * get_group_id(0);
  const int slot = (int)block[0];
  const long first = block[1];
  const int n = (int)(block[2] - first);
  BIND
  NUMBERS
  const int lane = get_local_id(0);
  for (int begin = 0; begin < n; begin += PACK) {
    const long place = (first + begin) / PACK - first;  // of the scales: their pointers are moved by `first` as well
    element kept[2][EACH], all[2] = {0, 0};
    uint bits[EACH];
    for (int j = 0; j < EACH; ++j) {
      const int i = begin + j * LOCAL + lane, left = 1;
      if (i >= n) break;
      LOADS
      const real m_ = unpacked(t_m[i], t_m_scale[place], 1), v_ = unpacked(t_v[i], t_v_scale[place], 0);
      LINES
      STORES
      kept[0][j] = new_m_, kept[1][j] = new_v_;
      bits[j] = drawn_bits(as_uint((float)new_p_) + drawn_bits(as_uint((float)g) + (uint)(first + i) * 0x9e3779b9u));
      all[0] = fmax(all[0], fabs(new_m_)), all[1] = fmax(all[1], new_v_);
    }
    most[0][lane] = all[0], most[1][lane] = all[1];
    for (int half_size = LOCAL / 2; half_size > 0; half_size /= 2) {
      barrier(CLK_LOCAL_MEM_FENCE);
      for (int k = 0; k < 2; ++k)
        if (lane < half_size) most[k][lane] = fmax(most[k][lane], most[k][lane + half_size]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    const float scale_m = (float)most[0][0], scale_v = (float)most[1][0];
    for (int j = 0; j < EACH; ++j) {
      const int i = begin + j * LOCAL + lane;
      if (i >= n) break;
      t_m[i] = packed(kept[0][j], scale_m, 1, bits[j]);
      t_v[i] = packed(kept[1][j], scale_v, 0, drawn_bits(bits[j]));
    }
    if (lane == 0) t_m_scale[place] = scale_m, t_v_scale[place] = scale_v;
    barrier(CLK_LOCAL_MEM_FENCE);
  }
}
