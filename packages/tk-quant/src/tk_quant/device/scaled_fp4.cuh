#pragma once
// Elements times a scale to e2m1 by arithmetic on pairs, and scales for them, where there is no FP4 instruction; a
// T.cast to float4_e2m1fn that used it would replace this.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "division.cuh"
#include "fp4.cuh"
#include "pairs.cuh"

// Eight codes with the signs that are the top bits of the bytes of even and odd.
__device__ __forceinline__ unsigned tk_signed(unsigned codes, unsigned even, unsigned odd) {
  return codes | ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

// The same with the signs of eight bfloat16.
__device__ __forceinline__ unsigned tk_signed_like(unsigned codes, unsigned x0, unsigned x1, unsigned x2, unsigned x3) {
  const unsigned x01 = __byte_perm(x0, x1, 0x7351), x23 = __byte_perm(x2, x3, 0x7351);
  return tk_signed(codes, __byte_perm(x01, x23, 0x5410), __byte_perm(x01, x23, 0x7632));
}

// Eight codes in a word, of pairs in bytes 0 and 2.
__device__ __forceinline__ unsigned tk_codes_of_pairs(unsigned c0, unsigned c1, unsigned c2, unsigned c3) {
  const unsigned c01 = __byte_perm(c0, c1, 0x6240), c23 = __byte_perm(c2, c3, 0x6240);
  return __byte_perm(c01, c23, 0x5410) + 16u * __byte_perm(c01, c23, 0x7632);
}

// Codes of two elements in bytes 0 and 2. Sums with m, m + 2, m + 4, where the last place of m is worth 1.
template <class Pair, unsigned one_half, unsigned m>
__device__ __forceinline__ unsigned tk_e2m1x2_by_power(unsigned x, unsigned scale) {
  const Pair a = __habs2(tk_pair<Pair>(x)), once = tk_pair<Pair>(scale);
  const Pair twice = __hadd2(once, once), half = __hmul2(once, tk_pair<Pair>(one_half * 0x10001u));
  const Pair halves = __hfma2(a, twice, tk_pair<Pair>(m * 0x10001u));
  const Pair ones = __hfma2(a, once, tk_pair<Pair>((m + 2) * 0x10001u));
  const Pair twos = __hfma2(a, half, tk_pair<Pair>((m + 4) * 0x10001u));
  return __vimin3_s16x2(tk_bits(halves), tk_bits(ones), tk_bits(twos));
}

// Eight bfloat16 times powers of two: one for the first four, one for the others, each twice, as bfloat16.
__device__ __forceinline__ unsigned tk_e2m1x8_by_power(unsigned x0, unsigned x1, unsigned x2, unsigned x3,
                                                       unsigned first, unsigned second) {
  constexpr auto codes = tk_e2m1x2_by_power<__nv_bfloat162, 0x3f00u, 0x4300u>;
  const unsigned word = tk_codes_of_pairs(codes(x0, first), codes(x1, first), codes(x2, second), codes(x3, second));
  return tk_signed_like(word, x0, x1, x2, x3);
}

// Eight e4m3 codes, which are also there as float16, times a power of two. Where that is above 2^14 all are zeros: no
// other amax is that small.
__device__ __forceinline__ unsigned tk_e2m1x8_of_e4m3(unsigned x0, unsigned x1, const unsigned* halves, float scale) {
  constexpr auto codes = tk_e2m1x2_by_power<__half2, 0x3800u, 0x6400u>;
  const unsigned twice = tk_bits(__float2half2_rn(fminf(scale, 0x1p14f)));
  const unsigned word = tk_codes_of_pairs(codes(halves[0], twice), codes(halves[1], twice), codes(halves[2], twice),
                                          codes(halves[3], twice));
  return tk_signed(word, __byte_perm(x0, x1, 0x6420), __byte_perm(x0, x1, 0x7531));
}

// Eight bfloat16 times float32, each product rounded to float32: one for the first four, one for the others.
__device__ __forceinline__ unsigned tk_e2m1x8_by_float(unsigned x0, unsigned x1, unsigned x2, unsigned x3, float first,
                                                       float second) {
  const unsigned x[4] = {x0, x1, x2, x3};
  unsigned even[4], odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = i < 2 ? first : second;
    even[i] = tk_e2m1_code(fabsf(__uint_as_float(x[i] << 16)) * scale);
    odd[i] = tk_e2m1_code(fabsf(__uint_as_float(x[i] & 0xffff0000u)) * scale);
  }
  const unsigned even_codes =
      __byte_perm(__byte_perm(even[0], even[1], 0x0040), __byte_perm(even[2], even[3], 0x0040), 0x5410);
  const unsigned odd_codes =
      __byte_perm(__byte_perm(odd[0], odd[1], 0x0040), __byte_perm(odd[2], odd[3], 0x0040), 0x5410);
  return tk_signed_like(even_codes + 16u * odd_codes, x0, x1, x2, x3);
}

