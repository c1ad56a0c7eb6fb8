// Random numbers from a counter: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011). Four 32-bit words per block; the block's
// number is the counter, the seed is the key. So a value depends on its position alone, whatever the work-group size. Operand P: probabilities.
#ifndef OUT_T  // the result's dtype
#define OUT_T float
#define OUT_REAL float
#define OUT_STORE(p, i, x) (p)[i] = (x)
#endif
#ifndef BITS
#define BITS 24  // of a uniform value: as many as the dtype's significand, so that rounding never gives 1
#define WIDE 0  // 1: values of 64 random bits, two per block; 0: of 32, four per block
#endif
#ifndef OUT_QUAD  // four floats v to element i on, where that is one store
#define OUT_QUAD(p, i, v)                    \
  OUT_STORE(p, (i), (OUT_REAL)(v).x);        \
  OUT_STORE(p, (i) + 1, (OUT_REAL)(v).y);    \
  OUT_STORE(p, (i) + 2, (OUT_REAL)(v).z);    \
  OUT_STORE(p, (i) + 3, (OUT_REAL)(v).w)
#endif
#define PER_BLOCK (WIDE ? 2 : 4)

static inline uint4 philox(const ulong block, const ulong seed) {
  uint4 c = (uint4)((uint)block, (uint)(block >> 32), 0u, 0u);
  uint k0 = (uint)seed, k1 = (uint)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint high0 = mul_hi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
    const uint high1 = mul_hi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
    c = (uint4)(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// One store for the whole block where it is whole; neighbours then write neighbouring memory.
static inline void store_block(__global OUT_T* out, const long first, const long n, const float4 v) {
  if (first + 4 <= n) {
    OUT_QUAD(out, first, v);
    return;
  }
  const float lanes[4] = {v.x, v.y, v.z, v.w};
  for (int j = 0; first + j < n; ++j) OUT_STORE(out, first + j, (OUT_REAL)lanes[j]);
}

static inline ulong pair(const uint low, const uint high) { return ((ulong)high << 32) | low; }

// state[0] is the seed, state[1] + drawn the next unused block. The counter lives on the device so that recorded launches draw anew when
// replayed; `drawn` is what the host has drawn since it was moved on, which is done once for many launches.
__kernel void advance(__global long* state, const long blocks) { state[1] += blocks; }

// The words of a work-item's block, which makes `elements` of the n, and the first of these.
#define DRAW(elements)                                     \
  const long first = (long)get_global_id(0) * (elements);  \
  if (first >= n) return;                                  \
  const uint4 w = philox((ulong)(state[1] + drawn) + get_global_id(0), (ulong)state[0]);

__kernel void uniform(__global const long* state, const long drawn, __global OUT_T* out, const long n) {
  DRAW(PER_BLOCK)
#if WIDE
  const ulong bits[2] = {pair(w.x, w.y) >> 11, pair(w.z, w.w) >> 11};
  for (int j = 0; j < 2 && first + j < n; ++j) OUT_STORE(out, first + j, (OUT_REAL)bits[j] * (OUT_REAL)1.1102230246251565e-16);
#else
  const float4 values = convert_float4(w >> (32 - BITS)) * (1.0f / (float)(1u << BITS));
  store_block(out, first, n, values);
#endif
}

// Box and Muller: two uniform values give two normal ones. The first is in (0, 1], so its logarithm is finite.
__kernel void normal(__global const long* state, const long drawn, __global OUT_T* out, const long n) {
  DRAW(PER_BLOCK)
#if WIDE
  const OUT_REAL unit = (OUT_REAL)1.1102230246251565e-16;
  const OUT_REAL radius = sqrt(-2 * log((OUT_REAL)((pair(w.x, w.y) >> 11) + 1) * unit));
  const OUT_REAL turn = 2 * ((OUT_REAL)(pair(w.z, w.w) >> 11) * unit);
  const OUT_REAL values[2] = {radius * cospi(turn), radius * sinpi(turn)};
  for (int j = 0; j < 2 && first + j < n; ++j) OUT_STORE(out, first + j, values[j]);
#else
  const float unit = 5.9604644775390625e-8f;
  const float2 radius = sqrt(-2.0f * log((float2)((float)((w.x >> 8) + 1), (float)((w.z >> 8) + 1)) * unit));
  const float2 turn = 2.0f * ((float2)((float)(w.y >> 8), (float)(w.w >> 8)) * unit);
  const float2 even = radius * cospi(turn), odd = radius * sinpi(turn);
  store_block(out, first, n, (float4)(even.x, odd.x, even.y, odd.y));
#endif
}

// Integers in [low, low + range); 64 random bits each, so the bias is range / 2^64. `range` is the bits of an unsigned number, 0 means 2^64.
__kernel void integers(__global const long* state, const long drawn, __global OUT_T* out, const long n, const long low, const long range) {
  DRAW(2)
  const ulong bits[2] = {pair(w.x, w.y), pair(w.z, w.w)};
  for (int j = 0; j < 2 && first + j < n; ++j)
    OUT_STORE(out, first + j, (OUT_REAL)(low + (long)(range ? mul_hi(bits[j], (ulong)range) : bits[j])));
}

// 1 with probability p[i], else 0; NaN where p[i] is not a probability.
__kernel void bernoulli(__global const long* state, const long drawn, __global const P_T* p, __global OUT_T* out, const long n) {
  DRAW(4)
  const uint bits[4] = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
  for (int j = 0; j < 4 && first + j < n; ++j) {
    const OUT_REAL chance = P_LOAD(p, first + j);
    const int below = (float)bits[j] * 5.9604644775390625e-8f < chance;
    OUT_STORE(out, first + j, chance >= 0 && chance <= 1 ? (OUT_REAL)below : (OUT_REAL)NAN);
  }
}

// 0 with probability p, else 1.
__kernel void keep_mask(__global const long* state, const long drawn, __global uchar* out, const long n, const float p) {
  DRAW(4)
  const float4 u = convert_float4(w >> 8) * 5.9604644775390625e-8f;
  const uchar4 keep = (uchar4)(u.x >= p, u.y >= p, u.z >= p, u.w >= p);
  if (first + 4 <= n) {
    *(__global uchar4*)(out + first) = keep;
    return;
  }
  const uchar lanes[4] = {keep.x, keep.y, keep.z, keep.w};
  for (int j = 0; first + j < n; ++j) out[first + j] = lanes[j];
}
