"""Benchmarks of ops from their specs: `test_bench = benchmarks(SPEC)` in benchmarks/bench_f.py.

    pytest -m bench --tk-results FILE                        all of them
    pytest packages/tk-quant/benchmarks/bench_f.py           one op's

Device time is the sum of the durations of a call's kernels as CUPTI reports them (torch.profiler), so launch gaps do
not count; where CUPTI does not work, CUDA events around the call. Before each call 256 MB are written, so that L2 holds
no input. The op, a device-to-device copy of 117 MB and the baselines take turns within one recording, in this order and
then in reverse, and each figure is a median; so a drift of clocks meets all of them alike.

Baselines: the eager reference in every case; the reference under torch.compile, which takes seconds to compile, only in
the cases that are also warm-up cases (the shapes of real models).
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tk_core.kernel import recorded_launches
from tk_core.op import forget_short_cut
from tk_core.testing.machine import versions
from tk_core.testing.specs import Case, OpSpec
from tk_core.testing.trees import tensors

# Four times the L2 of an H200.
_FLUSH_BYTES = 256 << 20
_COPY_BYTES = 8192 * 7168 * 2
_ROUNDS = 20
# Of device time, for the rounds of one slow contender.
_SECONDS = 0.4
_HOST_CALLS = 256
# Well below the depth of a launch queue, so that no call waits for the device.
_HOST_BATCH = 16
# Long enough for the host to queue the call behind it.
_MARKER_CYCLES = 20_000
_MARKER_KERNEL = "spin_kernel"
# Half a millisecond: as long as the host may take to queue a call of several launches.
_LATENCY_CYCLES = 900_000

Call = Callable[[], Any]


def benchmarks(spec: OpSpec) -> Callable[..., None]:
    """A test, marked bench, for each case of the spec with bench=True."""

    @pytest.mark.bench
    @pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in spec.cases if case.bench])
    def test(case: Case, tk_bench: "Bench", request: pytest.FixtureRequest) -> None:
        request.node.user_properties.append(("tk_bench", tk_bench.measure(spec, case)))

    return test


class Bench:
    """Measures cases on the current GPU. One a session: it holds the buffers that every measurement uses."""

    def __init__(self, baselines: str = "compiled") -> None:
        self.baselines = baselines
        self.versions = versions()
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
        self._target = torch.empty_like(self._source)
        # The first recording of a process loads CUPTI and may miss kernels.
        self._record([lambda: self._target.copy_(self._source)])

    def close(self) -> None:
        """Free the buffers."""
        del self._flush, self._source, self._target
        torch.cuda.empty_cache()

    def measure(self, spec: OpSpec, case: Case) -> dict[str, Any]:
        """One row of results: times in µs, rates in GB/s (10⁹ bytes a second)."""
        kwargs = case.make("cuda")
        outputs = spec.op(**kwargs)
        least_bytes = spec.bytes_of(kwargs, outputs)
        contenders: dict[str, Call] = {
            "copy": lambda: self._target.copy_(self._source),
            "op": lambda: spec.op(**kwargs),
        }
        errors: dict[str, str] = {}
        if self.baselines != "none":
            contenders["eager"] = lambda: spec.reference(**kwargs)
        if self.baselines == "compiled" and case.warmup:
            torch._dynamo.reset()
            compiled = torch.compile(spec.reference)
            contenders["compiled"] = lambda: compiled(**kwargs)
        for name in ("eager", "compiled"):
            if name in contenders and (error := _try(contenders[name])):
                errors[f"{name}_error"] = error
                del contenders[name]

        timer, times = self._device_times(contenders)
        host_us, host_bare_us = self._host_times(spec.op, kwargs, outputs)
        return {
            "op": spec.name,
            "case": case.name,
            "model_shape": case.warmup,
            "arguments": {name: _describe(value) for name, value in kwargs.items()},
            **rates(least_bytes, times["op"], times["copy"]),
            "eager_us": _rounded(times.get("eager")),
            "compiled_us": _rounded(times.get("compiled")),
            **errors,
            "host_us": round(host_us, 2),
            "host_bare_us": _rounded(host_bare_us),
            "timer": timer,
            **self.versions,
        }

    def measure_latencies(self, name: str, case: str, least_bytes: int, op: Call, compiled: Call) -> dict[str, Any]:
        """A row for calls of several launches, such as replays of CUDA graphs: what is between them counts as well.

        From the first kernel's start to the last one's end by CUDA events, the copy too.
        """
        contenders = {"copy": lambda: self._target.copy_(self._source), "op": op, "compiled": compiled}
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(_ROUNDS + 2):
            for contender in contenders if turn % 2 == 0 else reversed(contenders):
                elapsed = self._time_by_events(contenders[contender], _LATENCY_CYCLES)
                if turn >= 2:
                    samples[contender].append(elapsed)
        copy_us, op_us, compiled_us = (statistics.median(values) for values in samples.values())
        return {
            "op": name,
            "case": case,
            "model_shape": False,
            **rates(least_bytes, op_us, copy_us),
            "eager_us": None,
            "compiled_us": round(compiled_us, 2),
            "host_us": round(_host_time(op), 2),
            "host_bare_us": None,
            "timer": "latency",
            **self.versions,
        }

    # ---- device time

    def _device_times(self, contenders: dict[str, Call]) -> tuple[str, dict[str, float]]:
        """Median device time of each contender, and what measured it."""
        once = {name: self._time_by_events(call) for name, call in contenders.items()}
        rounds = max(4, min(_ROUNDS, int(_SECONDS * 1e6 / sum(once.values()))))
        names = list(contenders)
        order = [name for turn in range(rounds) for name in (names if turn % 2 == 0 else reversed(names))]
        samples: dict[str, list[float]] = {name: [] for name in names}
        durations = self._record([contenders[name] for name in order])
        if durations is not None:
            for name, duration in zip(order, durations):
                samples[name].append(duration)
        else:
            for name in order:
                samples[name].append(self._time_by_events(contenders[name]))
        timer = "events" if durations is None else "cupti"
        return timer, {name: statistics.median(values) for name, values in samples.items()}

    def _time_by_events(self, call: Call, head_start: int = 0) -> float:
        """From the end of what was queued before to the end of the call, which has so many cycles to be queued."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.fill_(1)
        if head_start:
            torch.cuda._sleep(head_start)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def _record(self, calls: Sequence[Call]) -> list[float] | None:
        """Device time of each call in µs from one recording; None if CUPTI reports no kernels."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            for call in calls:
                self._flush.fill_(1)
                torch.cuda._sleep(_MARKER_CYCLES)
                call()
                torch.cuda._sleep(1)
            torch.cuda.synchronize()
        events = [
            (event.start_ns(), event.name(), event.duration_ns())
            for event in recorded.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        return between_markers(events, len(calls))

    # ---- host time

    def _host_times(self, op: Callable[..., Any], kwargs: dict[str, Any], outputs: Any) -> tuple[float, float | None]:
        """Median µs that the Python thread spends in a call, and in the allocations and launches that it consists of.

        The second is None if the call launches no kernel of ours.
        """
        # What `@replayable` remembers asks for no kernel.
        forget_short_cut()
        with recorded_launches() as launches:
            op(**kwargs)
        allocations = _allocations(outputs)

        def bare() -> None:
            for allocate in allocations:
                allocate()
            for function, arguments in launches:
                function(*arguments)

        return _host_time(lambda: op(**kwargs)), _host_time(bare) if launches else None


def rates(least_bytes: int, op_us: float, copy_us: float) -> dict[str, float]:
    """The columns of a row that compare what took `op_us` with the copy of the same run."""
    gbps, copy_gbps = least_bytes / op_us / 1e3, 2 * _COPY_BYTES / copy_us / 1e3
    return {
        "least_bytes": least_bytes,
        "us": round(op_us, 3),
        "gbps": round(gbps, 1),
        "copy_us": round(copy_us, 3),
        "copy_gbps": round(copy_gbps, 1),
        "of_copy": round(gbps / copy_gbps, 4),
    }


def between_markers(events: Sequence[tuple[int, str, int]], num_calls: int) -> list[float] | None:
    """Sums, in µs, of the durations of what ran between each pair of marker kernels.

    `events` are (start, name, duration) in ns, in any order. None if there is not one pair of markers for each call.
    """
    sums: list[float] = []
    inside = False
    for _, name, duration in sorted(events):
        if _MARKER_KERNEL in name:
            inside = not inside
            if inside:
                sums.append(0.0)
        elif inside:
            sums[-1] += duration / 1e3
    return sums if len(sums) == num_calls and not inside else None


def _allocations(outputs: Any) -> list[Call]:
    """One allocation for each output tensor, made the usual way."""

    def allocation(x: Tensor) -> Call:
        shape, stride = tuple(x.shape), x.stride()
        return (lambda: x.new_empty(shape)) if x.is_contiguous() else (lambda: x.new_empty_strided(shape, stride))

    return [allocation(x) for x in tensors(outputs)]


def _host_time(call: Call) -> float:
    samples = []
    for _ in range(_HOST_CALLS // _HOST_BATCH):
        torch.cuda.synchronize()
        for _ in range(_HOST_BATCH):
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(samples)


def _try(call: Call) -> str | None:
    """The error of a baseline, if it has one: that is a result, not a failure. Warms it up otherwise."""
    try:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    return None


# ---- rows


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        strided = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strided}"
    if isinstance(value, (tuple, list)):
        return [_describe(item) for item in value]
    return value if isinstance(value, (int, float, str)) or value is None else str(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Add one row to a file of JSON lines at once, so that an interrupted run keeps what it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def format_rows(rows: Sequence[dict[str, Any]], color: bool = False) -> str:
    """Rows as a short table, by op."""
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(
        ("op", "case", "µs", "GB/s", "of copy", "eager µs", "compiled µs", "host µs", "bare")
    ):
        table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row["op"]):
        table.add_row(
            *(row["op"], row["case"], f"{row['us']:.1f}", f"{row['gbps']:.0f}", f"{row['of_copy']:.0%}"),
            *(_cell(row, "eager"), _cell(row, "compiled"), f"{row['host_us']:.1f}"),
            "–" if row["host_bare_us"] is None else f"{row['host_bare_us']:.1f}",
        )
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=color, highlight=False).print(table)
    return out.getvalue().rstrip()


def _cell(row: dict[str, Any], baseline: str) -> str:
    if row.get(f"{baseline}_error"):
        return "error"
    value = row.get(f"{baseline}_us")
    return "–" if value is None else f"{value:.1f}"
