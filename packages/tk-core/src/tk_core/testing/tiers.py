"""The tests that every op gets from its spec: `test_tiers = tiers.tests(SPEC)` in its test file."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_core import env
from tk_core.arch import Arch, arch_from_name
from tk_core.kernel import Kernel, KernelRequest, capture
from tk_core.testing.numeric import assert_equal, assert_same_metadata, bits_of
from tk_core.testing.poison import poison, poisoned_allocations
from tk_core.testing.specs import Case, OpSpec
from tk_core.testing.trees import map_tensors, storage_bytes, tensors, transfer
from tk_core.testing.usage import ResourceUsage, lower, resource_usages

Check = tuple[str, Callable[[], None]]


def tests(spec: OpSpec) -> Callable[..., None]:
    """All tiers' tests of an op.

    cpu: what each small case tells on a CPU, where the op's values are the reference's. The outputs' shapes, dtypes and
    strides are those of the reference, on fake and meta tensors too; each element is written; inputs stay as they are;
    under torch.compile without a graph break, cases with modes=True give the same.

    compile: each compile case's kernels compile for the first of its architectures, use no local memory, and fit in
    shared memory. A test has several cases, because one run of nvcc compiles all their kernels in hardly more time than
    one. For the other architectures, `check_other_architectures` compiles one program of each kernel.

    gpu: kernel against reference, outputs poisoned first, run twice for equal bits, inputs unchanged.

    modes: cases with modes=True on a GPU on a side stream, under torch.compile, in a CUDA graph, and, where there are
    several GPUs, on one that is not the current one.
    """
    cases = [case for case in spec.cases if case.compile]
    groups = [cases[start : start + _COMPILED_TOGETHER] for start in range(0, len(cases), _COMPILED_TOGETHER)]
    compiled = [(_group_name(group), partial(_check_compile, spec, group)) for group in groups]
    gpu = pytest.mark.gpu(gib=partial(_gib_of, spec))
    tiers: list[tuple[str, list[Check], list[pytest.MarkDecorator]]] = [
        ("cpu", _cpu_checks(spec), []),
        ("compile", compiled, [pytest.mark.compile]),
        ("gpu", _gpu_checks(spec), [gpu]),
        ("modes", _mode_checks(spec, torch.cuda.device_count() > 1), [gpu]),
    ]

    @pytest.mark.parametrize(
        "check",
        [
            pytest.param(
                check, id=f"{tier}-{name}", marks=[pytest.mark.tk_case(op=spec.name, test=f"{tier}-{name}"), *marks]
            )
            for tier, checks, marks in tiers
            for name, check in checks
        ],
    )
    def test(check: Callable[[], None]) -> None:
        check()

    return test


def bad_input(
    spec: OpSpec, good: dict[str, Any], rows: Sequence[tuple[dict[str, Any], type[Exception], str]]
) -> Callable[..., None]:
    """A test for each (changes of good arguments, error, regular expression of its message): a refusal changes nothing.

    Wrong types, dtypes, numbers of dimensions, devices and strides need no row: tests/test_bad_arguments.py has those.
    """

    @pytest.mark.parametrize(("changes", "error", "match"), rows)
    def test(changes: dict[str, Any], error: type[Exception], match: str) -> None:
        kwargs = {**good, **changes}
        present = [x for x in tensors(kwargs) if not x.is_meta]
        before = transfer(present)
        with pytest.raises(error, match=match):
            spec.op(**kwargs)
        assert_equal(present, before)

    return test


def gpu_test_names(spec: OpSpec) -> set[str]:
    """Names of the gpu tests that an op has on any machine: all must pass before gpu-verified.json records the op."""
    gpu = {f"gpu-{name}" for name, _ in _gpu_checks(spec)}
    return gpu | {f"modes-{name}" for name, _ in _mode_checks(spec, several_gpus=False)}


def _cpu_checks(spec: OpSpec) -> list[Check]:
    small = [case for case in spec.cases if case.small]
    modes = [case for case in small if case.modes]
    return [
        ("spec", partial(_check_spec, spec)),
        ("cases", partial(_check_each, _check_cpu, spec, small)),
        ("torch-compile", partial(_check_each, _check_cpu_compile, spec, modes)),
    ]


def _gpu_checks(spec: OpSpec) -> list[Check]:
    return [(case.name, partial(_check_gpu, spec, case)) for case in spec.cases if case.gpu]


def _mode_checks(spec: OpSpec, several_gpus: bool) -> list[Check]:
    modes = {"stream": _check_stream, "torch-compile": _check_gpu_compile, "graph": _check_graph}
    if several_gpus:
        modes["other-device"] = _check_other_device
    cases = [case for case in spec.cases if case.modes]
    return [(f"{mode}-{case.name}", partial(check, spec, case)) for case in cases for mode, check in modes.items()]


# Most of what a case takes is its reference's: up to 24 times the memory of its inputs and outputs on an H100.
_TIMES_TENSORS = 32


def _gib_of(spec: OpSpec, params: dict[str, Any]) -> float:
    """The memory that a case may take on a GPU."""
    _, case = params["check"].args
    kwargs = case.make("meta")
    return max(_TIMES_TENSORS * sum(x.nbytes for x in tensors((kwargs, spec.op(**kwargs)))) / 2**30, 1)


# ---- what all tiers share


def run(spec: OpSpec, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """The result of the op or its reference, followed by the arguments that it writes into, if any."""
    result = function(**kwargs)
    return (result, *(kwargs[name] for name in spec.mutates)) if spec.mutates else result


def _own(spec: OpSpec, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for one call: copies if the op writes into some of them, else `kwargs` itself."""
    return transfer(kwargs) if spec.mutates else kwargs


