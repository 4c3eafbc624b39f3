#pragma once
// The amax of rows that a warp has in registers, eight at a time, by exchanging halves: fewer shuffles than a
// T.warp_reduce_max of each row.

// The bits of the largest float32 of row lane % 8 in groups of 8 or 32 lanes, from each lane's magnitudes of eight
// rows, float32 or bfloat16 pairs.
template <bool is_bf16, int group_lanes>
__device__ __forceinline__ unsigned tk_row_amax(const unsigned* rows) {
  const auto larger = [](unsigned a, unsigned b) { return is_bf16 ? __vmaxu2(a, b) : max(a, b); };
  unsigned words[8];
#pragma unroll
  for (int i = 0; i < (is_bf16 ? 4 : 8); ++i) {
    const unsigned* two = rows + 2 * i;
    words[i] = is_bf16 ? __vmaxu2(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[0], two[1], 0x7632)) : rows[i];
  }
  // Lanes that differ in a bit share words: the one that has it goes on with the upper half, the other with the lower.
#pragma unroll
  for (int bit = 4; bit > (is_bf16 ? 1 : 0); bit /= 2) {
    const bool is_upper = threadIdx.x & bit;
    const int half = is_bf16 ? bit / 2 : bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const unsigned low = words[i], high = words[half + i];
      const unsigned other = __shfl_xor_sync(~0u, is_upper ? low : high, bit);
      words[i] = larger(is_upper ? high : low, other);
    }
  }
  unsigned amax = is_bf16 ? larger(words[0], __shfl_xor_sync(~0u, words[0], 1)) : words[0];
#pragma unroll
  for (int bit = 8; bit < group_lanes; bit *= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, bit));
  return !is_bf16 ? amax : threadIdx.x & 1 ? amax & 0xffff0000u : amax << 16;
}
