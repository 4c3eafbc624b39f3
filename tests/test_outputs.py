"""No op writes into memory of another argument, or twice into the same: it refuses before it changes anything."""

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_with_path

from tk_core import kernel, overlap
from tk_core.testing import OpSpec, load_specs
from tk_core.testing.tiers import run
from tk_core.testing.trees import map_tensors, storage_bytes, tensors, transfer

# Outputs that each op may make itself: calls give it those that it made.
OUTPUTS = {"out", "out_sf"}
SPECS = {
    name: spec
    for name, spec in load_specs().items()
    if spec.mutates or OUTPUTS & inspect.signature(spec.op).parameters.keys()
}
# What may be written exactly over another argument, as (written, other).
IN_PLACE = {("d", "c"), ("out", "matrix"), ("out", "x"), ("residual_out", "x"), ("residual_out", "residual")}
# Ops whose `out` is the first of several results.
FIRST_OF_SEVERAL = {"norm_forward", "norm_forward_and_per_token_cast"}
# Ops that write in place without `out`, and return something else.
RETURN_OTHERS = {"qk_norm_rotary"}
# Arguments that nothing reads.
UNREAD = {"k_grouped_bf16_gemm_tn_contiguous": "grouped_layout", "k_grouped_fp8_gemm_nt_contiguous": "grouped_layout"}
Path = tuple[Any, ...]
"""Keys of a tensor in a tree of arguments: "x" and 1 are those of the second of the pair x."""


def leaves(tree: Any) -> dict[Path, Tensor]:
    """The tensors of a tree of arguments by their paths."""
    return {path: x for path, x in tree_leaves_with_path(tree) if isinstance(x, Tensor)}


def replaced(tree: Any, new: dict[Path, Tensor]) -> Any:
    """The same tree with other tensors at some paths, and copies of the rest."""
    return tree_map_with_path(lambda path, x: new[path] if path in new else transfer(x), tree)


def calls(spec: OpSpec, device: str) -> Iterator[tuple[dict[str, Any], list[Path]]]:
    """The arguments of a small case for each set of tensors and flags, outputs among them; paths of what is written."""
    seen = set()
    for case in spec.cases:
        if not case.small or (device == "cuda" and not case.gpu):
            continue
        torch.manual_seed(0)
        kwargs = case.make(device)
        if any(kwargs.get(name) is not None and kwargs[name] is kwargs.get(other) for name, other in IN_PLACE):
            continue  # What is written there is read, too.
        flags = {(name, value) for name, value in kwargs.items() if isinstance(value, bool)}
        kind = frozenset(flags | {(path, x.ndim) for path, x in leaves(kwargs).items() if x.numel()})
        if kind in seen:
            continue
        seen.add(kind)
        for name in OUTPUTS & inspect.signature(spec.op).parameters.keys():
            if kwargs.get(name) is None and spec.op.__name__ not in RETURN_OTHERS:
                alone = {"return_counts": False} if "return_counts" in kwargs else {}
                made = spec.op(**{**kwargs, **alone})
                kwargs[name] = made[0] if spec.op.__name__ in FIRST_OF_SEVERAL else made
        copy = transfer(kwargs)
        with kernel.recorded_launches() as recorded:
            spec.op(**copy)
        copies, before = leaves(copy), leaves(kwargs)
        written = [path for path, x in copies.items() if any(overlap.overlap(x, y) for y in recorded.written)]
        changed = [path for path, x in copies.items() if not torch.equal(storage_bytes(x), storage_bytes(before[path]))]
        assert {*changed} <= {*written}, f"{spec.name}: expected writes= for {changed}, which it changes, got {written}"
        yield kwargs, written