@contextmanager
def _unchanged(spec: OpSpec, kwargs: dict[str, Any]) -> Iterator[None]:
    """Assert that a with block changes no byte of the inputs' storages, gaps between rows included."""
    written = {x.data_ptr() for name in spec.mutates for x in tensors(kwargs.get(name))}  # As c too, where c is d
    inputs = {name: value for name, value in kwargs.items() if not any(x.data_ptr() in written for x in tensors(value))}
    before = transfer(inputs)
    yield
    for name, value in inputs.items():
        for now, then in zip(tensors(value), tensors(before[name])):
            assert torch.equal(storage_bytes(now), storage_bytes(then)), f"{name}: input was changed"


def _assert_same_metadata(actual: Any, expected: Any, how: str) -> None:
    got, want = tensors(actual), tensors(expected)
    assert len(got) == len(want), f"{how}: expected {len(want)} tensors, got {len(got)}"
    for index, (x, y) in enumerate(zip(got, want)):
        assert_same_metadata(x, y, f"{how}, tensor {index}")


# ---- cpu


def _check_spec(spec: OpSpec) -> None:
    op, reference = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (spec.op, spec.reference)
    )
    assert op == reference, f"{spec.name}: expected the reference's signature {reference}, got {op}"
    assert spec.op.__doc__, f"{spec.name}: expected a docstring"
    for flag in ("small", "modes"):
        assert any(getattr(case, flag) for case in spec.cases), f"{spec.name}: expected a case with {flag}=True"
    assert any(case.small and case.modes for case in spec.cases), f"{spec.name}: expected a small case with modes=True"


def _check_each(check: Callable[[OpSpec, Case], None], spec: OpSpec, cases: Sequence[Case]) -> None:
    for case in cases:
        try:
            check(spec, case)
        except Exception as error:
            error.add_note(f"in case {case.name}")
            raise


def _check_cpu(spec: OpSpec, case: Case) -> None:
    kwargs = case.make("cpu")
    fresh = _own(spec, kwargs)
    with _unchanged(spec, kwargs), poisoned_allocations():
        actual = run(spec, spec.op, kwargs)
    expected = run(spec, spec.reference, fresh)
    # The values are the reference's, but not if they miss an output, or go to a wrong one.
    spec.compare(actual, expected)

    meta = case.make("meta")
    _assert_same_metadata(meta, kwargs, "made on meta")
    _assert_same_metadata(run(spec, spec.op, meta), expected, "result on meta tensors")
    mode = FakeTensorMode()
    fake = map_tensors(mode.from_tensor, fresh)
    with mode:
        _assert_same_metadata(run(spec, spec.op, fake), expected, "result on fake tensors")


