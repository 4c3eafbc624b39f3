"""Conversions that TileLang has no expression for, as CUDA device functions that kernels import with T.import_source.

e2m1 (FP4): the values 0, .5, 1, 1.5, 2, 3, 4, 6 have the codes 0 to 7. The values are .5 apart up to 2, then 1 apart,
and 2 apart from 4 on; hence, with `round` to the nearest integer, ties to even,

    code(a) = min(round(2 * a), round(a) + 2, round(a / 2) + 4)          for 0 <= a <= 6.

Adding a power of two whose last place is worth the step rounds in this way, and leaves the integer in the low bits of
the sum: three additions and two minima, no branch.

e5m6 is a float16 with four fewer bits of mantissa.
"""

from tk_core.arch import Arch

_E2M1_BY_INSTRUCTION = r"""
#include <cuda_fp4.h>

// Eight float32 to eight e2m1 codes, the first in the lowest nibble; saturates, NaN becomes +6.
__device__ __forceinline__ unsigned tk_e2m1x8(
    float y0, float y1, float y2, float y3, float y4, float y5, float y6, float y7) {
  const float2 pairs[4] = {{y0, y1}, {y2, y3}, {y4, y5}, {y6, y7}};
  unsigned codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    codes |= unsigned(__nv_cvt_float2_to_fp4x2(pairs[i], __NV_E2M1, cudaRoundNearest)) << (8 * i);
  return codes;
}
"""

_E2M1_BY_ARITHMETIC = r"""
#include <cuda_bf16.h>

// Eight float32 to eight e2m1 codes, the first in the lowest nibble; saturates, NaN becomes +6.
__device__ __forceinline__ unsigned tk_e2m1x8(
    float y0, float y1, float y2, float y3, float y4, float y5, float y6, float y7) {
  const float y[8] = {y0, y1, y2, y3, y4, y5, y6, y7};
  unsigned codes = 0, signs = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float a = fminf(fabsf(y[i]), 6.0f);
    // Sums with 2^22, 2^23 + 2, 2^24 + 8; the bits of 2^23 are 0x4b000000.
    int code = __viaddmin_s32(__float_as_int(a + 4194304.0f), 0x00800000, __float_as_int(a + 8388610.0f));
    code = __viaddmin_s32(__float_as_int(a + 16777224.0f), -0x00800000, code);
    codes = (codes << 4) + unsigned(code);
    signs = __funnelshift_l(__float_as_uint(y[i]), signs, 4);
  }
  // 0xfb000000 is what the eight 0x4b000000 have summed up to.
  return (codes - 0xfb000000u) | (signs & 0x88888888u);
}
"""


def e2m1_source(arch: Arch) -> str:
    """CUDA source of `uint32 tk_e2m1x8(eight float32)`: eight e2m1 codes, the first in the lowest nibble."""
    return _E2M1_BY_INSTRUCTION if arch.has_fp4_convert else _E2M1_BY_ARITHMETIC


_E5M6 = r"""
#include <cuda_fp16.h>

// Bits of x where the mask has ones, of y where it has zeros; in one instruction, which nvcc makes two.
template <unsigned mask>
__device__ __forceinline__ unsigned tk_select_bits(unsigned x, unsigned y) {
  unsigned bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "n"(mask), "r"(x), "r"(y));
  return bits;
}

// The nearest value with six bits of mantissa, ties to even; the last place is worth 2^-20 at least. A zero loses its
// sign.
__device__ __forceinline__ float tk_round_to_e5m6(float y) {
  const float power = fmaxf(__uint_as_float(__float_as_uint(y) & 0x7f800000u), 0x1p-14f);
  // The last place of a sum with 1.5 * 2^17 times the power of two in y is the 2^-6th of that power.
  const float sum = __fmaf_rn(power, 196608.0f, y);
  return __fmaf_rn(power, -196608.0f, sum);
}

// Eight float32 to eight e5m6 codes in three words. All must be finite and below 65280, from where on they round to
// more than 65024.
__device__ __forceinline__ void tk_e5m6x8(const float *y, unsigned *words) {
  // Two codes in the upper 24 bits.
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = y[2 * i], second = y[2 * i + 1];
    const __half2 rounded = __floats2half2_rn(tk_round_to_e5m6(second), tk_round_to_e5m6(first));
    const unsigned signs = __byte_perm(__float_as_uint(second), __float_as_uint(first), 0x7632);
    const unsigned halves = tk_select_bits<0x80008000u>(signs, reinterpret_cast<const unsigned &>(rounded));
    pairs[i] = tk_select_bits<0xfff00000u>(halves, halves << 4);
  }
  words[0] = __byte_perm(pairs[0], pairs[1], 0x3217);
  words[1] = __byte_perm(pairs[1], pairs[2], 0x2176);
  words[2] = __byte_perm(pairs[2], pairs[3], 0x1765);
}
"""


