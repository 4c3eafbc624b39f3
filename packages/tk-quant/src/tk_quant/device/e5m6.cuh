#pragma once
// float32 to e5m6, a float16 with four fewer bits of mantissa. TileLang has no such type.
#include "pairs.cuh"

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

// Eight float32 to eight codes in three words. All must be finite and below 65280, from where on they round to more
// than 65024.
__device__ __forceinline__ void tk_encode_e5m6x8(const float* y, unsigned* words) {
  // Two codes in the upper 24 bits.
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = y[2 * i], second = y[2 * i + 1];
    const __half2 rounded = __floats2half2_rn(tk_round_to_e5m6(second), tk_round_to_e5m6(first));
    const unsigned signs = __byte_perm(__float_as_uint(second), __float_as_uint(first), 0x7632);
    const unsigned halves = tk_select_bits<0x80008000u>(signs, tk_bits(rounded));
    pairs[i] = tk_select_bits<0xfff00000u>(halves, halves << 4);
  }
  words[0] = __byte_perm(pairs[0], pairs[1], 0x3217);
  words[1] = __byte_perm(pairs[1], pairs[2], 0x2176);
  words[2] = __byte_perm(pairs[2], pairs[3], 0x1765);
}
