#pragma once
#include <cuda.h>
// Tensor maps (CUtensorMap, 128 bytes) in global memory, which TileLang has no word for: it makes a map for each matrix
// that the host knows, as an argument of the kernel.

// Writes to *map the map `like`, but of num_cols columns of bytes from `data` on, rows row_bytes apart, a multiple of 16.
// All 32 lanes of a thread block's only warp call it.
__device__ __forceinline__ void tk_write_map(void* map, const CUtensorMap& like, const void* data, int num_cols,
                                             int row_bytes) {
  __shared__ alignas(128) int words[32];
  const unsigned there = static_cast<unsigned>(__cvta_generic_to_shared(words));
  words[threadIdx.x] = reinterpret_cast<const int*>(&like)[threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(there), "l"(data)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" ::"r"(there), "r"(num_cols)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], 0, %1;" ::"r"(there),
                 "l"(static_cast<long long>(row_bytes))
                 : "memory");
  }
  // The copy is an atomic exchange in the machine code, which reads what was there: compute-sanitizer wants it written.
  static_cast<int*>(map)[threadIdx.x] = 0;
  __syncwarp();
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(map),
      "r"(there)
      : "memory");
}

// Before this warp's first load by a map that another kernel has written.
__device__ __forceinline__ void tk_acquire_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// A map in global memory, as tl::tma_load takes it.
__device__ __forceinline__ const CUtensorMap& tk_map(const void* map) { return *static_cast<const CUtensorMap*>(map); }
