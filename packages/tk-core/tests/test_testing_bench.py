"""tk_core.testing.bench: what becomes of recorded events, and rows. The measuring itself needs a GPU."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_core.testing import Case, OpSpec, bench

_SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def test_only_what_runs_between_markers_counts() -> None:
    events = [
        (0, "fill", 100_000),
        (100, _SPIN, 10_000),
        (200, "main_kernel", 2_000),
        (300, "Memset (Device)", 500),
        (400, _SPIN, 10),
        (500, "fill", 100_000),
        (600, _SPIN, 10_000),
        (700, _SPIN, 10),
    ]
    assert bench.between_markers(list(reversed(events)), 2) == [2.5, 0.0]
    assert bench.between_markers(events, 3) is None
    assert bench.between_markers(events[:-1], 2) is None
    assert bench.between_markers([], 1) is None


def test_a_rotation_uses_each_set_of_arguments_and_keeps_each_result() -> None:
    kept_at_calls = []

    def function(x: int) -> tuple[int, int]:
        kept_at_calls.append(list(rotation._results))
        return x, len(kept_at_calls)

    rotation = bench.Rotation(function, [{"x": 0}, {"x": 1}, {"x": 2}])
    for _ in range(4):
        rotation()
    # Memory of the results of the first call is free for those of the fourth.
    assert kept_at_calls[3] == [None, (1, 2), (2, 3)]
    assert rotation._results == [(0, 4), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("moved_bytes", "lead"), [(0, 16), (4096, 16), (9 << 20, 15), (64 << 20, 2), (128 << 20, 1), (1 << 30, 1)]
)
def test_calls_that_do_not_count_fill_l2(moved_bytes: int, lead: int) -> None:
    assert bench.lead_of(moved_bytes) == lead
    assert lead * moved_bytes >= 128 << 20 or lead == 16


def test_contenders_take_turns() -> None:
    # Of 0.4 s a contender has 33 ms in each of twelve turns: six calls of 5 ms, and not one of a second.
    plan = bench.plan_of({"copy": 57.0, "op": 10.0, "eager": 5e3, "compiled": 1e6}, 3)
    assert plan[0] == ("copy", 8, 5)
    counting = {name: sum(count for turn, _, count in plan if turn == name) for name, _, _ in plan}
    others = {name: sum(calls - count for turn, calls, count in plan if turn == name) for name, _, _ in plan}
    assert counting == {"copy": 60, "op": 60, "eager": 60, "compiled": 4}
    assert others == {"copy": 36, "op": 36, "eager": 12, "compiled": 4}
    names = [name for name, _, _ in plan]
    assert len(names) == 40
    turns = [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    assert turns[:7] == ["copy", "op", "eager", "compiled", "eager", "op", "copy"]
    assert turns[-5:] == ["copy", "op", "eager", "op", "copy"]


def test_each_turn_is_recorded_behind_one_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    device = []

    def launch(name: str, duration: int) -> None:
        start = len(device)
        event = SimpleNamespace(
            start_ns=lambda: start,
            name=lambda: name,
            duration_ns=lambda: duration,
            device_type=lambda: torch.autograd.DeviceType.CUDA,
        )
        device.append((duration, event))

    recorded = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: [event for _, event in device]))
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(SimpleNamespace(profiler=recorded)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    made = object.__new__(bench.Bench)
    turns = [[lambda: launch("read", 9), lambda: launch("first", 2000)], [lambda: launch("second", 3000)]]
    cycles = iter([900_000, 1, 1, 1, 600_000, 1, 450_000, 1])
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: launch(_SPIN, next(cycles)))
    # A turn's clock is that of the head start which follows: 900,000 cycles in 0.6 and 0.45 ms.
    assert made._record(turns) == ([[0.009, 2.0], [3.0]], [1500.0, 2000.0])
    assert [duration for duration, _ in device] == [900_000, 9, 1, 1, 2000, 1, 600_000, 3000, 1, 450_000, 1]


def test_only_the_last_calls_of_a_turn_count() -> None:
    made = object.__new__(bench.Bench)
    made._time_by_events = lambda call: 57.0
    made._record = lambda turns: bench.Recording(
        [[1e9, *range(len(turn) - 1)] for turn in turns], [1500.0 + turn for turn in range(len(turns))]
    )
    # Eight calls of which five count: 3, 4, 5, 6, 7. The op has turns 1, 2, 5, 6 … of 24.
    assert made._device_times({"copy": None, "op": None}, 3) == ("cupti", {"copy": 5, "op": 5}, 1511.5)
    made._record = lambda turns: None
    assert made._device_times({"copy": None, "op": None}, 3) == ("events", {"copy": 57.0, "op": 57.0}, None)


def test_rates() -> None:
    # 117,440,512 bytes there and as many back in 56 µs; half of that in 35.
    assert bench.rates(117_440_512, 35.0, 56.0) == {
        "least_bytes": 117_440_512,
        "us": 35.0,
        "gbps": 3355.4,
        "copy_us": 56.0,
        "copy_gbps": 4194.3,
        "of_copy": 0.8,
    }


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def broken(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not on this machine\nmore")


SHAPES = (
    Case("real", lambda device: {"x": torch.ones(4, 8)[:, :6]}, bench=True, model_shape=True),
    Case("other", lambda device: {"x": torch.ones(4)}, bench=True),
    Case("test", lambda device: {"x": torch.ones(4)}),
)


def test_one_test_for_each_benchmark_case() -> None:
    test = bench.benchmarks({"tk_zz.double": OpSpec(double, double, SHAPES)})
    marks = {mark.name: mark for mark in test.pytestmark}
    assert set(marks) == {"bench", "parametrize"}
    assert [param.id for param in marks["parametrize"].args[1]] == ["double-real", "double-other"]


@pytest.fixture
def cpu_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Bench without a GPU, whose times are made up."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    times = {"copy": 56.9, "op": 2.0, "eager": 8.0, "compiled": 4.0, "doubling": 3.0}
    made = object.__new__(bench.Bench)
    made.baselines, made.versions = "compiled", {"gpu": "H200", "date": "2026-11-21"}
    made._copy = None
    made._device_times = lambda contenders, lead: ("cupti", {name: times[name] for name in contenders}, 1700.0)
    return made


def test_a_row(cpu_bench: Any) -> None:
    row = cpu_bench.measure(OpSpec(double, double, SHAPES), SHAPES[0])
    assert row["arguments"] == {"x": "float32[4, 6] strides [8, 1]"}
    assert row["least_bytes"] == 2 * 4 * 6 * 4
    assert (row["us"], row["gbps"], row["copy_us"]) == (2.0, 0.1, 56.9)
    assert row["copy_gbps"] == round(2 * 8192 * 7168 * 2 / 56.9e3, 1)
    assert (row["eager_us"], row["compiled_us"], row["model_shape"], row["gpu"]) == (8.0, 4.0, True, "H200")
    assert row["host_us"] > 0
    assert (row["host_bare_us"], row["sm_mhz"]) == (None, 1700.0)
    json.dumps(row)
    assert cpu_bench.measure(OpSpec(double, double, SHAPES), SHAPES[1])["compiled_us"] is None


def test_a_baseline_that_fails_is_a_result(cpu_bench: Any) -> None:
    row = cpu_bench.measure(OpSpec(double, broken, SHAPES), SHAPES[0])
    assert row["eager_error"] == row["compiled_error"] == "RuntimeError: not on this machine"
    assert row["eager_us"] is None
    cpu_bench.baselines = "none"
    assert "eager_error" not in cpu_bench.measure(OpSpec(double, broken, SHAPES), SHAPES[0])


def test_peers_are_prepared_and_measured(cpu_bench: Any) -> None:
    prepared: list[torch.Tensor] = []

    def doubling(x: torch.Tensor) -> Any:
        prepared.append(x)
        return lambda: x + x

    cpu_bench.baselines = "none"
    row = cpu_bench.measure(OpSpec(double, broken, SHAPES), SHAPES[0], {"doubling": doubling, "broken": broken})
    assert (row["doubling_us"], row["broken_us"]) == (3.0, None)
    assert row["broken_error"] == "RuntimeError: not on this machine"
    assert len({x.data_ptr() for x in prepared}) == len(prepared) > 1
    assert "doubling_us" not in cpu_bench.measure(OpSpec(double, broken, SHAPES), SHAPES[0])


def test_launches_are_recorded_and_made() -> None:
    from tk_core.kernel import Kernel

    launched = []
    kernel = Kernel(lambda: None, {}, ())
    kernel._functions[("key",)] = lambda *arguments: launched.append(arguments)
    with bench.recorded_launches() as recorded:
        kernel("key")(1, 2)
    assert launched == [(1, 2)]
    ((function, arguments),) = recorded.launches
    function(*arguments)
    assert launched == [(1, 2), (1, 2)]


def test_allocations_are_like_the_outputs() -> None:
    outputs = (torch.zeros(3, 4), [torch.zeros(4, 3).t(), None])
    made = [allocate() for allocate in bench._allocations(outputs)]
    assert [(x.shape, x.stride()) for x in made] == [((3, 4), (4, 1)), ((3, 4), (1, 3))]


def test_rows_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.jsonl"
    for case in ("one", "µ"):
        bench.append_row(file, {"case": case})
    assert [json.loads(line)["case"] for line in file.read_text(encoding="utf-8").splitlines()] == ["one", "µ"]
