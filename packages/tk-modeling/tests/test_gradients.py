from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tk_modeling.gradients import autocast_to_bf16, main_grad_of, needs_gradients
from tk_modeling.linear import float32_product, linear


def _parameters(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, nn.Parameter]:
    torch.manual_seed(0)
    return torch.randn(3, 5, 7, dtype=dtype), nn.Parameter(torch.randn(9, 7, dtype=dtype))


def _grad_of_input(function: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    function(x, *weights).float().square().sum().backward()
    return x.grad


def _weight_gradient(x: Tensor, weight: Tensor) -> Tensor:
    """Of the sum of squares, from the same bfloat16 factors in float64."""
    d_y = torch.nn.functional.linear(x, weight).detach() * 2
    return (d_y.flatten(0, -2).double().t() @ x.flatten(0, -2).double()).float()


def test_linear_adds_an_unrounded_product_to_main_grad() -> None:
    x, weight = _parameters()
    expected = _weight_gradient(x, weight)
    d_x = _grad_of_input(torch.nn.functional.linear, x, weight)
    rounded, weight.grad = weight.grad, None
    weight.main_grad = torch.full(weight.shape, 3.0)
    assert torch.equal(_grad_of_input(linear, x, weight), d_x)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 3 + expected, atol=1e-3, rtol=1e-5)
    assert not torch.allclose(3 + rounded.float(), 3 + expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("leading", [(), (0,), (2, 0)])
def test_linear_takes_any_number_of_rows(leading: tuple[int, ...]) -> None:
    x, weight = _parameters()
    weight.main_grad = torch.zeros(weight.shape)
    x = x[0, 0].expand(*leading, 7).clone().requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad.shape == x.shape
    assert weight.main_grad.any() == (x.numel() > 0)


def test_linear_under_autocast() -> None:
    x, weight = _parameters()
    wide = nn.Parameter(weight.detach().float())
    wide.main_grad = torch.zeros(weight.shape)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x.float(), wide)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    torch.testing.assert_close(wide.main_grad, _weight_gradient(x, weight), atol=1e-3, rtol=1e-5)
    assert wide.grad is None


@pytest.mark.parametrize(
    "main_grad",
    [
        torch.zeros(9, 7, dtype=torch.bfloat16),
        torch.zeros(7, 9),
        torch.zeros(9, 7, device="meta"),
        [0.0],
    ],
    ids=["dtype", "shape", "device", "type"],
)
def test_a_wrong_main_grad_names_the_parameter(main_grad: Any) -> None:
    _, weight = _parameters()
    weight.main_grad = main_grad
    with pytest.raises(ValueError, match=r"^main_grad of down: expected a tensor of dtype, shape and device .*, got "):
        main_grad_of("down", weight)


def test_float32_product_is_not_rounded_under_autocast() -> None:
    a, b = torch.randn(2, 3, 65).bfloat16(), torch.randn(2, 65, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        product = float32_product(a, b)
        assert torch.equal(float32_product(a[0], b[0]), product[0])
    torch.testing.assert_close(product, (a.double() @ b.double()).float())


@pytest.mark.gpu
def test_float32_product_on_a_gpu() -> None:
    a, b = (torch.randn(2, 64, 64, device="cuda").bfloat16() for _ in range(2))
    for x, y in ((a, b), (a[0].t(), b[0])):
        torch.testing.assert_close(float32_product(x, y), (x.double() @ y.double()).float(), atol=1e-4, rtol=1e-5)


def test_autocast_to_bf16() -> None:
    x = torch.ones(2, requires_grad=True)
    others = (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32), torch.ones(2).bfloat16())
    meta = torch.ones(2, device="meta")
    assert autocast_to_bf16(x, *others, meta) == (x, *others, meta)
    with torch.autocast("cpu", torch.bfloat16):
        cast, *rest = autocast_to_bf16(x, *others)
        assert cast.dtype == autocast_to_bf16(meta)[0].dtype == torch.bfloat16
        assert all(a is b for a, b in zip(rest, others))
    cast.sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert autocast_to_bf16(x) == (x,)


def test_needs_gradients() -> None:
    x, y = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert needs_gradients(x, None, y)
    assert not needs_gradients(x, None)
    assert not needs_gradients([1.0])
    with torch.no_grad():
        assert not needs_gradients(y)
