#pragma once
// Scores of logits, rounded as torch rounds them on a GPU. TileLang has neither rsqrt.approx nor ex2.approx, nor a way
// to say that a value is finite.

__device__ __forceinline__ float tk_score_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float tk_score_sqrtsoftplus(float x) { return sqrtf(x > 20.0f ? x : log1pf(expf(x))); }

// The same, bit for bit, for n logits at a time. Within +-64 no special case occurs in division and root: what nvcc
// makes of them is written out without its branches, so that the n chains of instructions overlap.
template <int n>
__device__ __forceinline__ bool tk_all_near(const float* x) {
  bool near = true;
#pragma unroll
  for (int i = 0; i < n; ++i) near &= fabsf(x[i]) <= 64.0f;
  return near;
}

template <int n>
__device__ __forceinline__ void tk_scores_sigmoid(const float* x, float* scores) {
  if (tk_all_near<n>(x)) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float d = 1.0f + expf(-x[i]);
      float r;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
      scores[i] = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) scores[i] = tk_score_sigmoid(x[i]);
  }
}

template <int n>
__device__ __forceinline__ void tk_scores_sqrtsoftplus(const float* x, float* scores) {
  if (tk_all_near<n>(x)) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float e = expf(fminf(x[i], 20.0f));
      __builtin_assume(__float_as_uint(e) < 0x7f800000u);
      const float l = x[i] > 20.0f ? x[i] : log1pf(e);
      float r;
      asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(l));
      const float root = l * r;
      scores[i] = __fmaf_rn(__fmaf_rn(-root, root, l), 0.5f * r, root);
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) scores[i] = tk_score_sqrtsoftplus(x[i]);
  }
}

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
