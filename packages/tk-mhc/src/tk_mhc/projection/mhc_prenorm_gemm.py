"""mhc_prenorm_gemm: each split's partial sums of the projection, for kernels that add them up themselves.

    mul[s, t, j]  = Σ_c x[t, c] · fn[j, c]       c in split s
    sqrsum[s, t]  = Σ_c x[t, c]²

lib/projection.py has the kernel, its arithmetic and the order of the sums. With several rms groups each has a
product of its own. Source: arXiv 2512.24880; the partial products are those of DeepGEMM's tf32_hc_prenorm_gemm.
"""

from torch import Tensor

from tk_core import check
from tk_core.op import launching, new, op
from tk_mhc.lib.projection import launch_projection
from tk_mhc.lib.projection_config import CHANNEL_BLOCK, Projection
from tk_mhc.lib.tokens import MAX_HIDDEN, MHC_MULTS, check_fn, check_streams

MAX_SPLITS = max(MHC_MULTS) * MAX_HIDDEN // CHANNEL_BLOCK
"""As many as the widest token has blocks of channels; further splits would be zeros."""


@op
def mhc_prenorm_gemm(residual: Tensor, fn: Tensor, n_splits: int, *, num_rms_groups: int = 1) -> tuple[Tensor, Tensor]:
    """Partial sums, split by split, of the product of a token's streams with fn's rows and of their squares.

    The m·H channels of a token make `num_rms_groups` groups of B blocks of 64 channels each; split s has blocks
    ⌊s·B/n_splits⌋ to ⌊(s+1)·B/n_splits⌋ - 1 of each group, and is zeros if there are none. Weights count with 16 bits
    of mantissa (two bfloat16), sums are float32. Source: arXiv 2512.24880, as DeepGEMM's tf32_hc_prenorm_gemm has it.

    Args:
        residual: bfloat16 (..., m, H), contiguous; m is 2, 4 or 8, H a multiple of 64, 64 to 8192.
        fn: float32 (m·(m+2), m·H), (2m, m·H) without comb, or (m, m·H) for the head; contiguous; already times
            the norm's weight.
        n_splits: 1 to 1024.
        num_rms_groups: groups of channels, each a multiple of 64 channels.

    Returns:
        mul: float32 (n_splits, T, rows of fn), T the product of the leading dimensions; with several groups
            (n_splits, T, num_rms_groups, rows of fn).
        sqrsum: float32 (n_splits, T), with several groups (n_splits, T, num_rms_groups).

    Raises:
        TypeError: a tensor or number has another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    streams = check_streams("residual", residual)
    num_rows, width = check_fn("fn", fn, streams), streams.width
    check.in_range("n_splits", n_splits, 1, MAX_SPLITS)
    check.in_range("num_rms_groups", num_rms_groups, 1, width // CHANNEL_BLOCK)
    check.require(
        width % (num_rms_groups * CHANNEL_BLOCK) == 0,
        "num_rms_groups",
        "groups of a multiple of {} of {} channels",
        num_rms_groups,
        CHANNEL_BLOCK,
        width,
    )
    x = residual.view(-1, width)
    groups = (num_rms_groups,) if num_rms_groups > 1 else ()
    mul = new(fn.new_empty, (n_splits, x.shape[0], *groups, num_rows))
    sqrsum = new(fn.new_empty, (n_splits, x.shape[0], *groups))
    if launching(mul, sqrsum):
        if n_splits > width // num_rms_groups // CHANNEL_BLOCK:  # No thread block writes the empty splits.
            mul.zero_()
            sqrsum.zero_()
        sums = mul.view(n_splits, x.shape[0], -1), sqrsum.view(n_splits, -1)
        launch_projection("partials", x, Projection(fn, None, n_splits), *sums)
    return mul, sqrsum
