"""qk_norm_rotary, differentiable."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_modeling
import tk_quant
from tk_core.testing import assert_equal


def arguments(device: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """query, key and their weights, the cache, and options with some positions outside of the cache."""
    heads = [torch.randn(2, 5, heads, 80, device=device).to(dtype) for heads in (3, 1)]
    weights = [torch.randn(80, device=device).to(dtype) for _ in range(2)]
    options = {"positions": torch.randint(-2, 11, (2, 5), device=device), "weight_offset": 1.0}
    return [*heads, *weights], torch.randn(9, 64, device=device), options


def call(function: Any, leaves: list[Tensor], cache: Tensor, **options: Any) -> Any:
    query, key, query_weight, key_weight = leaves
    return function(query, cache, query_weight, key_weight, 1e-5, key, **options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    """Results and gradients are those of rms_norm, and then apply_rotary, bit for bit."""
    leaves, cache, options = arguments(device, dtype)
    options["interleaved"] = interleaved
    of_norm = {"weight_offset": options["weight_offset"], "round_before_weight": True}
    of_rope = {name: options[name] for name in ("positions", "interleaved")}

    def composed(
        query: Tensor, cache: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, key: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        normed = [tk_modeling.rms_norm(x, w, eps, **of_norm) for x, w in ((query, query_weight), (key, key_weight))]
        return tk_modeling.apply_rotary(normed[0], cache, normed[1], **of_rope)

    both, grads = [], None
    for function in (tk_modeling.qk_norm_rotary, composed):
        own = [x.clone().requires_grad_() for x in leaves]
        found = call(function, own, cache, **options, round_before_weight=True)
        grads = grads or tuple(torch.randn_like(x) for x in found)
        both.append([*(x.detach() for x in found), *torch.autograd.grad(found, own, grads)])
    assert_equal(both[0], both[1])


def test_one_of_two(device: str) -> None:
    """A key that is frozen, unused, or absent: the query's gradients are the same, and those of keys alone."""
    (query, key, weight, key_weight), cache, options = arguments(device)
    query.requires_grad_(), weight.requires_grad_()
    alone = tk_modeling.qk_norm_rotary(query, cache, weight, None, **options)
    expected = torch.autograd.grad(alone.square().sum(), (query, weight))
    found = tk_modeling.qk_norm_rotary(query, cache, weight, key_weight, key=key, **options)
    assert_equal(torch.autograd.grad(found[0].square().sum(), (query, weight)), expected)
    found = tk_modeling.qk_norm_rotary(key, cache, key_weight, weight, key=query, **options)
    assert_equal(torch.autograd.grad(found[1].square().sum(), (query, weight)), expected)
    leaves = query, weight, key.requires_grad_(), key_weight.requires_grad_()
    found = tk_modeling.qk_norm_rotary(key, cache, key_weight, weight, key=query, **options)
    grads = torch.autograd.grad(found[1].square().sum(), leaves, materialize_grads=True)
    assert_equal(grads[:2], expected)
    assert not any(x.any() for x in grads[2:])


def test_main_grad(device: str) -> None:
    leaves, cache, options = arguments(device, torch.bfloat16)
    leaves = [x.requires_grad_() for x in leaves]
    found = call(tk_modeling.qk_norm_rotary, leaves, cache, **options)
    expected = torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
    for weight in leaves[2:]:
        weight.main_grad = torch.ones(80, device=device)
    found = call(tk_modeling.qk_norm_rotary, leaves, cache, **options)
    torch.autograd.backward(found, [torch.ones_like(x) for x in found])
    assert_equal((leaves[0].grad, leaves[1].grad), expected[:2])
    for weight, grad in zip(leaves[2:], expected[2:]):
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, 1 + grad.float(), rtol=1e-2, atol=1e-2)


def test_cos_and_sin_have_no_gradient(device: str) -> None:
    leaves, cache, options = arguments(device)
    cache.requires_grad_()
    leaves[0].requires_grad_()
    found = call(tk_modeling.qk_norm_rotary, leaves, cache, **options)
    (found[0].sum() + found[1].sum()).backward()
    assert cache.grad is None
    assert not call(tk_quant.qk_norm_rotary, [x.detach().clone() for x in leaves], cache.detach(), **options)


def test_compiled(device: str) -> None:
    leaves, cache, options = arguments(device)
    torch._dynamo.reset()
    compiled = torch.compile(
        tk_modeling.qk_norm_rotary, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    both = []
    for function in (compiled, tk_modeling.qk_norm_rotary):
        own = [x.clone().requires_grad_() for x in leaves]
        found = call(function, own, cache, **options)
        both.append([*found, *torch.autograd.grad(found, own, [x.detach() for x in found])])
        alone = function(own[0], cache, own[2], None, **options)
        both[-1] += [alone, *torch.autograd.grad(alone.square().sum(), (own[0], own[2]))]
    assert_equal(both[0], both[1])


@pytest.mark.parametrize("name", ["query", "key", "cos_sin_cache", "query_weight"])
def test_no_tensor(name: str) -> None:
    (query, key, weight, key_weight), cache, options = arguments("cpu")
    given = {"query": query.requires_grad_(), "key": key, "cos_sin_cache": cache, "query_weight": weight}
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor"):
        tk_modeling.qk_norm_rotary(**{**given, name: 3}, key_weight=key_weight, **options)
