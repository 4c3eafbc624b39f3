"""Benchmarks of a package's ops: `test_bench = benchmarks(load_specs(package))` in its benchmarks/bench_ops.py.

    pytest -m bench --tk-results FILE                                 all of them
    pytest packages/tk-quant/benchmarks/bench_ops.py -k transpose     of a package, those named so

Device time is the sum of the durations of a call's kernels as CUPTI reports them (torch.profiler), so gaps between
launches do not count. The op, a device-to-device copy of 117 MB and the baselines take turns within one recording, in
this order and then in reverse, and each figure is a median; so a drift of the clock rate affects all of them alike.

Each call of a turn has its own arguments and results, so no call finds its data in L2. The first calls of a turn do not
count. They leave as many dirty lines in L2 as the op itself leaves, so a counted call pays for the bytes that it moves.
A flush of L2 by writing before each call would add 45 MB of dirty lines on an H200, which the call would have to write
back, in up to 11 µs; after a flush by reading, the call would leave its own last 45 MB for others to write back. Calls
follow each other closely, as an idle GPU writes lines back at no cost: 10 µs of idle time take 0.5 µs off a copy.

The kernel that gives the host a head start before a turn spins for a fixed number of cycles; how long that took tells
the clock of the SMs, as it was when the turn before ended. A row has the op's median.

Where CUPTI does not work, CUDA events around a call time it. They also time calls of several launches in a CUDA graph,
whose buffers are fixed. L2 is flushed before such a call by writing 256 MB.

Baselines: the eager reference in every case; the reference under torch.compile, which takes seconds to compile, only in
cases with model_shape=True (the shapes of real models). Peers, other libraries' functions that compute the same, are
baselines that are always measured.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tk_core.kernel import recorded_launches
from tk_core.math import ceil_div
from tk_core.testing.machine import versions
from tk_core.testing.specs import Call, Case, OpSpec, Peer
from tk_core.testing.trees import distinct_bytes, tensors, transfer

_FLUSH_BYTES = 256 << 20  # four times the L2 of an H200
_LEAD_BYTES = 128 << 20  # twice that L2: what the uncounted calls of a turn move before the counted ones
# At most this many uncounted calls: those of a small op do not fill L2 anyway.
_LEAD_CALLS = 16
_COPY_BYTES = 8192 * 7168 * 2
# A single copy takes either 55 or 57 µs on an H200: the median of 60 calls is stable, that of 20 jumps between these.
_TURNS = 12
# Turns of a slow contender, of which two calls take longer than a turn's share of _SECONDS.
_SLOW_TURNS = 4
# Counted calls of a turn, its last ones.
_CALLS = 5
# Device time that all turns of one contender may take together.
_SECONDS = 0.4
_LATENCY_ROUNDS = 20
_HOST_CALLS = 256
# Well below the depth of a launch queue, so that no call waits for the device.
_HOST_BATCH = 16
_MARKER_KERNEL = "spin_kernel"
# Half a millisecond: enough for the host to queue the calls of a turn, or one call of several launches.
_HEAD_START_CYCLES = 900_000


def benchmarks(
    specs: Mapping[str, OpSpec], peers: Mapping[str, Mapping[str, Peer]] | None = None
) -> Callable[..., None]:
    """A test, marked bench, for each case of the specs with bench=True; `peers` by op, then by name."""
    found = [(spec, case) for spec in specs.values() for case in spec.cases if case.bench]

    @pytest.mark.bench
    @pytest.mark.parametrize(
        ("spec", "case"), [pytest.param(spec, case, id=f"{spec.op.__name__}-{case.name}") for spec, case in found]
    )
    def test(spec: OpSpec, case: Case, tk_bench: "Bench", request: pytest.FixtureRequest) -> None:
        row = tk_bench.measure(spec, case, (peers or {}).get(spec.name))
        request.node.user_properties.append(("tk_bench", row))

    return test


class Rotation:
    """Calls a function with several sets of arguments in turn, and keeps the last result of each."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[dict[str, Any]]) -> None:
        self._function = function
        self._arguments = arguments
        self._results: list[Any] = [None] * len(arguments)
        self._next = 0

    def __call__(self) -> None:
        """Call the function with the next set. The new results may reuse the memory of this set's last results."""
        index, self._next = self._next, (self._next + 1) % len(self._arguments)
        self._results[index] = None
        self._results[index] = self._function(**self._arguments[index])


class Recording(NamedTuple):
    """What one recording tells of its turns."""

    durations: list[list[float]]
    """Device time in µs of each call of each turn."""
    sm_mhz: list[float]
    """The clock of the SMs at the end of each turn."""


