"""SiLU, l / (1 + exp(-l)), as CUDA device functions with the bits of CUDA's accurate expf and of IEEE division.

nvcc compiles a division to 8 instructions and a branch to the special cases, which keeps it from interleaving several
divisions. For a bfloat16 l within ±87 four instructions without a branch are enough. Then d = 1 + exp(-l) is a normal
float32, and

    r = 1 / d, approximately;  q = l * r;  out = q - (d * q - l) * r          both differences fused

is l / d correctly rounded: tests/lib/test_silu.py checks all such l, with exp and r also one unit in the last place
off. The sole exception is d = 2 - 2**-23, where r has to be the float32 nearest to 1 / d. nvcc's own division needs
that as well, and the gpu tier compares all bfloat16 values. The inner bracket is d * q - l and not l - d * q, so that
l = -0 gives -0.

CLAMP_SOURCE is for a SwiGLU that first clamps its inputs and counts those that were clamped.
"""

NEAR_LIMIT = 0x42AE
"""The bits of 87 as bfloat16."""

SILU_SOURCE = r"""
#include <cuda_bf16.h>

__device__ __forceinline__ float tk_silu(float l) { return l / (1.0f + expf(-l)); }

// The same for a bfloat16 within +-87; NaN stays NaN.
__device__ __forceinline__ float tk_silu_near(float l) {
  const float d = 1.0f + expf(-l);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  const float q = l * r;
  return __fmaf_rn(-__fmaf_rn(d, q, -l), r, q);
}

// The larger of a and |x| in both halves, bfloat16; NaN only if both are.
__device__ __forceinline__ unsigned tk_max_magnitude_bf16x2(unsigned a, unsigned x) {
  unsigned larger;
  asm("{\n"
      "  .reg .b32 magnitude;\n"
      "  abs.bf16x2 magnitude, %2;\n"
      "  max.bf16x2 %0, %1, magnitude;\n"
      "}\n"
      : "=r"(larger)
      : "r"(a), "r"(x));
  return larger;
}

// Whether tk_silu_near serves 2 * num_words bfloat16. Each of the two chains takes three operands an instruction.
template <int num_words>
__device__ __forceinline__ bool tk_are_near(const unsigned *words) {
  unsigned most = 0u, least = 0u;
#pragma unroll
  for (int i = 0; i < num_words; ++i) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(words[i]));
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(least), "r"(words[i]));
  }
  // Bits without a sign order like what they stand for.
  return __vmaxu2(__vmaxu2(most, least & 0x7fff7fffu), TK_NEAR_LIMITS) == TK_NEAR_LIMITS;
}

// The larger of a and |x|; NaN, with the bits 0x7fffffff, if either is.
__device__ __forceinline__ float tk_max_magnitude(float a, float x) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(fabsf(x)));
  return larger;
}
""".replace("TK_NEAR_LIMITS", f"0x{NEAR_LIMIT:04x}{NEAR_LIMIT:04x}u")
"""float tk_silu(float), float tk_silu_near(float), bool tk_are_near<n>(const unsigned *), two maxima of magnitudes."""

CLAMP_SOURCE = r"""
// NaN stays NaN.
__device__ __forceinline__ float tk_clamp(float x, float least, float most) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  return x;
}

__device__ __forceinline__ float tk_if_above(float x, float limit, float then, float otherwise) {
  return x > limit ? then : otherwise;
}

// A bfloat16 is above clamp where it is above what this returns twice, clamp cut off to a bfloat16.
__device__ __forceinline__ unsigned tk_cut_off(float clamp) { return __byte_perm(__float_as_uint(clamp), 0u, 0x3232); }

// Whether, of 2 * num_words bfloat16 each, no gate is above clamp and no value's magnitude is.
template <int num_words>
__device__ __forceinline__ bool tk_are_within_clamp(const unsigned *gates, const unsigned *values, float clamp) {
  unsigned most = 0u, least = 0u;
#pragma unroll
  for (int i = 0; i < num_words; ++i) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(gates[i]));
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(most), "r"(values[i]));
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(least), "r"(values[i]));
  }
  const unsigned cut = tk_cut_off(clamp);
  return __vmaxu2(__vmaxu2(most, least & 0x7fff7fffu), cut) == cut;
}

// The same of float32.
template <int num_words>
__device__ __forceinline__ bool tk_are_within_clamp_float(const unsigned *gates, const unsigned *values, float clamp) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < num_words; ++i)
    most = fmaxf(fmaxf(most, __uint_as_float(gates[i])), fabsf(__uint_as_float(values[i])));
  return most <= clamp;
}

// Adds the numbers of gates > clamp, values > clamp and values < -clamp; of pairs of bfloat16, at most 16 words.
template <int num_words>
__device__ __forceinline__ void tk_count_clamped(
    const unsigned *gates, const unsigned *values, float clamp, int *count) {
  const unsigned cut = tk_cut_off(clamp);
  const __nv_bfloat162 most = reinterpret_cast<const __nv_bfloat162 &>(cut), least = __hneg2(most);
  unsigned beyond[3] = {0u, 0u, 0u};
#pragma unroll
  for (int i = 0; i < num_words; ++i) {
    const __nv_bfloat162 gate = reinterpret_cast<const __nv_bfloat162 *>(gates)[i];
    const __nv_bfloat162 value = reinterpret_cast<const __nv_bfloat162 *>(values)[i];
    // A bit of either half for each word.
    beyond[0] |= __hgt2_mask(gate, most) & (0x10001u << i);
    beyond[1] |= __hgt2_mask(value, most) & (0x10001u << i);
    beyond[2] |= __hlt2_mask(value, least) & (0x10001u << i);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) count[i] += __popc(beyond[i]);
}

// The same of float32.
template <int num_words>
__device__ __forceinline__ void tk_count_clamped_float(
    const unsigned *gates, const unsigned *values, float clamp, int *count) {
#pragma unroll
  for (int i = 0; i < num_words; ++i) {
    const float gate = __uint_as_float(gates[i]), value = __uint_as_float(values[i]);
    count[0] += gate > clamp;
    count[1] += value > clamp;
    count[2] += value < -clamp;
  }
}

__device__ __forceinline__ void tk_add_int64(void *sum, int value) {
  atomicAdd(static_cast<unsigned long long *>(sum), static_cast<unsigned long long>(value));
}
"""
"""float tk_clamp, float tk_if_above, bool tk_are_within_clamp<n> and void tk_count_clamped<n>, the last two also as
…_float<n>, and void tk_add_int64."""
