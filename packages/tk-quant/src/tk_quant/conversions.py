"""Conversions that TileLang has no expression for, as CUDA device functions: kernels take one in with T.import_source.

e2m1 (FP4): value 0, .5, 1, 1.5, 2, 3, 4, 6 is code 0 to 7. Below 2 the codes step by .5, then by 1, from 4 by 2; hence,
rounding to the nearest integer with ties to even,

    code(a) = min(round(2 * a), round(a) + 2, round(a / 2) + 4)          for 0 <= a <= 6.

Adding a power of two whose last place is the step does such a rounding, and leaves the integer in the low bits of the
sum: three additions and two minima, no branch. In bfloat16 one instruction does two elements, and if the scale is a
power of two then the scaled bfloat16 is exact.
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

E2M1_FROM_BF16 = r"""
#include <cuda_bf16.h>

// Two elements of x * scale: magnitude codes in bytes 0 and 2 of `codes`, signs on top of the halves of `scaled`.
__device__ __forceinline__ void tk_e2m1x2_bf16(unsigned x, unsigned scale, unsigned &codes, unsigned &scaled) {
  union Pair {
    unsigned bits;
    __nv_bfloat162 value;
    __device__ Pair(unsigned bits) : bits(bits) {}
    __device__ Pair(__nv_bfloat162 value) : value(value) {}
  };
  const Pair y = __hmul2(Pair(x).value, Pair(scale).value);
  const Pair a = __hmin2(__habs2(y.value), Pair(0x40c040c0u).value);  // 6
  const Pair halves = __hadd2(a.value, Pair(0x42804280u).value);      // 64
  const Pair ones = __hadd2(a.value, Pair(0x43024302u).value);        // 128 + 2
  const Pair twos = __hadd2(a.value, Pair(0x43844384u).value);        // 256 + 8
  codes = __viaddmin_s16x2(halves.bits, 0x00800080u, ones.bits);
  codes = __viaddmin_s16x2(twos.bits, 0xff80ff80u, codes);
  scaled = y.bits;
}

// Eight bfloat16 times a power of two (twice in `scale`) to eight e2m1 codes, the first in the lowest nibble;
// saturates, NaN becomes +6.
__device__ __forceinline__ unsigned tk_e2m1x8_bf16(unsigned x0, unsigned x1, unsigned x2, unsigned x3, unsigned scale) {
  unsigned c0, c1, c2, c3, y0, y1, y2, y3;
  tk_e2m1x2_bf16(x0, scale, c0, y0);
  tk_e2m1x2_bf16(x1, scale, c1, y1);
  tk_e2m1x2_bf16(x2, scale, c2, y2);
  tk_e2m1x2_bf16(x3, scale, c3, y3);
  const unsigned c01 = __byte_perm(c0, c1, 0x6420), c23 = __byte_perm(c2, c3, 0x6420);
  const unsigned y01 = __byte_perm(y0, y1, 0x7531), y23 = __byte_perm(y2, y3, 0x7531);
  const unsigned even = __byte_perm(c01, c23, 0x6420), odd = __byte_perm(c01, c23, 0x7531);
  const unsigned even_signs = __byte_perm(y01, y23, 0x6420), odd_signs = __byte_perm(y01, y23, 0x7531);
  return even | ((even_signs >> 4) & 0x08080808u) | (odd << 4) | (odd_signs & 0x80808080u);
}
"""
"""uint32 tk_e2m1x8_bf16(four uint32 of bfloat16 pairs, uint32 with the scale twice)."""


def e2m1_source(arch: Arch) -> str:
    """CUDA source of `uint32 tk_e2m1x8(eight float32)`: eight e2m1 codes, the first in the lowest nibble."""
    return _E2M1_BY_INSTRUCTION if arch.has_fp4_convert else _E2M1_BY_ARITHMETIC
