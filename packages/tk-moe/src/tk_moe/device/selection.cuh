#pragma once
// One step of a warp's selection, where nvcc chooses instructions that compete with the rest of the loop.

// The lane whose best key is `top` moves on to its next. Multiplications by 1 (the grid has one row) take another pipe
// than selections would, which is the busy one.
__device__ __forceinline__ void tk_take_best(int* best, int top) {
  asm("{\n.reg .pred p;\nsetp.eq.s32 p, %0, %4;\n"
      "@p mad.lo.s32 %0, %1, %5, 0;\n@p mad.lo.s32 %1, %2, %5, 0;\n@p mad.lo.s32 %2, %3, %5, 0;\n"
      "@p mov.b32 %3, 0x80000000;\n}"
      : "+r"(best[0]), "+r"(best[1]), "+r"(best[2]), "+r"(best[3])
      : "r"(top), "r"(gridDim.y));
}
