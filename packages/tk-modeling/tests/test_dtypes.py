"""Dtypes that a module keeps when it is cast, and those that it gets whatever torch's defaults are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tk_core.testing import assert_equal
from tk_core.testing.trees import map_tensors
from tk_modeling import Router

from .checks import ModuleCase
from .engram import cases as engram
from .fp8 import cases as fp8
from .mhc import cases as mhc
from .moe import cases as moe
from .norm import cases as norm

CASES = (*mhc.CASES, *engram.CASES, *moe.CASES, *fp8.CASES, *norm.CASES)
BF16 = torch.bfloat16

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def made(case: ModuleCase, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return case.make("cpu").eval()


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in module.state_dict().items()}


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to(BF16),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "type": lambda module: module.type(BF16),
    "device-and-dtype": lambda module: module.to("meta", BF16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("case", [*mhc.CASES, *moe.CASES], ids=lambda case: case.name)
def test_what_is_float32_in_any_case_stays_so(case: ModuleCase, cast: str) -> None:
    module = made(case)
    before = module.state_dict()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    model = CASTS[cast](nn.Sequential(module, nn.Linear(4, 4, dtype=torch.float32)))
    assert model[1].weight.dtype != torch.float32
    kept = [name for name in before if name in case.float32 or before[name].dtype == torch.int64]
    assert kept
    for name in kept:
        after = module.state_dict()[name]
        assert after.dtype == before[name].dtype, name
        assert after.is_meta if cast == "device-and-dtype" else torch.equal(after, before[name])
    for parameter in module.parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.is_meta == parameter.grad.is_meta == (cast == "device-and-dtype")
    others = [parameter for name, parameter in module.named_parameters() if name not in case.float32]
    assert all(parameter.dtype == model[1].weight.dtype for parameter in others)
    if cast == "device-and-dtype":
        assert dtypes(module.to_empty(device="cpu")) == dtypes(module)


@pytest.mark.parametrize("assign", [False, True])
@each_case
def test_a_narrowed_state_dict_loads(case: ModuleCase, assign: bool) -> None:
    module = made(case, seed=1)
    narrow = {name: x.to(BF16) if x.is_floating_point() else x for name, x in made(case).state_dict().items()}
    given = dict(narrow)
    module.load_state_dict(narrow, assign=assign)
    assert dtypes(module) == dtypes(made(case))
    assert_equal({name: x.to(narrow[name].dtype) for name, x in module.state_dict().items()}, given)
    assert_equal(narrow, given)


def test_a_bias_narrowed_from_outside_is_an_error() -> None:
    module = Router(64, 4, 2)
    module.bias = module.bias.bfloat16()
    module.load += 5
    with pytest.raises(TypeError, match=r"^bias: expected dtype torch.float32, got torch.bfloat16"):
        module.update_bias()
    assert module.load.all()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("default", [BF16, torch.float16, torch.float64], ids=str)
@each_case
def test_built_and_run_under_another_default_dtype(case: ModuleCase, default: torch.dtype) -> None:
    torch.manual_seed(1)
    inputs = case.make_inputs((1, 3), "cpu")
    usual = made(case)
    with default_dtype(default):
        module = made(case)
        assert dtypes(module) == dtypes(case.make_reference("cpu")) == dtypes(usual)
        module.load_state_dict(usual.state_dict())
        found = map_tensors(torch.Tensor.detach, module(*inputs))
    assert_equal(found, map_tensors(torch.Tensor.detach, usual(*inputs)))
