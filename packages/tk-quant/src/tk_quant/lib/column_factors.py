"""Scale factors of channels in kernels at thread level, whose threads have some rows of a tile as words in registers.

The largest magnitudes of each thread's channels meet in shared memory; then one thread for each channel of a block of
rows makes its scale factor, and what to multiply its elements by.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tk_core.math import ceil_div
from tk_quant.device.magnitude import larger_magnitude_bf16x2, larger_magnitude_f32
from tk_quant.lib.quantize import LIMITS, float_bits

LEAST_AMAX = float_bits(LIMITS["e4m3"][1])


@dataclass(frozen=True)
class ColumnFactors:
    """A tile of `channels`, in `blocks` of rows, each of which `lanes` rows of threads share."""

    dtype: torch.dtype
    """Of the elements: bfloat16, of which a word has two, or float32."""
    channels: int
    blocks: int
    lanes: int
    threads: int
    hidden: int
    round_sf: bool

    def macros(self) -> tuple[Any, Any]:
        """Macros `share(words, parts, lane, first_word)` and `make(parts, factors, sf, sf_row, first_col)`.

        `share` stores the largest magnitudes of a thread's words, uint32 (rows, words), in row `lane` of parts, uint32
        (blocks * lanes, words) in shared memory. After a barrier, all threads call `make`, which stores sf, float32
        from (sf_row, first_col) on, one row for each block, and factors, float32 (blocks, channels) in shared memory.
        """
        import tilelang.language as T

        from tk_quant.lib.division import quick_scale_of_amax

        is_bf16, channels, num_factors = self.dtype is torch.bfloat16, self.channels, self.blocks * self.channels
        larger_magnitude = larger_magnitude_bf16x2 if is_bf16 else larger_magnitude_f32

        @T.macro
        def share(words: T.Buffer, parts: T.Buffer, lane: T.int32, first_word: T.int32) -> None:
            amax = T.alloc_local((words.shape[1],), "uint32")
            for j in T.unroll(words.shape[1]):
                amax[j] = T.uint32(0)
            for i in T.unroll(words.shape[0]):
                for j in T.unroll(words.shape[1]):
                    amax[j] = larger_magnitude(amax[j], words[i, j])
            for j in T.vectorized(words.shape[1]):
                parts[lane, first_word + j] = amax[j]

        @T.macro
        def make(parts: T.Buffer, factors: T.Buffer, sf: T.Buffer, sf_row: T.int32, first_col: T.int32) -> None:
            thread = T.get_thread_binding()
            amax = T.alloc_var("uint32")
            elements = T.view(parts, (parts.shape[0], channels), "uint16" if is_bf16 else "uint32")
            for k in T.unroll(ceil_div(num_factors, self.threads)):
                index = k * self.threads + thread
                block, channel = index // channels, index % channels
                if index < num_factors:
                    amax = T.uint32(0)
                    for i in T.unroll(self.lanes):
                        amax = T.max(amax, T.cast(elements[block * self.lanes + i, channel], "uint32"))
                    bits = T.max(T.reinterpret(amax << T.uint32(16 if is_bf16 else 0), "int32"), LEAST_AMAX)
                    scale, factors[block, channel] = quick_scale_of_amax(bits, "e4m3", self.round_sf)
                    if first_col + channel < self.hidden:
                        sf[sf_row + block, first_col + channel] = scale

        return share, make
