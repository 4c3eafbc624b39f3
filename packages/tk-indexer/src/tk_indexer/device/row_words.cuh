#pragma once
// Reads of rows that begin at any address, and a comparison of what is read.

// Bytes from the last multiple of 16 up to an address.
__device__ __forceinline__ int tk_past_16_bytes(const void* address) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(address) & 15);
}

// Loads 16 bytes from global memory, at a multiple of 16.
__device__ __forceinline__ void tk_load_16_bytes(const void* address, unsigned* words) {
  uint4 loaded = *static_cast<const uint4*>(address);
  words[0] = loaded.x;
  words[1] = loaded.y;
  words[2] = loaded.z;
  words[3] = loaded.w;
}

// Whether x is above a bound, as any NaN is. TileLang would turn !(x <= bound) into bound < x.
__device__ __forceinline__ unsigned tk_is_above(float x, float bound) {
  return !(x <= bound);
}
