"""A kernel that adds up the projection's splits, ascending, and if wanted makes mixes of the sums."""

from typing import Any

from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.tiles import DIRECT_COPIES

_BLOCK_TOKENS = 2
"""mhc_pre_norm_fn, H 7168, on an H200, 64 and 4096 tokens: 8.0 and 79 µs with four, 7.7 and 81 with two."""


@kernel(pass_configs=DIRECT_COPIES)
def _sum_splits_kernel(num_rows: int, width: int | None, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_mhc.lib.partials import sum_partials, threads_per_token

    # All splits of a model's call; fewer for m = 8, where these would take all registers.
    splits_in_flight = 64 if num_rows <= 24 else 16
    num_tokens, num_partials = T.dynamic("num_tokens"), T.dynamic("num_partials")

    @T.prim_func
    def sum_splits(
        mul: T.Tensor((num_partials, num_tokens, num_rows), "float32"),
        sqrsum: T.Tensor((num_partials, num_tokens), "float32"),
        sums: T.Tensor((num_tokens, num_rows), "float32"),
        square_sums: T.Tensor((num_tokens,), "float32"),
        eps: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _BLOCK_TOKENS), threads=128) as block:
            first_token = block * _BLOCK_TOKENS
            summed = T.alloc_fragment((_BLOCK_TOKENS, num_rows), "float32")
            squares = T.alloc_shared((_BLOCK_TOKENS,), "float32")
            T.annotate_layout({summed: threads_per_token(_BLOCK_TOKENS, num_rows, 32)})
            sum_partials(mul, sqrsum, first_token, width, eps, summed, squares, splits_in_flight)
            T.copy(summed, sums[first_token : first_token + _BLOCK_TOKENS, :])
            T.copy(squares, square_sums[first_token : first_token + _BLOCK_TOKENS])

    return sum_splits


def launch_sum_splits(
    mul: Tensor, sqrsum: Tensor, sums: Tensor, square_sums: Tensor, width: int | None = None, eps: float = 0.0
) -> None:
    """Add up mul (splits, T, rows) and sqrsum (splits, T), splits ascending, into sums (T, rows), square_sums (T,).

    With `width`, the number of channels, square_sums becomes rstd = rsqrt(square sum / width + eps), and sums are
    multiplied by it.
    """
    sum_splits = _sum_splits_kernel(mul.shape[2], width, get_arch(mul.device))
    sum_splits(mul, sqrsum, sums, square_sums, eps)