def e5m6_source() -> str:
    """CUDA source of `void tk_e5m6x8(const float *, uint32 *)`: eight float32 to eight e5m6 codes in three words.

    Magnitudes must be below 65280, as they are if the scale was computed from the amax of the block.
    """
    return _E5M6


_E2M1_DECODE_BY_INSTRUCTION = r"""
#include <cuda_fp4.h>

// Four e2m1 codes in the lower half of `codes`, the first in the lowest nibble, to float32.
__device__ __forceinline__ void tk_floats_of_e2m1x4(unsigned codes, float *values) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __half2_raw pair = __nv_cvt_fp4x2_to_halfraw2(__nv_fp4x2_storage_t(codes >> (8 * i)), __NV_E2M1);
    const float2 pair_values = __half22float2(__half2(pair));
    values[2 * i] = pair_values.x;
    values[2 * i + 1] = pair_values.y;
  }
}
"""

_E2M1_DECODE_BY_ARITHMETIC = r"""
#include <cuda_fp16.h>

// Four bytes of low (0 to 3) and high (4 to 7), chosen by the nibbles of the selector's lower half. With its top bit
// set a nibble gives eight copies of the chosen byte's top bit instead, which __byte_perm does not promise.
__device__ __forceinline__ unsigned tk_prmt(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// Four e2m1 codes in the lower half of `codes`, the first in the lowest nibble, to float32.
__device__ __forceinline__ void tk_floats_of_e2m1x4(unsigned codes, float *values) {
  // Upper bytes of 0, .5, 1, 1.5, 2, 3, 4, 6 in float16; their lower bytes are 0.
  const unsigned magnitudes = tk_prmt(0x3e3c3800u, 0x46444240u, codes & 0x7777u);
  // 0x80 for a positive code and 0xff for a negative one: bit 6 is the sign.
  const unsigned signs = tk_prmt(0x80808080u, 0x80808080u, codes) << 1;
  const unsigned upper = magnitudes | (signs & 0x80808080u);
  const unsigned pairs[2] = {tk_prmt(upper, 0u, 0x1404u), tk_prmt(upper, 0u, 0x3424u)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair_values = __half22float2(*reinterpret_cast<const __half2 *>(&pairs[i]));
    values[2 * i] = pair_values.x;
    values[2 * i + 1] = pair_values.y;
  }
}
"""


def e2m1_decode_source(arch: Arch) -> str:
    """CUDA source of `void tk_floats_of_e2m1x4(uint32, float *)`."""
    return _E2M1_DECODE_BY_INSTRUCTION if arch.has_fp4_convert else _E2M1_DECODE_BY_ARITHMETIC


E5M6_DECODE = r"""
#include <cuda_fp16.h>

// Four e5m6 codes in the upper 48 bits of high:low, the first on top, to float32.
__device__ __forceinline__ void tk_floats_of_e5m6x4(unsigned high, unsigned low, float *values) {
  // A code is the upper 12 bits of a float16.
  const unsigned pairs[2] = {
      ((high >> 16) & 0xfff0u) | ((high << 12) & 0xfff00000u),
      (__funnelshift_l(low, high, 8) & 0xfff0u) | ((low << 4) & 0xfff00000u)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair_values = __half22float2(*reinterpret_cast<const __half2 *>(&pairs[i]));
    values[2 * i] = pair_values.x;
    values[2 * i + 1] = pair_values.y;
  }
}
"""
"""void tk_floats_of_e5m6x4(uint32, uint32, float *): four codes of two words."""

