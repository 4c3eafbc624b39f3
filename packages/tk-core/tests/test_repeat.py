"""Repeated calls: what is remembered, what is not, and that a remembered call does the same."""

import enum
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from tk_core import check, env, kernel, num_sms, overlap, repeat, serving
from tk_core.arch import arch_from_name
from tk_core.kernel import Kernel

ARCH = arch_from_name("sm_90a")


@pytest.fixture(autouse=True)
def _remembering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU are remembered, as if it were the current GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(serving, "kernels_only", True)
        monkeypatch.setattr(serving, "current_device", lambda: -1)


def fake_kernel(function: Callable[..., None]) -> Kernel:
    """A kernel whose compiled function is given."""

    def launch(*args: Any) -> None:
        with _disable_current_modes():  # As torch sees nothing of a kernel.
            function(*args)

    made = Kernel(function, {}, ())
    made._functions[(ARCH,)] = launch
    return made


scale_kernel = fake_kernel(lambda x, factor, out: out.copy_(x * factor))
count_kernel = fake_kernel(lambda x, out: out.fill_(x.shape[0]))


def scale(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    out = x.new_empty_strided(x.shape, (1, x.shape[0]))
    count = x.new_empty((1,), dtype=torch.int32)
    scale_kernel(ARCH)(x, factor, out)
    count_kernel(ARCH)(x, count)
    return out, None, count


def key_of(*args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    return repeat._read(args, kwargs)[1]


def record(function: Callable[..., Any], *args: Any) -> Callable[[list[Any]], Any] | None:
    """What repeats the call, given a list of its arguments."""
    with kernel.recorded_launches() as recorded, repeat._Watch() as watch:
        result = function(*args)
    if not watch.only_allocates:
        return None
    return repeat._repeat_of(repeat._read(args, {})[0], recorded, watch.allocated, result)


def test_a_replayed_call_does_the_same() -> None:
    x, other = torch.randn(2, 3, 4)
    call = record(scale, x, 3)
    assert call is not None
    for value in (x, other):
        out, nothing, count = call([value, 3])
        assert torch.equal(out, value * 3)
        assert out.stride() == (1, 3)
        assert nothing is None
        assert (count.dtype, count.tolist()) == (torch.int32, [3])


def test_a_result_of_pairs_is_remembered() -> None:
    def scale_in_pairs(x: torch.Tensor, factor: int) -> Any:
        out, nothing, count = scale(x, factor)
        return (out, nothing), ((count,), ())

    x = torch.randn(3, 4)
    call = record(scale_in_pairs, x, 3)
    assert call is not None
    (out, nothing), ((count,), empty) = call([-x, 3])
    assert torch.equal(out, x * -3)
    assert empty == ()
    assert nothing is None
    assert count.tolist() == [3]


def test_strides_of_single_columns_are_kept() -> None:
    def column(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty_strided((5, 1), (1, 8))
        scale_kernel(ARCH)(x, 2, out)
        return out

    x = torch.randn(5, 1)
    call = record(column, x)
    assert call is not None
    assert call([x]).stride() == (1, 8)


def test_workspaces_are_made_again() -> None:
    def scale_twice(x: torch.Tensor, factor: int) -> torch.Tensor:
        once = x.new_empty((1, *x.shape), dtype=torch.float64)
        out = x.new_empty(x.shape)
        scale_kernel(ARCH)(x, factor, once.squeeze(0))
        scale_kernel(ARCH)(once.squeeze(0), factor, out)
        return out

    x, other = torch.randn(2, 3, 4)
    call = record(scale_twice, x, 3)
    assert call is not None
    for value in (x, other):
        assert torch.equal(call([value, 3]), ((value * 3).double() * 3).float())


def test_a_tensor_that_is_no_workspace_is_not_remembered() -> None:
    def scale_copy(x: torch.Tensor) -> torch.Tensor:
        copy, out = x.clone(), x.new_empty(x.shape)
        scale_kernel(ARCH)(copy, 2, out)
        return out

    assert record(scale_copy, torch.randn(3, 4)) is None


def test_an_output_given_by_the_caller_is_returned() -> None:
    def into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        scale_kernel(ARCH)(x, 2, out)
        return out

    call = record(into, torch.randn(4), torch.empty(4))
    x, out = torch.randn(4), torch.empty(4)
    assert call is not None
    assert call([x, out]) is out
    assert torch.equal(out, x * 2)


@pytest.mark.parametrize("shape", [(-1,), (6, 4), (2, 3, 2, 2)])
def test_views_of_another_shape_are_made_again(shape: tuple[int, ...]) -> None:
    def reshape(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scale_kernel(ARCH)(x.view(shape), 2, out.view(shape))
        return out

    call = record(reshape, torch.randn(2, 3, 4))
    x = torch.randn(2, 3, 4)
    assert call is not None
    assert torch.equal(call([x]), x * 2)


def workspace(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scale_kernel(ARCH)(torch.ones_like(x), 2, out)
    return out


def view(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scale_kernel(ARCH)(x, 2, out)
    return out[:1]


def unwritten(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x)
    scale_kernel(ARCH)(x, 2, out)
    return out, torch.zeros_like(x)


def no_launch(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def sizes(x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    out = torch.empty_like(x)
    scale_kernel(ARCH)(x, 2, out)
    return out, [3]


@pytest.mark.parametrize("function", [workspace, view, unwritten, no_launch, sizes])
def test_other_calls_are_not_remembered(function: Callable[..., Any]) -> None:
    assert record(function, torch.randn(4)) is None


def test_one_tensor_for_two_arguments_is_not_remembered() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scale_kernel(ARCH)(x, 2, out)
        return out

    x = torch.randn(4)
    assert record(add, x, x) is None
    assert record(add, x, torch.randn(4)) is not None


class Choice(enum.IntEnum):
    FIRST = 1
    SECOND = 2


def test_signatures_tell_calls_apart() -> None:
    x = torch.zeros(8, 16)
    keys = [
        key_of(x),
        key_of(torch.zeros(8, 17)),
        key_of(torch.zeros(8, 16, dtype=torch.bfloat16)),
        key_of(torch.zeros(8, 32)[:, :16]),
        key_of(torch.zeros(8, 64)[:, :16]),
        key_of(torch.zeros(8 * 16 + 1)[1:].view(8, 16)),
        key_of(torch.zeros(1, 16)),
        key_of(torch.zeros(8, 64)[:1, :16]),
        key_of((x, x)),
        key_of(x, x),
        key_of(x, 1),
        key_of(x, True),
        key_of(x, 1.0),
        key_of(x, 0.0),
        key_of(x, -0.0),
        key_of(x, None),
        key_of(x, a=None),
        key_of(x, b=None),
        key_of(x, a=1, b=2),
        key_of(x, b=1, a=2),
        key_of(x, "e4m3"),
        key_of(x, torch.int32),
        key_of(x, ()),
        key_of(x, (1, 32)),
        key_of(x, (1, True)),
        key_of(x, (1,), (32,)),
        key_of(x, (1, 32), ()),
        key_of(x, 1, 32),
        key_of(x, Choice.FIRST),
        key_of(x, Choice.SECOND),
    ]
    with num_sms(7):
        keys.append(key_of(x))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key_of(x, 1) == key_of(torch.ones(8, 16), 1) == key_of(torch.nn.Parameter(x), 1)


def test_other_arguments_have_no_key() -> None:
    x = torch.zeros(8, 16)
    others = ([x], ([x], 1), torch.nn.Module(), math.inf + 0j, x.to_sparse(), x.as_subclass(Wrapped))
    assert [key_of(x, other) for other in others] == [None] * len(others)
    assert key_of((x, [x])) is None
    assert key_of(x, flag=[1]) is None
    keys = []
    torch.vmap(lambda row: (keys.append(key_of(row)), row)[1])(x)
    assert keys == [None]


class Wrapped(torch.Tensor):
    pass


def test_what_is_in_tuples_comes_last() -> None:
    x, y = torch.zeros(2), torch.zeros(3)
    pair, sizes = (x, y), (2, 3)
    values, _ = repeat._read((pair, 1), {"a": None, "b": sizes})
    expected = [pair, 1, None, sizes, x, y, 2, 3]
    assert len(values) == len(expected)
    assert all(map(operator.is_, values, expected))


def test_nothing_keeps_the_memory_of_a_call() -> None:
    x = torch.randn(3, 4)
    call = record(scale, x, 3)
    memory = weakref.ref(x)
    assert call is not None
    del x
    assert memory() is None


def test_a_sparse_result_is_not_remembered() -> None:
    def sparse(x: torch.Tensor) -> torch.Tensor:
        scale_kernel(ARCH)(x, 2, x)
        return x.to_sparse()

    for size in (0, 4):
        assert record(sparse, torch.ones(size)) is None


def test_launches_of_other_threads_are_not_noted() -> None:
    import threading

    x, out = torch.randn(4), torch.empty(4)
    with kernel.recorded_launches() as recorded:
        thread = threading.Thread(target=lambda: scale_kernel(ARCH)(x, 2, out))
        thread.start()
        thread.join()
        assert recorded.launches == []
        scale_kernel(ARCH)(x, 2, out)
    assert len(recorded.launches) == 1


def test_nothing_is_replayed_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "current_device", lambda: 0)
    calls = []

    @repeat.repeating
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        out = torch.empty_like(x)
        scale_kernel(ARCH)(x, 2, out)
        return out

    for _ in range(3):
        counted(torch.ones(2))
    assert len(calls) == 3


def test_a_remembered_call_runs_no_python() -> None:
    calls = 0

    @repeat.repeating
    def counted(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = torch.empty_like(x) if out is None else out
        overlap.check_written(("x", "out"), (x, out), [1])  # As an operator does.
        scale_kernel(ARCH)(x, 2, out)
        return out

    memory = torch.ones(16)
    for _ in range(3):
        assert counted(torch.ones(8)).tolist() == [2.0] * 8
        counted(memory[:8], memory[8:])
    assert calls == 2
    # One that is given and overlaps is for the operator to judge, each time.
    for expected in (3, 4):
        with pytest.raises(ValueError, match="out: expected memory of its own, got some of x"):
            counted(memory[:8], memory[4:12])
        assert calls == expected
    counted(memory[:8], memory[8:])
    assert calls == 4
    # Columns of the same rows are apart, at this distance only.
    rows = torch.ones(4, 16)
    for first in (0, 0, 0, 8, 0):
        counted(rows[:, 4:8], rows[:, first : first + 4])
    assert calls == 6
    with serving.backend("reference"):
        counted(torch.ones(8))
    assert calls == 7


def counted_doubling() -> tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    """A replayable function, and the arguments with which its Python has run."""
    calls: list[torch.Tensor] = []

    @repeat.repeating
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        out = torch.empty_like(x)
        scale_kernel(ARCH)(x, 2, out)
        return out

    return counted, calls


def test_modes_see_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, calls = counted_doubling()
    counted(torch.ones(8))
    counted(torch.ones(8).as_subclass(Wrapped))
    assert len(calls) == 2
    with monkeypatch.context() as patch:
        patch.setattr(repeat, "_len_torch_dispatch_stack", lambda: 1)
        counted(torch.ones(8))
    assert len(calls) == 3
    with forward_ad.dual_level():
        counted(forward_ad.make_dual(torch.ones(8), torch.ones(8)))
    assert len(calls) == 4
    counted(torch.ones(8))
    assert len(calls) == 4


def test_a_negative_view_is_for_the_function_to_judge() -> None:
    counted, calls = counted_doubling()
    pairs = torch.arange(8.0).view(4, 2)
    for _ in range(2):
        assert torch.equal(counted(pairs[:, 1]), pairs[:, 1] * 2)
    assert len(calls) == 1
    negative = torch.view_as_complex(pairs).conj().imag
    assert torch.equal(counted(negative), pairs[:, 1] * -2)
    assert len(calls) == 2


# ---- with it and without it, any calls launch the same

_log: list[tuple[str, tuple[Any, ...]]] = []


def _logging_kernel(name: str) -> Callable[..., None]:
    made = fake_kernel(lambda *operands: _log.append((name, operands)))
    return lambda *operands: made(ARCH)(*operands)


_first, _second, _third, _inner = map(_logging_kernel, ("first", "second", "third", "inner"))


@repeat.repeating
def _in_place(x: torch.Tensor) -> None:
    _inner(x)


def _several_launches(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    y: torch.Tensor | None,
    sizes: tuple[int, ...],
    factor: float,
    mode: str = "plain",
    *,
    out: torch.Tensor | None = None,
    rows: int = 1,
    columns: int = 1,
) -> Any:
    """Takes what public functions take, and depends on all of it."""
    data, sf = x if isinstance(x, tuple) else (x, None)
    check.require(len(sizes) > 0, "sizes", "some", sizes)
    if out is None:
        result = data.new_empty_strided(data.shape, (1, *data.shape[:-1])) if data.ndim == 2 else torch.empty_like(data)
    else:
        check.tensor("out", out, (data.dtype,), tuple(data.shape), layout="any")
        overlap.check_written(("out", "data", "y", "sf"), (out, data, y, sf), [0])  # As an operator does.
        result = out
    if data.data_ptr() % 16 == 0 and data.stride(-1) == 1:
        _first(
            data, y, factor, type(factor).__name__, math.copysign(1, factor), result, rows, columns, repeat.get_limit()
        )
    else:
        _second(data, *sizes, result, rows, columns, repeat.get_limit())
    if mode == "plain":
        return result
    if mode == "nested":
        _in_place(data)
        return result, None
    if mode == "bits":
        _third(result.view(torch.int32 if result.dtype is torch.float32 else torch.int16))
        return result
    if mode == "part of x":
        part = data[:1]
        _third(part, result)
        return result, part
    if mode == "copy":
        _third(data.clone(), result)
        return (result,)
    if mode == "unwritten":
        return result, data.new_zeros(3)
    workspace = data.new_empty((*sizes, data.numel()), dtype=torch.float64)
    total = data.new_empty((data.shape[0],), dtype=torch.int32)
    rows = result.view(-1) if result.is_contiguous() else result.transpose(0, -1)
    if sf is not None:
        _second(sf, workspace)
    _third(workspace.view(-1), rows, data if y is None else y, total)
    if mode == "views":
        return total, result[:1]
    if mode == "pairs":
        return (total, None), result, ((), (None,))
    return total, None, result


_FIELDS: dict[str, list[Any]] = {
    "shape": [(4, 8), (1, 8), (3, 5), (0, 8), (8,), (2, 3, 4)],
    "strides": ["usual", "padded", "transposed", "of one row"],
    "offset": [0, 1, 8],
    "dtype": [torch.float32, torch.bfloat16],
    "kind": [torch.Tensor, torch.nn.Parameter],
    "y": [None, "new", "x", "view of x"],
    "sf": [False, True],
    "out": [None, "new", "x", "overlapping", "wrong"],
    "sizes": [(1, 2), (2, 1), (True, 2), (3,), ()],
    "factor": [1, True, 1.0, 2, 0.0, -0.0, Choice.FIRST],
    "mode": ["all", "pairs", "views", "plain", "nested", "bits", "part of x", "copy", "unwritten"],
    "sides": [{}, {"rows": 2}, {"columns": 2}, {"rows": 2, "columns": 3}, {"columns": 2, "rows": 3}],
    "num_keywords": [0, 1, 5],
    "limit": [None, 2],
}
_USUAL = {name: values[0] for name, values in _FIELDS.items()}
_CHANGES = st.sampled_from([(name, value) for name, values in _FIELDS.items() for value in values])


def _tensor(call: dict[str, Any]) -> torch.Tensor:
    shape = call["shape"]
    strides = torch.empty(shape, device="meta").stride()
    if call["strides"] == "padded":
        strides = (*(stride * 2 for stride in strides[:-1]), 1)
    elif call["strides"] == "transposed":
        strides = torch.empty(shape[::-1], device="meta").stride()[::-1]
    elif call["strides"] == "of one row":
        strides = tuple(64 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    x = torch.zeros(256, dtype=call["dtype"])[call["offset"] :].as_strided(shape, strides)
    return x if call["kind"] is torch.Tensor else torch.nn.Parameter(x, requires_grad=False)


def _arguments(call: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    x = _tensor(call)
    y = {None: None, "new": _tensor(call), "x": x, "view of x": x[:1]}[call["y"]]
    new, wrong = torch.zeros(call["shape"], dtype=call["dtype"]), torch.zeros(3, dtype=torch.int32)
    out = {None: None, "new": new, "x": x, "overlapping": x.view_as(x), "wrong": wrong}[call["out"]]
    named = {"x": (x, torch.zeros(7)) if call["sf"] else x, "y": y}
    named |= {name: call[name] for name in ("sizes", "factor", "mode")}
    num_positional = len(named) - call["num_keywords"]
    keywords = {**dict(list(named.items())[num_positional:]), **call["sides"]}
    if out is not None:
        keywords["out"] = out
    return list(named.values())[:num_positional], keywords


def _seen(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a call launches, and how it ends, with tensors told by whose memory they have, dtype, shape and strides."""
    owners = [x for x in repeat._read(tuple(args), kwargs)[0] if isinstance(x, torch.Tensor)]
    _log.clear()
    try:
        ended = function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        ended = (type(error), str(error))
    results = ended if isinstance(ended, tuple) else (ended,)
    are_given = [[x is y for y in owners] for x in results]

    def told(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(told, x))
        if not isinstance(x, torch.Tensor):
            return type(x), repr(x)
        storage = x.untyped_storage()._cdata
        owner = next((i for i, y in enumerate(owners) if y.untyped_storage()._cdata == storage), len(owners))
        if owner == len(owners):
            owners.append(x)
        return owner, x.dtype, x.shape, x.stride(), x.storage_offset()

    return told(tuple(_log)), told(ended), are_given


@settings(max_examples=150, deadline=None)
@example([], [("factor", 0.0), ("factor", -0.0)], [0, 1])
@example([("strides", "transposed")], [("out", "new"), ("out", "overlapping")], [0, 1, 0, 1])
@given(
    st.lists(_CHANGES, max_size=6),
    st.lists(_CHANGES, min_size=1, max_size=8),
    st.lists(st.integers(0, 7), max_size=16),
)
def test_any_calls_launch_the_same(
    common: list[tuple[str, Any]], changes: list[tuple[str, Any]], order: list[int]
) -> None:
    """Calls that differ from each other in few things, as `order` says, each perhaps several times."""
    replayed = repeat.repeating(_several_launches)
    calls = [_USUAL | dict(common) | {name: value} for name, value in changes]
    for index in order:
        call = calls[index % len(calls)]
        args, kwargs = _arguments(call)
        with num_sms(call["limit"]):
            assert _seen(replayed, args, kwargs) == _seen(_several_launches, args, kwargs)


@pytest.mark.parametrize("name", _FIELDS)
def test_calls_that_differ_in_one_thing_launch_the_same(name: str) -> None:
    replayed = repeat.repeating(_several_launches)
    for value in _FIELDS[name] * 2:
        args, kwargs = _arguments(_USUAL | {name: value})
        with num_sms(2 if name == "limit" and value else None):
            assert _seen(replayed, args, kwargs) == _seen(_several_launches, args, kwargs)


@pytest.mark.gpu
def test_checks_run_once_for_each_kind_of_call() -> None:
    import tk_core
    import tk_quant

    assert not env.debug()
    calls = 0

    @repeat.repeating
    def transpose(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return tk_quant.transpose.op(x)

    a, b = torch.randn(2, 64, 32, device="cuda")
    transpose(a)
    calls = 0
    for x in (a, b, a):
        assert torch.equal(transpose(x), x.t())
    assert calls <= 1
    before = calls
    assert torch.equal(transpose(torch.ones(32, 32, device="cuda")), torch.ones(32, 32, device="cuda"))
    assert calls == before + 1
    with tk_core.backend("reference"):
        assert torch.equal(transpose(a), a.t())
    assert calls == before + 2
    with pytest.raises(ValueError, match="x: expected shape"):
        transpose(a[0])


@pytest.mark.gpu
def test_a_tensor_elsewhere_is_named_also_the_second_time() -> None:
    import tk_moe

    weights = torch.rand(4, 2, device="cuda")
    rows = torch.randn(8, 64, device="cuda")
    positions = torch.arange(8, dtype=torch.int32, device="cuda").view(4, 2)
    for _ in range(2):
        tk_moe.reduce_fused(rows, weights, positions)
    with pytest.raises(ValueError, match="topk_weights: expected device cuda:0, got cpu"):
        tk_moe.reduce_fused(rows, weights.cpu(), positions)
