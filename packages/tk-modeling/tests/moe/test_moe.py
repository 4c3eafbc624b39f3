"""MoE."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tk_modeling.moe.moe as moe_module
from tk_core.testing import assert_equal
from tk_core.testing.numeric import calc_diff
from tk_core.testing.poison import poisoned_allocations
from tk_modeling import MoE
from tk_modeling.reference import MoE as ReferenceMoE

HIDDEN, INTERMEDIATE = 64, 128


def moe(num_experts: int = 8, num_topk: int = 3, **options: Any) -> MoE:
    torch.manual_seed(3)
    return MoE(HIDDEN, INTERMEDIATE, num_experts, num_topk, dtype=torch.bfloat16, **options)


def x(*leading: int) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(*leading, HIDDEN).bfloat16()


def by_tokens(module: MoE, x: Tensor) -> Tensor:
    """The layer token by token, in float64."""
    idx, weights, _ = module.router(x)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, experts) in enumerate(zip(x.double(), idx.tolist(), strict=True)):
        for expert, weight in zip(experts, weights[token].tolist(), strict=True):
            gate, up = (module.gate_up[expert].double() @ row).chunk(2)
            y[token] += weight * (module.down[expert].double() @ (nn.functional.silu(gate) * up))
    return y


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(8, 3), (1, 1), (40, 2), (4, 4)])
def test_token_by_token(sizes: tuple[int, int]) -> None:
    """Also of one expert, of more experts than pairs, and where all tokens go to all experts."""
    module = moe(*sizes, routed_scaling_factor=2.5)
    y, aux = module(x(17))
    expected = by_tokens(module, x(17))
    assert (y.double() - expected).norm() <= 2**-7 * expected.norm()
    assert y.dtype == torch.bfloat16
    assert aux.dtype == torch.float32


def test_all_tokens_to_one_expert() -> None:
    module = moe(8, 1)
    module.router.bias[5] = 10
    y, _ = module(x(33))
    with torch.no_grad():
        expected = by_tokens(module, x(33))
    assert (y.double() - expected).norm() <= 2**-7 * expected.norm()
    y.sum().backward()
    for weight in (module.gate_up, module.down):
        assert weight.grad[5].any()
        assert not weight.grad[torch.arange(8) != 5].any()


def test_memory_that_nobody_wrote_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many rows as the worst routing needs; those past the last segment hold NaN here."""
    grouped_linear = moe_module.grouped_linear

    def run(linear: Any) -> dict[str, Tensor | None]:
        monkeypatch.setattr(moe_module, "grouped_linear", linear)
        module, leaf = moe(), x(19).requires_grad_()
        y, aux = module(leaf)
        (y.double().square().sum() + aux).backward()
        return {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}}

    class Poison(torch.autograd.Function):
        """NaN in all rows from `end` on, forward and backward."""

        @staticmethod
        def forward(ctx: Any, rows: Tensor, end: int) -> Tensor:
            ctx.end = end
            return torch.cat((rows[:end], torch.full_like(rows[end:], torch.nan)))

        @staticmethod
        def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
            return torch.cat((d_rows[: ctx.end], torch.full_like(d_rows[ctx.end :], torch.nan))), None

    def poisoned_linear(rows: Tensor, weight: Tensor, ends: Tensor, **more: str) -> Tensor:
        end = int(ends[-1])
        assert end < len(rows)
        return Poison.apply(grouped_linear(Poison.apply(rows, end), weight, ends, **more), end)

    expected = run(grouped_linear)
    with poisoned_allocations():
        assert_equal(run(poisoned_linear), expected)
    assert all(each.isfinite().all() for each in expected.values())


def test_main_grads_accumulate() -> None:
    module, leaf = moe(), x(19)
    module.router.requires_grad_(False)
    for parameter in (module.gate_up, module.down):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    module(leaf)[0].float().square().sum().backward()
    once = [parameter.main_grad.clone() for parameter in (module.gate_up, module.down)]
    module(leaf)[0].float().square().sum().backward()
    for parameter, grad in zip((module.gate_up, module.down), once, strict=True):
        assert parameter.grad is None
        assert grad.any()
        torch.testing.assert_close(parameter.main_grad, 2 * grad)
    assert module.router.weight.grad is None


