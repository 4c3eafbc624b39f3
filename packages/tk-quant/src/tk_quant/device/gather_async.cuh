#pragma once
// Asynchronous copies of 4, 8 or 16 bytes to shared memory; only those of 16 bypass L1. TileLang's T.ptx_cp_async would
// replace them if it had an L2 prefetch size.

// Copies a piece of the row, given row 0's, and the line around it to L2; zeros if the row is not below the limit.
template <int num_bytes>
__device__ __forceinline__ void tk_gather_async(void* shared, const void* row0, unsigned row, unsigned stride,
                                                unsigned limit) {
  const unsigned to = __cvta_generic_to_shared(shared);
#define TK_GATHER(cache)                                                                       \
  asm volatile(                                                                                \
      "{ .reg .pred ignored; .reg .b64 address;\n"                                             \
      "  setp.ge.u32 ignored, %2, %4; mad.wide.u32 address, %2, %3, %1;\n"                     \
      "  cp.async." cache ".shared.global.L2::128B [%0], [address], %5, ignored; }" ::"r"(to), \
      "l"(row0), "r"(row), "r"(stride), "r"(limit), "n"(num_bytes)                             \
      : "memory")
  if constexpr (num_bytes == 16)
    TK_GATHER("cg");
  else
    TK_GATHER("ca");
#undef TK_GATHER
}

// Waits until at most num_groups groups of this thread, three or fewer, are in flight.
__device__ __forceinline__ void tk_wait_for_groups(int num_groups) {
  if (num_groups == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (num_groups == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if (num_groups == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  if (num_groups == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
}
