"""tk_prefetch, a CUDA device function: what another block is about to read, brought into L2 early."""

PREFETCH_SOURCE = r"""
// Brings the line that holds *address into L2, some time.
__device__ __forceinline__ void tk_prefetch(const void *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
"""