E4M3_DECODE = r"""
#include <cuda_fp8.h>

// The e4m3 code in the lowest byte, exactly; NaN stays NaN.
__device__ __forceinline__ float tk_float_of_e4m3(unsigned code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(code), __NV_E4M3)));
}
"""
"""float32 tk_float_of_e4m3(uint32)."""

UE8M0_DECODE = r"""
// Byte `index` of a word as the exponent of a power of two: 0 is 2^-127, 255 is NaN.
__device__ __forceinline__ float tk_float_of_ue8m0(unsigned word, int index) {
  const unsigned bits = __byte_perm(word, 0u, 0x0444u | unsigned(index) << 12) >> 1;
  // 2^-127 is subnormal, so its exponent field would say 0; 255 would say infinity, but infinity * 0 is NaN.
  const float power = fmaxf(__uint_as_float(bits), 0x1p-127f);
  return __fmaf_rn(power, 0.0f, power);
}
"""
"""float32 tk_float_of_ue8m0(uint32, int)."""

NARROW_LOADS = r"""
// Like TileLang's loads of 32 bits and more; unspecified where not valid.
__device__ __forceinline__ unsigned tk_load_16_bits(const void *address, bool valid) {
  unsigned short loaded = 0;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %2, 0;\n"
      "  @p ld.global.u16 %0, [%1];\n"
      "}\n"
      : "+h"(loaded)
      : "l"(address), "r"(int(valid)));
  return loaded;
}

__device__ __forceinline__ unsigned tk_load_8_bits(const void *address, bool valid) {
  unsigned short loaded = 0;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %2, 0;\n"
      "  @p ld.global.u8 %0, [%1];\n"
      "}\n"
      : "+h"(loaded)
      : "l"(address), "r"(int(valid)));
  return loaded;
}
"""
"""uint32 tk_load_16_bits(pointer, bool) and tk_load_8_bits."""

E2M1_SCALED = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

template <class Pair>
__device__ __forceinline__ Pair tk_pair(unsigned bits) {
  return reinterpret_cast<const Pair &>(bits);
}

template <class Pair>
__device__ __forceinline__ unsigned tk_bits(Pair pair) {
  return reinterpret_cast<const unsigned &>(pair);
}

// Eight codes with the signs that are the top bits of the bytes of even and odd.
__device__ __forceinline__ unsigned tk_signed(unsigned codes, unsigned even, unsigned odd) {
  return codes | ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

// The same with the signs of eight bfloat16.
__device__ __forceinline__ unsigned tk_signed_like(
    unsigned codes, unsigned x0, unsigned x1, unsigned x2, unsigned x3) {
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
__device__ __forceinline__ unsigned tk_e2m1x8_by_power(
    unsigned x0, unsigned x1, unsigned x2, unsigned x3, unsigned first, unsigned second) {
  constexpr auto codes = tk_e2m1x2_by_power<__nv_bfloat162, 0x3f00u, 0x4300u>;
  const unsigned word = tk_codes_of_pairs(codes(x0, first), codes(x1, first), codes(x2, second), codes(x3, second));
  return tk_signed_like(word, x0, x1, x2, x3);
}

// Four e4m3 codes as two pairs of float16; NaN stays NaN.
__device__ __forceinline__ void tk_halves_of_e4m3x4(unsigned codes, unsigned *pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    pairs[i] = tk_bits(__half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes >> (16 * i)), __NV_E4M3)));
}

// The larger of a and |x|, both float16 pairs; NaN, of bits 0x7fff, where either is.
__device__ __forceinline__ unsigned tk_larger_magnitude_f16x2(unsigned a, unsigned x) {
  return tk_bits(__hmax2_nan(tk_pair<__half2>(a), __habs2(tk_pair<__half2>(x))));
}

// The larger half of a pair as a float32.
__device__ __forceinline__ float tk_float_of_larger_half(unsigned pair) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(max(pair & 0xffffu, pair >> 16))));
}

