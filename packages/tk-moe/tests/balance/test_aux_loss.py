"""aux_loss and aux_loss_bwd."""

from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_moe import reference
from tk_moe.balance.aux_loss import aux_loss, aux_loss_bwd

from ..models import benches


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow an error of 1e-5 of the value, plus 1e-6 of the largest magnitude in its row, as terms may cancel."""
    assert_same_metadata(actual, expected, "result")
    if expected.numel() == 0:
        return
    difference = (actual.double() - expected.double()).abs()
    magnitude = expected.double().abs()
    largest = magnitude.amax(-1, keepdim=True) if expected.ndim else magnitude
    worst = (difference - 1e-5 * magnitude - 1e-6 * largest).max().item()
    assert worst <= 0, f"result: expected within 1e-5, got a difference that is {worst} too large"


def make(
    num_tokens: int, num_experts: int, values: str = "sigmoid", alpha: float = 1.0, backward: bool = False
) -> Make:
    """Scores of normal logits by sigmoid or softmax, or "sparse": most are 0, and all of every third token."""

    def build(device: str) -> dict[str, Any]:
        logits = torch.randn((num_tokens, num_experts), device=device)
        scores = logits.softmax(1) if values == "softmax" else logits.sigmoid()
        if values == "sparse":
            scores.masked_fill_(torch.rand(scores.shape, device=device) < 0.7, 0)
            scores[::3] = 0
        fi = torch.rand(num_experts, device=device) * 2
        fi[::5] = 0
        inputs: dict[str, Any] = {"scores": scores, "fi": fi, "alpha": alpha}
        return {"grad_loss": torch.full((), 0.37, device=device), **inputs} if backward else inputs

    return build


_MODEL_EXPERTS = (8, 16, 36, 72, 108, 128, 144, 256, 288, 384, 512)


def _cases(backward: bool) -> tuple[Case, ...]:
    def made(*args: Any, **kwargs: Any) -> Make:
        return make(*args, backward=backward, **kwargs)

    return (
        # One, two and eight vectors of 4 per lane; vectors of 2 and 1; lanes without any.
        Case("e256-t67", made(67, 256), small=True, modes=True, compile=True),
        Case("e72-t33", made(33, 72, alpha=0.001), small=True),
        Case("e13-t17", made(17, 13, alpha=-2.0), small=True, compile=True),
        Case("e66-t5", made(5, 66), small=True, compile=True),
        Case("e1024-t3", made(3, 1024), small=True),
        Case("e3-t3", made(3, 3), small=True),
        Case("e256-t0", made(0, 256), small=True),
        Case("e256-t1", made(1, 256), small=True),
        Case("e8-t300-sparse", made(300, 8, "sparse"), small=True),
        *(
            Case(f"e{num_experts}-t{num_tokens}", made(num_tokens, num_experts, "softmax"))
            for num_experts in _MODEL_EXPERTS
            for num_tokens in (2, 31, 4001, 8001)
        ),
        *benches("e256-t{}", lambda t: made(t, 256), (8192, 1, 8, 64, 128, 1024), models=(8192,)),
    )


SPEC = OpSpec(op=aux_loss, reference=reference.aux_loss, cases=_cases(False), compare=compare)
BWD_SPEC = OpSpec(op=aux_loss_bwd, reference=reference.aux_loss_bwd, cases=_cases(True), compare=compare)


test_tiers = tiers.tests(SPEC)
test_bwd_tiers = tiers.tests(BWD_SPEC)


def test_by_hand() -> None:
    scores = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    fi = torch.tensor([0.5, 2.0])
    # Shares (1/4, 3/4) and (1/2, 1/2), so P = (3/8, 5/8).
    assert tk_moe.aux_loss(scores, fi).item() == 0.5 * 3 / 8 + 2 * 5 / 8
    assert tk_moe.aux_loss(scores, fi, 4.0).item() == 4 * (0.5 * 3 / 8 + 2 * 5 / 8)
    # part = (1.625, 1.25), row sums 4 and 4, weight 1/2 a token.
    grad = tk_moe.aux_loss_bwd(torch.tensor(8.0), scores, fi)
    assert grad.tolist() == [[-1.125, 0.375], [-0.75, 0.75]]


def test_even_load_costs_alpha() -> None:
    scores = torch.rand(64, 8)
    fi = tk_moe.aux_fi(torch.arange(512).view(64, 8) % 8, 8, 8)
    torch.testing.assert_close(tk_moe.aux_loss(scores, fi, 0.25), torch.tensor(0.25))


def test_a_token_without_scores_adds_nothing() -> None:
    scores = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert tk_moe.aux_loss(scores, torch.tensor([1.0, 3.0])).item() == 1.0


def test_a_token_without_scores_has_no_gradient(device: str) -> None:
    scores = torch.tensor([[0.0, 0.0], [1.0, 3.0], [-0.0, 0.0]], device=device, requires_grad=True)
    fi, grad_loss = torch.tensor([1.0, 3.0], device=device), torch.tensor(6.0, device=device)
    # The scores sum to 4, part = 2.5, and each of three tokens weighs a third.
    expected = [[0.0, 0.0], [-0.75, 0.25], [0.0, 0.0]]
    assert tk_moe.aux_loss_bwd(grad_loss, scores.detach(), fi).tolist() == expected
    (grad_scores,) = torch.autograd.grad(reference.aux_loss(scores, fi), scores, grad_loss)
    assert grad_scores.tolist() == expected


def test_no_tokens() -> None:
    scores, fi = torch.empty(0, 4), torch.ones(4)
    assert tk_moe.aux_loss(scores, fi).item() == 0.0
    assert tk_moe.aux_loss_bwd(torch.tensor(1.0), scores, fi).shape == (0, 4)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_against_autograd(dtype: torch.dtype, rtol: float) -> None:
    scores = torch.rand(50, 12, dtype=dtype, requires_grad=True)
    fi = torch.rand(12, dtype=dtype)
    grad_loss = torch.tensor(3.0, dtype=dtype)
    (expected,) = torch.autograd.grad(reference.aux_loss(scores, fi, 0.7), scores, grad_loss)
    function = tk_moe.aux_loss_bwd if dtype == torch.float32 else reference.aux_loss_bwd
    grad_scores = function(grad_loss, scores.detach(), fi, 0.7)
    torch.testing.assert_close(grad_scores, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


GOOD = {"scores": torch.ones(4, 3), "fi": torch.ones(3), "alpha": 1.0}
BAD = [
    ({"scores": torch.ones(4, 1025)}, ValueError, "scores.*1 to 1024"),
    ({"scores": torch.ones(2**30 + 1, 3, device="meta")}, ValueError, "scores.*0 to 1073741824"),
    ({"fi": torch.ones(4)}, ValueError, "fi.*shape"),
]

test_bad_input = tiers.bad_input(SPEC, GOOD, BAD)
test_bwd_bad_input = tiers.bad_input(BWD_SPEC, {"grad_loss": torch.tensor(1.0), **GOOD}, BAD)