// From the amax of a block, at least 6 * 2^-126: the bits of sf and of what its elements are multiplied by. sf is NaN
// or infinite where amax is.
__device__ __forceinline__ void tk_e2m1_scale_of_amax(int amax_bits, unsigned* scale) {
  const float amax = __int_as_float(amax_bits), quarter = amax * 0.25f;
  scale[0] = amax_bits == 0x7f800000 ? amax_bits : __float_as_uint(tk_quotient(amax, 6.0f, 1.0f / 6.0f));
  scale[1] = __float_as_uint(tk_quotient(1.5f, quarter, tk_reciprocal(quarter)));
}

// From the amax of a group of bfloat16: the byte of sf in e4m3, and the bits of sf * tensor_sf.
__device__ __forceinline__ void tk_nvfp4_scale_of_amax(int amax_bits, float tensor_sf, unsigned* scale) {
  const float sixth = tk_quotient(__int_as_float(amax_bits), 6.0f, 1.0f / 6.0f);
  float quotient;
  if (tensor_sf >= 0x1p-90f && tensor_sf <= 0x1p90f) {
    const float reciprocal = tk_reciprocal(tensor_sf);
    quotient = tk_quotient(sixth, tensor_sf, reciprocal);
    quotient = __fmaf_rn(-__fmaf_rn(tensor_sf, quotient, -sixth), reciprocal, quotient);
    quotient = sixth * reciprocal > 1024.0f ? 1024.0f : quotient;
  } else {
    quotient = sixth / tensor_sf;
  }
  // In this order NaN stays NaN.
  quotient = quotient < 0x1p-9f ? 0x1p-9f : quotient;
  quotient = amax_bits < 0x7f800000 ? quotient : __int_as_float(0x7fffffff);
  const __nv_fp8_storage_t sf = __nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, __NV_E4M3);
  scale[0] = sf;
  scale[1] = __float_as_uint(__half2float(__half(__nv_cvt_fp8_to_halfraw(sf, __NV_E4M3))) * tensor_sf);
}

// 8 * num_words bfloat16 times 1 / sf to codes, whatever they are: saturates, NaN becomes +6.
template <int num_words>
__device__ __forceinline__ void tk_e2m1_by_sf(const unsigned* x, unsigned sf_bits, unsigned* codes) {
  const float sf = __uint_as_float(sf_bits), scale = tk_reciprocal(sf);
  if (sf >= 0x1p-125f && sf <= 0x1p125f) {
    // 6.75 * sf, rounded down: what is more has code 7, and so has this.
    const unsigned most = __byte_perm(__float_as_uint(6.75f * sf), 0u, 0x3232);
#pragma unroll
    for (int i = 0; i < num_words; ++i) {
      unsigned clamped[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const __nv_bfloat162 below = __hmin2(tk_pair<__nv_bfloat162>(x[4 * i + j]), tk_pair<__nv_bfloat162>(most));
        clamped[j] = tk_bits(__hmax2(below, tk_pair<__nv_bfloat162>(most ^ 0x80008000u)));
      }
      codes[i] = tk_e2m1x8_by_float(clamped[0], clamped[1], clamped[2], clamped[3], scale, scale);
    }
  } else {
    const float scale = 1.0f / sf;
#pragma unroll
    for (int i = 0; i < num_words; ++i) {
      float y[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned word = x[4 * i + j / 2];
        y[j] = __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u) * scale;
      }
      codes[i] = tk_encode_e2m1x8<false>(y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7]);
    }
  }
}
