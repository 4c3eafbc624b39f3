"""engram_sinkhorn_step_reduce: the partial sums of `engram_sinkhorn_step`, added up.

    col_sumsq[d] = Σ_p col_sumsq_partial[p, d]

in float32, beginning with 0, p ascending, one addition a partial: every bit is defined.
Source: the optimizer step for embedding tables of TileKernels 2.1.0, `engram_sinkhorn_step_reduce`.

A thread has one column, and 66 partials of it in flight.
"""

from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES
from tk_engram.lib.scaled_rows import DTYPES, MAX_WIDTH

_COLUMNS = 32
"""Columns of a thread block, few so that narrow matrices reach many SMs. Untuned."""
_IN_FLIGHT = 66
"""Partials whose loads are in flight together: a sixth of the 396 that the step makes. Untuned."""


@kernel(pass_configs=DIRECT_COPIES)
def _engram_sinkhorn_step_reduce_kernel(arch: Arch) -> Any:
    import tilelang.language as T

    num_partials, width = T.dynamic("num_partials"), T.dynamic("width")

    @T.prim_func
    def engram_sinkhorn_step_reduce(
        col_sumsq_partial: T.Tensor((num_partials, width), "float32"),
        col_sumsq: T.Tensor((width,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(width, _COLUMNS), threads=_COLUMNS) as block:
            column = block * _COLUMNS
            partials = T.alloc_fragment((_IN_FLIGHT, _COLUMNS), "float32")
            sums = T.alloc_fragment((_COLUMNS,), "float32")
            T.annotate_layout({partials: T.Fragment(partials.shape, forward_fn=lambda p, d: (d, p))})
            T.clear(sums)
            for chunk in T.serial(T.ceildiv(num_partials, _IN_FLIGHT)):
                first = chunk * _IN_FLIGHT
                # Beyond the last partial come zeros, which change no sum that began with 0.
                T.copy(col_sumsq_partial[first : first + _IN_FLIGHT, column : column + _COLUMNS], partials)
                for p in T.unroll(_IN_FLIGHT):
                    for d in T.Parallel(_COLUMNS):
                        sums[d] = sums[d] + partials[p, d]
            T.copy(sums, col_sumsq[column : column + _COLUMNS])

    return engram_sinkhorn_step_reduce


@op(
    "tk_engram::engram_sinkhorn_step_reduce_out",
    mutates=("col_sumsq",),
    reference="engram_sinkhorn_step_reduce",
)
def _engram_sinkhorn_step_reduce_out(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    if col_sumsq_partial.shape[0] == 0:
        col_sumsq.zero_()
        return
    _engram_sinkhorn_step_reduce_kernel(get_arch(col_sumsq.device))(col_sumsq_partial, col_sumsq)


@replayable
def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Add up partial sums of columns: col_sumsq[d] = Σ_p col_sumsq_partial[p, d], p ascending.

    In float32, beginning with 0; every bit equals the reference's. The caller makes the column scales of the sums.
    Source: TileKernels 2.1.0's function of this name.

    Args:
        col_sumsq_partial: float32 (P, D), contiguous, as `engram_sinkhorn_step` returned it; any P, D is 1 to 16384.
        col_sumsq: float32 (D), contiguous, to be written, of no other argument's memory.

    Raises:
        TypeError: an argument is not a float32 tensor.
        ValueError: a shape, stride or device does not fit, or D is out of range.
    """
    _, width = check.tensor("col_sumsq_partial", col_sumsq_partial, DTYPES, ("P", "D"))
    check.in_range("D (columns of col_sumsq_partial)", width, 1, MAX_WIDTH)
    check.tensor("col_sumsq", col_sumsq, DTYPES, (width,), device=col_sumsq_partial.device)
    _engram_sinkhorn_step_reduce_out(col_sumsq_partial, col_sumsq)
