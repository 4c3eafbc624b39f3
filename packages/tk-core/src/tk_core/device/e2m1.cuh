#pragma once
// e2m1: casts from float32 and to e4m3; fp4.py has the formula. T.cast to float4_e2m1fn would replace the first if it
// took registers and, before sm_100, arithmetic.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "pairs.cuh"
#if __CUDA_ARCH__ >= 1000
#include <cuda_fp4.h>
#endif

// The code of a, from 0 to below 7, above the bits of 2^23, 0x4b000000. Sums with 2^23, 2^23 + 2, 2^23 + 4.
__device__ __forceinline__ int tk_e2m1_code(float a) {
  const float halves = __fmaf_rn(a, 2.0f, 8388608.0f), twos = __fmaf_rn(a, 0.5f, 8388612.0f);
  return __vimin3_s32(__float_as_int(halves), __float_as_int(a + 8388610.0f), __float_as_int(twos));
}

// The same of any a; NaN becomes 6. Sums with 2^22, 2^23 + 2, 2^24 + 8.
__device__ __forceinline__ int tk_saturated_e2m1_code(float a) {
  a = fminf(a, 6.0f);
  const int code = __viaddmin_s32(__float_as_int(a + 4194304.0f), 0x00800000, __float_as_int(a + 8388610.0f));
  return __viaddmin_s32(__float_as_int(a + 16777224.0f), -0x00800000, code);
}

// Eight codes, the first in the lowest nibble. They saturate and NaN becomes +6, unless magnitudes are known to be
// below 7.
template <bool are_bounded>
__device__ __forceinline__ unsigned tk_encode_e2m1x8(float y0, float y1, float y2, float y3, float y4, float y5,
                                                     float y6, float y7) {
  const float y[8] = {y0, y1, y2, y3, y4, y5, y6, y7};
  unsigned codes = 0;
#if __CUDA_ARCH__ >= 1000
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = {y[2 * i], y[2 * i + 1]};
    codes |= unsigned(__nv_cvt_float2_to_fp4x2(pair, __NV_E2M1, cudaRoundNearest)) << (8 * i);
  }
  return codes;
#else
  unsigned signs = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float a = fabsf(y[i]);
    codes = (codes << 4) + unsigned(are_bounded ? tk_e2m1_code(a) : tk_saturated_e2m1_code(a));
    signs = __funnelshift_l(__float_as_uint(y[i]), signs, 4);
  }
  // 0xfb000000 is what the eight 0x4b000000 have summed up to.
  return (codes - 0xfb000000u) | (signs & 0x88888888u);
#endif
}

// Four bytes of low (0 to 3) and high (4 to 7), chosen by the nibbles of the selector's lower half, each below 8.
// __byte_perm takes an instruction more, to make sure of that.
__device__ __forceinline__ unsigned tk_look_up(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

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

// Two float32 to two e4m3 codes.
__device__ __forceinline__ unsigned tk_e4m3x2(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

// 0, .5, 1, 1.5 (low) and 2, 3, 4, 6 (high) times 2^shift as e4m3. From 2^-20 on all of them round to zero.
__device__ __forceinline__ void tk_e4m3_of_e2m1_magnitudes(int shift, unsigned& low, unsigned& high) {
  const float one = __int_as_float((max(shift, -20) + 127) << 23);
  low = tk_e4m3x2(0.0f, 0.5f * one) | tk_e4m3x2(one, 1.5f * one) << 16;
  high = tk_e4m3x2(2.0f * one, 3.0f * one) | tk_e4m3x2(4.0f * one, 6.0f * one) << 16;
}

// Eight codes to eight bytes, given those of the magnitudes.
__device__ __forceinline__ void tk_e4m3_of_e2m1x8(unsigned codes, unsigned low, unsigned high, unsigned* bytes) {
  // Signs on top of bytes: those of even codes here, those of odd ones in `codes` itself.
  const unsigned magnitudes = codes & 0x77777777u, even = codes << 4;
  bytes[0] = tk_look_up(low, high, magnitudes) | (__byte_perm(even, codes, 0x5140) & 0x80808080u);
  bytes[1] = tk_look_up(low, high, magnitudes >> 16) | (__byte_perm(even, codes, 0x7362) & 0x80808080u);
}
