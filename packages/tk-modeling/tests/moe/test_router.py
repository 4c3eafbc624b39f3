"""Router."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tk_moe
from tk_core.testing import assert_equal
from tk_modeling import Router
from tk_modeling.reference import Router as ReferenceRouter

HIDDEN = 24


def router(**options: Any) -> Router:
    torch.manual_seed(3)
    made = Router(HIDDEN, 12, 3, **options)
    made.bias.normal_(std=0.1)
    return made


def x(*leading: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*leading, HIDDEN).bfloat16()


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("groups", [(0, 0), (4, 2)])
@pytest.mark.parametrize(("renormalize", "num_topk_sum"), [(True, 2), (False, 1)])
def test_against_the_reference_in_float64(
    scoring_func: str, groups: tuple[int, int], renormalize: bool, num_topk_sum: int
) -> None:
    options = {
        "num_groups": groups[0],
        "num_topk_groups": groups[1],
        "num_topk_sum": num_topk_sum,
        "renormalize": renormalize,
        "scoring_func": scoring_func,
        "routed_scaling_factor": 2.5,
        "aux_loss_factor": 0.5,
    }
    ours, reference = router(**options), ReferenceRouter(HIDDEN, 12, 3, **options)
    reference.load_state_dict(ours.state_dict())
    reference.weight.data, reference.bias = reference.weight.data.double(), reference.bias.double()
    inputs = x(2, 9).requires_grad_(), x(2, 9).double().requires_grad_()
    outputs = ours(inputs[0], return_logits=True), reference(inputs[1], return_logits=True)
    assert_equal(outputs[0][0], outputs[1][0])
    for got, want in zip(outputs[0][1:], outputs[1][1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    assert outputs[0][3].shape == (2, 9, 12)
    d_weights, d_logits = torch.randn(2, 9, 3), 0.1 * torch.randn(2, 9, 12)
    for _, weights, aux, logits in outputs:
        ((weights * d_weights).sum() + aux + (logits * d_logits).sum()).backward()
    torch.testing.assert_close(ours.weight.grad.double(), reference.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(inputs[0].grad.double(), inputs[1].grad, rtol=2**-7, atol=1e-4)
    assert_equal(ours.load, reference.load)
    for module in (ours, reference):
        module.update_bias()
    torch.testing.assert_close(ours.bias.double(), reference.bias, rtol=1e-6, atol=1e-7)


def test_logits_are_float32_products_under_autocast_too() -> None:
    module = router().eval()
    wide = x(5).float() + 2**-12
    idx, weights, aux = module(wide)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(module(wide), (idx, weights, aux))
    logits = wide @ module.weight.t()
    expected = tk_moe.topk_gate_with_weights(logits.detach(), 3, tk_moe.ScoringFunc.SIGMOID, module.bias)
    assert_equal((idx, weights.detach()), expected)


def test_a_weight_narrowed_from_outside_routes_in_float32() -> None:
    module = router().eval()
    module.weight.data = module.weight.data.bfloat16()  # as FSDP's mixed precision does for a forward
    wide = copy.deepcopy(module).float()
    _, weights, _ = module(x(7))
    assert_equal(weights, wide(x(7))[1])
    weights[:, 0].sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16


def test_load_and_bias() -> None:
    module = router(bias_update_rate=0.25)
    bias = module.bias.clone()
    chosen = torch.cat([module(x(n))[0].flatten() for n in (5, 8)])
    load = torch.bincount(chosen, minlength=12)
    assert_equal(module.load, load)
    module.eval()(x(6))
    assert_equal(module.load, load)
    module.update_bias()
    # 39 pairs of 12 experts: 3.25 each.
    assert_equal(module.bias, bias + torch.where(load < 3.25, 0.25, -0.25))
    assert not module.load.any()
    module.update_bias()
    assert_equal(module.bias, bias + torch.where(load < 3.25, 0.25, -0.25))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_not_counted(use_reentrant: bool, compiled: bool) -> None:
    """Also where the checkpoint is around compiled code."""
    module = router()
    calls = 0

    def call(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return run(x)

    def run(x: Tensor) -> Tensor:
        _, weights, aux = module(x)
        return weights.sum() * weights[:, 0].sum() + aux

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaf = x(5).requires_grad_()
    checkpoint(call, leaf, use_reentrant=use_reentrant).backward()
    assert calls == 2
    assert leaf.grad.any()
    assert int(module.load.sum()) == 15


def test_large_negative_logits_of_sqrtsoftplus_have_finite_gradients() -> None:
    module = router(scoring_func="sqrtsoftplus", aux_loss_factor=1.0)
    _, weights, aux = module(1000 * x(9).float())
    (weights.sum() + aux).backward()
    assert module.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: router()(x(3).double()), TypeError, "x: .*bfloat16"),
        (lambda: router()(x(3)[:, :8]), ValueError, r"x: expected shape \(..., 24\)"),
        (lambda: Router(8, 12, 2, num_groups=5, num_topk_groups=2), ValueError, "num_groups: .*divisor of 12"),
        (lambda: router()(x(3), 1), TypeError, "return_logits: .*bool"),
        (lambda: Router(8, 12, 2, renormalize=1), TypeError, "renormalize: .*bool"),
        (lambda: Router(8, 12, 2, num_topk_sum=3), ValueError, "num_topk_sum: .*1 to 2"),
        (lambda: Router(8, 12, 2, num_groups=4), ValueError, "num_topk_groups: .*1 to 4"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
