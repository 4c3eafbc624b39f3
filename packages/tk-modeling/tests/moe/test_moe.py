"""MoE."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tk_modeling.moe.moe as moe_module
from tk_core.testing import assert_equal
from tk_core.testing.poison import poisoned_allocations
from tk_modeling import MoE

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


def test_float32_parameters_need_autocast() -> None:
    module = MoE(HIDDEN, INTERMEDIATE, 8, 3)
    assert module.gate_up.dtype == torch.float32
    with pytest.raises(TypeError, match=r"gate_up: expected dtype torch.bfloat16, got torch.float32"):
        module(x(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x(3).float())[0].dtype == torch.bfloat16


def test_initial_values() -> None:
    module = moe()
    assert module.gate_up.std().item() == pytest.approx(HIDDEN**-0.5, rel=0.05)
    assert module.down.std().item() == pytest.approx(INTERMEDIATE**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: moe()(None), TypeError, "x: expected a torch.Tensor"),
        (lambda: moe()(x(3).float()), TypeError, "x: expected dtype torch.bfloat16, got torch.float32"),
        (lambda: moe()(x(3)[:, :32]), ValueError, r"x: expected shape \(..., 64\)"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_fp8_keeps_small_gradients(device: str) -> None:
    """All steps are linear in dY: a power of two in it goes through to every gradient exactly."""
    torch.manual_seed(3)
    layer = MoE(128, 256, 8, 3, fp8=True, device=device, dtype=torch.bfloat16)
    leaf = torch.randn(200, 128, device=device).bfloat16().requires_grad_()
    with poisoned_allocations():
        y, _ = layer(leaf)
    d_y = torch.randn(200, 128, device=device).bfloat16()

    def gradients(d_y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (leaf, *layer.parameters()), d_y, retain_graph=True)

    with poisoned_allocations():
        expected, small = gradients(d_y), gradients(d_y * 2.0**-20)
    assert all(each.isfinite().all() for each in (y, *expected))
    assert_equal(small, tuple(each * 2.0**-20 for each in expected))
