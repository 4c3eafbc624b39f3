#pragma once
// Global memory with cache hints and prefetches. TileLang's T.ldg128 and T.copy would replace these if they took a
// cache hint, T.ldg32's family if it had 16 bits.

// Sixteen bytes, zeros where not valid, of which the caches need keep no copy.
__device__ __forceinline__ void tk_load_streaming(unsigned* words, const void* address, bool valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "  @p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "l"(address), "r"(int(valid)));
}

// The same at a place that nvcc chooses, to any type.
__device__ __forceinline__ void tk_load_streaming_to(void* to, const void* address, bool valid) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if (valid) words = __ldcs(static_cast<const uint4*>(address));
  *static_cast<uint4*>(to) = words;
}

// Sixteen bytes, zeros where not valid, of memory that no one writes. Three quarters of the lines leave L2 first.
__device__ __forceinline__ void tk_load_mostly_evict_first(unsigned* words, const void* address, bool valid) {
  asm("{ .reg .pred p; .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 0.75;\n"
      "  setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "  @p ld.global.nc.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], policy; }"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "l"(address), "r"(int(valid)));
}

// Two bytes, unspecified where not valid.
__device__ __forceinline__ unsigned tk_load_16_bits(const void* address, bool valid) {
  unsigned short loaded = 0;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
               : "+h"(loaded)
               : "l"(address), "r"(int(valid)));
  return loaded;
}

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
