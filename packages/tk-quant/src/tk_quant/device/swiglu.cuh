#pragma once
// SiLU without a branch and clamps of several elements at once; swiglu.py says why the division is right. TileLang has
// neither maxima of bfloat16 pairs nor max.NaN of float32.
#include <cuda_bf16.h>

#include "division.cuh"

__device__ __forceinline__ float tk_silu(float l) { return l / (1.0f + expf(-l)); }

// The same for a bfloat16 within +-87 or NaN.
__device__ __forceinline__ float tk_silu_near(float l) {
  const float d = 1.0f + expf(-l);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return tk_quotient(l, d, r);
}

// x, at least `least` and at most `most`; NaN stays NaN.
__device__ __forceinline__ float tk_clamp(float x, float least, float most) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  return x;
}

// Whether no bfloat16 of num_words has a magnitude above the limit, and none of num_gates words is above it; NaN
// passes, and `limits` is the limit twice.
template <int num_gates, int num_words>
__device__ __forceinline__ bool tk_are_within(const unsigned* gates, const unsigned* words, unsigned limits) {
  unsigned most = 0u, least = 0u;
#pragma unroll
  for (int i = 0; i < num_words; ++i) {
    // Either chain takes three operands an instruction.
    if (i < num_gates) asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(gates[i]));
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(words[i]));
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(least), "r"(words[i]));
  }
  // The bits of positive numbers are in order.
  return __vmaxu2(__vmaxu2(most, least & 0x7fff7fffu), limits) == limits;
}

// Adds the numbers of gates > limit, values > limit and values < -limit, of at most 16 words; `limits` is it twice.
template <int num_words>
__device__ __forceinline__ void tk_count_beyond(const unsigned* gates, const unsigned* values, unsigned limits,
                                                int* count) {
  const __nv_bfloat162 most = reinterpret_cast<const __nv_bfloat162&>(limits), least = __hneg2(most);
  unsigned beyond[3] = {0u, 0u, 0u};
#pragma unroll
  for (int i = 0; i < num_words; ++i) {
    const __nv_bfloat162 gate = reinterpret_cast<const __nv_bfloat162*>(gates)[i];
    const __nv_bfloat162 value = reinterpret_cast<const __nv_bfloat162*>(values)[i];
    // A bit of either half for each word.
    beyond[0] |= __hgt2_mask(gate, most) & (0x10001u << i);
    beyond[1] |= __hgt2_mask(value, most) & (0x10001u << i);
    beyond[2] |= __hlt2_mask(value, least) & (0x10001u << i);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) count[i] += __popc(beyond[i]);
}
