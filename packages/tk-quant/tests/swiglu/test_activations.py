"""All SwiGLU ops take other activations, gates and values beside each other, and gates without values."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core.testing import assert_equal, nearest_float32

from .activations import ACTIVATIONS, IN_HALVES, width

INF, NAN = math.inf, math.nan
NUM_ROWS, HIDDEN = 12, 128
NAMES = ("silu", "swiglu_oai", "gelu_tanh", "relu2")


def forward_cast(x: Tensor, grad: Tensor, **more: Any) -> tuple[Tensor, ...]:
    return tk_quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128, **more)


def backward_cast(x: Tensor, grad: Tensor, **more: Any) -> tuple[Tensor, ...]:
    pair = tk_quant.per_token_cast(x, "e4m3", 128)
    out, quantized, x_grad, _ = tk_quant.swiglu_backward_and_per_token_cast(pair, grad, None, None, None, 128, **more)
    return out, x_grad, *quantized


CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "forward": lambda x, grad, **more: (tk_quant.swiglu_forward(x, **more),),
    "forward_cast": forward_cast,
    "backward": lambda x, grad, **more: tk_quant.swiglu_backward(x, grad, with_out=True, **more)[:2],
    "backward_cast": backward_cast,
}
each_call = pytest.mark.parametrize("name", CALLS)


def inputs(device: str, columns: int = 2 * HIDDEN) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, grad = torch.randn(NUM_ROWS, columns), torch.randn(NUM_ROWS, HIDDEN)
    return (3 * x).bfloat16().to(device), grad.bfloat16().to(device)


def silu_of(x: Tensor) -> Tensor:
    return tk_quant.swiglu_forward(x, gated=False)


def interleaved(x: Tensor) -> Tensor:
    return torch.stack(x.chunk(2, dim=1), dim=2).flatten(1)


@pytest.mark.parametrize("name", ["forward", "forward_cast", "backward"])
@pytest.mark.parametrize("activation", NAMES)
def test_interleaved_is_another_order_of_columns(activation: str, name: str, device: str) -> None:
    call, (x, grad), options = CALLS[name], inputs(device), {"activation": activation, "clamp_value": 2.5}
    expected = call(x, grad, **options)
    if name == "backward":
        expected = expected[0], interleaved(expected[1])
    assert_equal(call(interleaved(x), grad, interleaved=True, **options), expected)


@each_call
@pytest.mark.parametrize("activation", [name for name in NAMES if name != "swiglu_oai"])
def test_without_values_is_with_values_of_1(activation: str, name: str, device: str) -> None:
    call, (x, grad), options = CALLS[name], inputs(device), {"activation": activation, "clamp_value": 2.0}
    x[:, HIDDEN:] = 1
    alone = call(x[:, :HIDDEN].contiguous(), grad, gated=False, **options)
    for got, expected in zip(alone, call(x, grad, **options), strict=True):
        assert_equal(got, expected[:, : got.shape[1]].contiguous())


@each_call
def test_alpha(name: str, device: str) -> None:
    call, (x, grad) = CALLS[name], inputs(device)
    expected = call(x, grad, activation="swiglu_oai")
    assert_equal(call(x, grad, activation="swiglu_oai", alpha=1.702), expected)
    assert not torch.equal(call(x, grad, activation="swiglu_oai", alpha=1.7)[0].float(), expected[0].float())
    assert_equal(call(x, grad, alpha=1), call(x, grad))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_casts_are_those_of_results_without(name: str, device: str) -> None:
    options = ACTIVATIONS[name]
    x, grad = inputs(device, width(HIDDEN, options))
    out = tk_quant.swiglu_forward(x, **options)
    assert_equal(CALLS["forward_cast"](x, grad, **options), tk_quant.per_token_cast(out, "e4m3", 128))
    pair = tk_quant.per_token_cast(x, "e4m3", 128)
    x_grad = tk_quant.swiglu_backward(tk_quant.per_token_cast_back(pair, "fp32", 128), grad, **options)[1]
    *_, data, sf = CALLS["backward_cast"](x, grad, **options)
    assert_equal((data, sf), tk_quant.per_token_cast(x_grad, "e4m3", 128))


@pytest.mark.parametrize(
    ("activation", "gate", "expected"),
    [
        # exp(-z) is lost beside 1 from z = 16.64 on, and is infinite below -88.73.
        ("silu", [80.0, -80.0, -0.0, 0.0, INF, -INF, NAN], [80.0, -0.0, -0.0, 0.0, INF, NAN, NAN]),
        ("swiglu_oai", [80.0, -80.0, -0.0, 0.0, INF, -INF, NAN], [240.0, -0.0, -0.0, 0.0, INF, NAN, NAN]),
        ("gelu_tanh", [8.0, -12.0, -0.0, 0.0, INF, -INF, NAN], [16.0, -0.0, -0.0, 0.0, INF, NAN, NAN]),
        ("gelu_tanh", [3e38, -3e38, 1e20, -1e20], [INF, -0.0, 2e20, -0.0]),
        ("relu2", [3.0, -3.0, -0.0, 0.0, INF, -INF, NAN, 1e-30, 2e19], [18.0, 0.0, 0.0, 0.0, INF, 0.0, NAN, 0.0, INF]),
    ],
)
def test_by_hand(activation: str, gate: list[float], expected: list[float], device: str) -> None:
    """With a value of 2, an alpha of 2 for silu and swiglu_oai."""
    x = torch.zeros(1, 128)
    x[0, : len(gate)], x[0, 64:] = torch.tensor(gate), 2.0
    alpha = 2.0 if activation in ("silu", "swiglu_oai") else None
    if activation == "silu":
        expected = [2 * each for each in expected]
    out = tk_quant.swiglu_forward(x.to(device), activation=activation, alpha=alpha)[0, : len(gate)].cpu()
    torch.testing.assert_close(out, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    zeros = out == 0
    assert out.signbit()[zeros].tolist() == torch.tensor(expected).signbit()[zeros].tolist()


def test_clamp_after(device: str) -> None:
    x = torch.zeros(1, 128)
    # silu(l) is l from 17 on; 20 is more than the clamp, 18 is the clamp.
    x[0, :4], x[0, 64:] = torch.tensor([20.0, 18.0, 17.0, NAN]), torch.tensor([3.0, 3.0, 3.0, 3.0] + [0.0] * 60)
    grad = torch.full((1, 64), 2.0)
    options = {"clamp_after": True, "clamp_value": 18.0, "topk_weights": torch.tensor([0.5], device=device)}
    out, x_grad, weight_grad = tk_quant.swiglu_backward(x.to(device), grad.to(device), with_out=True, **options)
    assert out[0, :3].tolist() == [27.0, 27.0, 25.5]
    assert x_grad[0, :3].tolist() == [0.0, 3.0, 3.0]
    assert x_grad[0, 64:67].tolist() == [18.0, 18.0, 17.0]
    assert bool(out[0, 3].isnan() & x_grad[0, 3].isnan() & weight_grad[0].isnan())
    # silu(1) is less than 0.8, and is not cut.
    ones = torch.ones(1, 128, device=device)
    assert_equal(tk_quant.swiglu_forward(ones, 0.8, gated=False, clamp_after=True), silu_of(ones))
    assert not torch.equal(tk_quant.swiglu_forward(ones, 0.8, gated=False), silu_of(ones))
    assert_equal(tk_quant.swiglu_forward(ones, gated=False, clamp_after=True), silu_of(ones))


def test_every_operation_is_rounded_once(device: str) -> None:
    """By fractions, of which nothing but exp is rounded before it should be."""
    torch.manual_seed(2)
    x, grad = torch.randn(1, 128, device=device), torch.randn(1, 64, device=device)
    constants = torch.tensor([0x3FCC422A, 0x3D922279], dtype=torch.int32).view(torch.float32).tolist()
    k1, k2 = map(Fraction, constants)
    alpha = Fraction(torch.tensor(1.702).item())

    def near(exact: Fraction) -> Fraction:
        return Fraction(nearest_float32(exact))

    def gelu(gate: Fraction, cubic: Fraction) -> Fraction:
        return near(gate * near(k1 + near(cubic * near(gate * gate))))

    exponents: dict[str, Callable[[Fraction], tuple[Fraction, Fraction]]] = {
        "swiglu_oai": lambda gate: (near(alpha * gate), near(alpha * gate)),
        "gelu_tanh": lambda gate: (gelu(gate, k2), gelu(gate, near(3 * k2))),
    }
    for activation, exponents_of in exponents.items():
        out, x_grad, _ = tk_quant.swiglu_backward(x, grad, with_out=True, activation=activation)
        found = [exponents_of(Fraction(gate)) for gate in x[0, :64].tolist()]
        divisors = (1 + torch.exp(-torch.tensor([float(z) for z, _ in found], device=device))).tolist()
        for j, ((_, product), divisor) in enumerate(zip(found, divisors, strict=True)):
            gate, value, g, d = map(Fraction, (x[0, j].item(), x[0, 64 + j].item(), grad[0, j].item(), divisor))
            if activation == "swiglu_oai":
                value = near(value + 1)
            s = near(1 / d)
            scaled, slope = near(g * s), near(product * near(1 - s) + 1)
            assert out[0, j].item() == near(near(gate / d) * value)
            assert x_grad[0, j].item() == near(near(scaled * value) * slope)
            assert x_grad[0, 64 + j].item() == near(scaled * gate)


@pytest.mark.parametrize("name", IN_HALVES)
def test_count_without_values(name: str, device: str) -> None:
    x, _ = inputs(device, HIDDEN)
    count = torch.tensor([1, 2, 3, 4], device=device)
    tk_quant.swiglu_forward(x, 1.5, clamped_count=count, gated=False, **IN_HALVES[name])
    assert count.tolist() == [1 + int((x > 1.5).sum()), 2, 3, 4 + x.numel()]


@each_call
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"activation": "gelu"}, ValueError, "activation: expected one of 'silu', 'swiglu_oai', .*, got 'gelu'"),
        (
            {"activation": "swiglu_oai", "gated": False},
            ValueError,
            "gated: expected True beside activation 'swiglu_oai'",
        ),
        ({"activation": "gelu_tanh", "alpha": 1.0}, ValueError, "alpha: expected None beside activation 'gelu_tanh'"),
        ({"activation": "relu2", "alpha": 1.0}, ValueError, "alpha: expected None beside activation 'relu2', got 1.0"),
        ({"alpha": 0.0}, ValueError, "alpha: expected at least 1.17.*e-38, got 0.0"),
        ({"alpha": -1.702}, ValueError, "alpha: expected at least"),
        ({"alpha": INF}, ValueError, "alpha: expected a finite number"),
        ({"alpha": "1"}, TypeError, "alpha: expected a number"),
        (
            {"activation": "swiglu_oai", "clamp_after": True},
            ValueError,
            "clamp_after: expected False beside activation",
        ),
        ({"interleaved": True, "gated": False}, ValueError, "interleaved: expected False without gated, got True"),
        ({"interleaved": 1}, TypeError, "interleaved: expected a bool"),
        ({"gated": None}, TypeError, "gated: expected a bool"),
        ({"clamp_after": 7.0}, TypeError, "clamp_after: expected a bool"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], match: str, name: str) -> None:
    with pytest.raises(error, match=match):
        CALLS[name](*inputs("cpu"), **options)