def _check_cpu_compile(spec: OpSpec, case: Case) -> None:
    kwargs = case.make("cpu")
    expected = run(spec, spec.op, _own(spec, kwargs))
    torch._dynamo.reset()
    assert_equal(run(spec, torch.compile(spec.op, fullgraph=True, backend="aot_eager"), kwargs), expected)


# ---- compile


# Cases of one compile test: few enough that several processes share the tests evenly.
_COMPILED_TOGETHER = 12


def _group_name(cases: Sequence[Case]) -> str:
    return cases[0].name if len(cases) == 1 else f"{cases[0].name}-and-{len(cases) - 1}-more"


def _check_compile(spec: OpSpec, cases: Sequence[Case]) -> None:
    of_arch: dict[str, list[Case]] = {}
    for case in cases:
        of_arch.setdefault((case.archs or spec.archs)[0], []).append(case)
    for name, of_one in of_arch.items():
        _check_kernels(_requests(spec, of_one, arch_from_name(name)))


def check_other_architectures(specs: Sequence[OpSpec]) -> None:
    """One program of each kernel of these ops compiles for each of a case's architectures after the first.

    Lowering is most of this tier's time, and an architecture hardly tells one code path from another.
    """
    found: dict[tuple[Kernel, str], KernelRequest] = {}
    for spec in specs:
        for case in spec.cases:
            for name in (case.archs or spec.archs)[1:] if case.compile else ():
                for request in _requests(spec, [case], arch_from_name(name)):
                    found.setdefault((request.kernel, name), request)
    for arch in dict.fromkeys(request.arch for request in found.values()):
        _check_kernels([request for request in found.values() if request.arch == arch])


_good: set[KernelRequest] = set()
"""Programs that this process has checked; ops share kernels, and cases."""


def _check_kernels(requests: Sequence[KernelRequest]) -> None:
    requests = [request for request in requests if request not in _good]
    lowered = [lower(request.kernel, *request.args, simplified=False) for request in requests]
    for request, usage in zip(requests, _usages(requests, lowered)):
        _check_usage(request, usage)
        _good.add(request)


def _requests(spec: OpSpec, cases: Sequence[Case], arch: Arch) -> list[KernelRequest]:
    """The kernels that the cases launch, each once."""
    found: list[KernelRequest] = []
    for case in cases:
        with capture(arch) as captured:
            spec.op(**case.make("meta"))
        assert captured, f"{case.name}: expected a kernel, saw none launched; such a case needs no compile=True"
        found += captured
    return list(dict.fromkeys(found))


def _usages(requests: Sequence[KernelRequest], lowered: Sequence[Any]) -> list[dict[str, ResourceUsage]]:
    try:
        return resource_usages(requests, lowered)
    except RuntimeError:
        # Compile the kernels one by one, so that the compiler's message shows which one it rejects.
        return [usage for each in zip(requests, lowered) for usage in resource_usages(*([one] for one in each))]


def _check_usage(request: KernelRequest, usage: dict[str, ResourceUsage]) -> None:
    for function, used in usage.items():
        where = f"{request.kernel.name}{request.args!r}, {function}"
        assert not used.stack_bytes, f"{where}: expected no local memory, got {used.stack_bytes} bytes a thread"
        assert used.shared_bytes <= request.arch.max_shared_memory, (
            f"{where}: expected at most {request.arch.max_shared_memory} bytes of shared memory, "
            f"got {used.shared_bytes}"
        )


# ---- gpu


def _require_kernels() -> None:
    assert env.default_backend() == "kernel", "TK_BACKEND: expected kernel for the gpu tier, got reference"


