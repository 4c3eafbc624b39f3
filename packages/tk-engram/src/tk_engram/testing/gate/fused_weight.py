"""Named cases of fused_weight."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.gate.fused_weight import fused_weight

Make = Callable[[str], dict[str, Any]]


def make(
    mhc_mult: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    embed_dtype: torch.dtype | None = None,
    first_element: int = 0,
) -> Make:
    """Normal weights, which begin at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        def weight(dtype: torch.dtype) -> torch.Tensor:
            storage = torch.empty(first_element + mhc_mult * hidden, dtype=dtype, device=device)
            return storage[first_element:].view(mhc_mult, hidden).normal_()

        return {"weight_hidden": weight(dtype), "weight_embed": weight(embed_dtype or dtype)}

    return build


SPEC = OpSpec(
    op=fused_weight,
    reference=reference.fused_weight,
    cases=(
        Case("bf16-m4-h64", make(4, 64), small=True, modes=True),
        Case("fp32-m1-h1088", make(1, 1088, torch.float32), small=True, modes=True),
        Case("fp32-bf16-m2-h576", make(2, 576, torch.float32, torch.bfloat16), small=True, compile=True),
        Case("bf16-fp32-m3-h192", make(3, 192, torch.bfloat16, torch.float32), small=True),
        Case("bf16-m8-h128-unaligned", make(8, 128, first_element=1), small=True),
        *(Case(f"bf16-m4-h{hidden}", make(4, hidden)) for hidden in (576, 2560, 8192)),
        Case("fp32-m8-h16384", make(8, 16384, torch.float32)),
        Case("bf16-m4-h7168-bench", make(4, 7168), bench=True, model_shape=True, gpu=False),
        Case("fp32-m4-h7168-bench", make(4, 7168, torch.float32), bench=True, gpu=False),
        *(Case(f"bf16-m4-h{hidden}-bench", make(4, hidden), bench=True, gpu=False) for hidden in (2048, 4096)),
    ),
)
