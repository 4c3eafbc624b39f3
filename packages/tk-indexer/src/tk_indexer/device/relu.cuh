#pragma once
// A maximum that keeps NaN, which fmaxf drops.

// max(x, 0); NaN of NaN.
__device__ __forceinline__ float tk_relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}
