#pragma once
// Approximations of one instruction; TileLang has no ex2.approx.ftz.

// T.fast_rcp is volatile, which keeps nvcc from moving it.
__device__ __forceinline__ float tk_fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The error is at most 2e-7, and 4e-6 of the value.
__device__ __forceinline__ float tk_fast_sigmoid(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
  return tk_fast_reciprocal(1.0f + power);
}
