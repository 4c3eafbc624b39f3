"""Beyond test_modules.py: initial values, arguments and results of sublayers, casts, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tk_core.testing import assert_equal
from tk_modeling import HyperConnection, HyperHead, mhc_pre, reference

from .cases import HIDDEN, Mlp, draw_residual, randomize


class _Returns(nn.Module):
    """A sublayer that takes more than its input, and returns its output, or what it took, too."""

    def __init__(self, with_rest: bool) -> None:
        super().__init__()
        self.with_rest = with_rest

    def forward(self, x: Tensor, factor: float, *, shift: float) -> Any:
        y = x * factor + shift
        return (y, factor, shift) if self.with_rest else y


def _gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    module.zero_grad()
    module(*inputs).float().square().sum().backward()
    return [x.grad for x in (*inputs, *module.parameters())]


@pytest.mark.parametrize("kind", [HyperConnection, reference.HyperConnection])
@pytest.mark.parametrize("mhc_mult", [2, 8])
@pytest.mark.parametrize("post_mult_value", [2.0, 3.5])
@pytest.mark.parametrize("has_comb", [True, False])
def test_initial_values(kind: type[nn.Module], mhc_mult: int, post_mult_value: float, has_comb: bool) -> None:
    torch.manual_seed(0)
    options = {"mhc_mult": mhc_mult, "post_mult_value": post_mult_value, "post_eps": 0.25}
    module = kind(nn.Identity(), HIDDEN, norm_weight=True, comb=has_comb, **options)
    assert abs(module.fn.std() - 0.02) < 0.001
    assert abs(module.fn.mean()) < 0.002
    assert module.scale.eq(0.01).all()
    assert module.norm_weight.eq(1).all()
    module.scale.data.zero_()
    residual = draw_residual((5,), "cpu", mhc_mult)
    parameters = {"fn": module.fn, "scale": module.scale, "base": module.base}
    _, (post, comb), pre = mhc_pre(residual, **parameters, **options, shifted=True)
    torch.testing.assert_close(pre, torch.full_like(pre, 1 / mhc_mult))
    torch.testing.assert_close(post, torch.ones_like(post))
    if not has_comb:
        assert comb is None
        return
    logits = module.base[2 * mhc_mult :].view(mhc_mult, mhc_mult)
    assert torch.equal(logits, 8 * torch.eye(mhc_mult))
    assert (comb.diagonal(dim1=-2, dim2=-1) > 0.99).all()


@pytest.mark.parametrize("kind", [HyperHead, reference.HyperHead])
def test_initial_values_of_the_head(kind: type[nn.Module]) -> None:
    head = kind(HIDDEN, mhc_mult=2, norm_weight=True)
    assert abs(head.fn.std() - 0.02) < 0.002
    assert head.scale.tolist() == [pytest.approx(0.01)]
    assert head.norm_weight.eq(1).all()
    residual = draw_residual((5,), "cpu", 2)
    with torch.no_grad():
        head.scale.zero_()
        torch.testing.assert_close(head(residual), residual.float().mean(-2).bfloat16())


@pytest.mark.parametrize("kind", [HyperConnection, reference.HyperConnection])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_the_sublayer_takes_and_returns_besides_is_handed_on(kind: type[nn.Module], shifted: bool) -> None:
    alone, beside = (kind(_Returns(with_rest), HIDDEN, shifted=shifted) for with_rest in (False, True))
    beside.load_state_dict(alone.state_dict())
    residual = draw_residual((3,), "cpu")
    args = (residual, None) if shifted else (residual,)
    want, got = (module(*args, 2.0, shift=1.0) for module in (alone, beside))
    assert got[-2:] == (2.0, 1.0)
    assert_equal(got[:-2], want if shifted else (want,))


def test_a_sublayers_output_may_be_strided_or_its_input() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mT.contiguous().mT

    residual = draw_residual((3, 5), "cpu")
    modules = [HyperConnection(sublayer, HIDDEN) for sublayer in (Transposed(), nn.Identity())]
    modules[1].load_state_dict(modules[0].state_dict())
    assert_equal(_gradients(modules[0], residual), _gradients(modules[1], residual))


def test_parameters_narrowed_from_outside_count_as_float32() -> None:
    torch.manual_seed(0)
    make = (
        (lambda: HyperConnection(Mlp("cpu"), HIDDEN, norm_weight=True)),
        (lambda: HyperHead(HIDDEN, norm_weight=True)),
    )
    for module in (randomize(m()) for m in make):
        residual = draw_residual((3,), "cpu")
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16()  # as FSDP's mixed precision does for a forward
        found = _gradients(module, residual)
        assert all(grad.dtype == torch.bfloat16 for grad in found)
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        _gradients(module, residual)
        assert all(parameter.grad is None for parameter in module.parameters())
        for parameter, rounded in zip(module.parameters(), found[1:], strict=True):
            torch.testing.assert_close(parameter.main_grad.bfloat16(), rounded)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (None, TypeError),
        ([torch.zeros(3, 64)], TypeError),
        (torch.zeros(3, 64), TypeError),
        (torch.zeros(192).bfloat16(), ValueError),
    ],
)
def test_a_wrong_output_of_the_sublayer_is_an_error(output: Any, error: type[Exception]) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return output

    with pytest.raises(error, match="output of sublayer: expected"):
        HyperConnection(Wrong(), HIDDEN)(draw_residual((3,), "cpu"))


def test_a_shifted_layer_asks_for_pre_mix() -> None:
    with pytest.raises(TypeError, match="pre_mix: expected a tensor or None behind residual"):
        HyperConnection(nn.Identity(), HIDDEN, shifted=True)(draw_residual((3,), "cpu"))
