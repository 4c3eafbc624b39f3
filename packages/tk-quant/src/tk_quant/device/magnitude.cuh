#pragma once
// Maxima of magnitudes in which NaN stays; T.reduce_absmax(nan_propagate=True) has them for tiles of 16-bit types,
// TileLang has no max.NaN of float32.

// The larger of a and |x|, both bfloat16 pairs; NaN, of bits 0x7fff, where either is.
__device__ __forceinline__ unsigned tk_larger_magnitude_bf16x2(unsigned a, unsigned x) {
  unsigned larger;
  asm("{\n"
      "  .reg .b32 magnitude;\n"
      "  abs.bf16x2 magnitude, %2;\n"
      "  max.NaN.bf16x2 %0, %1, magnitude;\n"
      "}\n"
      : "=r"(larger)
      : "r"(a), "r"(x));
  return larger;
}

// The same of the bits of float32; NaN has the bits 0x7fffffff.
__device__ __forceinline__ unsigned tk_larger_magnitude_f32(unsigned a, unsigned x) {
  unsigned larger;
  asm("{\n"
      "  .reg .b32 magnitude;\n"
      "  abs.f32 magnitude, %2;\n"
      "  max.NaN.f32 %0, %1, magnitude;\n"
      "}\n"
      : "=r"(larger)
      : "r"(a), "r"(x));
  return larger;
}
