#pragma once
// Bulk copies between global and shared memory and stores to other blocks of a cluster, which an mbarrier counts.
// TileLang has T.alloc_barrier, T.tma_load and T.tma_store for some of it, not with sizes known at run time.

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

__device__ __forceinline__ void tk_bulk_load(void* to, const void* from, int num_bytes, void* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   tk_shared_address(to)),
               "l"(from), "r"(num_bytes), "r"(tk_shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void tk_wait_for_bulk_loads(void* barrier) {
  unsigned int done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
        " selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(tk_shared_address(barrier))
        : "memory");
  }
}

__device__ __forceinline__ void tk_bulk_store(void* to, const void* from, int num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(tk_shared_address(from)),
               "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void tk_wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// mapa maps an address in this block's shared memory to the same place in that of another block of the cluster.
__device__ __forceinline__ int tk_load_from_cluster(const int* pointer, int rank) {
  unsigned int here = static_cast<unsigned int>(__cvta_generic_to_shared(pointer)), there;
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}

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
