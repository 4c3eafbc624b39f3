#pragma once
// Barriers of a cluster, and reads of the shared memory of its other thread blocks.

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

// All threads of all blocks arrive, and then wait; between, a block may do what others need not see.
__device__ __forceinline__ void tk_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without a fence, for the first time: there is nothing yet that others could read.
__device__ __forceinline__ void tk_cluster_arrive_first() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void tk_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
