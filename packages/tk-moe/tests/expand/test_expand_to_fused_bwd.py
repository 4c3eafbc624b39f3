"""expand_to_fused_bwd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers

from ..models import benches
from .test_expand_to_fused import make_maps, model_rows


def make(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    dtype: torch.dtype = torch.bfloat16,
    num_rows: int | None = None,
    **routing: Any,
) -> Make:
    """Normal gradients, and the map of a random routing."""

    def build(device: str) -> dict[str, Any]:
        rows = model_rows(num_tokens, num_topk) if num_rows is None else num_rows
        token_topk_to_pos, _ = make_maps(num_tokens, num_topk, rows, device, **routing)
        grad_rows = torch.randn((rows, hidden), dtype=dtype, device=device)
        return {"grad_rows": grad_rows, "token_topk_to_pos": token_topk_to_pos}

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the rows that have a token, of the map and of the output: rows of padding need not be read."""
    grad_rows, pos = inputs["grad_rows"], inputs["token_topk_to_pos"]
    used = int((pos >= 0).sum()) * grad_rows.shape[1] * grad_rows.element_size()
    return used + pos.numel() * pos.element_size() + outputs.numel() * outputs.element_size()


SMALL_ROUTING = {"num_rows": 40, "num_experts": 4, "alignment": 4, "share_without_position": 0.2}


def edge_cases(make: Callable[..., Make]) -> tuple[Case, ...]:
    """No tokens, no rows, positions past the last row."""
    past_the_end = {**SMALL_ROUTING, "num_rows": 30, "drop_what_does_not_fit": False}
    return (
        Case("bf16-h64-t0", make(0, 64, 3, **SMALL_ROUTING), small=True),
        Case("bf16-h64-t7-no-rows", make(7, 64, 3, **{**SMALL_ROUTING, "num_rows": 0}), small=True),
        Case("bf16-h64-t40-past-the-end", make(40, 64, 3, **past_the_end), small=True),
    )


SPEC = OpSpec(
    op=tk_moe.expand_to_fused_bwd,
    least_bytes=least_bytes,
    cases=(
        Case("bf16-h64-t7", make(7, 64, 3, **SMALL_ROUTING), small=True, modes=True, compile=True),
        Case("float32-h192-t7", make(7, 192, 3, torch.float32, **SMALL_ROUTING), small=True, compile=True),
        *edge_cases(make),
        *(
            Case(f"bf16-h{hidden}-t{num_tokens}", make(num_tokens, hidden, num_topk))
            for hidden, num_topk in ((576, 9), (2048, 8), (7168, 8))
            for num_tokens in (0, 1, 2, 31, 4001)
        ),
        Case("float32-h7168-t4001-k2", make(4001, 7168, 2, torch.float32)),
        Case("bf16-h7168-t8001-k1", make(8001, 7168, 1)),
        *benches("bf16-h7168-t{}", lambda t: make(t, 7168, 8), (4096, 1, 64, 1024, 4001), models=(4096,)),
    ),
)


test_tiers = tiers.tests(SPEC)

POS = torch.tensor([[2, 0], [1, -1], [-1, -5], [0, 3]], dtype=torch.int32)


def test_by_hand() -> None:
    grad_rows = torch.arange(1, 5, dtype=torch.float32)[:, None].repeat(1, 64)
    assert tk_moe.expand_to_fused_bwd(grad_rows, POS)[:, 5].tolist() == [4.0, 2.0, 0.0, 5.0]


def test_sum_is_in_order_of_slots_and_rounded_once() -> None:
    values = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])
    grad_rows = values[:, None].repeat(1, 64)
    pos = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 3]], dtype=torch.int32)
    assert tk_moe.expand_to_fused_bwd(grad_rows, pos)[:, 0].tolist() == [0.0, 2.0]
    assert tk_moe.expand_to_fused_bwd(grad_rows.bfloat16(), pos)[:, 0].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_autograd_of_indexing(dtype: torch.dtype) -> None:
    pos, pos_to_expert = make_maps(30, 3, 130, "cpu", num_experts=4, alignment=8, share_without_position=0.2)
    x = torch.randn(30, 64, dtype=dtype, requires_grad=True)
    pair = torch.full((130,), -1).long()
    pair[pos[pos >= 0].long()] = torch.arange(90)[pos.flatten() >= 0]
    rows = torch.where((pos_to_expert >= 0)[:, None], x[pair.clamp(min=0) // 3], 0)
    grad_rows = torch.randn_like(rows)
    (expected,) = torch.autograd.grad(rows, x, grad_rows)
    if dtype == torch.float32:
        assert torch.equal(rows, tk_moe.expand_to_fused(x.detach(), pos, pos_to_expert))
        grad_x = tk_moe.expand_to_fused_bwd(grad_rows, pos)
    else:
        # The reference adds in float32.
        grad_rows, expected = grad_rows.float(), expected.float()
        grad_x = tk_moe.reference.expand_to_fused_bwd(grad_rows, pos)
    torch.testing.assert_close(grad_x, expected, rtol=1e-5, atol=1e-6)


test_bad_input = tiers.bad_input(
    SPEC,
    {"grad_rows": torch.ones(5, 64), "token_topk_to_pos": POS},
    [
        ({"grad_rows": torch.ones(5, 96)}, ValueError, "hidden.*64"),
        ({"token_topk_to_pos": POS[:, :0]}, ValueError, "token_topk_to_pos.*slot"),
    ],
)
