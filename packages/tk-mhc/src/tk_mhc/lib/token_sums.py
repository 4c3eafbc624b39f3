"""Gradients of scale and base: sums over tokens, whose bits depend on the tokens alone.

`NUM_RANGES` thread blocks add up a range of tokens each, whatever the GPU, and the kernel here adds up the ranges,
ascending. All in float64: a sum of n terms of either sign is only about √n large, so rounding a sum
in float32 would add a larger error than its terms have.
"""

from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align

NUM_RANGES = 128
"""Ranges of tokens: about as many as an H200 has SMs."""


@kernel
def sum_ranges_kernel(num_scales: int, num_bases: int, arch: Arch) -> Any:
    """One thread block; a thread adds up a column."""
    import tilelang.language as T

    num_columns = num_scales + num_bases

    @T.prim_func
    def sum_ranges(
        sums: T.Tensor((NUM_RANGES, num_columns), "float64"),
        d_scale: T.Tensor((num_scales,), "float32"),
        d_base: T.Tensor((num_bases,), "float32"),
    ) -> None:
        with T.Kernel(1, threads=align(max(num_columns, 128), 32)):
            ranges = T.alloc_shared((NUM_RANGES, num_columns), "float64")
            totals = T.alloc_fragment((num_columns,), "float64")
            T.copy(sums, ranges)
            T.clear(totals)
            for r in T.serial(NUM_RANGES):
                for c in T.Parallel(num_columns):
                    totals[c] += ranges[r, c]
            for c in T.Parallel(num_columns):
                if c < num_scales:
                    d_scale[c] = T.cast(totals[c], "float32")
                else:
                    d_base[c - num_scales] = T.cast(totals[c], "float32")

    return sum_ranges
