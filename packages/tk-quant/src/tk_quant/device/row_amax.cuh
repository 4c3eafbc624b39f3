#pragma once
// The amax of rows that a warp has in registers, eight at a time, by exchanging halves: fewer shuffles than a
// T.warp_reduce_max of each row.

// The larger of float32 magnitudes, or of both halves of bfloat16 pairs.
template <bool is_bf16>
__device__ __forceinline__ unsigned tk_larger(unsigned a, unsigned b) {
  return is_bf16 ? __vmaxu2(a, b) : max(a, b);
}

// Lanes that differ in `bit` share words: the one that has it goes on with the upper half, the other with the lower.
template <bool is_bf16, int num_words, int bit>
__device__ __forceinline__ void tk_share_words(unsigned* words) {
  const bool is_upper = threadIdx.x & bit;
#pragma unroll
  for (int i = 0; i < num_words / 2; ++i) {
    const unsigned low = words[i], high = words[num_words / 2 + i];
    const unsigned other = __shfl_xor_sync(0xffffffffu, is_upper ? low : high, bit);
    words[i] = tk_larger<is_bf16>(is_upper ? high : low, other);
  }
}

// The bits of the largest float32 of row lane % 8 in groups of 8 or 32 lanes, from each lane's magnitudes of eight
// rows, float32 or bfloat16 pairs.
template <bool is_bf16, int group_lanes>
__device__ __forceinline__ unsigned tk_row_amax(const unsigned* rows) {
  unsigned words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = rows[i];
  if (is_bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = __byte_perm(rows[2 * i], rows[2 * i + 1], 0x5410);
      words[i] = __vmaxu2(low, __byte_perm(rows[2 * i], rows[2 * i + 1], 0x7632));
    }
  } else {
    tk_share_words<is_bf16, 8, 4>(words);
  }
  tk_share_words<is_bf16, 4, is_bf16 ? 4 : 2>(words);
  tk_share_words<is_bf16, 2, is_bf16 ? 2 : 1>(words);
  unsigned amax = words[0];
  if (is_bf16) amax = __vmaxu2(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
#pragma unroll
  for (int bit = 8; bit < group_lanes; bit *= 2)
    amax = tk_larger<is_bf16>(amax, __shfl_xor_sync(0xffffffffu, amax, bit));
  if (is_bf16) amax = threadIdx.x & 1 ? amax & 0xffff0000u : amax << 16;
  return amax;
}
