#pragma once
// Barriers asked without waiting.

// Whether a barrier's phase of this parity is over.
template <class Barrier>
__device__ __forceinline__ int tk_is_over(const Barrier& barrier, int parity) {
  return barrier.try_wait(parity);
}
