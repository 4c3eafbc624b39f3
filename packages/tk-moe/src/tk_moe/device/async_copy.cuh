#pragma once
// Stores to other blocks of a cluster, which an mbarrier counts.

__device__ __forceinline__ unsigned int tk_shared_address(const void* pointer) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void tk_init_mbarrier(void* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(tk_shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void tk_expect_bytes(void* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(tk_shared_address(barrier)),
               "r"(num_bytes)
               : "memory");
}

// mapa maps an address in this block's shared memory to the same place in that of another block of the cluster.
__device__ __forceinline__ void tk_send_to_cluster(void* to, const void* from, void* barrier, int rank) {
  unsigned int there, barrier_there;
  uint4 value = *static_cast<const uint4*>(from);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(tk_shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(barrier_there)
               : "r"(tk_shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier_there)
      : "memory");
}

__device__ __forceinline__ void tk_wait_for_cluster(void* barrier) {
  unsigned int done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;"
        " selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(tk_shared_address(barrier))
        : "memory");
  }
}