class Bench:
    """Measures cases on the current GPU. One per session: it owns the buffers that every measurement uses."""

    def __init__(self, baselines: str = "compiled") -> None:
        self.baselines = baselines
        self.versions = versions()
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
        pair = {"source": source, "target": torch.empty_like(source)}
        pairs = [pair, *(transfer(pair) for _ in range(_CALLS))]
        self._copy = Rotation(lambda source, target: target.copy_(source), pairs)
        # The first recording of a process loads CUPTI and may miss kernels.
        self._record([[self._copy]])

    def close(self) -> None:
        """Free the buffers."""
        del self._flush, self._copy
        torch.cuda.empty_cache()

    def measure(self, spec: OpSpec, case: Case, peers: Mapping[str, Peer] | None = None) -> dict[str, Any]:
        """Measure one case and return a row of results: times in µs, rates in GB/s (10⁹ bytes a second)."""
        kwargs = case.make("cuda")
        outputs = spec.op(**kwargs)
        least_bytes = spec.bytes_of(kwargs, outputs)
        lead = lead_of(distinct_bytes((kwargs, outputs)))
        arguments = [kwargs, *(transfer(kwargs) for _ in range(lead + _CALLS - 1))]
        contenders: dict[str, Call] = {"copy": self._copy, "op": Rotation(spec.op, arguments)}
        baselines: dict[str, Callable[[], Call]] = {
            name: lambda peer=peer: Rotation(lambda call: call(), [{"call": peer(**each)} for each in arguments])
            for name, peer in (peers or {}).items()
        }
        if self.baselines != "none":
            baselines["eager"] = lambda: Rotation(spec.reference, arguments)
        if self.baselines == "compiled" and case.model_shape:
            torch._dynamo.reset()
            baselines["compiled"] = lambda: Rotation(torch.compile(spec.reference), arguments)
        errors: dict[str, str] = {}
        for name, prepare in baselines.items():
            try:
                contenders[name] = _warmed_up(prepare())
            except Exception as error:  # a result to report, not a failure
                first_line = str(error).strip().partition("\n")[0]
                errors[f"{name}_error"] = f"{type(error).__name__}: {first_line}"[:200]

        timer, times, sm_mhz = self._device_times(contenders, lead)
        host_us, host_bare_us = self._host_times(spec.op, kwargs, outputs)
        return {
            "op": spec.name,
            "case": case.name,
            "model_shape": case.model_shape,
            "arguments": {name: _describe(value) for name, value in kwargs.items()},
            **rates(least_bytes, times["op"], times["copy"]),
            "eager_us": _rounded(times.get("eager")),
            "compiled_us": _rounded(times.get("compiled")),
            **{f"{name}_us": _rounded(times.get(name)) for name in peers or {}},
            **errors,
            "host_us": round(host_us, 2),
            "host_bare_us": _rounded(host_bare_us),
            "sm_mhz": _rounded(sm_mhz),
            "timer": timer,
            "cold_by": "rotation" if timer == "cupti" else "flush",
            **self.versions,
        }

    def measure_latencies(self, name: str, case: str, least_bytes: int, op: Call, compiled: Call) -> dict[str, Any]:
        """Return a row for calls of several launches, such as replays of CUDA graphs; gaps between launches count.

        CUDA events time every call, the copy too, from the start of its first kernel to the end of its last.
        """
        contenders = {"copy": self._copy, "op": op, "compiled": compiled}
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(_LATENCY_ROUNDS + 2):
            for contender in contenders if turn % 2 == 0 else reversed(contenders):
                elapsed = self._time_by_events(contenders[contender], _HEAD_START_CYCLES)
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
            "cold_by": "flush",
            **self.versions,
        }

    # ---- device time

    def _device_times(self, contenders: dict[str, Call], lead: int) -> tuple[str, dict[str, float], float | None]:
        """The timer, "cupti" or "events"; each contender's median device time in µs; the op's clock in MHz.

        Events tell no clock.
        """
        single_call_us = {name: self._time_by_events(call) for name, call in contenders.items()}
        plan = plan_of(single_call_us, lead)
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        # Reading evicts the dirty lines that the last contender left in L2.
        recording = self._record([[self._read, *[contenders[name]] * calls] for name, calls, _ in plan])
        for turn, (name, _, count) in enumerate(plan):
            call = contenders[name]
            samples[name] += (
                recording.durations[turn][-count:] if recording else [self._time_by_events(call) for _ in range(count)]
            )
        times = {name: statistics.median(values) for name, values in samples.items()}
        if recording is None:
            return "events", times, None
        of_op = [mhz for mhz, (name, _, _) in zip(recording.sm_mhz, plan) if name == "op"]
        return "cupti", times, statistics.median(of_op)

    def _read(self) -> None:
        self._flush.view(torch.int64).max()

    def _time_by_events(self, call: Call, head_start: int = 0) -> float:
        """Time in µs from the end of earlier work to the end of the call. The earlier work is a flush of L2, then
        `head_start` cycles of spinning, in which the host queues the call."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.fill_(1)
        if head_start:
            torch.cuda._sleep(head_start)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def _record(self, turns: Sequence[Sequence[Call]]) -> Recording | None:
        """One recording of all turns; None if CUPTI reports too few kernels."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            for turn in turns:
                for index, call in enumerate(turn):
                    torch.cuda._sleep(_HEAD_START_CYCLES if index == 0 else 1)
                    call()
                    torch.cuda._sleep(1)
            # For the last turn's clock.
            torch.cuda._sleep(_HEAD_START_CYCLES)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
        events = [
            (event.start_ns(), event.name(), event.duration_ns())
            for event in recorded.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        sums = between_markers(events, sum(len(turn) for turn in turns) + 1)
        if sums is None:
            return None
        durations = iter(sums)
        head_starts = [duration for _, name, duration in sorted(events) if _MARKER_KERNEL in name][::2]
        firsts = accumulate(len(turn) for turn in turns)
        mhz = [_HEAD_START_CYCLES * 1e3 / head_starts[index] for index in firsts]
        return Recording([list(islice(durations, len(turn))) for turn in turns], mhz)

    # ---- host time

    def _host_times(self, op: Callable[..., Any], kwargs: dict[str, Any], outputs: Any) -> tuple[float, float | None]:
        """Median time in µs that the Python thread spends in a call, and in the call's allocations and launches alone.

        The second time is None if the call launches no kernel of ours.
        """
        with recorded_launches() as recorded:
            op(**kwargs)
        allocations = _allocations(outputs)

        def bare() -> None:
            for allocate in allocations:
                allocate()
            for function, arguments in recorded.launches:
                function(*arguments)

        return _host_time(lambda: op(**kwargs)), _host_time(bare) if recorded.launches else None


def lead_of(moved_bytes: int) -> int:
    """Number of uncounted calls at the beginning of a turn, if one call moves `moved_bytes`."""
    return min(_LEAD_CALLS, ceil_div(_LEAD_BYTES, max(moved_bytes, 1)))


def plan_of(single_call_us: dict[str, float], lead: int) -> list[tuple[str, int, int]]:
    """The turns, as (contender, number of calls, number of counted calls); the last calls of a turn are counted.

    `single_call_us` has the time of one call of each contender, in turn order. A slow contender makes fewer calls, but
    at least two per turn in at least four turns.
    """
    plan: list[tuple[str, int, int]] = []
    for turn in range(_TURNS):
        for name in single_call_us if turn % 2 == 0 else reversed(single_call_us):
            affordable = int(_SECONDS * 1e6 / _TURNS / single_call_us[name])
            if affordable < 2 and turn >= _SLOW_TURNS:
                continue
            calls = max(2, min(lead + _CALLS, affordable))
            plan.append((name, calls, min(_CALLS, calls - 1)))
    return plan


def rates(least_bytes: int, op_us: float, copy_us: float) -> dict[str, float]:
    """The columns of a row that compare the op's memory throughput with that of the copy of the same run."""
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
    """The total duration in µs of the kernels between each pair of marker kernels.

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
    """For each output tensor a function that allocates another like it, as an op does."""

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


def _warmed_up(call: Call) -> Call:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    return call


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
    """Append one row to a file of JSON lines at once, so that an interrupted run keeps its rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")


def format_rows(rows: Sequence[dict[str, Any]], color: bool = False) -> str:
    """Rows as a table, sorted by op."""
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    headings = ("op", "case", "µs", "GB/s", "of copy", "eager µs", "compiled µs", "host µs", "bare")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row["op"]):
        table.add_row(
            *(row["op"], row["case"], f"{row['us']:.1f}", f"{row['gbps']:.0f}", f"{row['of_copy']:.0%}"),
            *(_cell(row, name) for name in ("eager", "compiled", "host", "host_bare")),
        )
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=color, highlight=False).print(table)
    return out.getvalue().rstrip()


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(f"{name}_us")
    return "error" if row.get(f"{name}_error") else "–" if value is None else f"{value:.1f}"
