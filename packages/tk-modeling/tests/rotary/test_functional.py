"""apply_rotary, differentiable."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_modeling
import tk_quant
from tk_core.testing import assert_equal


def arguments(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """query and key, the cache, and options with some positions outside of the cache."""
    query, key = (torch.randn(2, 5, heads, 80, device=device).to(dtype) for heads in (3, 1))
    cache = torch.randn(9, 64, device=device)
    return query, key, cache, {"positions": torch.randint(-2, 11, (2, 5), device=device)}


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype, interleaved: bool, conjugate: bool, device: str) -> None:
    """The result is the op's; the gradient of ⟨turned, g⟩ is the conjugate's of g, bit for bit."""
    query, key, cache, options = arguments(device, dtype)
    options |= {"interleaved": interleaved, "conjugate": conjugate}
    leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
    found = tk_modeling.apply_rotary(leaves[0], cache, leaves[1], **options)
    grads = tuple(torch.randn_like(x) for x in found)
    d_leaves = torch.autograd.grad(found, leaves, grads)
    expected, d_expected = [query, key], [x.clone() for x in grads]
    tk_quant.apply_rotary(query, cache, key, **options)
    tk_quant.apply_rotary(d_expected[0], cache, d_expected[1], **{**options, "conjugate": not conjugate})
    assert_equal([x.detach() for x in found], expected)
    assert_equal(list(d_leaves), d_expected)


def test_the_backward_is_the_derivative() -> None:
    query, key, cache, options = arguments("cpu")
    query.requires_grad_(), key.requires_grad_()
    found = tk_modeling.apply_rotary(query, cache, key, **options)
    grads = tuple(torch.randn_like(x) for x in found)
    d_leaves = torch.autograd.grad(found, (query, key), grads)
    # The op is linear: ⟨turned x, g⟩ = ⟨x, d⟩.
    for x, y, g, d in zip((query, key), found, grads, d_leaves):
        torch.testing.assert_close((y * g).sum((2, 3)), (x * d).sum((2, 3)), rtol=1e-4, atol=1e-4)


def test_one_of_two(device: str) -> None:
    """A key alone frozen, or unused, or none at all: the other's gradient is the same."""
    query, key, cache, options = arguments(device)
    query.requires_grad_()
    expected = torch.autograd.grad(tk_modeling.apply_rotary(query, cache, **options).square().sum(), query)
    found = tk_modeling.apply_rotary(query, cache, key, **options)
    assert not tk_modeling.apply_rotary(query.detach(), cache, key, **options)[1].requires_grad
    assert_equal(torch.autograd.grad(found[0].square().sum(), query), expected)
    found = tk_modeling.apply_rotary(key, cache, query, **options)
    assert_equal(torch.autograd.grad(found[1].square().sum(), query), expected)
    found = tk_modeling.apply_rotary(key.requires_grad_(), cache, query, **options)
    d_query, d_key = torch.autograd.grad(found[1].square().sum(), (query, key), materialize_grads=True)
    assert_equal([d_query], list(expected))
    assert not d_key.any()


def test_forms_of_cos_and_sin(device: str) -> None:
    query, key, cache, options = arguments(device)
    cos, sin = cache.chunk(2, -1)
    expected = tk_modeling.apply_rotary(query, cache, key, **options)
    assert_equal(tk_modeling.apply_rotary(query, cos, key, sin_cache=sin, **options), expected)
    cache.requires_grad_()
    query.requires_grad_()
    tk_modeling.apply_rotary(query, cache, **options).sum().backward()
    assert cache.grad is None


def test_compiled(device: str) -> None:
    query, key, cache, options = arguments(device)
    torch._dynamo.reset()
    compiled = torch.compile(
        tk_modeling.apply_rotary, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    both = []
    for function in (compiled, tk_modeling.apply_rotary):
        leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
        found = function(leaves[0], cache, leaves[1], **options)
        both.append((*found, *torch.autograd.grad(found, leaves, [x.detach() for x in found])))
    assert_equal(both[0], both[1])


@pytest.mark.parametrize("name", ["query", "key", "cos_sin_cache", "sin_cache"])
def test_no_tensor(name: str) -> None:
    query, key, cache, options = arguments("cpu")
    given = {"query": query.requires_grad_(), "key": key, "cos_sin_cache": cache, **options, name: 3}
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor"):
        tk_modeling.apply_rotary(**given)
