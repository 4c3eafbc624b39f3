"""fp8_linear."""

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tk_core.testing import assert_equal
from tk_core.testing.numeric import calc_diff
from tk_modeling import fp8_linear

from .cases import main_grad_of_ones


def arguments(num_rows: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[Tensor, nn.Parameter]:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 384, device=device).bfloat16().requires_grad_()
    weight = nn.Parameter((torch.randn(256, 384, device=device) * 384**-0.5).to(dtype))
    return x, weight


def run(function: object, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients."""
    y = function(x, weight)
    torch.manual_seed(7)
    d_y = torch.randn(y.shape, device=y.device).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weight), d_y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [3, 128, 300])
def test_against_bf16(num_rows: int, dtype: torch.dtype, device: str) -> None:
    x, weight = arguments(num_rows, dtype, device)
    found = run(fp8_linear, x, weight)
    exact = [z.detach().double().requires_grad_() for z in (x, weight)]
    expected = run(nn.functional.linear, *exact)
    assert [z.dtype for z in found] == [torch.bfloat16, torch.bfloat16, dtype]
    for name, got, want in zip(("y", "x", "weight"), found, expected, strict=True):
        # e4m3 keeps 4 bits: each operand is off by 2.6 % (rms), a product of two by 3.7 %, half the square of which is
        # 7e-4.
        assert 1e-5 < calc_diff(got, want) < 1e-3, name


def test_a_row_does_not_depend_on_others() -> None:
    x, weight = arguments(130)
    whole, d_x, _ = run(fp8_linear, x, weight)
    with torch.no_grad():
        assert_equal(fp8_linear(x[:5], weight), whole[:5])
    assert d_x.shape == x.shape


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "not-on-16-bytes"])
def test_main_grad_takes_float32_gradients(layout: str, compiled: bool, device: str) -> None:
    torch._dynamo.reset()
    x, weight = arguments(300, torch.float32, device)
    _, _, expected = run(fp8_linear, x, weight)
    weight.main_grad = main_grad_of_ones(weight, layout)
    backend = "inductor" if device == "cuda" else "aot_eager"
    function = torch.compile(fp8_linear, fullgraph=True, backend=backend) if compiled else fp8_linear
    for times in (1, 2):
        y = function(x, weight)
        torch.manual_seed(7)
        y.backward(torch.randn(y.shape, device=device).to(y.dtype))
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, 1 + times * expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "not-on-16-bytes"])
def test_a_compiled_backward_adds_in_the_product(layout: str) -> None:
    """As an eager one does: there is no addition beside the operator."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph.code)
        return make_boxed_func(graph)

    x, weight = arguments(128)
    weight.main_grad = main_grad_of_ones(weight, layout)
    compiled = torch.compile(fp8_linear, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(x, weight).sum().backward()
    _, backward = graphs
    assert backward.count("tk_modeling.add_weight_product.default") == 1
    assert "aten.add" not in backward


def test_small_gradients_keep_their_codes(device: str) -> None:
    """A power of two in dY goes through to dX and dW exactly, and an error is the same at |dY| = 1e-9 as at 1."""
    x, weight = arguments(300, torch.float32, device)
    y = fp8_linear(x, weight)
    torch.manual_seed(7)
    d_y = torch.randn(y.shape, device=device).bfloat16()

    def gradients(d_y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (x, weight), d_y, retain_graph=True)

    expected = gradients(d_y)
    for scale in (2.0**-20, 2.0**-60):
        assert_equal(gradients(d_y * scale), tuple(each * scale for each in expected))
    d_y = d_y * 1e-9
    exact = d_y.double() @ weight.double(), d_y.double().t() @ x.double()
    for name, got, want in zip(("x", "weight"), gradients(d_y), exact, strict=True):
        # Each operand is off by 2.6 % (rms).
        assert (got - want).norm() < 0.04 * want.norm(), name


@pytest.mark.parametrize(
    ("error", "match", "x", "weight"),
    [
        (ValueError, "in_features", torch.zeros(2, 192), torch.zeros(128, 192)),
        (ValueError, "out_features", torch.zeros(2, 128), torch.zeros(64, 128)),
        (ValueError, "^x", torch.zeros(2, 256).bfloat16(), torch.zeros(128, 128)),
        (TypeError, "^x", torch.zeros(2, 128), torch.zeros(128, 128)),
        (TypeError, "^weight", torch.zeros(2, 128).bfloat16(), torch.zeros(128, 128).half()),
    ],
)
def test_bad_input(error: type[Exception], match: str, x: Tensor, weight: Tensor) -> None:
    with pytest.raises(error, match=match):
        fp8_linear(x, weight)
