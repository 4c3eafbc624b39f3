#pragma once
// IEEE divisions of float32 in a few instructions without a branch; lib/division.py says why they are right.

// 1 / d correctly rounded, for d from 2^-126 to 2^126.
__device__ __forceinline__ float tk_reciprocal(float d) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
}

// The quotient of l and d, given s = 1 / d correctly rounded.
__device__ __forceinline__ float tk_quotient(float l, float d, float s) {
  const float q = l * s;
  return __fmaf_rn(-__fmaf_rn(d, q, -l), s, q);
}
