"""CUDA device functions that prefetch into L2 what another thread block is about to read."""

PREFETCH_SOURCE = r"""
// Brings the line that holds *address into L2, some time.
__device__ __forceinline__ void tk_prefetch(const void *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
"""
"""void tk_prefetch(const void *)."""

BULK_PREFETCH_SOURCE = r"""
// Brings num_bytes from `from` on into L2, some time; both are multiples of 16.
__device__ __forceinline__ void tk_prefetch_bytes(const void *from, int num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes) : "memory");
}
"""
"""void tk_prefetch_bytes(const void *, int), from sm_90 on."""
