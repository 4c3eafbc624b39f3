"""@replayable: what is remembered, what is not, and that a remembered call does the same."""

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tk_core import env, kernel, replay
from tk_core.arch import arch_from_name
from tk_core.kernel import Kernel

ARCH = arch_from_name("sm_90a")


def fake_kernel(function: Callable[..., None]) -> Kernel:
    """A kernel whose compiled function is given."""
    made = Kernel(function, {}, ())
    made._functions[(ARCH,)] = function
    return made


scale_kernel = fake_kernel(lambda x, factor, out: out.copy_(x * factor))
count_kernel = fake_kernel(lambda x, out: out.fill_(x.shape[0]))


def scale(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    out = x.new_empty_strided(x.shape, (1, x.shape[0]))
    count = x.new_empty((1,), dtype=torch.int32)
    scale_kernel(ARCH)(x, factor, out)
    count_kernel(ARCH)(x, count)
    return out, None, count


def read(like: tuple[Any, ...], like_names: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """What a reader that was compiled for the arguments `like` finds in others."""
    return replay._compile_reader(replay._kinds(like, like_names), tuple(like_names))(args, kwargs)


def record(function: Callable[..., Any], *args: Any) -> replay._Call | None:
    values, _ = read(args, {}, *args)
    return replay._record(function, args, {}, values)[1]


def test_a_replayed_call_does_the_same() -> None:
    x, other = torch.randn(2, 3, 4)
    call = record(scale, x, 3)
    assert call is not None
    for value in (x, other):
        out, nothing, count = replay._replay(call, [value, 3])
        assert torch.equal(out, value * 3)
        assert out.stride() == (1, 3)
        assert nothing is None
        assert (count.dtype, count.tolist()) == (torch.int32, [3])


def test_strides_of_single_columns_are_kept() -> None:
    def column(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty_strided((5, 1), (1, 8))
        scale_kernel(ARCH)(x, 2, out)
        return out

    x = torch.randn(5, 1)
    call = record(column, x)
    assert call is not None
    assert replay._replay(call, [x]).stride() == (1, 8)


def test_workspaces_are_made_again() -> None:
    def scale_twice(x: torch.Tensor, factor: int) -> torch.Tensor:
        once = replay.new_workspace(x, (1, *x.shape), torch.float64)
        out = x.new_empty(x.shape)
        scale_kernel(ARCH)(x, factor, once.squeeze(0))
        scale_kernel(ARCH)(once.squeeze(0), factor, out)
        return out

    assert replay.new_workspace(torch.empty(2), (3,)).shape == (3,)  # outside of any recording
    x, other = torch.randn(2, 3, 4)
    call = record(scale_twice, x, 3)
    assert call is not None
    assert [(a.shape, a.like.dtype) for a in call.allocations] == [((3, 4), torch.float32), ((1, 3, 4), torch.float64)]
    for value in (x, other):
        assert torch.equal(replay._replay(call, [value, 3]), ((value * 3).double() * 3).float())


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
    assert replay._replay(call, [x, out]) is out
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
    assert torch.equal(replay._replay(call, [x]), x * 2)


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


def key_of(*args: Any) -> tuple[Any, ...]:
    _, key = read(args, {}, *args)
    return *replay._kinds(args, {}), *key


def test_signatures_tell_calls_apart() -> None:
    x = torch.zeros(8, 16)
    keys = [
        key_of(x),
        key_of(torch.zeros(8, 17)),
        key_of(torch.zeros(8, 16, dtype=torch.bfloat16)),
        key_of(torch.zeros(8, 32)[:, :16]),
        key_of(torch.zeros(8, 64)[:, :16]),
        key_of(torch.zeros(8 * 16 + 1)[1:].view(8, 16)),
        key_of((x, x)),
        key_of(x, x),
        key_of(x, 1),
        key_of(x, True),
        key_of(x, 1.0),
        key_of(x, None),
        key_of(x, "e4m3"),
        key_of(x, (1, 32)),
        key_of(x, 1, 32),
        key_of(x, Choice.FIRST),
        key_of(x, Choice.SECOND),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(x, 1) == key_of(torch.ones(8, 16), 1)
    for other in ([x], (1, True), (x, x), (), torch.nn.Module(), torch._subclasses.FakeTensorMode()):
        assert read((x, other), {}, x, other) is None
    assert read((1,), {}, 1) is None
    assert read((), {}) is None


def test_a_reader_reads_nothing_else() -> None:
    x = torch.zeros(2, 3)
    assert read((x, 1), {"flag": True}, x, 2, flag=False)[0] == [x, 2, False]
    pair, _ = read(((x, x),), {"a": 1, "b": None}, (x, x), b=None, a=1)
    assert pair == [x, x, 1, None]
    for args, names in (
        ((x, 1), {}),
        ((x, True), {"flag": True}),
        ((x, 1), {"other": True}),
        ((x, 1, 1), {"flag": True}),
        ((x,), {"flag": True, "k": 1}),
        (((x, x), 1), {"flag": True}),
    ):
        assert read((x, 1), {"flag": True}, *args, **names) is None
    # A tensor of two rows could be unpacked, too; an absent name is not None.
    assert read(((x, x),), {}, x) is None
    assert read(((x, x),), {}, (x, x, x)) is None
    assert read((x,), {"a": None}, x, b=5) is None


def test_launches_of_other_threads_are_not_noted() -> None:
    import threading

    x, out = torch.randn(4), torch.empty(4)
    with kernel.recorded_launches() as launches:
        thread = threading.Thread(target=lambda: scale_kernel(ARCH)(x, 2, out))
        thread.start()
        thread.join()
        assert launches == []
        scale_kernel(ARCH)(x, 2, out)
    assert len(launches) == 1


def test_nothing_is_replayed_on_a_cpu() -> None:
    calls = []

    @replay.replayable
    def counted(x: torch.Tensor) -> torch.Tensor:
        """Counts."""
        calls.append(x)
        return x * 2

    for _ in range(3):
        counted(torch.ones(2))
    assert len(calls) == 3
    assert counted.__doc__ == "Counts."


@pytest.mark.gpu
def test_checks_run_once_for_each_kind_of_call() -> None:
    import tk_core
    import tk_quant

    assert not env.debug()
    calls = 0

    @replay.replayable
    def transpose(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return tk_quant.transpose.__wrapped__(x)

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
