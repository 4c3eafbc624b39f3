"""grad_w_reduce."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, bench_case, empty, tiers
from tk_core.testing.trees import distinct_bytes

from ..compare import assert_calc_diff


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
            return empty(*shape, dtype=dtype, device=device, first_element=first_element).normal_()

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
    op=tk_engram.grad_w_reduce,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("grad_weight_hidden", "grad_weight_embed"),
    cases=(
        # One round of parts and several, the last one full or partial; zero parts.
        Case("b33-bf16-m2-h64", make(33, 2, 64), small=True, modes=True),
        Case("b7-fp32-m1-h192", make(7, 1, 192, torch.float32), small=True, modes=True),
        Case("b64-fp32-bf16-m1-h64", make(64, 1, 64, torch.float32, torch.bfloat16), small=True, compile=True),
        Case("b1-bf16-m8-h64", make(1, 8, 64), small=True),
        Case("b0-bf16-m4-h64", make(0, 4, 64), small=True),
        Case("b3-bf16-m4-h64-unaligned", make(3, 4, 64, first_element=1), small=True),
        *(Case(f"b132-bf16-m4-h{hidden}", make(132, 4, hidden)) for hidden in (2560, 7168)),
        Case("b528-bf16-fp32-m4-h576", make(528, 4, 576, torch.bfloat16, torch.float32)),
        Case("b1000-fp32-m8-h8192", make(1000, 8, 8192, torch.float32)),
        bench_case("b132-bf16-m4-h7168", make(132, 4, 7168), model_shape=True),
        bench_case("b132-bf16-m4-h4096", make(132, 4, 4096)),
        bench_case("b264-bf16-m4-h2048", make(264, 4, 2048)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand(device: str) -> None:
    partial = torch.tensor([1.0, 10.0, 100.0], device=device)[:, None, None].repeat(1, 2, 64)
    partial[2, 1, 7] = 500.0
    hidden = torch.full((2, 64), 3.0, device=device).bfloat16()
    embed = torch.full((2, 64), -2.0, device=device).bfloat16()
    by_hidden, by_embed = torch.full((2, 64), 0.5, device=device), torch.zeros(2, 64, device=device)
    assert tk_engram.grad_w_reduce(partial, hidden, embed, by_hidden, by_embed) is None
    assert by_hidden[1, 5:8].tolist() == [0.5 - 222, 0.5 - 222, 0.5 - 1022]
    assert by_embed[1, 5:8].tolist() == [333, 333, 1533]


@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 132, 1000])
def test_against_float64(blocks: int, device: str) -> None:
    inputs = make(blocks, 2, 192, torch.float32, torch.bfloat16)(device)
    grad_w = inputs["grad_w_partial"].double().sum(0)
    by_hidden = inputs["grad_weight_hidden"].double() + grad_w * inputs["weight_embed"].double()
    by_embed = inputs["grad_weight_embed"].double() + grad_w * inputs["weight_hidden"].double()
    tk_engram.grad_w_reduce(**inputs)
    torch.testing.assert_close(inputs["grad_weight_hidden"], by_hidden.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inputs["grad_weight_embed"], by_embed.float(), rtol=1e-5, atol=1e-4)


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 2, 64)("cpu"),
    [
        ({"grad_w_partial": torch.ones(3, 9, 64)}, ValueError, "hc_mult .*grad_w_partial.*1 to 8"),
        ({"grad_w_partial": torch.ones(3, 2, 32)}, ValueError, "hidden .*grad_w_partial.*64 to 16384"),
        ({"grad_w_partial": torch.ones(3, 2, 96)}, ValueError, "hidden .*grad_w_partial.*multiple of 64"),
    ],
)
