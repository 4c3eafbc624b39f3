"""checkpoint_streams gives the bits of its layers, and in between their residuals are gone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import tk_mhc
from tk_core.testing import assert_equal
from tk_modeling import HyperConnection, checkpoint_streams

from .cases import HIDDEN, Mlp, draw_residual, randomize

M = 4
LAYERS = 5


class _WithRest(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.float().square().mean()


class _Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class _ChangesItsInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class _SavesItsOutput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class _Views(nn.Module):
    """Saves other views of its input."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        return x + (flat[3:67] * flat[64:128].flip(0)).view(1, 64) + x.mT.mul(x.mT).mT


SUBLAYERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Mlp("cpu"),
    "identity": nn.Identity,
    "with-rest": lambda: _WithRest("cpu"),
    "checkpointed": lambda: _Checkpointed("cpu"),
    "changes-its-input": lambda: _ChangesItsInput("cpu"),
    "saves-its-output": lambda: _SavesItsOutput("cpu"),
    "views": _Views,
}


def _stack(make: Callable[[], nn.Module] = SUBLAYERS["mlp"], num_layers: int = LAYERS, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    options = {"sinkhorn_repeat": 2} | options
    return nn.ModuleList([randomize(HyperConnection(make(), HIDDEN, **options)) for _ in range(num_layers)])


def _residual() -> Tensor:
    torch.manual_seed(1)
    return draw_residual((2, 3), "cpu", M)


def _one_by_one(layers: nn.ModuleList, residual: Tensor, pre_mix: Tensor | None = None) -> tuple[Any, ...]:
    rests = []
    for layer in layers:
        if layer.settings.shifted:
            residual, pre_mix, *rest = layer(residual, pre_mix)
        else:
            output = layer(residual)
            residual, *rest = output if isinstance(output, tuple) else (output,)
        rests.append(tuple(rest))
    return (residual, pre_mix, rests) if layers[0].settings.shifted else (residual, rests)


def _loss(outputs: tuple[Any, ...]) -> Tensor:
    residual, *mixes, rests = outputs
    torch.manual_seed(2)
    weighted = (residual * torch.randn(residual.shape).bfloat16()).float().sum()
    return weighted + sum(mix.sum() for mix in mixes) + sum(x for rest in rests for x in rest)


def _train(layers: nn.ModuleList, residual: Tensor, run: Callable[..., tuple[Any, ...]], **options: Any) -> Any:
    """All outputs and gradients."""
    layers.zero_grad()
    residual = residual.clone().requires_grad_()
    outputs = run(layers, residual, **options)
    _loss(outputs).backward()
    grads = {name: parameter.grad for name, parameter in layers.named_parameters()}
    return outputs, residual.grad, grads


@pytest.mark.parametrize("group_size", [None, 1, 2, 3, LAYERS, 100])
@pytest.mark.parametrize("mix", ["own", "no-comb", "shifted", "given"])
def test_bits_are_those_of_the_layers(mix: str, group_size: int | None) -> None:
    """Of layers with their own mixes, also without comb, of shifted ones, and of shifted ones with a first pre_mix."""
    layers = _stack(shifted=mix in ("shifted", "given"), comb=mix != "no-comb")
    pre_mix = torch.rand(2, 3, M, 1)
    found = []
    for run in (partial(checkpoint_streams, group_size=group_size), _one_by_one):
        leaf = pre_mix.clone().requires_grad_()
        found.append((_train(layers, _residual(), run, pre_mix=leaf if mix == "given" else None), leaf.grad))
    assert_equal(*found)


@pytest.mark.parametrize("name", SUBLAYERS)
def test_sublayers(name: str) -> None:
    layers = _stack(SUBLAYERS[name], norm_weight=True)
    want = _train(layers, _residual(), _one_by_one)
    assert_equal(_train(layers, _residual(), checkpoint_streams, group_size=3), want)


def test_frozen_layers() -> None:
    layers = _stack()
    layers[0].requires_grad_(False)
    # The mixes of this one take no gradient, where the residual takes none.
    for parameter in (layers[1].fn, layers[1].scale, layers[1].base):
        parameter.requires_grad_(False)

    def gradients(run: Callable[..., tuple[Any, ...]], **options: Any) -> list[Tensor | None]:
        layers.zero_grad()
        _loss(run(layers, _residual(), **options)).backward()
        return [parameter.grad for parameter in layers.parameters()]

    want = gradients(_one_by_one)
    for group_size in (1, 2, LAYERS):
        assert_equal(gradients(checkpoint_streams, group_size=group_size), want)


def test_without_gradients() -> None:
    layers = _stack(shifted=True)
    want = _one_by_one(layers, _residual())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            residual, pre_mix, _ = checkpoint_streams(layers, _residual())
            assert_equal((residual.clone(), pre_mix.clone()), (want[0].detach().clone(), want[1].detach().clone()))


def test_under_autocast() -> None:
    layers = _stack()
    layers.float()
    with torch.autocast("cpu", torch.bfloat16):
        want = _train(layers, _residual().float(), _one_by_one)
        assert_equal(_train(layers, _residual().float(), checkpoint_streams, group_size=2), want)


def test_retain_graph() -> None:
    layers = _stack()
    loss = _loss(checkpoint_streams(layers, _residual().requires_grad_(), group_size=3))
    first, second = (torch.autograd.grad(loss, list(layers.parameters()), retain_graph=True) for _ in range(2))
    assert_equal(second, first)


class _Memory:
    """Which of the residuals and sublayer inputs that were made in the forward are still in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: dict[str, list[StorageWeakRef]] = {"mhc_post": [], "mhc_pre_apply_mix": []}
        for name in self._made:
            monkeypatch.setattr(tk_mhc, name, partial(self._call, name, getattr(tk_mhc, name)))

    def _call(self, name: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        out = function(*args)
        self._made[name].append(StorageWeakRef(out.untyped_storage()))
        return out

    def residuals(self) -> list[int]:
        """Numbers of the layers that they came out of, from 1."""
        return [i for i, made in enumerate(self._made["mhc_post"], 1) if not made.expired()]

    def layer_inputs(self) -> list[int]:
        """Numbers of the layers whose inputs they are, from 1."""
        return [i for i, made in enumerate(self._made["mhc_pre_apply_mix"], 1) if not made.expired()]


def test_residuals_and_inputs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(range(1, LAYERS + 1))
    layers = _stack(SUBLAYERS["saves-its-output"], norm_weight=True)
    for run, residuals, inputs in (
        (_one_by_one, every, every),
        # The groups after the first begin with residuals 2 and 4; 5 is the result.
        (partial(checkpoint_streams, group_size=2), [2, 4, 5], []),
        (partial(checkpoint_streams, group_size=LAYERS), [LAYERS], []),
    ):
        with monkeypatch.context() as patch:
            memory = _Memory(patch)
            outputs = run(layers, _residual().requires_grad_())
            assert memory.residuals() == residuals
            assert memory.layer_inputs() == inputs
            _loss(outputs).backward()
            del outputs
            # No cycle of references either.
            assert memory.residuals() == memory.layer_inputs() == []


def test_one_launch_a_group_and_what_it_computes_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, int]] = []
    computed: list[list[StorageWeakRef]] = []
    recompute = tk_mhc.mhc_multilayer_recompute

    def remember(*args: Any) -> None:
        recompute(*args)
        assert all(x.expired() for group in computed for x in group)
        launches.append((len(args[1]), len(args[2])))
        computed.append([StorageWeakRef(x.untyped_storage()) for x in (*args[-1], *args[-2])])

    monkeypatch.setattr(tk_mhc, "mhc_multilayer_recompute", remember)
    # Two layers a group, of five with four streams.
    _train(_stack(), _residual(), checkpoint_streams)
    assert launches == [(1, 0), (2, 1), (2, 1)]


def test_a_kept_tensor_that_was_changed_in_place_is_an_error() -> None:
    layers = _stack()
    residual = _residual()
    start = residual.requires_grad_() * 1
    loss = _loss(checkpoint_streams(layers, start, group_size=3))
    start.detach().zero_()
    with pytest.raises(RuntimeError, match="that checkpoint_streams keeps for the backward: expected version 0, got 1"):
        loss.backward()


def test_under_compile() -> None:
    torch._dynamo.reset()
    layers = _stack(num_layers=2)
    want = _train(layers, _residual(), _one_by_one)
    assert_equal(_train(layers, _residual(), torch.compile(checkpoint_streams, backend="aot_eager")), want)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the sublayers"):
        torch.compile(lambda x: checkpoint_streams(layers, x), backend="aot_eager", fullgraph=True)(_residual())
    for layer in layers:
        layer.sublayer.compile(backend="aot_eager", fullgraph=True)
    assert_equal(_train(layers, _residual(), checkpoint_streams), want)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"layers": []}, ValueError, "layers: expected at least one, got 0"),
        ({"layers": [nn.Identity()]}, TypeError, r"layers\[0\]: expected a HyperConnection"),
        ({"group_size": 0}, ValueError, "group_size: expected at least 1, got 0"),
        ({"group_size": 1.5}, TypeError, "group_size: expected an int"),
        ({"pre_mix": torch.zeros(2, 3, 4, 1)}, ValueError, "pre_mix: expected None where layers are not shifted"),
        ({"residual": torch.zeros(2, 3, 4, 64)}, TypeError, "residual: expected dtype torch.bfloat16"),
        ({"residual": torch.zeros(2, 3, 2, 64).bfloat16()}, ValueError, "residual: expected shape"),
    ],
)
def test_errors(change: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        checkpoint_streams(**{"layers": _stack(num_layers=1), "residual": _residual()} | change)


@pytest.mark.parametrize("options", [{"mhc_mult": 2}, {"shifted": True}])
def test_layers_that_do_not_go_together(options: dict[str, Any]) -> None:
    layers = [*_stack(num_layers=1), *_stack(num_layers=1, **options)]
    with pytest.raises(ValueError, match=r"layers\[1\]: expected \(hidden, mhc_mult, shifted\) \(64, 4, False\)"):
        checkpoint_streams(layers, _residual())


@pytest.mark.gpu
@pytest.mark.parametrize("shifted", [False, True])
def test_bits_on_a_gpu(shifted: bool) -> None:
    layers = _stack(shifted=shifted).cuda()
    residual = draw_residual((3, 333), "cuda", M)
    start = residual.clone().requires_grad_(), residual.clone().requires_grad_()
    grads = []
    for run, x in zip((_one_by_one, partial(checkpoint_streams, group_size=2)), start, strict=True):
        outputs = run(layers, x)
        loss = outputs[0].float().square().mean() + sum(mix.sum() for mix in outputs[1:-1])
        grads.append(torch.autograd.grad(loss, [x, *layers.parameters()], allow_unused=True))
    assert_equal(grads[1], grads[0])
