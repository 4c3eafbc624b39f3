#pragma once
// IEEE divisions of float32 in a few instructions without a branch; division.py says why they are right. TileLang's
// T.fast_rcp is the approximation that they begin with.

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

// s = 1 / (1 + exp(-l)) and q = l / (1 + exp(-l)), for l within +-87 or NaN.
__device__ __forceinline__ void tk_sigmoid_near(float l, float* s, float* q) {
  const float d = 1.0f + expf(-l);
  *s = tk_reciprocal(d);
  *q = tk_quotient(l, d, *s);
}

// The same for any l.
__device__ __forceinline__ void tk_sigmoid(float l, float* s, float* q) {
  const float d = 1.0f + expf(-l), scaled = d * 0x1p-64f;
  const float r = tk_reciprocal(scaled);
  // Subnormal results are one step off where r was rounded before: 1 - d * s tells.
  const float rest = __fmaf_rn(-scaled, r * 0x1p-64f * 0x1p64f, 1.0f), half_step = scaled * 0x1p-86f;
  const float step = d > 0x1p126f ? (rest > half_step ? 0x1p-149f : rest < -half_step ? -0x1p-149f : 0.0f) : 0.0f;
  *s = r * 0x1p-64f + step;
  *q = tk_quotient(l, scaled, r) * 0x1p-64f;
  if (d == 1.0f) *s = 1.0f, *q = l;
  if (d == __int_as_float(0x7f800000)) *s = 0.0f, *q = l * 0.0f;
}

// From amax, at least 1e-4, the bits of a group's sf and of s, what its elements are multiplied by; NaN and infinity
// come to sf, and s is NaN and 0 then.
template <bool round_sf>
__device__ __forceinline__ void tk_scale_of_amax(int amax_bits, unsigned* sf, unsigned* s) {
  const float amax = __int_as_float(amax_bits);
  const bool is_infinite = amax_bits == 0x7f800000;
  const unsigned quotient = is_infinite ? amax_bits : __float_as_uint(tk_quotient(amax, 448.0f, 1.0f / 448.0f));
  if (round_sf) {
    // Exponents of a power of two and of its reciprocal sum up to 254.
    const unsigned power = (quotient + 0x007fffffu) & 0x7f800000u;
    *sf = amax_bits < 0x7f800000 ? power : quotient;
    *s = amax_bits < 0x7f800000 ? 0x7f000000u - power : is_infinite ? 0u : quotient;
  } else {
    // 1 / amax may be subnormal.
    const float scaled = amax * 0x1p-64f;
    *sf = quotient;
    *s = is_infinite ? 0u : __float_as_uint(tk_quotient(448.0f * 0x1p-64f, scaled, tk_reciprocal(scaled)));
  }
}
