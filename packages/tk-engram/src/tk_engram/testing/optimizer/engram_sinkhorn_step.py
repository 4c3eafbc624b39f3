"""Named cases of engram_sinkhorn_step."""

from collections.abc import Callable
from typing import Any

from tk_core.testing import Case, OpSpec
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.optimizer.engram_sinkhorn_step import engram_sinkhorn_step
from tk_engram.testing.optimizer.rows import compare, make_rows

Make = Callable[[str], dict[str, Any]]


def make(num_rows: int, width: int, *, first_element: int = 0) -> Make:
    """Arguments of the op."""
    return lambda device: make_rows(num_rows, width, device, first_element=first_element)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and the rows' scales twice: they are read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["row_scale"])


SPEC = OpSpec(
    op=engram_sinkhorn_step,
    reference=reference.engram_sinkhorn_step,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("row_scale",),
    cases=(
        # At most one row per range, and several; a shorter last range; columns in vectors of 4, 2 and 1; one column.
        Case("r5-d64", make(5, 64), small=True, modes=True),
        Case("r797-d8", make(797, 8), small=True, modes=True),
        Case("r40-d100", make(40, 100), small=True),
        Case("r9-d262", make(9, 262), small=True),
        Case("r9-d67", make(9, 67), small=True),
        Case("r400-d1", make(400, 1), small=True),
        Case("r0-d64", make(0, 64), small=True),
        Case("r3-d640-unaligned", make(3, 640, first_element=1), small=True),
        *(Case(f"r4001-d{width}", make(4001, width)) for width in (32, 127, 512, 576, 1280, 2560, 4096)),
        Case("r1000-d8192", make(1000, 8192)),
        Case("r1000-d16384", make(1000, 16384), compile=True),
        Case("r100003-d256", make(100003, 256)),
        Case("r1048576-d256-bench", make(1048576, 256), bench=True, model_shape=True, gpu=False, compile=True),
        Case("r65536-d256-bench", make(65536, 256), bench=True, gpu=False),
        Case("r262144-d1024-bench", make(262144, 1024), bench=True, gpu=False),
        Case("r65536-d4096-bench", make(65536, 4096), bench=True, gpu=False),
    ),
)
