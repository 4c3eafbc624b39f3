"""Checks that every module has to pass; a case makes the module, its reference and inputs for both."""

import copy
import pickle
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tk_core.testing import assert_equal
from tk_core.testing.trees import map_tensors, tensors

LEADING = (3, 5)
"""Leading dimensions of the inputs: (batch, sequence)."""
# Gradients of fewer elements than this are compared together: the error of a few numbers is too random.
_FEW = 1024
_SEEDS = 6
# Errors of float32 arithmetic: below this it is random which of two modules is closer.
_NO_ERROR = 1e-6


@dataclass(frozen=True)
class ModuleCase:
    """A module of tk_modeling, the same in plain PyTorch, and inputs for both."""

    name: str
    """Kebab-case, such as hyper-connection-shifted."""
    make: Callable[[str], nn.Module]
    """make(device), with the module's usual dtypes; parameters that are initially constant have to be randomized."""
    make_reference: Callable[[str], nn.Module]
    """The reference, with parameters and buffers of the same names, shapes and dtypes."""
    make_inputs: Callable[[tuple[int, ...], str], tuple[Any, ...]]
    """make_inputs(leading, device): bfloat16 activations, drawn from torch's global generator."""
    float32: tuple[str, ...] = ()
    """Names of parameters and buffers that stay float32 where the reference computes in bfloat16."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Relative errors allowed in gradients that plain PyTorch computes more exactly: in float32, or without FP8."""
    has_leading: bool = True
    """Whether the inputs have leading dimensions; GroupedFP8Linear's do not."""


