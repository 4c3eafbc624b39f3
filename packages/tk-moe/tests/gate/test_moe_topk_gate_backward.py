"""moe_topk_gate_backward."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_moe
from tk_core.testing import Case, Make, OpSpec, empty, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_moe import ScoringFunc
from tk_moe.reference.gate.gate import scores_of, weights_of

from ..models import MODEL_EXPERTS, benches

SIGMOID, SQRTSOFTPLUS, SOFTMAX = ScoringFunc.SIGMOID, ScoringFunc.SQRTSOFTPLUS, ScoringFunc.SOFTMAX
EACH = pytest.mark.parametrize("scoring_func", [SIGMOID, SQRTSOFTPLUS, SOFTMAX])
_NO_EXPERT = (-1, -2, -(2**31), 2**31 - 1)


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: ScoringFunc = SQRTSOFTPLUS,
    *,
    spread: float = 1.0,
    routing: str = "distinct",
    mask: bool = False,
    num_seqs: int = 0,
    out: bool = False,
    idx_dtype: torch.dtype = torch.int64,
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments; scores of logits of this spread, of which a tenth underflow to 0 and masked tokens' are all 0.

    A token's experts are `distinct`, or may repeat (`any`); in `none`, many are -1 or out of range.
    """

    def build(device: str) -> dict[str, Any]:
        shape = num_tokens, num_topk
        logits = spread * torch.randn(num_tokens, num_experts, device=device)
        logits = torch.where(torch.rand(logits.shape, device=device) < 0.1, logits - 300, logits)
        kept = torch.rand(num_tokens, device=device) < 0.8
        topk_idx = torch.randint(0, num_experts, shape, device=device)
        if routing == "distinct":
            topk_idx = torch.rand(logits.shape, device=device).topk(num_topk).indices
        if routing == "none":
            none = torch.tensor((*_NO_EXPERT, num_experts), device=device)
            nothing = none[torch.randint(0, len(none), shape, device=device)]
            topk_idx = torch.where(torch.rand(shape, device=device) < 0.3, nothing, topk_idx)
            topk_idx[::5] = -1
        found = scores_of(logits, scoring_func)
        if mask:
            topk_idx = torch.where(kept[:, None], topk_idx, -1)
            found = torch.where(kept[:, None], found, 0.0)
        weights = weights_of(logits, topk_idx, scoring_func, options.get("renormalize", True), 2.5)
        scores = empty(num_tokens, num_experts, device=device, first_element=first_element).copy_(found)
        return {
            "scores": scores,
            "topk_idx": topk_idx.to(idx_dtype),
            "topk_weights": weights,
            "grad_topk_weights": torch.randn(shape, device=device),
            "routed_scaling_factor": 2.5,
            "scoring_func": scoring_func,
            "mask": kept if mask else None,
            "grad_scores_sum": torch.randn(num_seqs, num_experts, device=device) if num_seqs else None,
            "out": torch.ones(num_tokens, num_experts, device=device) if out else None,
            **options,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Within rtol 1e-5, and 1e-5 of the largest gradient."""
    (grad, out), (expected_grad, _) = actual, expected
    assert_same_metadata(grad, expected_grad, "grad_logits")
    assert out is None or out.data_ptr() == grad.data_ptr()
    largest = expected_grad.abs().max().item() if expected_grad.numel() else 0.0
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5 * largest)


SPEC = OpSpec(
    op=tk_moe.moe_topk_gate_backward,
    compare=compare,
    mutates=("out",),
    cases=(
        Case("e256-k6-t9", make(9, 256, 6), small=True, modes=True),
        Case(
            "e256-k6-t32-sums",
            make(32, 256, 6, routing="none", mask=True, num_seqs=4, out=True),
            small=True,
            modes=True,
            compile=True,
        ),
        Case(
            "e72-k8-t30-softmax-sums",
            make(30, 72, 8, SOFTMAX, routing="none", mask=True, num_seqs=3, idx_dtype=torch.int32),
            small=True,
            compile=True,
        ),
        Case("e72-k8-t9-softmax", make(9, 72, 8, SOFTMAX, renormalize=False), small=True, compile=True),
        Case("e33-k3-t10-sigmoid-sums", make(10, 33, 3, SIGMOID, routing="any", num_seqs=1), small=True, compile=True),
        Case("e16-k4-t9-sigmoid", make(9, 16, 4, SIGMOID, renormalize=False, routing="none"), small=True),
        Case("e4-k32-t7-repeats", make(7, 4, 32, routing="any"), small=True),
        Case("e4-k32-t7-softmax-repeats", make(7, 4, 32, SOFTMAX, routing="any", num_seqs=7), small=True),
        # Renormalized, the gradient would be 0: test_one_expert.
        Case("e1-k1-t3", make(3, 1, 1, num_seqs=3, renormalize=False), small=True),
        Case("e1023-k32-t4", make(4, 1023, 32, num_seqs=2), small=True, compile=True),
        Case("e256-k6-t5-unaligned", make(5, 256, 6, first_element=1, num_seqs=1), small=True),
        Case("e256-k6-t0", make(0, 256, 6, num_seqs=5, mask=True), small=True),
        Case("e64-k6-t31-wide", make(31, 64, 6, spread=10.0, num_seqs=1), small=True),
        *(
            Case(
                f"e{num_experts}-k{min(num_experts, 6)}-t4000-{('sigmoid', 'sqrtsoftplus', 'softmax')[index % 3]}",
                make(
                    *(4000, num_experts, min(num_experts, 6), (SIGMOID, SQRTSOFTPLUS, SOFTMAX)[index % 3]),
                    routing=("distinct", "none")[index % 2],
                    mask=index % 2 == 1,
                    num_seqs=(0, 0, 8, 4000)[index % 4],
                ),
            )
            for index, num_experts in enumerate(MODEL_EXPERTS)
        ),
        *benches("e256-k6-t{}", lambda t: make(t, 256, 6), (1, 128, 1024, 8192), models=(128, 8192)),
        *benches("e256-k6-t{}-sums", lambda t: make(t, 256, 6, num_seqs=2, mask=True), (8192,)),
        *benches("e256-k6-t{}-softmax", lambda t: make(t, 256, 6, SOFTMAX), (8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # √softplus scores 1 and 2, whose slopes are (1 - exp(-1)) / 2 and (1 - exp(-4)) / 4.
    scores, topk_idx = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[1, 0]])
    weights, grad = torch.tensor([[2 / 3, 1 / 3]]), torch.tensor([[1.0, 4.0]])
    slopes = (1 - math.exp(-1)) / 2, (1 - math.exp(-4)) / 4
    found = tk_moe.moe_topk_gate_backward(scores, topk_idx, weights, grad, 1.0)
    # Σ g·w = 2; what is left of 1 and 4 is -1 and 2, divided by 3.
    torch.testing.assert_close(found, torch.tensor([[2 / 3 * slopes[0], -1 / 3 * slopes[1], 0.0]]))
    found = tk_moe.moe_topk_gate_backward(scores, topk_idx, weights, grad, 2.0, renormalize=False)
    torch.testing.assert_close(found, torch.tensor([[8 * slopes[0], 2 * slopes[1], 0.0]]))
    # The auxiliary loss of u / 3: h - Σ h·u / 3 = 3 - 1, 0 - 1, 6 - 1; without an expert, it is alone.
    h, nothing = torch.tensor([[3.0, 0.0, 6.0]]), torch.tensor([[-1, 5]])
    found = tk_moe.moe_topk_gate_backward(scores, nothing, weights, grad, 1.0, "sigmoid", grad_scores_sum=h)
    torch.testing.assert_close(found, torch.tensor([[2 / 3 * 0, -1 / 3 * -2, 0.0]]))
    off = torch.tensor([False])
    found = tk_moe.moe_topk_gate_backward(scores, nothing, weights, grad, 1.0, "sigmoid", off, h)
    assert (found == 0).all()


@EACH
def test_one_expert(scoring_func: ScoringFunc, device: str) -> None:
    """Its weight and its share of the scores are constants; left are rounding errors of the terms that cancel."""
    arguments = make(64, 1, 1, scoring_func, num_seqs=4)(device)
    found = tk_moe.moe_topk_gate_backward(**arguments)
    terms = 2.5 * arguments["grad_topk_weights"].abs() + arguments["grad_scores_sum"].abs().repeat_interleave(16, dim=0)
    scores = arguments["scores"]
    assert (found.abs() <= 1e-5 * torch.where(scores == 0, 0.0, terms / scores)).all()


@EACH
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("num_seqs", [0, 4])
def test_against_autograd(scoring_func: ScoringFunc, renormalize: bool, num_seqs: int) -> None:
    """From the forward's scores and weights to the derivative of the forward in float64."""
    logits = 2 * torch.randn(40, 20)
    scores, unmapped = torch.empty(40, 20), torch.empty(40, 5, dtype=torch.int64)
    mask = torch.rand(40) < 0.8
    outputs = {"mask": mask, "unmapped_topk_idx": unmapped, "scores": scores}
    options: dict[str, Any] = {"renormalize": renormalize}
    _, weights = tk_moe.moe_topk_gate(logits, 5, False, 0, 2.5, 0, scoring_func, **outputs, **options)
    grad, h = torch.randn(40, 5), torch.randn(max(num_seqs, 1), 20)
    sums = {"grad_scores_sum": h} if num_seqs else {}
    found = tk_moe.moe_topk_gate_backward(scores, unmapped, weights, grad, 2.5, scoring_func, mask, **sums, **options)
    leaf = logits.double().requires_grad_()
    loss = (weights_of(leaf, unmapped, scoring_func, renormalize, 2.5) * grad).sum()
    if num_seqs:
        u = scores_of(leaf, scoring_func)
        shares = torch.where(mask[:, None], u / u.sum(dim=1, keepdim=True), 0.0)
        loss = loss + (shares.unflatten(0, (num_seqs, -1)).sum(dim=1) * h).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert (found[~mask] == 0).all()


def test_repeated_experts_add_up_and_no_expert_is_ignored() -> None:
    scores, weights = torch.rand(1, 4), torch.full((1, 4), 0.25)
    grad = torch.tensor([[1.0, 2.0, 4.0, math.nan]])
    plain = {"routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "renormalize": False}
    found = tk_moe.moe_topk_gate_backward(scores, torch.tensor([[2, 0, 2, -1]]), weights, grad, **plain)
    slopes = scores * (1 - scores)
    torch.testing.assert_close(found, torch.tensor([[2.0, 0.0, 5.0, 0.0]]) * slopes)


@EACH
def test_scores_of_zeros_have_no_gradient(scoring_func: ScoringFunc) -> None:
    scores, idx, one = torch.zeros(2, 3), torch.tensor([[0], [1]]), torch.ones(2, 1)
    found = tk_moe.moe_topk_gate_backward(scores, idx, one, one, 1.0, scoring_func, grad_scores_sum=torch.ones(1, 3))
    assert (found == 0).all()


GOOD: dict[str, Any] = {
    "scores": torch.rand(4, 8),
    "topk_idx": torch.zeros(4, 3, dtype=torch.int64),
    "topk_weights": torch.zeros(4, 3),
    "grad_topk_weights": torch.zeros(4, 3),
    "routed_scaling_factor": 1.0,
}
WIDE: dict[str, Tensor] = {"topk_idx": torch.zeros(4, 33, dtype=torch.int64)}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"scores": torch.rand(4, 1025)}, ValueError, "num_experts.*1 to 1024.*1025"),
        (WIDE, ValueError, "num_topk.*1 to 32.*33"),
        ({"topk_weights": torch.zeros(4, 2)}, ValueError, "topk_weights.*shape"),
        ({"grad_topk_weights": torch.zeros(3, 3)}, ValueError, "grad_topk_weights.*shape"),
        ({"scoring_func": "identity"}, ValueError, "scoring_func.*identity"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask.*shape"),
        ({"grad_scores_sum": torch.zeros(0, 8)}, ValueError, "grad_scores_sum.*at least one.*0"),
        ({"grad_scores_sum": torch.zeros(3, 8)}, ValueError, "grad_scores_sum.*divides 4 tokens.*3"),
        ({"grad_scores_sum": torch.zeros(2, 7)}, ValueError, "grad_scores_sum.*shape"),
        ({"out": torch.zeros(4, 7)}, ValueError, "out.*shape"),
    ],
)
