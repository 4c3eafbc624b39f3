"""reduce_fused_bwd."""

from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_moe import reference

from ..expand.test_expand_to_fused import make_maps, model_rows
from ..expand.test_expand_to_fused_bwd import SMALL_ROUTING, edge_cases
from ..models import benches, name_of

_BF16, _FLOAT32 = torch.bfloat16, torch.float32


def compare(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """grad_x must be equal bit for bit; grad_topk_weights, added in another order, within 1e-5 of the largest sum.

    A sum of n products of normal values has a magnitude of √n, and errors of about that times 2⁻²⁴.
    """
    assert_equal(actual[0], expected[0], name="grad_x")
    if expected[1] is None:
        assert actual[1] is None, "grad_topk_weights: expected None"
        return
    assert_same_metadata(actual[1], expected[1], "grad_topk_weights")
    if expected[1].numel() == 0:
        return
    difference = (actual[1].double() - expected[1].double()).abs().max().item()
    limit = 1e-5 * expected[1].abs().max().item()
    assert difference <= limit, f"grad_topk_weights: expected within {limit}, got a difference of {difference}"
    assert torch.equal(actual[1] == 0, expected[1] == 0), "grad_topk_weights: expected 0 for pairs without a position"


def make(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    dtype: torch.dtype = _BF16,
    *,
    grad_dtype: torch.dtype | None = None,
    weights: bool = True,
    num_rows: int | None = None,
    **routing: Any,
) -> Make:
    """Normal values, and maps as `get_fused_mapping` returns them."""

    def build(device: str) -> dict[str, Any]:
        rows = model_rows(num_tokens, num_topk) if num_rows is None else num_rows

        def draw(num: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn((num, hidden), dtype=dtype, device=device)

        token_topk_to_pos, pos_to_expert = make_maps(num_tokens, num_topk, rows, device, **routing)
        return {
            "grad": draw(num_tokens, grad_dtype or dtype),
            "x": draw(rows, dtype) if weights else None,
            "topk_weights": torch.randn((num_tokens, num_topk), device=device) if weights else None,
            "token_topk_to_pos": token_topk_to_pos,
            "pos_to_expert": pos_to_expert,
        }

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the rows of x that have a token, and of all else: rows of padding need not be read."""
    pos, x = inputs["token_topk_to_pos"], inputs["x"]
    total = 0 if x is None else int((pos >= 0).sum()) * x.shape[1] * x.element_size()
    others = (inputs["grad"], inputs["topk_weights"], pos, inputs["pos_to_expert"], *outputs)
    return total + sum(y.numel() * y.element_size() for y in others if y is not None)


SPEC = OpSpec(
    op=tk_moe.reduce_fused_bwd,
    compare=compare,
    least_bytes=least_bytes,
    cases=(
        Case("bf16-h64-t7", make(7, 64, 3, **SMALL_ROUTING), small=True, modes=True, compile=True),
        Case("float32-h192-t7", make(7, 192, 3, _FLOAT32, **SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h64-t7-no-weights", make(7, 64, 3, weights=False, **SMALL_ROUTING), small=True, modes=True),
        Case("float32-h64-t7-no-weights", make(7, 64, 3, _FLOAT32, weights=False, **SMALL_ROUTING), small=True),
        Case(
            "bf16-h192-t7-float32-grad",
            make(7, 192, 3, grad_dtype=_FLOAT32, **SMALL_ROUTING),
            small=True,
            compile=True,
        ),
        Case(
            "float32-h192-t7-bf16-grad",
            make(7, 192, 3, _FLOAT32, grad_dtype=_BF16, **SMALL_ROUTING),
            small=True,
            compile=True,
        ),
        # Several warps and chunks.
        Case("bf16-h576-t7", make(7, 576, 3, **SMALL_ROUTING), small=True),
        # More rows than needed, one row.
        Case("bf16-h64-t3-mostly-padding", make(3, 64, 2, **{**SMALL_ROUTING, "num_rows": 600}), small=True),
        Case("bf16-h64-t1-one-row", make(1, 64, 1, num_rows=1, num_experts=1, alignment=1), small=True),
        *edge_cases(make),
        Case("bf16-h576-t67-no-position", make(67, 576, 4, num_rows=256, share_without_position=1.0)),
        Case("bf16-h576-t67-one-expert", make(67, 576, 4, num_rows=300, num_experts=1)),
        *(
            Case(f"{name_of(dtype)}-h576-t131-k{k}", make(131, 576, k, dtype, share_without_position=0.1))
            for dtype in (_BF16, _FLOAT32)
            for k in (1, 2, 4, 6, 7, 9)
            if dtype == _BF16 or k == 6
        ),
        Case("bf16-h576-t131-k32", make(131, 576, 32), compile=True),
        *(
            Case(f"bf16-h{hidden}-t{num_tokens}", make(num_tokens, hidden, num_topk))
            for hidden, num_topk in ((576, 9), (2048, 8), (4096, 6), (7168, 8))
            for num_tokens in (0, 1, 2, 31, 4001)
        ),
        *(Case(f"bf16-h{hidden}-t1001", make(1001, hidden, 8)) for hidden in (2560, 3072, 6144)),
        Case("bf16-h2048-t8001", make(8001, 2048, 8)),
        Case("float32-h7168-t4001-k4", make(4001, 7168, 4, _FLOAT32)),
        Case("bf16-h7168-t4001-no-weights", make(4001, 7168, 8, weights=False)),
        *benches("bf16-h7168-t{}", lambda t: make(t, 7168, 8), (4096,), models=(4096,), compile=True),
        *benches("bf16-h7168-t{}", lambda t: make(t, 7168, 8), (1, 8, 64, 128, 1024, 8001)),
        *benches("float32-h7168-t{}", lambda t: make(t, 7168, 8, _FLOAT32), (4096,)),
        *benches("bf16-h7168-t{}-no-weights", lambda t: make(t, 7168, 8, weights=False), (4096,)),
        *benches("bf16-h{}-t4096", lambda h: make(4096, h, 8), (576, 2048, 2560, 3072, 4096, 6144)),
    ),
)


test_tiers = tiers.tests(SPEC)

POS = torch.tensor([[2, 0], [1, -1], [-1, -5], [3, 9]], dtype=torch.int32)
POS_TO_EXPERT = torch.tensor([0, 0, 1, 1, -1], dtype=torch.int32)
X = torch.arange(1.0, 6.0)[:, None].repeat(1, 64)
WEIGHTS = torch.tensor([[0.5, 10.0], [2.0, 7.0], [1.0, 1.0], [-1.0, 0.25]])


def test_by_hand() -> None:
    grad = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None].repeat(1, 64)
    grad_x, grad_weights = tk_moe.reduce_fused_bwd(grad, X, WEIGHTS, POS, POS_TO_EXPERT)
    assert grad_x[:, 5].tolist() == [10.0, 4.0, 0.5, -4.0, 0.0]
    assert grad_weights is not None
    assert grad_weights.tolist() == [[192.0, 64.0], [256.0, 0.0], [0.0, 0.0], [1024.0, 0.0]]
    grad_x, grad_weights = tk_moe.reduce_fused_bwd(grad, None, None, POS, POS_TO_EXPERT)
    assert grad_x[:, 5].tolist() == [1.0, 2.0, 1.0, 4.0, 0.0]
    assert grad_weights is None


def test_without_weights_it_is_expand_to_fused() -> None:
    inputs = make(20, 128, 3, weights=False, num_rows=80, num_experts=4, alignment=4)("cpu")
    grad_x, _ = tk_moe.reduce_fused_bwd(**inputs)
    expected = tk_moe.expand_to_fused(inputs["grad"], inputs["token_topk_to_pos"], inputs["pos_to_expert"])
    assert_equal(grad_x, expected)


def weighted_sum(x: torch.Tensor, topk_weights: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The sum of reduce_fused, in operations that autograd follows in any dtype."""
    rows = torch.where((pos >= 0)[..., None], x[pos.clamp(min=0).long()], 0)
    return (rows * topk_weights[..., None]).sum(1)


def test_against_autograd(device: str) -> None:
    inputs = make(60, 192, 4, torch.float32, num_rows=300, num_experts=8, alignment=8, share_without_position=0.2)(
        device
    )
    x, topk_weights = (inputs[name].double().requires_grad_() for name in ("x", "topk_weights"))
    out = weighted_sum(x, topk_weights, inputs["token_topk_to_pos"])
    forward = reference.reduce_fused(inputs["x"], inputs["topk_weights"], inputs["token_topk_to_pos"])
    torch.testing.assert_close(out.float(), forward, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(out, (x, topk_weights), inputs["grad"].double())
    for actual, want in zip(tk_moe.reduce_fused_bwd(**inputs), expected, strict=True):
        torch.testing.assert_close(actual, want.float(), rtol=1e-5, atol=1e-5)


GOOD = {
    "grad": torch.ones(4, 64),
    "x": X,
    "topk_weights": WEIGHTS,
    "token_topk_to_pos": POS,
    "pos_to_expert": POS_TO_EXPERT,
}

test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"grad": torch.ones(4, 96)}, ValueError, "hidden"),
        ({"x": X[:4]}, ValueError, "x"),
        ({"x": torch.ones(5, 128)}, ValueError, "x"),
        ({"topk_weights": None}, ValueError, "x"),
        ({"topk_weights": torch.ones(4, 3)}, ValueError, "topk_weights"),
        ({"token_topk_to_pos": POS[:3]}, ValueError, "token_topk_to_pos"),
        ({"token_topk_to_pos": POS[:, :0]}, ValueError, "token_topk_to_pos"),
        ({"token_topk_to_pos": torch.ones(4, 33, dtype=torch.int32)}, ValueError, "token_topk_to_pos"),
    ],
)


@pytest.mark.gpu
def test_gpu_bits_do_not_depend_on_other_tokens() -> None:
    inputs = make(300, 576, 8)("cuda")
    _, expected = tk_moe.reduce_fused_bwd(**inputs)
    few = {name: inputs[name][:3].clone() for name in ("grad", "topk_weights", "token_topk_to_pos")}
    _, actual = tk_moe.reduce_fused_bwd(**{**inputs, **few})
    assert actual is not None
    assert expected is not None
    assert_equal(actual, expected[:3].clone())