def sharing(x: Tensor, y: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """Tensors like x and y, the first at the beginning of memory, the second, equal to y, `distance` bytes later."""
    num_bytes = max(overlap.extent(x), overlap.extent(y) + distance)
    memory = torch.zeros((num_bytes + 63) // 64 * 64, dtype=torch.uint8, device=x.device).untyped_storage()
    second = y.new_empty(0).set_(memory, distance // y.element_size(), y.shape, y.stride())
    second.copy_(y)
    return x.new_empty(0).set_(memory, 0, x.shape, x.stride()), second


def bad_calls(spec: OpSpec, device: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """What is wrong with a call; its arguments; right ones that they differ from; whether the op may take them."""
    seen = set()
    for kwargs, written in calls(spec, device):
        arguments = {path: x for path, x in leaves(kwargs).items() if x.numel()}
        for path in written:
            x = arguments.get(path)
            if x is None:
                continue
            for other, y in arguments.items():
                for distance in (0, 64):
                    is_new = other != path and (path, other, distance) not in seen
                    is_read = UNREAD.get(spec.op.__name__) != other[0].key
                    if is_new and is_read and y.device == x.device and distance < overlap.extent(x):
                        seen.add((path, other, distance))
                        first, second = sharing(x, y, distance)
                        if overlap.lie_beside(first, second):  # in the gaps between rows
                            continue
                        are_same = distance == 0 and (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
                        may_pass = are_same and (path[0].key, other[0].key) in IN_PLACE
                        bad = replaced(kwargs, {path: first, other: second})
                        yield f"{keystr(path)} over {keystr(other)}, {distance} bytes before", bad, kwargs, may_pass
            if max(x.shape, default=1) > 1 and (path, 0) not in seen:
                seen.add((path, 0))
                dim = max(range(x.ndim), key=lambda d: x.shape[d] > 1)
                bad = replaced(kwargs, {path: x.narrow(dim, 0, 1).expand(x.shape)})
                yield f"{keystr(path)} of stride 0", bad, kwargs, False
    assert seen, f"{spec.name}: expected a case in which an argument is written"


def compared(spec: OpSpec, kwargs: dict[str, Any], actual: Any) -> Any:
    """What `run` returned; without results that are arguments which the op does not write, if there are any."""
    unwritten = tensors([x for name, x in kwargs.items() if name not in spec.mutates])
    results = tensors([actual])
    own = [y for y in results if not any(y is x for x in unwritten)]
    return actual if len(own) == len(results) else own


def problem_of(spec: OpSpec, function: Callable[..., Any], bad: dict[str, Any], may_pass: bool) -> str | None:
    """What is wrong with how `function`, the op, takes a bad call, if anything is."""
    before = [storage_bytes(x).clone() for x in tensors(bad)]
    apart = map_tensors(transfer, bad)
    try:
        actual = run(spec, function, bad)
    except ValueError as error:
        named = any(str(error).startswith(name) for name in inspect.signature(spec.op).parameters)
        if not named or ": expected " not in str(error):
            return f"names no argument: {error}"
        changed = any(not torch.equal(storage_bytes(x), then) for x, then in zip(tensors(bad), before))
        return "changed an argument" if changed else None
    if not may_pass:
        return "accepted"
    try:
        spec.compare(compared(spec, bad, actual), compared(spec, apart, run(spec, spec.op, apart)))
    except AssertionError as error:
        return f"wrong values: {error}"
    return None


@pytest.mark.parametrize("name", SPECS)
def test_outputs_over_other_arguments(name: str) -> None:
    spec = SPECS[name]
    found = {what: problem_of(spec, spec.op, bad, may_pass) for what, bad, _, may_pass in bad_calls(spec, "cpu")}
    problems = [f"{what}: {problem}" for what, problem in found.items() if problem]
    assert not problems, "\n".join(problems)


# torch.compile may have copied them apart before the op runs: then the values are right.
@pytest.mark.parametrize(
    "name",
    ["tk_engram.grad_w_reduce", "tk_gemm.bf16_gemm_nt", "tk_mhc.mhc_pre_apply_mix_bwd", "tk_quant.per_token_cast"],
)
def test_outputs_over_other_arguments_compiled(name: str) -> None:
    spec = SPECS[name]
    problems = []
    for what, bad, _, _ in islice(bad_calls(spec, "cpu"), 4):
        torch._dynamo.reset()
        compiled = torch.compile(spec.op, fullgraph=True, backend="aot_eager")
        try:
            problem = problem_of(spec, compiled, bad, may_pass=True)
        except torch._dynamo.exc.BackendCompilerFailed as error:  # torch takes no written views of other dtypes.
            problem = None if "views with different dtypes" in str(error) else str(error)
        if problem:
            problems.append(f"{what}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_gpu_outputs_over_other_arguments(name: str) -> None:
    """A repeated call, whose launches were recorded, looks at its arguments as the first did."""
    spec = SPECS[name]
    problems = []
    for what, bad, good, may_pass in bad_calls(spec, "cuda"):
        for _ in range(2):
            spec.op(**transfer(good))
        if problem := problem_of(spec, spec.op, bad, may_pass):
            problems.append(f"{what}: {problem}")
    assert not problems, "\n".join(problems)
