#pragma once
// Stores with a cache hint and prefetches, which a T.copy that took a cache hint and a T.prefetch would replace.

// Sixteen bytes to a line that is to leave L2 before others.
__device__ __forceinline__ void tk_store_evict_first(void* address, const unsigned* words) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3]), "l"(policy));
}

// Starts to bring the line that holds *address into L2.
__device__ __forceinline__ void tk_prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Starts to bring num_bytes from `address` on into L2; both are multiples of 16.
__device__ __forceinline__ void tk_prefetch_bytes(const void* address, int num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(num_bytes) : "memory");
}
