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
