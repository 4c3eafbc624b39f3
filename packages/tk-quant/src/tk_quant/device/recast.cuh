#pragma once
// Codes of e4m3 times a row's sf, for their amax and to codes with new sf. TileLang's T.cast would replace this if it
// let codes be decoded again rather than keep float32 in registers.
#include <cuda_fp16.h>
#include <cuda_fp8.h>

// x, in a way that keeps the compiler from holding on to what it computed from x before.
__device__ __forceinline__ unsigned tk_hide(unsigned x) {
  asm("" : "+r"(x));
  return x;
}

// Four e4m3 codes to float32.
__device__ __forceinline__ void tk_decode_e4m3x4(unsigned codes, float* values) {
  const ushort2 pairs = reinterpret_cast<const ushort2&>(codes);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(i == 0 ? pairs.x : pairs.y, __NV_E4M3)));
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
}

// Raises amax, the bits of four float32, to |code * sf| of two rows; such bits are in order, NaN above infinity.
__device__ __forceinline__ void tk_raise_amax(unsigned* amax, unsigned codes0, float sf0, unsigned codes1, float sf1) {
  float row0[4], row1[4];
  tk_decode_e4m3x4(codes0, row0);
  tk_decode_e4m3x4(codes1, row1);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const unsigned value0 = __float_as_uint(fabsf(row0[k]) * fabsf(sf0));
    const unsigned value1 = __float_as_uint(fabsf(row1[k]) * fabsf(sf1));
    amax[k] = __vimax3_u32(amax[k], value0, value1);
  }
}

// The codes of code * sf * factor.
__device__ __forceinline__ unsigned tk_recast(unsigned codes, float sf, const float* factors) {
  float values[4];
  tk_decode_e4m3x4(tk_hide(codes), values);
  unsigned new_codes = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = {values[2 * i] * sf * factors[2 * i], values[2 * i + 1] * sf * factors[2 * i + 1]};
    new_codes |= unsigned(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << (16 * i);
  }
  return new_codes;
}
