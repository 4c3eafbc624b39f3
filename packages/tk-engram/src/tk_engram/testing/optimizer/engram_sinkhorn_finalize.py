"""Named cases of engram_sinkhorn_finalize."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.optimizer.engram_sinkhorn_finalize import engram_sinkhorn_finalize
from tk_engram.testing.optimizer.rows import compare, make_rows

Make = Callable[[str], dict[str, Any]]


def make(num_rows: int, width: int, *, out: bool = False, first_element: int = 0) -> Make:
    """Arguments of the op, alpha √D; `out` is filled with NaN."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_rows(num_rows, width, device, first_element=first_element)
        written = torch.full_like(inputs["matrix"], torch.nan) if out else None
        return {**inputs, "alpha": width**0.5, "out": written}

    return build


SPEC = OpSpec(
    op=engram_sinkhorn_finalize,
    reference=reference.engram_sinkhorn_finalize,
    compare=compare,
    mutates=("out",),
    cases=(
        # A partial tile of rows, several tiles; columns in vectors of four, two and one; one column.
        Case("r5-d64", make(5, 64), small=True, modes=True),
        Case("r67-d8-out", make(67, 8, out=True), small=True, modes=True),
        Case("r40-d100", make(40, 100), small=True),
        Case("r9-d262-out", make(9, 262, out=True), small=True, compile=True),
        Case("r9-d67", make(9, 67), small=True),
        Case("r400-d1", make(400, 1), small=True),
        Case("r0-d64-out", make(0, 64, out=True), small=True),
        Case("r3-d640-unaligned", make(3, 640, first_element=1), small=True),
        *(Case(f"r4001-d{width}", make(4001, width)) for width in (32, 127, 512, 576, 1280, 2560, 4096)),
        Case("r1000-d8192", make(1000, 8192)),
        Case("r1000-d16384", make(1000, 16384)),
        Case("r100003-d256", make(100003, 256)),
        Case("r1048576-d256-bench", make(1048576, 256), bench=True, model_shape=True, gpu=False),
        Case("r65536-d256-bench", make(65536, 256), bench=True, gpu=False),
        Case("r262144-d1024-bench", make(262144, 1024), bench=True, gpu=False),
        Case("r65536-d4096-bench", make(65536, 4096), bench=True, gpu=False),
    ),
)
