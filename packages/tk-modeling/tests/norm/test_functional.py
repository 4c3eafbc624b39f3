"""rms_norm, differentiable."""

import pytest
import torch
from torch import Tensor

import tk_modeling
import tk_quant
from tk_core.testing import assert_equal

OPTIONS = {"out_scale": 0.5, "weight_offset": 1.0, "round_before_weight": True}


def arguments(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight."""
    x, residual = (torch.randn(3, 5, 72, device=device).to(dtype) for _ in range(2))
    return x, residual, torch.randn(72, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_the_ops(dtype: torch.dtype, device: str) -> None:
    x, residual, weight = arguments(device, dtype)
    leaves = [each.clone().requires_grad_() for each in (x, residual, weight)]
    found = tk_modeling.rms_norm(leaves[0], leaves[2], 1e-5, leaves[1], **OPTIONS)
    grads = [torch.randn_like(each) for each in found]
    d_leaves = torch.autograd.grad(found, leaves, grads)
    of_op = {name: OPTIONS[name] for name in ("weight_offset", "round_before_weight")}
    out, rstd, norm_input = tk_quant.norm_forward(x, weight, 1e-5, residual, 0.5, with_rstd=True, **of_op)
    assert_equal([each.detach() for each in found], [out, norm_input])
    d_x, d_weight = tk_quant.norm_backward(grads[0], norm_input, weight, rstd, grads[1], 0.5, weight_offset=1.0)
    assert_equal(list(d_leaves), [d_x, d_x, d_weight])


@pytest.mark.parametrize("with_residual", [False, True])
def test_gradients_to_torch(with_residual: bool, device: str) -> None:
    x, residual, weight = (each.requires_grad_() for each in arguments(device))
    given = (x, residual, weight) if with_residual else (x, weight)
    found = tk_modeling.rms_norm(x, weight, 1e-5, residual if with_residual else None)
    found = found if with_residual else (found,)
    summed = x.double() + residual.double() if with_residual else x.double()
    expected = (torch.nn.functional.rms_norm(summed, (72,), weight.double(), 1e-5), summed)[: len(found)]
    grads = [torch.randn_like(each) for each in found]
    ours = torch.autograd.grad(found, given, grads)
    theirs = torch.autograd.grad(expected, given, [grad.double() for grad in grads])
    for got, want in zip(ours, theirs):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_one_output_alone(device: str) -> None:
    """The norm's gradient without that of its input, and the other way round."""
    x, residual, weight = (each.requires_grad_() for each in arguments(device))
    out, norm_input = tk_modeling.rms_norm(x, weight, 1e-5, residual)
    d_out = torch.randn_like(out)
    expected = torch.autograd.grad(tk_modeling.rms_norm(norm_input.detach().requires_grad_(), weight), weight, d_out)
    assert_equal(torch.autograd.grad(out, weight, d_out, retain_graph=True)[0].shape, expected[0].shape)
    d_x, d_residual, d_weight = torch.autograd.grad(norm_input, (x, residual, weight), d_out, allow_unused=True)
    assert d_weight is None
    assert_equal([d_x, d_residual], [d_out, d_out])


def test_main_grad(device: str) -> None:
    x, _, weight = arguments(device, torch.bfloat16)
    plain = weight.clone().requires_grad_()
    d_out = torch.randn_like(x)
    (expected,) = torch.autograd.grad(tk_modeling.rms_norm(x, plain), plain, d_out)
    weight.requires_grad_()
    weight.main_grad = torch.ones_like(weight)
    tk_modeling.rms_norm(x.requires_grad_(), weight).backward(d_out)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + expected)


def test_without_weight_and_with_one_a_row(device: str) -> None:
    x, _, _ = arguments(device)
    x.requires_grad_()
    weight = torch.randn(5, 72, device=device, requires_grad=True)
    d_out = torch.randn_like(x)
    plain = torch.autograd.grad(tk_modeling.rms_norm(x, None), x, d_out * weight.detach())[0]
    d_x, d_weight = torch.autograd.grad(tk_modeling.rms_norm(x, weight), (x, weight), d_out)
    torch.testing.assert_close(d_x, plain)
    assert d_weight.shape == weight.shape


def test_frozen_weight(device: str) -> None:
    x, residual, weight = arguments(device)
    out, _ = tk_modeling.rms_norm(x.requires_grad_(), weight, 1e-6, residual)
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert not tk_modeling.rms_norm(x.detach(), weight).requires_grad


def test_compiled(device: str) -> None:
    x, residual, weight = arguments(device, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(
        tk_modeling.rms_norm, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    both = []
    for function in (compiled, tk_modeling.rms_norm):
        leaves = [each.clone().requires_grad_() for each in (x, weight, residual)]
        found = function(leaves[0], leaves[1], 1e-6, leaves[2])
        both.append((*found, *torch.autograd.grad(found, leaves, [each.detach() for each in found])))
    assert_equal(both[0], both[1])


def test_gemma_begins_with_zeros() -> None:
    module = tk_modeling.RMSNorm(72, weight_offset=1.0)
    assert not module.weight.any()
    x = torch.randn(4, 72)
    assert_equal(module(x).detach(), tk_modeling.RMSNorm(72)(x).detach())
    assert list(module.state_dict()) == ["weight"]
    assert module.variance_epsilon == 1e-6
