"""Every op refuses tensors of kinds that it cannot take by an error that names the argument and says what to do."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_with_path

import tk_modeling
from tk_core.op import _what_differentiates
from tk_core.testing import OpSpec, load_specs
from tk_core.testing.trees import tensors, transfer

SPECS = load_specs()
Call = Callable[[Tensor], Any]


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sparse(x: Tensor) -> Tensor:
    places = torch.zeros((x.ndim, 0), dtype=torch.int64)
    return torch.sparse_coo_tensor(places, torch.zeros(0, dtype=x.dtype), x.shape)


def negative(x: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def distributed(x: Tensor) -> Tensor:
    return DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])


def in_forward_mode(call: Call, x: Tensor) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.zeros_like(x)))


def differentiated(call: Call, x: Tensor) -> None:
    def without_result(x: Tensor) -> Tensor:
        call(x)
        return x.sum()

    torch.func.grad(without_result)(x)


# How an op is called with each kind of tensor in place of x, and the error, whose text begins with the argument or op.
KINDS: dict[str, tuple[Callable[[Call, Tensor], Any], type[Exception], str]] = {
    "sparse": (lambda call, x: call(sparse(x)), TypeError, r"ARGUMENT: .*\.to_dense\(\)$"),
    "negative": (lambda call, x: call(negative(x)), TypeError, r"ARGUMENT: .*\.resolve_neg\(\)$"),
    "distributed": (lambda call, x: call(distributed(x)), TypeError, r"ARGUMENT: .*\.to_local\(\)$"),
    "two": (lambda call, x: call(TwoTensor(x, x)), TypeError, r"ARGUMENT: .* got a TwoTensor; call it on the tensors"),
    "batched": (
        lambda call, x: torch.func.vmap(call)(x.unsqueeze(0)),
        TypeError,
        r"ARGUMENT: .*vmap.* not supported",
    ),
    "differentiated": (differentiated, RuntimeError, r"\S+: drops the gradient of ARGUMENT; "),
    "dual": (in_forward_mode, RuntimeError, r"\S+: drops the tangent of ARGUMENT \("),
}
_DIFFERENTIABLE = (torch.float32, torch.bfloat16)
DTYPES = {"negative": (torch.float32,), "differentiated": _DIFFERENTIABLE, "dual": _DIFFERENTIABLE}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_unusual_tensors(name: str, kind: str) -> None:
    spec: OpSpec = SPECS[name]
    call_with, error, text = KINDS[kind]
    case = next(case for case in spec.cases if case.small and case.modes)
    torch.manual_seed(0)
    problems = []
    kwargs = case.make("cpu")
    for path, x in tree_leaves_with_path(kwargs):
        if not isinstance(x, Tensor) or x.dtype not in DTYPES.get(kind, (x.dtype,)):
            continue
        argument = path[0].key + keystr(path[1:])
        others, results = transfer(kwargs), []

        def call(y: Tensor, path: Any = path, others: Any = others, results: Any = results) -> None:
            results.append(spec.op(**tree_map_with_path(lambda other, z: y if other == path else z, others)))

        expected = text.replace("ARGUMENT", re.escape(argument))
        try:
            call_with(call, transfer(x))
        except Exception as got:
            if type(got) is not error or not re.match(expected, str(got)):
                problems.append(f"{argument}: {type(got).__name__}: {str(got)[:150]}")
        else:
            # Indices and packed factors have no derivative.
            if error is not RuntimeError or any(y.is_floating_point() for y in tensors(results)):
                problems.append(f"{argument}: accepted")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", SPECS)
def test_no_op_is_told_to_compute_its_own_derivative(name: str) -> None:
    """tk_modeling exports some ops as they are: those build no graph there either."""
    package, _, function = name.partition(".")
    if found := re.match(r"tk_modeling\.(\w+) is differentiable", _what_differentiates(package, function)):
        assert getattr(tk_modeling, found[1]) is not SPECS[name].op