def _seeded(case: ModuleCase, device: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.make(device)


def _inputs(case: ModuleCase, device: str, leading: tuple[int, ...] = LEADING, seed: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    return case.make_inputs(leading, device)


def _with_gradients(inputs: Any) -> Any:
    return map_tensors(lambda x: x.detach().requires_grad_() if x.is_floating_point() else x, inputs)


def _backward(outputs: Any, seed: int = 2) -> None:
    """Backward of a weighted sum of the outputs; the weights are the same in every dtype."""
    differentiable = [y for y in tensors(outputs) if y.requires_grad]
    torch.manual_seed(seed)
    weights = [torch.randn(y.shape, dtype=torch.bfloat16, device=y.device).to(y.dtype) for y in differentiable]
    torch.autograd.backward(differentiable, weights)


def gradients(module: nn.Module, inputs: tuple[Any, ...], input_grads: bool = True) -> dict[str, Tensor]:
    """Gradients of a fixed weighted sum of the outputs, by name of the parameter, or input.0 and so on."""
    inputs = _with_gradients(inputs) if input_grads else inputs
    module.zero_grad()
    _backward(module(*inputs))
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    found |= {f"input.{i}": x.grad for i, x in enumerate(tensors(inputs)) if x.grad is not None}
    return {name: grad.clone() for name, grad in found.items()}


def reference_in(case: ModuleCase, module: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """The reference with the module's parameters, in float64, or in bfloat16 except `case.float32`."""
    reference = case.make_reference(device)
    reference.load_state_dict(module.state_dict())
    for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
        if tensor.is_floating_point() and not (dtype is torch.bfloat16 and name in case.float32):
            tensor.data = tensor.data.to(dtype)
    return reference


def _in(dtype: torch.dtype, inputs: Any) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def check_gradients(case: ModuleCase, device: str) -> None:
    """Errors relative to float64 are at most 1.1 times those of the reference in bfloat16, or the case's bounds.

    Both are root mean squares of several draws.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(_SEEDS):
        module = _seeded(case, device, seed)
        inputs = _inputs(case, device, (2, 24), 100 + seed)
        exact = gradients(reference_in(case, module, torch.float64, device), _in(torch.float64, inputs))
        plain = gradients(reference_in(case, module, torch.bfloat16, device), inputs)
        ours = gradients(module, inputs)
        assert ours.keys() == exact.keys() == plain.keys()
        for name, want in exact.items():
            size = want.norm()
            assert size, f"{name}: expected a gradient that is not zero everywhere"
            pair = tuple(float(((found[name].double() - want).norm() / size) ** 2) for found in (ours, plain))
            is_alone = want.numel() >= _FEW or name in case.bounds
            errors.setdefault(name if is_alone else "all smaller ones", []).append(pair)
    for name, pairs in errors.items():
        our_error, plain_error = (statistics.fmean(values) ** 0.5 for values in zip(*pairs))
        assert our_error <= max(1.1 * plain_error, case.bounds.get(name, _NO_ERROR)), (
            f"{name}: error {our_error:.3g}, in plain bfloat16 {plain_error:.3g}"
        )


def check_reference_gradients(case: ModuleCase) -> None:
    """Gradcheck of the reference in float64."""
    module = reference_in(case, _seeded(case, "cpu"), torch.float64, "cpu")
    inputs = _with_gradients(_in(torch.float64, _inputs(case, "cpu", (1, 4))))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def run(*parameters: Tensor) -> tuple[Tensor, ...]:
        outputs = functional_call(module, dict(zip(names, parameters)), inputs)
        return tuple(y for y in tensors(outputs) if y.requires_grad)

    parameters = [dict(module.named_parameters())[name] for name in names]
    # Fast mode compares one random projection of each Jacobian.
    torch.autograd.gradcheck(run, parameters, fast_mode=True, atol=1e-6)
    torch.autograd.gradcheck(
        lambda *_: tuple(y for y in tensors(module(*inputs)) if y.requires_grad),
        [x for x in tensors(inputs) if x.requires_grad],
        fast_mode=True,
        atol=1e-6,
    )


def check_leading_dimensions(case: ModuleCase, device: str) -> None:
    """(batch, sequence, …) gives the same as (tokens, …) for a batch of one, which is one sequence."""
    module = _seeded(case, device)
    inputs = _inputs(case, device, (1, 7))
    flat = map_tensors(lambda x: x.flatten(0, 1), inputs)
    assert_equal(map_tensors(lambda y: y.flatten(0, 1) if y.dim() > 1 else y, module(*inputs)), module(*flat))


def check_zero_tokens(case: ModuleCase, device: str) -> None:
    """Zero tokens: outputs have the right shapes, gradients of parameters are zeros, and none is missing."""
    module = _seeded(case, device)
    few, none = (_inputs(case, device, leading) for leading in ((1, 2), (1, 0)))
    for some, empty in zip(tensors(module(*few)), tensors(module(*none)), strict=True):
        assert (empty.dtype, empty.dim()) == (some.dtype, some.dim())
        if some.dim() > 1:
            assert empty.shape == (1, 0, *some.shape[2:])
    found = gradients(module, none)
    assert found.keys() == gradients(module, few).keys()
    for name, grad in found.items():
        assert not grad.any(), f"{name}: expected zeros"


def check_without_gradients(case: ModuleCase, device: str) -> None:
    """Under no_grad and inference_mode the results are those of training, and nothing requires gradients."""
    module, inputs = _seeded(case, device).eval(), _inputs(case, device)
    expected = map_tensors(Tensor.detach, module(*inputs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = module(*inputs)
            assert not any(y.requires_grad for y in tensors(outputs))
            assert_equal(map_tensors(torch.clone, outputs), map_tensors(torch.clone, expected))


def check_copies(case: ModuleCase, device: str) -> None:
    """A deep copy, a pickled copy and one made by state_dict, also by way of the reference, compute the same."""
    module, inputs = _seeded(case, device).eval(), _inputs(case, device)
    expected = map_tensors(Tensor.detach, module(*inputs))
    reference = case.make_reference(device)
    assert [(k, v.shape, v.dtype) for k, v in reference.state_dict().items()] == [
        (k, v.shape, v.dtype) for k, v in module.state_dict().items()
    ]
    reference.load_state_dict(module.state_dict())
    restored = _seeded(case, device, 7).eval()
    restored.load_state_dict(reference.state_dict())
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), restored):
        assert_equal(map_tensors(Tensor.detach, made(*inputs)), expected)
    assert repr(module)


def check_frozen(case: ModuleCase, device: str) -> None:
    """What is frozen gets no gradient, nor does its main_grad; all others get the same as before."""
    module, inputs = _seeded(case, device), _inputs(case, device)
    expected = gradients(module, inputs)
    for name, _ in module.named_parameters():
        frozen = copy.deepcopy(module)
        alone = dict(frozen.named_parameters())[name].requires_grad_(False)
        alone.main_grad = torch.zeros_like(alone, dtype=torch.float32)
        found = gradients(frozen, inputs)
        assert found.keys() == expected.keys() - {name}
        assert_equal(found, {key: expected[key] for key in found})
        assert not alone.main_grad.any()
    of_inputs = {key for key in expected if key.startswith("input.")}
    for found, names in (
        (gradients(copy.deepcopy(module).requires_grad_(False), inputs), of_inputs),
        (gradients(module, inputs, input_grads=False), expected.keys() - of_inputs),
    ):
        assert found.keys() == names
        assert_equal(found, {key: expected[key] for key in found})


def check_main_grad(case: ModuleCase, device: str) -> None:
    """Where parameters have a float32 main_grad, gradients of all uses are added to it and .grad stays None."""
    module, inputs = _seeded(case, device), _inputs(case, device)
    expected = gradients(module, inputs)
    for name, found in _main_grads(module, inputs, 1.0).items():
        error = (found - 2 * expected[name].float()).norm() / (2 * expected[name].float()).norm()
        assert error <= 2**-8, f"{name}: relative error {error:.3g}"
    for name, parameter in module.named_parameters():
        right, parameter.main_grad = parameter.main_grad, torch.zeros_like(parameter, dtype=torch.float64)
        with pytest.raises(ValueError, match=rf"^main_grad of ({name.rpartition('.')[-1]}|weight): expected a tensor"):
            module(*inputs)
        parameter.main_grad = right


def _main_grads(module: nn.Module, inputs: tuple[Any, ...], before: float = 0.0) -> dict[str, Tensor]:
    """What two backwards, after two forwards, add to new main_grads, by name of the parameter."""
    module.zero_grad()
    for parameter in module.parameters():
        parameter.main_grad = torch.full_like(parameter, before, dtype=torch.float32)
    for outputs in [module(*_with_gradients(inputs)) for _ in range(2)]:
        _backward(outputs)
    assert all(parameter.grad is None for parameter in module.parameters())
    return {name: parameter.main_grad - before for name, parameter in module.named_parameters()}


def check_checkpoint(case: ModuleCase, device: str) -> None:
    """Activation checkpointing, reentrant or not, changes no bit of gradients and main_grads."""
    module, inputs = _seeded(case, device), _inputs(case, device)
    expected = gradients(module, inputs)
    for use_reentrant in (False, True):
        again = _Checkpointed(copy.deepcopy(module), use_reentrant)
        found = gradients(again, inputs)
        assert_equal({name.removeprefix("module."): grad for name, grad in found.items()}, expected)
        assert_equal(list(_main_grads(again, inputs).values()), list(_main_grads(module, inputs).values()))


class _Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self.module, *inputs, use_reentrant=self.use_reentrant)


def check_compile(case: ModuleCase, device: str) -> None:
    """torch.compile(fullgraph=True) gives the gradients of eager mode, for two numbers of tokens, and main_grads."""
    torch._dynamo.reset()
    module = _seeded(case, device)
    compiled = copy.deepcopy(module)
    # Not inductor on a CPU: it would generate code for a minute, without any of our kernels.
    compiled.compile(fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for parameter in compiled.parameters():
        parameter.main_grad = None  # torch 2.11 does not see that a parameter gets a first main_grad
    inputs = _inputs(case, device, (3, 5)), _inputs(case, device, (3, 9))
    runs = [(gradients(compiled, each), gradients(module, each)) for each in inputs]
    runs += [(_main_grads(compiled, inputs[1]), _main_grads(module, inputs[1])) for _ in range(2)]
    for found, expected in runs:
        assert found.keys() == expected.keys()
        for name, want in expected.items():
            error = (found[name].double() - want.double()).norm() / want.double().norm()
            # inductor keeps float32 between operations that eager mode rounds to bfloat16.
            assert error <= (0.01 if device == "cuda" else 1e-5), f"{name}: relative error {error:.3g}"


def check_autocast(case: ModuleCase, device: str) -> None:
    """Under bfloat16 autocast, float32 parameters and inputs give the same as bfloat16 ones, up to rounding."""
    module = _seeded(case, device).eval()
    inputs = _inputs(case, device)
    expected = gradients(module, inputs)
    wide = copy.deepcopy(module).float()
    with torch.autocast(device, torch.bfloat16):
        found = gradients(wide, _in(torch.float32, inputs))
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = (found[name].double() - want.double()).norm() / want.double().norm()
        assert error <= 0.02, f"{name}: relative error {error:.3g}"


def check_stream(case: ModuleCase) -> None:
    """Forward and backward on another stream give the same bits."""
    module, inputs = _seeded(case, "cuda"), _inputs(case, "cuda")
    expected = gradients(copy.deepcopy(module), inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(module, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(found, expected)


def check_graph(case: ModuleCase) -> None:
    """The forward in a CUDA graph computes with new values of its inputs."""
    module, inputs, others = _seeded(case, "cuda").eval(), _inputs(case, "cuda"), _inputs(case, "cuda", seed=8)
    with torch.no_grad():
        expected = map_tensors(torch.clone, module(*others))
        module(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = module(*inputs)
        for into, new in zip(tensors(inputs), tensors(others), strict=True):
            into.copy_(new)
        graph.replay()
        assert_equal(outputs, expected)


DEVICE_CHECKS = {
    "gradients": check_gradients,
    "leading-dimensions": check_leading_dimensions,
    "zero-tokens": check_zero_tokens,
    "without-gradients": check_without_gradients,
    "copies": check_copies,
    "frozen": check_frozen,
    "main-grad": check_main_grad,
    "checkpoint": check_checkpoint,
    "compile": check_compile,
    "autocast": check_autocast,
}
"""Checks that run on a CPU and on a GPU."""
GPU_CHECKS = {"stream": check_stream, "graph": check_graph}


def checks(case: ModuleCase) -> Iterator[tuple[str, Callable[[], None], bool]]:
    """(name, check, whether it needs a GPU) for all checks of a module."""
    yield f"{case.name}-reference-gradients", lambda: check_reference_gradients(case), False
    for name, check in DEVICE_CHECKS.items():
        if not case.has_leading and name in ("leading-dimensions", "zero-tokens"):
            continue
        for device in ("cpu", "cuda"):
            yield f"{case.name}-{name}-{device}", lambda check=check, d=device: check(case, d), device == "cuda"
    for name, check in GPU_CHECKS.items():
        yield f"{case.name}-{name}", lambda check=check: check(case), True
