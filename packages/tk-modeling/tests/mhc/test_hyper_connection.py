"""Beyond test_modules.py: initial values, arguments and results of sublayers, casts, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tk_core.testing import assert_equal
from tk_modeling import HyperConnection, HyperHead, mhc_head, mhc_post, mhc_pre, reference

from .cases import HIDDEN, Mlp, draw_residual, randomize


class _Returns(nn.Module):
    """A sublayer that takes more than its input, and may return more than its output."""

    def __init__(self, rest: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, x: Tensor, factor: float = 1.0, *, shift: float = 0.0) -> Any:
        y = x * factor + shift
        return (y, *self.rest) if self.rest else y


def _gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    module.zero_grad()
    module(*inputs).float().square().sum().backward()
    return [x.grad for x in (*inputs, *module.parameters())]


@pytest.mark.parametrize("kind", [HyperConnection, reference.HyperConnection])
@pytest.mark.parametrize("mhc_mult", [2, 8])
@pytest.mark.parametrize("post_mult_value", [2.0, 3.5])
def test_initial_values(kind: type[nn.Module], mhc_mult: int, post_mult_value: float) -> None:
    torch.manual_seed(0)
    module = kind(nn.Identity(), HIDDEN, mhc_mult=mhc_mult, post_mult_value=post_mult_value, norm_weight=True)
    assert abs(module.fn.std() - 0.02) < 0.001
    assert abs(module.fn.mean()) < 0.001
    assert module.scale.eq(0.01).all()
    assert module.norm_weight.eq(1).all()
    module.scale.data.zero_()
    residual = draw_residual((5,), "cpu", mhc_mult)
    parameters = {"fn": module.fn, "scale": module.scale, "base": module.base, "mhc_mult": mhc_mult}
    _, (post, comb), pre = mhc_pre(residual, **parameters, post_mult_value=post_mult_value, shifted=True)
    torch.testing.assert_close(pre, torch.full_like(pre, 1 / mhc_mult))
    torch.testing.assert_close(post, torch.ones_like(post))
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


def test_reset_parameters() -> None:
    module = randomize(HyperConnection(nn.Identity(), HIDDEN, norm_weight=True))
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    assert_equal(module.state_dict(), HyperConnection(nn.Identity(), HIDDEN, norm_weight=True).state_dict())


def test_forward_is_pre_sublayer_post() -> None:
    module = randomize(HyperConnection(_Returns(), HIDDEN, norm_weight=True))
    residual = draw_residual((3,), "cpu")
    layer_input, mixes = mhc_pre(
        residual,
        module.fn,
        module.scale,
        module.base,
        norm_weight=module.norm_weight,
        post_mult_value=2.0,
        sinkhorn_repeat=20,
    )
    want = mhc_post(layer_input * 2.0 + 1.0, residual, *mixes)
    assert_equal(module(residual, 2.0, shift=1.0).detach(), want.detach())


@pytest.mark.parametrize("kind", [HyperConnection, reference.HyperConnection])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_the_sublayer_returns_beside_its_output_is_handed_on(kind: type[nn.Module], shifted: bool) -> None:
    rest = (torch.ones(2), "more")
    residual = draw_residual((3,), "cpu")
    alone, beside = (kind(_Returns(r), HIDDEN, shifted=shifted) for r in ((), rest))
    beside.load_state_dict(alone.state_dict())
    args = (residual, None) if shifted else (residual,)
    want = alone(*args, 2.0)
    got = beside(*args, 2.0)
    num_results = 2 if shifted else 1
    assert got[num_results:] == rest
    assert_equal(got[:num_results], want if shifted else (want,))


def test_shifted_layers_pass_the_mix_on() -> None:
    first, second = (randomize(HyperConnection(_Returns(), HIDDEN, shifted=True)) for _ in range(2))
    residual = draw_residual((3,), "cpu")
    inputs = []
    for layer in (first, second):
        layer.sublayer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    residual_1, mix_1 = first(residual, None)
    residual_2, mix_2 = second(residual_1, mix_1)
    assert_equal(inputs[0], residual[:, 0].contiguous())
    want = (mix_1 * residual_1).sum(-2).bfloat16()
    torch.testing.assert_close(inputs[1], want.detach(), atol=0.02, rtol=0.02)
    mix_2.sum().backward()
    # The second mix is of the second layer's own residual, which the first one's mix has no part in.
    assert second.fn.grad[:4].any()
    assert not second.fn.grad[4:].any()
    assert residual_2.shape == residual.shape


def test_a_sublayers_output_may_be_strided_or_its_input() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mT.contiguous().mT

    residual = draw_residual((3, 5), "cpu")
    modules = [HyperConnection(sublayer, HIDDEN) for sublayer in (Transposed(), nn.Identity())]
    modules[1].load_state_dict(modules[0].state_dict())
    assert_equal(_gradients(modules[0], residual), _gradients(modules[1], residual))


@pytest.mark.parametrize("leading", [(), (5,), (0,)])
def test_without_batch(leading: tuple[int, ...]) -> None:
    grads = _gradients(randomize(HyperConnection(Mlp("cpu"), HIDDEN, norm_weight=True)), draw_residual(leading, "cpu"))
    assert all(grad is not None and bool(grad.any()) == (0 not in leading) for grad in grads)


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


def test_reentrant_checkpoint() -> None:
    module = randomize(HyperConnection(Mlp("cpu"), HIDDEN))
    residual = draw_residual((3,), "cpu")
    want = _gradients(module, residual)
    again = residual.clone().requires_grad_()
    module.zero_grad()
    checkpoint(module, again, use_reentrant=True).float().square().sum().backward()
    assert_equal([x.grad for x in (again, *module.parameters())], want)


def test_the_head_alone_and_behind_layers_trains() -> None:
    head, layer = randomize(HyperHead(HIDDEN)), randomize(HyperConnection(Mlp("cpu"), HIDDEN))
    residual = draw_residual((3,), "cpu")
    want = mhc_head(residual, head.fn, head.scale, head.base)
    assert_equal(head(residual).detach(), want.detach())
    for module in (head, nn.Sequential(layer, head)):
        assert all(grad.any() for grad in _gradients(module, residual))


@pytest.mark.parametrize("kind", [HyperConnection, HyperHead])
def test_on_another_device(kind: type[nn.Module]) -> None:
    args = (nn.Identity(), HIDDEN) if kind is HyperConnection else (HIDDEN,)
    module = kind(*args, norm_weight=True, device="meta")
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert module(torch.empty(3, 4, HIDDEN, dtype=torch.bfloat16, device="meta")).device.type == "meta"


def test_repr_shows_the_options() -> None:
    text = repr(HyperConnection(nn.Identity(), HIDDEN, mhc_mult=2, shifted=True))
    assert "64, mhc_mult=2, norm_weight=False, norm_eps=1e-06, post_mult_value=2.0" in text
    assert "shifted=True" in text
    assert "64, mhc_mult=2, norm_weight=True" in repr(HyperHead(HIDDEN, mhc_mult=2, norm_weight=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mhc_mult": 3}, "mhc_mult: expected one of 2, 4, 8, got 3"),
        ({"hidden": 96}, "hidden: expected a multiple of 64, got 96"),
        ({"hidden": 8256}, "hidden: expected 64 to 8192, got 8256"),
        ({"pre_eps": 0.25}, "pre_eps: expected more than 1/m - 1 and less than 1/m for m = 4, got 0.25"),
        ({"pre_eps": -0.5, "mhc_mult": 2}, "pre_eps: expected more than .* for m = 2, got -0.5"),
        ({"post_mult_value": 1.0}, "post_mult_value: expected more than 1, got 1.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HyperConnection(nn.Identity(), **{"hidden": HIDDEN} | options)
    if "post_mult_value" not in options:
        with pytest.raises(ValueError, match=message):
            HyperHead(**{"hidden": HIDDEN} | options)


@pytest.mark.parametrize(
    ("sublayer", "residual", "kind", "message"),
    [
        (nn.Identity(), torch.zeros(3, 4, 64), TypeError, "residual: expected dtype torch.bfloat16"),
        (nn.Identity(), torch.zeros(3, 4, 128).bfloat16(), ValueError, "fn: expected shape"),
        (_Returns(), torch.zeros(3, 2, 64).bfloat16(), ValueError, r"residual: expected shape \(..., 4, hidden\)"),
        (nn.Flatten(0), torch.zeros(3, 4, 64).bfloat16(), ValueError, r"output of sublayer: expected shape \(3, 64\)"),
    ],
)
def test_errors_name_the_argument(sublayer: nn.Module, residual: Tensor, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        HyperConnection(sublayer, HIDDEN)(residual)


@pytest.mark.parametrize("output", [None, [torch.zeros(3, 64)], torch.zeros(3, 64)])
def test_a_wrong_output_of_the_sublayer_is_an_error(output: Any) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return output

    with pytest.raises(TypeError, match="output of sublayer: expected"):
        HyperConnection(Wrong(), HIDDEN)(draw_residual((3,), "cpu"))


def test_a_shifted_layer_asks_for_pre_mix() -> None:
    with pytest.raises(TypeError, match="pre_mix: expected a tensor or None behind residual"):
        HyperConnection(nn.Identity(), HIDDEN, shifted=True)(draw_residual((3,), "cpu"))


def test_compiled_with_main_grads() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = randomize(HyperConnection(Mlp("cpu"), HIDDEN, norm_weight=True, sinkhorn_repeat=2))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    residual = draw_residual((3,), "cpu")
    main_grads = []
    for run in (module, compiled):
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        # Twice before the backward, which then changes main_grad between the uses.
        run(run(residual.clone().requires_grad_())).float().square().sum().backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        main_grads.append([parameter.main_grad for parameter in module.parameters()])
    assert_equal(main_grads[1], main_grads[0])
    assert all(x.any() for x in main_grads[0])