def _check_gpu(spec: OpSpec, case: Case) -> None:
    _require_kernels()
    kwargs = case.make("cuda")
    runs = [_own(spec, kwargs) for _ in range(2)]
    with _unchanged(spec, runs[0]):
        with poisoned_allocations():
            first = run(spec, spec.op, runs[0])
        torch.cuda.synchronize()
    with poisoned_allocations():
        second = run(spec, spec.op, runs[1])
    spec.compare(first, run(spec, spec.reference, kwargs))
    assert_equal(second, first, name="second run")


# About 0.2 s at 2 GHz: much longer than a call whose kernels are loaded.
_BUSY_CYCLES = 400_000_000


def _check_stream(spec: OpSpec, case: Case) -> None:
    _require_kernels()
    kwargs = case.make("cuda")
    warm, owned = _own(spec, kwargs), _own(spec, kwargs)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), poisoned_allocations():
        # Load kernels and reserve memory now, or the call below would wait for the device.
        transfer(run(spec, spec.op, warm))
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_CYCLES)
    with torch.cuda.stream(side), poisoned_allocations():
        actual = transfer(run(spec, spec.op, owned))
    side.synchronize()
    still_busy = not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    # A launch on the default stream, still busy then, would have run after the outputs were copied, and fail here.
    spec.compare(actual, run(spec, spec.reference, kwargs))
    assert still_busy, f"{spec.name}: expected the default stream to be busy still; does the op synchronize?"


def _check_gpu_compile(spec: OpSpec, case: Case) -> None:
    _require_kernels()
    kwargs = case.make("cuda")
    runs = [_own(spec, kwargs) for _ in range(2)]
    with poisoned_allocations():
        eager = run(spec, spec.op, runs[0])
    torch._dynamo.reset()
    compiled = run(spec, torch.compile(spec.op, fullgraph=True), runs[1])
    spec.compare(compiled, run(spec, spec.reference, kwargs))
    _leave_out_unwritten(compiled, eager)
    assert_equal(compiled, eager)


def _leave_out_unwritten(compiled: Any, eager: Any) -> None:
    """Poison what is poison in `eager`: a compiled call's own allocations hold anything where the op writes nothing."""
    for x, y in zip(tensors(compiled), tensors(eager), strict=True):
        bits, poisoned = bits_of(x), bits_of(y)
        bits.copy_(torch.where(~poisoned == 0, poisoned, bits))


def _check_graph(spec: OpSpec, case: Case) -> None:
    _require_kernels()
    static = case.make("cuda")
    fresh = _other_values(case, static)
    # Kernels cannot be loaded while a graph is captured.
    run(spec, spec.op, _own(spec, static))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(spec, spec.op, static)
    inputs = {x.untyped_storage().data_ptr() for x in tensors(static)}
    for x in tensors(outputs):
        if x.untyped_storage().data_ptr() not in inputs:
            poison(x)
    for x, y in zip(tensors(static), tensors(fresh)):
        storage_bytes(x).copy_(storage_bytes(y))
    graph.replay()
    torch.cuda.synchronize()
    spec.compare(outputs, run(spec, spec.reference, fresh))


def _other_values(case: Case, like: dict[str, Any]) -> dict[str, Any]:
    """Inputs of the same case with other random values."""
    made = case.make("cuda")
    _assert_same_metadata(made, like, f"{case.name} made again")
    return made


def _check_other_device(spec: OpSpec, case: Case) -> None:
    _require_kernels()
    with torch.cuda.device(0):
        kwargs = case.make("cuda:1")
        owned = _own(spec, kwargs)
        with poisoned_allocations():
            actual = run(spec, spec.op, owned)
        assert torch.cuda.current_device() == 0, f"{spec.name}: expected cuda:0 to stay the current device"
        torch.cuda.synchronize(1)
        devices = {x.device for x in tensors(actual)}
        assert devices <= {torch.device("cuda:1")}, f"{spec.name}: expected outputs on cuda:1, got {devices}"
        spec.compare(actual, run(spec, spec.reference, kwargs))