def test_main_grads_under_compile() -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        module = moe()
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        y, aux = run(x(19))
        (y.float().square().sum() + aux).backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        found.append([parameter.main_grad for parameter in module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_torch_func_grad() -> None:
    module, leaf = moe(), x(5)
    parameters = dict(module.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y, aux = torch.func.functional_call(module, parameters, (leaf,))
        return y.float().square().sum() + aux

    found = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for got, want in zip(found.values(), expected, strict=True):
        assert_equal(got.detach(), want)


def test_output_does_not_depend_on_other_tokens() -> None:
    module = moe().eval()
    y, _ = module(x(40))
    assert_equal(module(x(40)[:7])[0], y[:7].clone())


@pytest.mark.parametrize("fp8", [False, True])
def test_one_token_without_leading_dimensions(fp8: bool) -> None:
    module = MoE(128, 128, 8, 3, fp8=fp8, dtype=torch.bfloat16).eval()
    token = torch.randn(128).bfloat16()
    y, aux = module(token)
    expected, expected_aux = module(token.unsqueeze(0))
    assert_equal((y, aux), (expected[0].clone(), expected_aux))


def test_strided_input() -> None:
    module = moe().eval()
    wide = torch.cat((x(7), x(7)), dim=1)
    assert_equal(module(wide[:, :HIDDEN]), module(x(7)))
    transposed = x(3, 5).transpose(0, 1)
    assert_equal(module(transposed)[0], module(transposed.contiguous())[0])


def test_reference_takes_any_dtype_and_agrees() -> None:
    module = moe()
    reference = ReferenceMoE(HIDDEN, INTERMEDIATE, 8, 3, dtype=torch.float64)
    reference.load_state_dict(module.state_dict())
    y, aux = reference.double()(x(9).double())
    assert y.dtype == aux.dtype == torch.float64
    found, found_aux = module(x(9))
    assert (found - y).norm() <= 2**-7 * y.norm()
    torch.testing.assert_close(found_aux.double(), aux, rtol=1e-5, atol=1e-8)


def test_float32_parameters_need_autocast() -> None:
    module = MoE(HIDDEN, INTERMEDIATE, 8, 3)
    assert module.gate_up.dtype == torch.float32
    with pytest.raises(TypeError, match=r"gate_up: expected dtype torch.bfloat16, got torch.float32"):
        module(x(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x(3).float())[0].dtype == torch.bfloat16


def test_repr_and_initial_values() -> None:
    module = moe()
    assert repr(module).startswith("MoE(\n  64, intermediate=128\n  (router): Router(64, 3 of 8 experts, sigmoid)")
    assert module.gate_up.std().item() == pytest.approx(HIDDEN**-0.5, rel=0.05)
    assert module.down.std().item() == pytest.approx(INTERMEDIATE**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: MoE(96, 128, 8, 2), ValueError, "hidden: expected a multiple of 64, got 96"),
        (lambda: MoE(64, 100, 8, 2), ValueError, "intermediate: expected a multiple of 64, got 100"),
        (lambda: MoE(0, 64, 8, 2), ValueError, "hidden: expected 64 to .*, got 0"),
        (lambda: MoE(64, 64.0, 8, 2), TypeError, "intermediate: expected an int, got 64.0"),
        (lambda: MoE(64, 64, 8, 9), ValueError, "num_topk: expected 1 to 8, got 9"),
        (lambda: moe()(None), TypeError, "x: expected a torch.Tensor"),
        (lambda: moe()(x(3).float()), TypeError, "x: expected dtype torch.bfloat16, got torch.float32"),
        (lambda: moe()(x(3)[:, :32]), ValueError, r"x: expected shape \(..., 64\)"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def fp8_and_bf16(**options: Any) -> tuple[MoE, MoE]:
    """Two layers with the same weights."""
    torch.manual_seed(3)
    layers = [MoE(128, 256, 8, 3, fp8=fp8, dtype=torch.bfloat16, **options) for fp8 in (True, False)]
    layers[1].load_state_dict(layers[0].state_dict())
    return tuple(layers)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_experts_are_near_those_of_bf16(device: str) -> None:
    """Output and gradients: three casts, each off by 2.6 % (rms), lie between x and y."""
    found = []
    for layer in fp8_and_bf16(device=device):
        torch.manual_seed(5)
        leaf = torch.randn(200, 128, device=device).bfloat16().requires_grad_()
        with poisoned_allocations():
            y, _ = layer(leaf)
            y.backward(torch.randn(200, 128, device=device).bfloat16())
        found.append((y.detach(), leaf.grad, layer.gate_up.grad, layer.down.grad))
    for name, got, want in zip(("y", "x", "gate_up", "down"), *found, strict=True):
        assert 1e-5 < calc_diff(got, want) < 4e-3, name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_keeps_small_gradients(device: str) -> None:
    """All steps are linear in dY: a power of two in it goes through to every gradient exactly."""
    layer, _ = fp8_and_bf16(device=device)
    leaf = torch.randn(200, 128, device=device).bfloat16().requires_grad_()
    y, _ = layer(leaf)
    d_y = torch.randn(200, 128, device=device).bfloat16()

    def gradients(d_y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (leaf, *layer.parameters()), d_y, retain_graph=True)

    assert_equal(gradients(d_y * 2.0**-20), tuple(each * 2.0**-20 for each in gradients(d_y)))


def test_fp8_under_compile() -> None:
    torch._dynamo.reset()
    layer, _ = fp8_and_bf16()
    leaf = torch.randn(40, 128).bfloat16()
    expected, _ = layer(leaf)
    assert_equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(leaf)[0], expected)
    assert "intermediate=256, fp8=True" in repr(layer)


def test_fp8_needs_multiples_of_128() -> None:
    with pytest.raises(ValueError, match=r"^hidden"):
        MoE(64, 128, 8, 3, fp8=True)
    with pytest.raises(ValueError, match=r"^intermediate"):
        MoE(128, 64, 8, 3, fp8=True)
