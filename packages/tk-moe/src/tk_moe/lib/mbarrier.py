"""CUDA device functions for an mbarrier: a barrier in shared memory that counts the bytes that have arrived."""

MBARRIER = """
__device__ __forceinline__ unsigned int tk_shared_address(const void* pointer) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

// By one thread, before a barrier of all threads.
__device__ __forceinline__ void tk_make_mbarrier(void* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(tk_shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread: the barrier opens once so many bytes have come.
__device__ __forceinline__ void tk_expect_bytes(void* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(tk_shared_address(barrier)), "r"(num_bytes) : "memory");
}
"""
