"""normalize_weight_bwd."""

from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_moe import reference

from ..models import benches


def make(num_tokens: int, num_topk: int, grad_denominator: bool = False, values: str = "uniform") -> Make:
    """Outputs of the forward for weights in 0 … 1 (`uniform`) or of all magnitudes (`wide`), and gradients."""

    def build(device: str) -> dict[str, Any]:
        w = torch.rand((num_tokens, num_topk), device=device)
        if values == "wide":
            w = w * torch.exp2(torch.randint(-140, 120, w.shape, device=device))
        denominator, normalized = reference.normalize_weight(w)
        return {
            "grad_normalized": torch.randn_like(w),
            "grad_denominator": torch.randn_like(denominator) if grad_denominator else None,
            "denominator": denominator,
            "normalized": normalized,
        }

    return build


SPEC = OpSpec(
    op=tk_moe.normalize_weight_bwd,
    cases=(
        # Vectors of 4, 2 and 1 weights.
        Case("k8-t67", make(67, 8), small=True, modes=True, compile=True),
        Case("k8-t67-denominator", make(67, 8, True), small=True, modes=True, compile=True),
        Case("k6-t67-denominator", make(67, 6, True), small=True, compile=True),
        Case("k9-t67", make(67, 9), small=True, compile=True),
        Case("k32-t3-denominator", make(3, 32, True), small=True, compile=True),
        Case("k1-t3", make(3, 1), small=True),
        Case("k8-t0", make(0, 8, True), small=True),
        Case("k8-t1", make(1, 8, True), small=True),
        Case("k7-t67-wide", make(67, 7, True, "wide"), small=True),
        *(
            Case(f"k{num_topk}-t{num_tokens}-wide", make(num_tokens, num_topk, num_tokens > 31, "wide"))
            for num_topk in (1, 2, 6, 7, 8, 9)
            for num_tokens in (0, 2, 31, 4001, 8001)
        ),
        *benches("k8-t{}", lambda t: make(t, 8), (8192, 1, 8, 64, 128, 1024), models=(8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # w = (1, 3): a sum of 4, shares of 1/4 and 3/4; dot = 8 · 1/4 + 4 · 3/4 = 5.
    grad = torch.tensor([[8.0, 4.0]])
    denominator, normalized = torch.tensor([4.0]), torch.tensor([[0.25, 0.75]])
    assert tk_moe.normalize_weight_bwd(grad, None, denominator, normalized).tolist() == [[0.75, -0.25]]
    grad_w = tk_moe.normalize_weight_bwd(grad, torch.tensor([2.0]), denominator, normalized)
    assert grad_w.tolist() == [[2.75, 1.75]]


@pytest.mark.parametrize("has_grad_denominator", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_autograd(dtype: torch.dtype, rtol: float, has_grad_denominator: bool) -> None:
    w = (torch.rand(100, 8, dtype=dtype) + 0.1).requires_grad_()
    denominator, normalized = reference.normalize_weight(w)
    grad_normalized = torch.randn_like(normalized)
    grad_denominator = torch.randn_like(denominator) if has_grad_denominator else None
    expected = torch.autograd.grad(
        (normalized, denominator) if has_grad_denominator else (normalized,),
        w,
        (grad_normalized, grad_denominator) if has_grad_denominator else (grad_normalized,),
    )[0]
    function = tk_moe.normalize_weight_bwd if dtype == torch.float32 else reference.normalize_weight_bwd
    grad_w = function(grad_normalized, grad_denominator, denominator.detach(), normalized.detach())
    torch.testing.assert_close(grad_w, expected, rtol=rtol, atol=rtol)


GOOD: dict[str, Any] = {
    "grad_normalized": torch.ones(4, 2),
    "grad_denominator": torch.ones(4),
    "denominator": torch.ones(4),
    "normalized": torch.ones(4, 2),
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"grad_normalized": torch.ones(4, 33)}, ValueError, "grad_normalized.*1 to 32"),
        ({"grad_denominator": torch.ones(3)}, ValueError, "grad_denominator.*shape"),
        ({"denominator": torch.ones(4, 1)}, ValueError, "denominator.*shape"),
        ({"normalized": torch.ones(4, 3)}, ValueError, "normalized.*shape"),
    ],
)
