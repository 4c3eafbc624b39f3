#pragma once
// bfloat16 times a power of two to e2m1 by arithmetic on pairs, where there is no FP4 instruction; a T.cast to
// float4_e2m1fn that used it would replace this.
#include <cuda_bf16.h>

#include "pairs.cuh"

// Codes of two elements in bytes 0 and 2. Sums with 2^7, 2^7 + 2, 2^7 + 4, where the last place is worth 1.
__device__ __forceinline__ unsigned tk_e2m1x2_by_power(unsigned x, unsigned scale) {
  typedef __nv_bfloat162 Pair;
  const Pair a = __habs2(tk_pair<Pair>(x)), once = tk_pair<Pair>(scale);
  const Pair twice = __hadd2(once, once), half = __hmul2(once, tk_pair<Pair>(0x3f003f00u));
  const Pair halves = __hfma2(a, twice, tk_pair<Pair>(0x43004300u));
  const Pair ones = __hfma2(a, once, tk_pair<Pair>(0x43024302u));
  const Pair twos = __hfma2(a, half, tk_pair<Pair>(0x43044304u));
  return __vimin3_s16x2(tk_bits(halves), tk_bits(ones), tk_bits(twos));
}

// Eight bfloat16 times a power of two, which `scale` holds twice as bfloat16.
__device__ __forceinline__ unsigned tk_e2m1x8_by_power(unsigned x0, unsigned x1, unsigned x2, unsigned x3,
                                                       unsigned scale) {
  const unsigned c01 = __byte_perm(tk_e2m1x2_by_power(x0, scale), tk_e2m1x2_by_power(x1, scale), 0x6240);
  const unsigned c23 = __byte_perm(tk_e2m1x2_by_power(x2, scale), tk_e2m1x2_by_power(x3, scale), 0x6240);
  const unsigned codes = __byte_perm(c01, c23, 0x5410) + 16u * __byte_perm(c01, c23, 0x7632);
  const unsigned x01 = __byte_perm(x0, x1, 0x7351), x23 = __byte_perm(x2, x3, 0x7351);
  const unsigned even = __byte_perm(x01, x23, 0x5410), odd = __byte_perm(x01, x23, 0x7632);
  return codes | ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}
