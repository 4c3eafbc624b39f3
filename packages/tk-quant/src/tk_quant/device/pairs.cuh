#pragma once
// Pairs of 16-bit floats in registers.
#include <cuda_fp16.h>

// Bits as a __half2 or __nv_bfloat162.
template <class Pair>
__device__ __forceinline__ Pair tk_pair(unsigned bits) {
  return reinterpret_cast<const Pair&>(bits);
}

// The bits of a __half2 or __nv_bfloat162.
template <class Pair>
__device__ __forceinline__ unsigned tk_bits(Pair pair) {
  return reinterpret_cast<const unsigned&>(pair);
}

// Four float16 to float32.
__device__ __forceinline__ void tk_floats_of_halves(const unsigned* pairs, float* values) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 two = __half22float2(tk_pair<__half2>(pairs[i]));
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}
