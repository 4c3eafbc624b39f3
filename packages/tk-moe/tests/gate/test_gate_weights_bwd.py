"""gate_weights_bwd."""

import math
from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_moe import ScoringFunc
from tk_moe.reference.gate.gate import weights_of

from ..models import benches, name_of
from .test_topk_gate_with_weights import Variant, make_logits, varied_cases

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc
BF16, FLOAT32 = torch.bfloat16, torch.float32

_NO_EXPERT = (-1, -2, -(2**31), 2**31 - 1)


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: ScoringFunc = SIGMOID,
    dtype: torch.dtype = FLOAT32,
    values: str = "normal",
    *,
    idx_dtype: torch.dtype = torch.int64,
    routing: str = "distinct",
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments; a token's experts are `distinct`, or may repeat (`any`); in `none`, many are -1 or out of range."""

    def build(device: str) -> dict[str, Any]:
        shape = (num_tokens, num_topk)
        if routing == "distinct" and num_topk <= num_experts:
            topk_idx = torch.rand((num_tokens, num_experts), device=device).topk(num_topk).indices
        else:
            topk_idx = torch.randint(0, num_experts, shape, device=device)
        if routing == "none":
            none = torch.tensor((*_NO_EXPERT, num_experts), device=device)
            nothing = none[torch.randint(0, len(none), shape, device=device)]
            topk_idx = torch.where(torch.rand(shape, device=device) < 0.3, nothing, topk_idx)
            topk_idx[::5] = -1
        return {
            "grad_weights": torch.randn(shape, device=device),
            "logits": make_logits(num_tokens, num_experts, dtype, values, device, first_element),
            "topk_idx": topk_idx.to(idx_dtype),
            "scoring_func": scoring_func,
            **options,
        }

    return build


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow an error of 1e-4 of the gradient (bfloat16: 2^-7), plus 1e-5 of the largest one in its row, plus 1e-6.

    The 1e-6 is for differences of nearly equal terms. Terms are up to 11, the largest gradient of a weight times the
    factor, and 1e-6 is two roundings of 11.
    """
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    rtol = 2.0**-7 if expected.dtype == torch.bfloat16 else 1e-4
    got, want = actual.double(), expected.double()
    assert torch.equal(got.isfinite(), want.isfinite()), "gradients that are not finite are elsewhere"
    assert torch.equal(got.isnan(), want.isnan()), "gradients that are NaN are elsewhere"
    largest = want.where(want.isfinite(), torch.zeros_like(want)).abs().amax(dim=1, keepdim=True)
    error = (got - want).abs() - (rtol * want.abs() + 1e-5 * largest + 1e-6)
    # A difference of infinities is NaN, which must not reach the maximum below.
    error = torch.where(want.isfinite(), error, torch.where(got.isnan() | (got == want), 0.0, 1.0))
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= 0, f"{int((error > 0).sum())} of {error.numel()} gradients are off, the worst by {worst} too much"


_VARIANTS: tuple[Variant, ...] = (
    (FLOAT32, SIGMOID, {"routed_scaling_factor": 2.5}),
    (BF16, SQRTSOFTPLUS, {"routing": "none"}),
    (FLOAT32, SOFTMAX, {"renormalize": False, "idx_dtype": torch.int32}),
    (BF16, SIGMOID, {"idx_dtype": torch.int32, "renormalize": False}),
    (FLOAT32, SQRTSOFTPLUS, {}),
    (BF16, SOFTMAX, {"routing": "none"}),
    (FLOAT32, IDENTITY, {"renormalize": False, "routing": "none"}),
)
_SIZES = (
    *((8, 2, 2), (8, 8, 8001), (16, 2, 31), (32, 6, 4001), (36, 7, 1), (64, 6, 8001), (72, 6, 4001), (96, 9, 31)),
    *((108, 8, 4001), (128, 8, 8001), (144, 7, 31), (256, 6, 4001), (256, 8, 8001), (288, 8, 31), (384, 6, 8001)),
    *((384, 8, 1), (512, 8, 4001), (512, 9, 31), (1024, 32, 31), (1000, 9, 2), (256, 8, 4001), (13, 3, 4001)),
)

SPEC = OpSpec(
    op=tk_moe.gate_weights_bwd,
    compare=compare,
    cases=(
        Case("sigmoid-float32-e256-k8-t9", make(9, 256, 8), small=True, modes=True, compile=True),
        Case(
            "softmax-bf16-e256-k8-t33",
            make(33, 256, 8, SOFTMAX, BF16, routing="none", renormalize=False, idx_dtype=torch.int32),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("sqrtsoftplus-bf16-e72-k6-t9", make(9, 72, 6, SQRTSOFTPLUS, BF16), small=True, compile=True),
        Case("softmax-float32-e33-k3-t9", make(9, 33, 3, SOFTMAX, first_element=1), small=True),
        Case("identity-float32-e8-k2-t33", make(33, 8, 2, IDENTITY, renormalize=False), small=True),
        Case("softmax-float32-e1023-k32-t3", make(3, 1023, 32, SOFTMAX), small=True, compile=True),
        Case("sigmoid-bf16-e66-k4-t5", make(5, 66, 4, SIGMOID, BF16), small=True),
        Case("sigmoid-bf16-e13-k3-t5", make(5, 13, 3, SIGMOID, BF16), small=True, compile=True),
        # One slot without and with renormalization, which leaves no gradient; repeated experts.
        Case("sigmoid-float32-e1-k1-t3", make(3, 1, 1, renormalize=False), small=True),
        Case("sigmoid-float32-e16-k1-t3-one-slot", make(3, 16, 1), small=True),
        *(
            Case(
                f"{function}-float32-e4-k32-t3-repeats",
                make(3, 4, 32, function, routing="none", renormalize=function is not IDENTITY),
                small=True,
            )
            for function in ScoringFunc
        ),
        Case("sigmoid-float32-e256-k8-t0", make(0, 256, 8), small=True),
        Case("sigmoid-bf16-e256-k8-t1", make(1, 256, 8, SIGMOID, BF16), small=True),
        *(
            Case(
                f"{function}-float32-e64-k6-t31-extremes{'' if renormalize else '-plain'}",
                make(31, 64, 6, function, values="extremes", routing="none", renormalize=renormalize),
                small=True,
            )
            for function in ScoringFunc
            for renormalize in (False, True)
            # If a sum of numbers of both signs overflows, its result depends on their order.
            if not (renormalize and function is IDENTITY)
        ),
        *(
            Case(
                f"{function}-{name_of(dtype)}-e256-k8-t4001-{values}",
                make(4001, 256, 8, function, dtype, values, routing="any", renormalize=function is not IDENTITY),
            )
            for function in ScoringFunc
            for dtype, values in ((FLOAT32, "ties"), (BF16, "normal"), (FLOAT32, "wide"))
        ),
        *varied_cases(make, _SIZES, _VARIANTS),
        *benches(
            "sigmoid-float32-e256-k8-t{}",
            lambda t: make(t, 256, 8),
            (1, 8, 64, 128, 1024, 4001, 8192),
            models=(128, 8192),
        ),
        *benches("softmax-float32-e256-k8-t{}", lambda t: make(t, 256, 8, SOFTMAX), (1, 8, 64, 128, 1024, 4001, 8192)),
        *benches("sqrtsoftplus-bf16-e256-k6-t{}", lambda t: make(t, 256, 6, SQRTSOFTPLUS, BF16), (8192,)),
        *benches("softmax-bf16-e512-k10-t{}", lambda t: make(t, 512, 10, SOFTMAX, BF16), (8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)

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
def test_weights_are_differentiable(scoring_func: ScoringFunc, renormalize: bool) -> None:
    # A sum of logits may come close to 0, where the clamp has no derivative.
    logits = (torch.rand(5, 6, dtype=torch.float64) + 0.1).requires_grad_()
    topk_idx = torch.tensor([[0, 1, 2], [5, 3, 3], [-1, 4, 6], [-1, -1, -1], [2, -7, 0]])
    assert torch.autograd.gradcheck(lambda x: weights_of(x, topk_idx, scoring_func, renormalize, 2.5), logits)


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


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"grad_weights": torch.zeros(2, 33)}, ValueError, "grad_weights.*1 to 32.*33"),
        ({"logits": torch.zeros(3, 8)}, ValueError, "logits.*shape"),
        ({"logits": torch.zeros(2, 1025)}, ValueError, "logits.*1 to 1024"),
        ({"topk_idx": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, "topk_idx.*shape"),
    ],
)
