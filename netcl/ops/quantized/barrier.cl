// A barrier of all groups of a launch, for kernels whose groups run at the same time (chain.cl). `waits` counts arrivals from 0 to twice the
// groups, then from 0 again. Its sides, below and from the number of groups on, take turns: all have arrived when it changes sides.
// After LIMIT readings in vain a group sets `late` and `lost` and goes on.
#define LIMIT 4000000

static inline uint side_of(__global const uint* waits) {
  uint now;
  __asm__ volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(waits));
  return now >= (uint)get_num_groups(0);
}

// Called by one item of a group, after a barrier of the group.
static inline void arrive(__global uint* waits) {
  __asm__ volatile("fence.acq_rel.gpu;");
  __asm__ volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(waits), "r"(2 * (uint)get_num_groups(0) - 1));
}

// Called by all items of a group; item 0 knows the side before its arrival.
static inline void wait_for_all(__global uint* waits, const uint side, __global int* late, __local int* lost) {
  if (get_local_id(0) == 0) {
    int tries = 0;
    while (side_of(waits) == side && ++tries < LIMIT) {}
    if (tries == LIMIT) *late = *lost = 1;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
}
