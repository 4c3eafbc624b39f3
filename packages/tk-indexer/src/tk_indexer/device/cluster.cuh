#pragma once
// Reads of the shared memory of the cluster's other thread blocks.

// The int32 of block `rank` at the place that `address` has in this block's shared memory.
__device__ __forceinline__ int tk_load_from_cluster(const void* address, int rank) {
  unsigned there;
  int value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(address))), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}
