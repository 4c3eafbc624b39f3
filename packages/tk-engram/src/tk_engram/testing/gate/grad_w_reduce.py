"""Named cases of grad_w_reduce."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.gate.grad_w_reduce import grad_w_reduce
from tk_engram.testing.gate.compare import assert_calc_diff

Make = Callable[[str], dict[str, Any]]


def make(
    blocks: int,
    mhc_mult: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    embed_dtype: torch.dtype | None = None,
    first_element: int = 0,
) -> Make:
    """Normal values, also in the gradients. Tensors begin at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = torch.Size(shape)
            storage = torch.empty(first_element + size.numel(), dtype=dtype, device=device)
            return storage[first_element:].view(size).normal_()

        shape = (mhc_mult, hidden)
        return {
            "grad_w_partial": tensor((blocks, *shape), torch.float32),
            "weight_hidden": tensor(shape, dtype),
            "weight_embed": tensor(shape, embed_dtype or dtype),
            "grad_weight_hidden": tensor(shape, torch.float32),
            "grad_weight_embed": tensor(shape, torch.float32),
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """calc_diff of both gradients below 1e-10; the op returns None."""
    assert actual[0] is None
    assert expected[0] is None
    for name, got, want in zip(("grad_weight_hidden", "grad_weight_embed"), actual[1:], expected[1:], strict=True):
        assert_calc_diff(got, want, 1e-10, name)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and the two gradients twice: they are read and written."""
    return distinct_bytes(inputs) + distinct_bytes((inputs["grad_weight_hidden"], inputs["grad_weight_embed"]))


SPEC = OpSpec(
    op=grad_w_reduce,
    reference=reference.grad_w_reduce,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("grad_weight_hidden", "grad_weight_embed"),
    cases=(
        # One round of parts and several, the last one full or partial; zero parts.
        Case("b33-bf16-m2-h64", make(33, 2, 64), small=True, modes=True),
        Case("b7-fp32-m1-h192", make(7, 1, 192, torch.float32), small=True, modes=True),
        Case(
            "b64-fp32-bf16-m1-h64",
            make(64, 1, 64, torch.float32, torch.bfloat16),
            small=True,
            compile=True,
        ),
        Case("b1-bf16-m8-h64", make(1, 8, 64), small=True),
        Case("b0-bf16-m4-h64", make(0, 4, 64), small=True),
        Case("b3-bf16-m4-h64-unaligned", make(3, 4, 64, first_element=1), small=True),
        *(Case(f"b132-bf16-m4-h{hidden}", make(132, 4, hidden)) for hidden in (2560, 7168)),
        Case("b528-bf16-fp32-m4-h576", make(528, 4, 576, torch.bfloat16, torch.float32)),
        Case("b1000-fp32-m8-h8192", make(1000, 8, 8192, torch.float32)),
        Case("b132-bf16-m4-h7168-bench", make(132, 4, 7168), bench=True, model_shape=True, gpu=False),
        Case("b132-bf16-m4-h4096-bench", make(132, 4, 4096), bench=True, gpu=False),
        Case("b264-bf16-m4-h2048-bench", make(264, 4, 2048), bench=True, gpu=False),
    ),
)