// Eight e4m3 codes, which are also there as float16, times a power of two. Where that is above 2^14 all are zeros: no
// other amax is that small.
__device__ __forceinline__ unsigned tk_e2m1x8_of_e4m3(unsigned x0, unsigned x1, const unsigned *halves, float scale) {
  constexpr auto codes = tk_e2m1x2_by_power<__half2, 0x3800u, 0x6400u>;
  const unsigned twice = tk_bits(__float2half2_rn(fminf(scale, 0x1p14f)));
  const unsigned word = tk_codes_of_pairs(
      codes(halves[0], twice), codes(halves[1], twice), codes(halves[2], twice), codes(halves[3], twice));
  return tk_signed(word, __byte_perm(x0, x1, 0x6420), __byte_perm(x0, x1, 0x7531));
}

// The code of |x * scale| in byte 0. Sums with 2^23, 2^23 + 2, 2^23 + 4.
__device__ __forceinline__ unsigned tk_e2m1_by_float(unsigned x, float scale) {
  const float a = fabsf(__uint_as_float(x)) * scale;
  const float halves = __fmaf_rn(a, 2.0f, 8388608.0f), twos = __fmaf_rn(a, 0.5f, 8388612.0f);
  return unsigned(__vimin3_s32(__float_as_int(halves), __float_as_int(a + 8388610.0f), __float_as_int(twos)));
}

// Eight bfloat16 times float32, each product rounded to float32: one for the first four, one for the others.
__device__ __forceinline__ unsigned tk_e2m1x8_by_float(
    unsigned x0, unsigned x1, unsigned x2, unsigned x3, float first, float second) {
  const unsigned x[4] = {x0, x1, x2, x3};
  unsigned even[4], odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = tk_e2m1_by_float(x[i] << 16, i < 2 ? first : second);
    odd[i] = tk_e2m1_by_float(x[i] & 0xffff0000u, i < 2 ? first : second);
  }
  const unsigned even_codes =
      __byte_perm(__byte_perm(even[0], even[1], 0x0040), __byte_perm(even[2], even[3], 0x0040), 0x5410);
  const unsigned odd_codes =
      __byte_perm(__byte_perm(odd[0], odd[1], 0x0040), __byte_perm(odd[2], odd[3], 0x0040), 0x5410);
  return tk_signed_like(even_codes + 16u * odd_codes, x0, x1, x2, x3);
}

// From the amax of a block, at least 6 * 2^-126: the bits of sf and of what its elements are multiplied by. NaN and
// infinity come to sf.
__device__ __forceinline__ void tk_e2m1_scale_of_amax(int amax_bits, unsigned *scale) {
  const float amax = __int_as_float(amax_bits), quarter = amax * 0.25f;
  scale[0] = amax_bits == 0x7f800000 ? amax_bits : __float_as_uint(tk_quotient(amax, 6.0f, 1.0f / 6.0f));
  scale[1] = __float_as_uint(tk_quotient(1.5f, quarter, tk_reciprocal(quarter)));
}

// From the amax of a group of bfloat16: the byte of sf in e4m3, and the bits of sf * tensor_sf.
__device__ __forceinline__ void tk_nvfp4_scale_of_amax(int amax_bits, float tensor_sf, unsigned *scale) {
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
__device__ __forceinline__ void tk_e2m1_by_sf(const unsigned *x, unsigned sf_bits, unsigned *codes) {
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
      codes[i] = tk_e2m1x8(y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7]);
    }
  }
}
"""
"""Eight elements times a scale to eight e2m1 codes in a uint32; the signatures are above. For kernels that also import
`DIVISIONS_SOURCE` and `e2m1_source`.

Unless stated otherwise, products must be finite and below 7 in magnitude, as they are if the scale was computed from
the amax of the block. Fused multiply-adds by 1/2, 1 and 2 give the three sums the same exponent, so that one
instruction finds the least of them."""

STREAMING_LOADS = r"""
// Sixteen bytes of which the caches need keep no copy, so that they do not drive out what is there; 0 where not valid.
__device__ __forceinline__ void tk_load_once(unsigned *words, const void *address, bool valid) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.b32 p, %5, 0;\n"
      "  mov.b32 %0, 0;\n"
      "  mov.b32 %1, 0;\n"
      "  mov.b32 %2, 0;\n"
      "  mov.b32 %3, 0;\n"
      "  @p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "l"(address), "r"(int(valid)));
}
"""
"""void tk_load_once(uint32 *, pointer, bool)."""
