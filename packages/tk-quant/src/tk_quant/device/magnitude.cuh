#pragma once
// Maxima of magnitudes in which NaN stays; T.reduce_absmax(nan_propagate=True) has them for tiles of 16-bit types,
// TileLang has no max.NaN of float32.

// The bits of the larger of a and |x|: of float32, or of both halves of a bfloat16 pair. NaN, of bits 0x7fff or
// 0x7fffffff, where either is.
#define TK_LARGER_MAGNITUDE(type)                                                                    \
  __device__ __forceinline__ unsigned tk_larger_magnitude_##type(unsigned a, unsigned x) {           \
    unsigned larger;                                                                                 \
    asm("{ .reg .b32 magnitude; abs." #type " magnitude, %2; max.NaN." #type " %0, %1, magnitude; }" \
        : "=r"(larger)                                                                               \
        : "r"(a), "r"(x));                                                                           \
    return larger;                                                                                   \
  }
TK_LARGER_MAGNITUDE(bf16x2)
TK_LARGER_MAGNITUDE(f32)
