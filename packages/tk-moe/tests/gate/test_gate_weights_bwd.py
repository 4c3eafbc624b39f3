"""gate_weights_bwd."""

import math
from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import tiers
from tk_moe import ScoringFunc, reference
from tk_moe.reference.lib.scoring import weights_of
from tk_moe.testing.gate.gate_weights_bwd import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc
BOTH = pytest.mark.parametrize("renormalize", [False, True])
EACH = pytest.mark.parametrize("scoring_func", ScoringFunc)


def bwd_by_autograd(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    scoring_func: ScoringFunc,
    renormalize: bool,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """The gradient of the forward's reference by autograd, in float64."""
    leaf = logits.double().requires_grad_()
    weights = weights_of(leaf, topk_idx, scoring_func, renormalize, routed_scaling_factor)
    return torch.autograd.grad(weights, leaf, grad_weights.double())[0]


def test_by_hand() -> None:
    # Sigmoids 3/4, 1/2, 1/4 with slopes 3/16, 1/4, 3/16.
    logits = torch.tensor([[math.log(3), 0.0, -math.log(3)]])
    topk_idx = torch.tensor([[1, 0]])
    grad_weights = torch.tensor([[1.0, 2.0]])
    grad = tk_moe.gate_weights_bwd(grad_weights, logits, topk_idx, SIGMOID, False)
    torch.testing.assert_close(grad, torch.tensor([[0.375, 0.25, 0.0]]))
    # Weights 0.4 and 0.6, their mean gradient 1.6, their sum 1.25.
    grad = tk_moe.gate_weights_bwd(grad_weights, logits, topk_idx, SIGMOID, routed_scaling_factor=2.0)
    torch.testing.assert_close(grad, torch.tensor([[2 * 0.4 / 1.25 * 3 / 16, 2 * -0.6 / 1.25 / 4, 0.0]]))
    # Probabilities 9/13, 3/13, 1/13; Σ grad · probability = 21/13.
    grad = tk_moe.gate_weights_bwd(grad_weights, logits, topk_idx, SOFTMAX, False)
    torch.testing.assert_close(grad, torch.tensor([[9 * 5, 3 * -8, -21.0]]) / 169)


@BOTH
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_autograd(scoring_func: ScoringFunc, renormalize: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(50, 20).to(dtype)
    logits = logits.abs() + 0.1 if scoring_func is IDENTITY else logits
    # Experts that repeat, that are none, and shared ones beyond the last.
    topk_idx = torch.randint(-2, 22, (50, 6))
    topk_idx[7] = -1
    grad_weights = torch.randn(50, 6)
    arguments = (grad_weights, logits, topk_idx, scoring_func, renormalize, 2.5)
    grad = tk_moe.gate_weights_bwd(*arguments)
    assert grad.dtype == dtype
    expected = bwd_by_autograd(*arguments)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2.0**-8, "atol": 1e-5}
    torch.testing.assert_close(grad.double(), expected, **tolerance)
    assert (grad[7] == 0).all()


@BOTH
@EACH
def test_reference_against_gradcheck(scoring_func: ScoringFunc, renormalize: bool) -> None:
    """In float64 the reference agrees with finite differences of the forward's reference."""
    logits = (torch.rand(5, 6, dtype=torch.float64) + 0.1).requires_grad_()
    topk_idx = torch.tensor([[0, 1, 2], [5, 3, 3], [-1, 4, 6], [-1, -1, -1], [2, -7, 0]])

    class Weights(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return weights_of(x, topk_idx, scoring_func, renormalize, 2.5)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return reference.gate_weights_bwd(grad, *ctx.saved_tensors, topk_idx, scoring_func, renormalize, 2.5)

    assert torch.autograd.gradcheck(Weights.apply, logits)
    assert torch.autograd.gradcheck(lambda x: weights_of(x, topk_idx, scoring_func, renormalize, 2.5), logits)


@EACH
def test_backward_of_both_gates(scoring_func: ScoringFunc) -> None:
    logits = (torch.rand(30, 12) + 0.1).requires_grad_()
    mask = torch.rand(30) < 0.7
    table = torch.randint(-1, 12, (9, 4), dtype=torch.int32)
    ids = torch.randint(-1, 10, (30,))
    for topk_idx, weights in (
        reference.topk_gate_with_weights(logits, 4, scoring_func, torch.randn(12), mask=mask, idx_dtype=torch.int32),
        reference.hash_gate(ids, table, logits, scoring_func, mask=mask),
    ):
        grad_weights = torch.randn_like(weights)
        (expected,) = torch.autograd.grad(weights, logits, grad_weights)
        grad = tk_moe.gate_weights_bwd(grad_weights, logits.detach(), topk_idx, scoring_func)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@EACH
def test_a_clamped_sum_has_no_gradient(scoring_func: ScoringFunc) -> None:
    logits = torch.tensor([[-60.0, -59.0, 0.0]])
    if scoring_func is SQRTSOFTPLUS:
        # Their exponentials are subnormal in float32.
        logits = torch.tensor([[-95.0, -96.0, 0.0]])
    if scoring_func is IDENTITY:
        logits = torch.tensor([[1e-21, -1.0, 0.0]])
    topk_idx = torch.tensor([[0, 1]])
    grad_weights = torch.tensor([[1.0, 3.0]])
    arguments = (grad_weights, logits, topk_idx, scoring_func, True, 1.0)
    grad = tk_moe.gate_weights_bwd(*arguments)
    expected = bwd_by_autograd(*arguments)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-3, atol=0.0)
    assert expected[0, 0] != 0


def test_padding_may_hold_anything() -> None:
    logits = torch.tensor([[math.nan, math.inf, 0.0], [1.0, 2.0, math.nan]])
    topk_idx = torch.tensor([[-1, -1], [0, 1]], dtype=torch.int32)
    grad_weights = torch.tensor([[math.nan, math.inf], [1.0, -1.0]])
    for scoring_func in (SIGMOID, SQRTSOFTPLUS, IDENTITY):
        grad = tk_moe.gate_weights_bwd(grad_weights, logits, topk_idx, scoring_func)
        assert grad[0].tolist() == [0.0, 0.0, 0.0]
        assert grad[1].isfinite().all()
        assert grad[1, 2] == 0
    assert tk_moe.gate_weights_bwd(grad_weights, logits, topk_idx, SOFTMAX)[0].tolist() == [0.0, 0.0, 0.0]


def test_one_slot_has_no_gradient() -> None:
    logits = torch.randn(5, 4)
    for scoring_func in (SIGMOID, SQRTSOFTPLUS, SOFTMAX):
        grad = tk_moe.gate_weights_bwd(torch.randn(5, 1), logits, torch.ones(5, 1, dtype=torch.int64), scoring_func)
        assert (grad == 0).all()


GOOD: dict[str, Any] = {
    "grad_weights": torch.zeros(2, 3),
    "logits": torch.zeros(2, 8),
    "topk_idx": torch.zeros(2, 3, dtype=torch.int64),
    "scoring_func": SIGMOID,
}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"grad_weights": None}, TypeError, "grad_weights.*Tensor"),
        ({"grad_weights": torch.zeros(2, 3, dtype=torch.bfloat16)}, TypeError, "grad_weights.*float32"),
        ({"grad_weights": torch.zeros(3)}, ValueError, "grad_weights.*shape"),
        ({"grad_weights": torch.zeros(3, 2).T}, ValueError, "grad_weights.*contiguous"),
        ({"grad_weights": torch.zeros(2, 0)}, ValueError, "grad_weights.*1 to 32"),
        ({"grad_weights": torch.zeros(2, 33)}, ValueError, "grad_weights.*1 to 32.*33"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float16)}, TypeError, "logits.*bfloat16 or torch.float32"),
        ({"logits": torch.zeros(3, 8)}, ValueError, "logits.*shape"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits.*1 to 1024"),
        ({"logits": torch.zeros(2, 1025)}, ValueError, "logits.*1 to 1024"),
        ({"logits": torch.zeros(2, 16)[:, ::2]}, ValueError, "logits.*contiguous"),
        ({"logits": torch.zeros(2, 8, device="meta")}, ValueError, "logits.*device"),
        ({"topk_idx": torch.zeros(2, 3, dtype=torch.int16)}, TypeError, "topk_idx.*int64 or torch.int32"),
        ({"topk_idx": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, "topk_idx.*shape"),
        ({"topk_idx": torch.zeros(2, 3, dtype=torch.int64, device="meta")}, ValueError, "topk_idx.*device"),
        ({"scoring_func": 2}, TypeError, "scoring_func.*ScoringFunc"),
        ({"scoring_func": "tanh"}, ValueError, "scoring_func.*softmax"),
        ({"renormalize": 0}, TypeError, "renormalize.*bool"),
        ({"routed_scaling_factor": False}, TypeError, "routed_scaling_factor.*number"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.gate_weights_bwd(**{**GOOD, **change})
