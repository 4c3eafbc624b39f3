#pragma once
// e4m3 and ue8m0: casts to wider types and to one byte. A vectorized T.cast from e4m3 to float16, and T.view with
// strides for single bytes, would replace most.
#include <cuda_bf16.h>
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

// The exponent of a power of two to byte `index` of a word whose other bytes are others' to write.
__device__ __forceinline__ void tk_store_exponent(int* word, int index, unsigned sf) {
  reinterpret_cast<unsigned char*>(word)[index] = static_cast<unsigned char>(sf >> 23);
}

// Eight bfloat16, each a block of its own with a power of two for sf: words of the e4m3 codes and of the exponents.
__device__ __forceinline__ void tk_cast_elements_bf16x8(const unsigned* x, unsigned* codes, unsigned* exponents,
                                                        int stride) {
  unsigned largest = 0u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned twice[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const unsigned word = x[2 * i + j], magnitude = word & 0x7fff7fffu;
      largest = __vmaxu2(largest, magnitude);
      // 256 * sf: the next power of two where the mantissa is above that of 448; for least amax, 1e-4, it is 2^-14.
      const unsigned power = __vmaxu2((magnitude + 0x001f001fu) & 0x7f807f80u, 0x38803880u);
      twice[j] = 2u * power - 0x08000800u;
      const __nv_bfloat162 y = __hmul2(tk_pair<__nv_bfloat162>(word), tk_pair<__nv_bfloat162>(0x83008300u - power));
      reinterpret_cast<__nv_fp8x2_storage_t*>(codes + i)[j] =
          __nv_cvt_float2_to_fp8x2(make_float2(__low2float(y), __high2float(y)), __NV_SATFINITE, __NV_E4M3);
    }
    exponents[i * stride] = __byte_perm(twice[0], twice[1], 0x7531);
  }
  if (__vmaxu2(largest, 0x7f7f7f7fu) != 0x7f7f7f7fu) {
    // Infinity and NaN: the code of NaN, and the exponent 255.
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned byte = 0xffu << (j % 4 * 8), magnitude = (x[j / 2] >> (j % 2 * 16)) & 0x7fffu;
      if (magnitude >= 0x7f80u) {
        codes[j / 4] = (codes[j / 4] & ~byte) | (byte & 0x7f7f7f7fu);
        exponents[j / 4 * stride] |= byte;
      }
    }
  }
}
