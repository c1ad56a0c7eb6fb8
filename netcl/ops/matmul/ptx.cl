// Instructions of NVIDIA GPUs from compute capability 8.0 on that OpenCL C has no words for: copies into local memory that run beside
// the work, fragments out of it, products of fragments, loads past L1 and through L2.
// A place in local memory is a number of 32 bits: LOCAL_AT(p). In a warp of 32 lanes
// a fragment is spread over all of them; with g = lane / 4 and t = lane % 4, a lane holds
//   of a, 16 rows x 32 bytes along k:  a[0] row g, bytes 4t..; a[1] row g + 8; a[2] row g, bytes 16 + 4t..; a[3] row g + 8
//   of b, 8 columns x 32 bytes:        b0 column g, bytes 4t..; b1 column g, bytes 16 + 4t..
//   of the sums d, 16 x 8 float32:     d[0], d[1] row g, columns 2t and 2t + 1; d[2], d[3] row g + 8
// that is 16 values along k of float16 and bfloat16, and 8 of TF32.
#define LOCAL_AT(p) ((uint)(ulong)(p))

// 16 bytes (a multiple of 16 both here and there) from global memory; the first `size` of them are read, the others become zero.
#define COPY_16(to, from, size) \
  __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size))
// The same, kept in the cache of the compute unit: for what its work-groups read several times.
#define COPY_16_NEAR(to, from, size) \
  __asm__ volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size))
// Copies since the last COMMIT are a batch; WAIT(n) until all batches but the last n are there: this work-item's own, so a barrier follows.
#define COPIES_COMMIT() __asm__ volatile("cp.async.commit_group;")
#define COPIES_WAIT(n) __asm__ volatile("cp.async.wait_group %0;" ::"n"(n))

// Barriers of 8 bytes in local memory, from compute capability 9.0 on. A phase, 0 or 1 in turn, ends after `count` arrivals and the copies they expect.
#define BARRIER_INIT(at, count) __asm__ volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(count))
#define BARRIERS_BEGIN() __asm__ volatile("fence.mbarrier_init.release.cluster;" ::: "memory")  // between BARRIER_INIT and COPY_BULK
// A multiple of 16 bytes by one work-item, whose arrival at `barrier_at` expects them.
#define COPY_BULK(to, from, size, barrier_at)                                                                               \
  __asm__ volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%3], %2;"                          \
                   " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3]; }"             \
                   ::"r"(to), "l"(from), "r"(size), "r"(barrier_at) : "memory")
static inline void await(const uint at, const uint phase) {
  uint there;
  do {
    __asm__ volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(there) : "r"(at), "r"(phase));
  } while (!there);
}

// Four matrices of 8 rows x 16 bytes: lanes 0-7 say where the rows of the first lie, lanes 8-15 those of the second, and so on. A lane
// gets 4 bytes of each, of row g from 4t on; TURNED exchanges rows and columns of 16-bit values.
#define FRAGMENTS(r0, r1, r2, r3, at)                                                        \
  __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"           \
                   : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(at))
#define FRAGMENTS_TURNED(r0, r1, r2, r3, at)                                                 \
  __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"     \
                   : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(at))
#define WORD(r, at) __asm__ volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(at))

// d += a b
#define MMA_(types, d, a, b0, b1)                                                                                        \
  __asm__("mma.sync.aligned." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                             \
          : "+f"((d)[0]), "+f"((d)[1]), "+f"((d)[2]), "+f"((d)[3])                                                       \
          : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"(b0), "r"(b1))
#define MMA_FLOAT16(d, a, b0, b1) MMA_("m16n8k16.row.col.f32.f16.f16.f32", d, a, b0, b1)
#define MMA_BFLOAT16(d, a, b0, b1) MMA_("m16n8k16.row.col.f32.bf16.bf16.f32", d, a, b0, b1)
#define MMA_TF32(d, a, b0, b1) MMA_("m16n8k8.row.col.f32.tf32.tf32.f32", d, a, b0, b1)

// A float32 rounded to TF32, as bits; two of them to 16 bits each, the first in the lower half.
static inline uint tf32_bits(float x) {
  uint bits;
  __asm__("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
// A float32 as two TF32: the units take the upper 19 bits of what they are given. The lower part is rounded, so that it is wrong either way.
static inline void split_tf32(uint bits, uint* high, uint* low) {
  *high = bits & 0xffffe000u;
  *low = as_uint(as_float(bits) - as_float(*high)) + 0x1000u;
}
static inline uint pair_float16(float low, float high) {
  uint bits;
  __asm__("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
static inline uint pair_bfloat16(float low, float high) {
  uint bits;
  __asm__("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// What the lane beside this one gives: 0 and 1, 2 and 3, ... exchange. All lanes of a warp come here together.
static inline uint exchanged(uint bits) {
  uint other;
  __asm__ volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, -1;" : "=r"(other) : "r"(bits));
  return other;
}
// Whether something holds for a lane of the warp.
static inline int any_lane(int holds) {
  int any;
  __asm__ volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; vote.sync.any.pred p, p, -1; selp.s32 %0, 1, 0, p; }" : "=r"(any) : "r"(holds));
  return any;
}

// What products with packed weights need (quantized/mma.cl). d = a b; 8 or 4 bytes that are read once, past the cache of the compute unit;
// a line of L2 that is read soon;
// bytes of two words by PTX's selector; pairs of halves; a value of another lane.
#define MMA_FRESH(d, a, b0, b1)                                                                                          \
  __asm__("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"  \
          : "=f"((d)[0]), "=f"((d)[1]), "=f"((d)[2]), "=f"((d)[3])                                                       \
          : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"(b0), "r"(b1), "f"(0.0f))
#define STREAM_8(v, p) __asm__("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"((v).x), "=r"((v).y) : "l"(p))
#define STREAM_4(v, p) __asm__("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p))
#define PREFETCH(p) __asm__ volatile("prefetch.global.L2 [%0];" ::"l"(p))
// As STREAM_4, but from the cache of the compute unit: neighboring words are read by neighboring instructions.
#define FETCH_4(v, p) __asm__("ld.global.nc.L1::evict_first.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p))
#define BYTES_OF(r, a, b, selector) __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(selector))
// A constant in a register: an instruction takes one constant, and for a second one the compiler emits an instruction of its own each time.
#define IN_REGISTER(r, constant) \
  __asm__("{ .reg .b32 zero; mov.u32 zero, %%ctaid.z; or.b32 %0, zero, %1; }" : "=r"(r) : "n"(constant))
#define SUB_HALVES(r, a, b) __asm__("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b))
#define FMA_HALVES(r, a, b, c) __asm__("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c))
#define FROM_LANE(r, v, lane) __asm__ volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(r) : "r"(v), "r"(lane))
static inline float of_half(const uint bits) {
  const ushort low = bits;
  float f;
  __asm__("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(low));
  return f;
}
static inline float2 of_halves(const uint bits) {
  float low, high;
  __asm__("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(bits));
  return (float2)(low, high);
}
// Four halves at a multiple of 8 bytes: vload_half4 reads them one by one. Eight floats as halves at a multiple of 16.
static inline float4 quad_float16(__global const void* p) {
  const uint2 bits = *(__global const uint2*)p;
  return (float4)(of_halves(bits.x), of_halves(bits.y));
}
#define PUT_HALVES(p, a, b)                                                                                          \
  *(__global uint4*)(p) = (uint4)(pair_float16((a).x, (a).y), pair_float16((a).z, (a).w), pair_float16((b).x, (b).y), \
                                  pair_float16((b).z, (b).w))
