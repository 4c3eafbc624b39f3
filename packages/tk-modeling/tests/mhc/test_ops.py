"""The single ops have the bits of tk_mhc's, and the gradients of its references in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tk_mhc
import tk_modeling
from tk_core.testing import assert_equal
from tk_core.testing.trees import tensors

from .cases import backward, leaves

HIDDEN = 64


class Case(NamedTuple):
    name: str
    make: Callable[[tuple[int, ...]], tuple[Any, ...]]
    parameters: tuple[int, ...] = ()
    """Arguments whose gradients go to main_grad."""


def _streams(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN).bfloat16()


CASES = [
    Case("expand_to_mhc", lambda t: (_streams(*t), 4)),
    Case("mhc_pre_norm_fn", lambda t: (_streams(*t, 2), torch.randn(8, 2 * HIDDEN), None, 1e-6), (1,)),
    Case(
        "mhc_pre_norm_fn",
        lambda t: (_streams(*t, 4), torch.randn(4, 4 * HIDDEN), torch.randn(4 * HIDDEN), 1e-6),
        (1, 2),
    ),
    Case(
        "mhc_pre_split_mixes",
        lambda t: (torch.randn(*t, 24), torch.rand(3) + 0.5, torch.randn(24), 4, 2.0, 1e-3),
        (1, 2),
    ),
    Case(
        "mhc_pre_split_mixes",
        lambda t: (torch.randn(*t, 8), torch.rand(2) + 0.5, torch.randn(8), 4, 2.0, 1e-3),
        (1, 2),
    ),
    Case("mhc_post", lambda t: (_streams(*t), _streams(*t, 4), torch.randn(*t, 4, 1), None)),
    Case("sinkhorn_normalize", lambda t: (torch.randn(*t, 4, 4).mT, 3, 1e-3)),
    Case("mhc_pre_apply_mix", lambda t: (_streams(*t, 8), torch.randn(*t, 8, 1))),
    Case("mhc_post", lambda t: (_streams(*t), _streams(*t, 4), torch.randn(*t, 4, 1), torch.randn(*t, 4, 4))),
    Case("mhc_head_compute_mix", lambda t: (torch.randn(*t, 4), torch.rand(1) + 0.5, torch.randn(4), 1e-3), (1, 2)),
]
each_case = pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.name}" for i, case in enumerate(CASES)])


def _draw(case: Case, leading: tuple[int, ...] = (3, 5)) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return case.make(leading)


@each_case
def test_gradients(case: Case) -> None:
    args = leaves(_draw(case))
    exact = leaves(args, torch.float64)
    outputs = getattr(tk_modeling, case.name)(*args)
    assert_equal(outputs, getattr(tk_mhc, case.name)(*(x.detach() if isinstance(x, Tensor) else x for x in args)))
    backward(outputs)
    backward(getattr(tk_mhc.reference, case.name)(*exact))
    for x, want in zip(tensors(args), tensors(exact), strict=True):
        assert x.grad.dtype == x.dtype
        tolerance = {} if x.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(x.grad, want.grad.to(x.dtype), **tolerance)


@each_case
@pytest.mark.parametrize("leading", [(0,), (2, 0), ()])
def test_leading_dimensions(case: Case, leading: tuple[int, ...]) -> None:
    args = leaves(_draw(case, leading))
    outputs = getattr(tk_modeling, case.name)(*args)
    backward(outputs)
    for x in tensors(args):
        assert x.grad.shape == x.shape
        if 0 in leading:
            assert not x.grad.any()
    assert all(y.shape[: len(leading)] == leading for y in tensors(outputs))


@each_case
def test_each_tensor_frozen(case: Case) -> None:
    drawn = _draw(case)
    expected = leaves(drawn)
    backward(getattr(tk_modeling, case.name)(*expected))
    for i in range(len(tensors(drawn))):
        args = leaves(drawn)
        tensors(args)[i].requires_grad_(False)
        if not any(x.requires_grad for x in tensors(args)):
            continue
        backward(getattr(tk_modeling, case.name)(*args))
        for j, (x, want) in enumerate(zip(tensors(args), tensors(expected), strict=True)):
            assert_equal(x.grad, None if i == j else want.grad)


@pytest.mark.parametrize("case", [c for c in CASES if c.parameters], ids=lambda c: c.name)
def test_main_grad_of_each_parameter_on_its_own(case: Case) -> None:
    drawn = _draw(case)
    expected = leaves(drawn)
    backward(getattr(tk_modeling, case.name)(*expected))
    for i in case.parameters:
        args = leaves(drawn)
        args[i].main_grad = torch.zeros_like(drawn[i])
        backward(getattr(tk_modeling, case.name)(*args))
        for j, (x, want) in enumerate(zip(tensors(args), tensors(expected), strict=True)):
            assert_equal(x.grad, None if i == j else want.grad)
        assert_equal(args[i].main_grad, expected[i].grad)


def test_rstd_carries_no_gradient() -> None:
    args = leaves((_streams(3, 4), torch.randn(24, 4 * HIDDEN), None))
    mixes, rstd = tk_modeling.mhc_pre_norm_fn(*args, 1e-6, n_splits=2, return_rstd=True)
    assert_equal((mixes, rstd), tk_mhc.mhc_pre_norm_fn(*args, 1e-6, n_splits=2, return_rstd=True))
    assert mixes.requires_grad
    assert not rstd.requires_grad


@pytest.mark.parametrize("name", ["expand_to_mhc", "mhc_pre_apply_mix", "mhc_post"])
def test_out_is_written_and_carries_the_gradient(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    drawn = _draw(case)
    expected, args = leaves(drawn), leaves(drawn)
    want = getattr(tk_modeling, name)(*expected)
    out = torch.empty_like(want.detach())
    result = getattr(tk_modeling, name)(*args, out)
    assert result is out
    assert_equal(result.detach(), want.detach())
    backward(want)
    backward(result)
    assert_equal([x.grad for x in tensors(args)], [x.grad for x in tensors(expected)])


def _all_ops(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    residual = tk_modeling.expand_to_mhc(x, 2)
    mixes = tk_modeling.mhc_pre_norm_fn(residual, fn, None, 1e-6)
    pre, post, comb = tk_modeling.mhc_pre_split_mixes(mixes, scale, base, 2, 2.0, 1e-6)
    comb = tk_modeling.sinkhorn_normalize(comb, 3)
    residual = tk_modeling.mhc_post(tk_modeling.mhc_pre_apply_mix(residual, pre), residual, post, comb)
    head = tk_modeling.mhc_head_compute_mix(pre.squeeze(-1), scale[:1], base[:2], 1e-6)
    return tk_modeling.mhc_pre_apply_mix(residual, head.unsqueeze(-1))


def _arguments_of_all_ops() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return leaves((_streams(2, 3), torch.randn(8, 2 * HIDDEN), torch.ones(3), torch.randn(8)))


def test_compiled() -> None:
    torch._dynamo.reset()
    expected, args = _arguments_of_all_ops(), _arguments_of_all_ops()
    want = _all_ops(*expected)
    got = torch.compile(_all_ops, fullgraph=True, backend="aot_eager")(*args)
    backward(want)
    backward(got)
    assert_equal(got.detach(), want.detach())
    assert_equal([x.grad for x in args], [x.grad for x in expected])


def test_ops_handed_on() -> None:
    for name in ("mhc_pre_big_fuse", "mhc_multilayer_recompute", "mhc_post_bwd"):
        assert getattr(tk_modeling, name) is getattr(tk_mhc, name)
    assert tk_modeling.mhc_post_fwd is tk_mhc.mhc_post
