#pragma once
// e4m3 and ue8m0: casts to wider types. A vectorized T.cast from e4m3 to float16 would replace most.
#include <cuda_fp8.h>

#include "pairs.cuh"

// Four e4m3 codes as two pairs of float16; NaN stays NaN.
__device__ __forceinline__ void tk_decode_e4m3x4_f16(unsigned codes, unsigned* pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    pairs[i] = tk_bits(__half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes >> (16 * i)), __NV_E4M3)));
}

// Byte `index` of a word as the exponent of a power of two: 0 is 2^-127, 255 is NaN.
__device__ __forceinline__ float tk_decode_ue8m0(unsigned word, int index) {
  const unsigned bits = __byte_perm(word, 0u, 0x0444u | unsigned(index) << 12) >> 1;
  // 2^-127 is subnormal, so its exponent field would say 0; 255 would say infinity, but infinity * 0 is NaN.
  const float power = fmaxf(__uint_as_float(bits), 0x1p-127f);
  return __fmaf_rn(power, 0.0f, power);
}
