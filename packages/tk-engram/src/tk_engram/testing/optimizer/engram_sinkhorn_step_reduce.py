"""Named cases of engram_sinkhorn_step_reduce."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.optimizer.engram_sinkhorn_step_reduce import engram_sinkhorn_step_reduce

Make = Callable[[str], dict[str, Any]]


def make(num_partials: int, width: int, *, first_element: int = 0) -> Make:
    """Sums of squares from 0 to 1; the output is filled with NaN.

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        partials = torch.rand(first_element + num_partials * width, device=device)
        sums = torch.full((first_element + width,), torch.nan, device=device)
        return {
            "col_sumsq_partial": partials[first_element:].view(num_partials, width),
            "col_sumsq": sums[first_element:],
        }

    return build


SPEC = OpSpec(
    op=engram_sinkhorn_step_reduce,
    reference=reference.engram_sinkhorn_step_reduce,
    mutates=("col_sumsq",),
    cases=(
        # Fewer partials than are in flight, and more; columns of one thread block, and some of a second.
        Case("p3-d32", make(3, 32), small=True, modes=True),
        Case("p67-d33", make(67, 33), small=True, modes=True),
        Case("p133-d1", make(133, 1), small=True),
        Case("p0-d40", make(0, 40), small=True),
        Case("p5-d31-unaligned", make(5, 31, first_element=1), small=True),
        Case("p396-d576", make(396, 576)),
        Case("p1001-d8192", make(1001, 8192)),
        Case("p396-d16384", make(396, 16384)),
        Case("p396-d256-bench", make(396, 256), bench=True, model_shape=True, gpu=False, compile=True),
        Case("p396-d1024-bench", make(396, 1024), bench=True, gpu=False),
        Case("p396-d4096-bench", make(396, 4096), bench=True, gpu=False),
    ),
)
