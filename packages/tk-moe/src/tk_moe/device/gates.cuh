#pragma once
// What TileLang has no expression for in gates: approximations of one instruction, and a predicated step.

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

// The lane whose best key is `top` moves on to its next. Multiplications by 1 (the grid has one row) take another pipe
// than selections would, which is the busy one.
__device__ __forceinline__ void tk_take_best(int* best, int top) {
  asm("{\n.reg .pred p;\nsetp.eq.s32 p, %0, %4;\n"
      "@p mad.lo.s32 %0, %1, %5, 0;\n@p mad.lo.s32 %1, %2, %5, 0;\n@p mad.lo.s32 %2, %3, %5, 0;\n"
      "@p mov.b32 %3, 0x80000000;\n}"
      : "+r"(best[0]), "+r"(best[1]), "+r"(best[2]), "+r"(best[3])
      : "r"(top), "r"(gridDim.y));
}
