"""Times of calls on several GPUs, beside those of the copy engine, of NCCL and of a local copy.

    torchrun --nproc-per-node 4 packages/tk-ep/benchmarks/measure.py --results nvidia-h100.jsonl

A row of the results, a JSON line, has a call's time `us`, the slowest rank's median, and what to compare it with:

    copy_engine_us   pushing the call's remote bytes, the most that a rank sends, by copy engines, all ranks at once, to
                     the peers side by side or in turn, whichever is faster
    local_us         reading and writing its local bytes at the rate of a large copy on one GPU
    of_bound         us / (copy_engine_us + local_us)
    of_copy_engine   copy_engine_us / the push kernel's time
    barrier_us       a barrier: what the shortest exchange takes
    all_to_all_us    NCCL's all_to_all_single of the remote bytes, in equal parts
    product_us       a product of bfloat16 8192 × 8192 matrices; beside_product_us: with the call beside it
    kernels_us       the mean time of each kernel on rank 0, waits included

Local bytes: dispatch reads the tokens received and writes its rows, those named "zeroed" their padding, too; combine
reads the rows that come back and writes its tokens; pp_recv reads a slot and writes its tensor. Calls of the symmetric
backend and copy engines are timed in a CUDA graph of several calls, those of NCCL from the host. On CPUs only the
collective backend is timed, by the host's clock, which shows that the program runs.
"""

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import tk_ep
from tk_core.testing.bench import append_row
from tk_core.testing.machine import versions

CALLS = 10
"""Calls of a round, which follow each other."""
ROUNDS = 7
ALIGNMENT = 128
PRODUCT = 8192
"""Rows, columns and channels of the bfloat16 product beside which calls are timed."""
Run = Callable[[], Any]


class Case(NamedTuple):
    """A call, and the bytes that the rank moves in it."""

    name: str
    run: Callable[[bool], Any]
    """Makes the call, asynchronously if told so"""
    remote_bytes: int
    local_bytes: int


class Bench:
    """A rank's buffers, clock and results."""

    def __init__(self, device: torch.device, results: Path | None) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.results = results
        self._copies: dict[int, float] = {}
        self.facts = {"num_gpus": self.num_ranks, "topology": _topology()} | versions() if self.rank == 0 else {}

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def time(self, run: Run, in_graph: bool = False) -> float:
        """µs of a run: the slowest rank's median of rounds."""
        for _ in range(3):
            run()
        replay = self._captured(run) if in_graph else lambda: [run() for _ in range(CALLS)]
        samples = []
        for _ in range(ROUNDS):
            dist.barrier()
            samples.append(self._round(replay) / CALLS)
        return self.most(statistics.median(samples))

    def _captured(self, run: Run) -> Run:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                run()
        graph.replay()
        return graph.replay

    def _round(self, run: Run) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def kernels(self, run: Run) -> dict[str, float]:
        """The mean time of each kernel in µs, by name."""
        torch.cuda.synchronize()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            for _ in range(CALLS):
                run()
            torch.cuda.synchronize()
        return {each.key: round(each.device_time, 2) for each in recorded.key_averages() if each.device_time}

    def copy_engine(self, num_bytes: int) -> float:
        """µs for every rank to push num_bytes in equal parts to its peers at once."""
        if num_bytes not in self._copies:
            self._copies[num_bytes] = self._push(num_bytes)
        return self._copies[num_bytes]

    def _push(self, num_bytes: int) -> float:
        import torch.distributed._symmetric_memory as symmetric_memory

        each = max(num_bytes // (self.num_ranks - 1), 16) // 16 * 16
        own = symmetric_memory.empty(self.num_ranks, each, dtype=torch.uint8, device=self.device)
        memory = symmetric_memory.rendezvous(own, dist.group.WORLD)
        # From the next rank on: then a rank gets one copy at a time, if all take as long.
        peers = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        places = [memory.get_buffer(peer, (self.num_ranks, each), torch.uint8)[self.rank] for peer in peers]
        source = torch.zeros(each, dtype=torch.uint8, device=self.device)
        streams = [torch.cuda.Stream() for _ in peers]

        def push_in_turn() -> None:
            for place in places:
                place.copy_(source)

        def push() -> None:
            current = torch.cuda.current_stream()
            for stream, place in zip(streams, places):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    place.copy_(source)
            for stream in streams:
                current.wait_stream(stream)

        return min(self.time(each, in_graph=True) for each in (push, push_in_turn))

    def copy_rate(self) -> float:
        """Bytes per µs, read and written, of a large copy on this GPU."""
        a, b = (torch.empty(1 << 28, dtype=torch.uint8, device=self.device) for _ in range(2))
        return 2 * a.numel() / self.time(lambda: b.copy_(a))

    def write(self, row: dict[str, Any]) -> None:
        """Print a row on rank 0, and append it to the results."""
        if self.rank == 0:
            print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
            if self.results:
                append_row(self.results, row | self.facts)


def _topology() -> str | None:
    """What `nvidia-smi topo -m` prints."""
    try:
        return subprocess.run(("nvidia-smi", "topo", "-m"), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def choose_experts(bench: Bench, num_tokens: int, num_experts: int, topk: int, skew: float) -> Tensor:
    """Random experts, int64 (num_tokens, topk); with skew those of rank 0 are more likely."""
    generator = torch.Generator().manual_seed(bench.rank)
    scores = torch.rand((num_tokens, num_experts), generator=generator)
    scores[:, : num_experts // bench.num_ranks] += skew
    return scores.topk(topk).indices.to(bench.device)


def cases_of(
    bench: Bench, buffer: tk_ep.ElasticBuffer, topk_idx: Tensor, hidden: int, num_experts: int, num_sms: int
) -> list[Case]:
    """The calls to be timed on a buffer, with the routing that topk_idx asks for."""
    num_tokens, topk = topk_idx.shape
    weights = torch.rand((num_tokens, topk), device=bench.device)
    bf16 = torch.randn((num_tokens, hidden), device=bench.device).bfloat16()
    fp8 = bf16.to(torch.float8_e4m3fn), torch.ones((num_tokens, hidden // 128), device=bench.device)
    fp8_bytes, bf16_bytes = hidden + hidden // 32, 2 * hidden
    asynchronous = {"allocate_on_comm_stream": True, "async_with_compute_stream": True}
    expand = {"do_expand": True, "expert_alignment": ALIGNMENT}
    handles = {
        do_expand: buffer.dispatch(bf16, topk_idx, weights, num_experts=num_experts, **(expand if do_expand else {}))[3]
        for do_expand in (False, True)
    }
    received = handles[False].psum_num_recv_tokens_per_scaleup_rank.long().cpu().diff(prepend=torch.zeros(1).long())
    homes = topk_idx.cpu() // (num_experts // bench.num_ranks)
    sent = torch.tensor([int((homes == rank).any(1).sum()) for rank in range(bench.num_ranks)])
    slots_here = int(handles[True].num_unaligned_recv_tokens_per_expert.sum())
    others = torch.arange(bench.num_ranks) != bench.rank
    num_sent, num_received = int(sent[others].sum()), int(received[others].sum())
    total = int(received.sum())

    def dispatch(x: Any, with_handle: bool = False, **options: Any) -> Callable[[bool], Any]:
        if with_handle:
            routing = {"handle": handles[options["do_expand"]]}
            options.pop("expert_alignment")
        else:
            routing = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": num_experts, "do_cpu_sync": False}
        options |= routing | {"num_sms": num_sms}
        return lambda later: buffer.dispatch(x, **options, **(asynchronous if later else {}))

    def combine(do_expand: bool) -> Callable[[bool], Any]:
        handle = handles[do_expand]
        num_rows = handle.num_expanded_tokens if do_expand else handle.num_recv_tokens
        rows = torch.randn((num_rows, hidden), device=bench.device).bfloat16()
        return lambda later: buffer.combine(rows, handle, num_sms=num_sms, **(asynchronous if later else {}))

    if not buffer.allow_multiple_reduction:
        own_slots_here = int((homes == bench.rank).sum())
        back = num_tokens * topk + num_tokens
        away = slots_here - own_slots_here
        return [Case("combine expanded, all rows", combine(True), away * bf16_bytes, back * bf16_bytes)]
    by_column = {"use_tma_aligned_col_major_sf": True}
    expanded = total + slots_here
    zeroed = expanded + handles[True].num_expanded_tokens - slots_here
    zeroing = expand | by_column | {"do_zero_padding": True}
    returned = (int(sent.sum()) + num_tokens) * bf16_bytes
    return [
        Case("dispatch FP8", dispatch(fp8), num_sent * fp8_bytes, 2 * total * fp8_bytes),
        Case("dispatch FP8 expanded", dispatch(fp8, **expand, **by_column), num_sent * fp8_bytes, expanded * fp8_bytes),
        Case("dispatch FP8 expanded, zeroed", dispatch(fp8, **zeroing), num_sent * fp8_bytes, zeroed * fp8_bytes),
        Case("dispatch bf16", dispatch(bf16), num_sent * bf16_bytes, 2 * total * bf16_bytes),
        Case("dispatch bf16 expanded", dispatch(bf16, **expand), num_sent * bf16_bytes, expanded * bf16_bytes),
        Case(
            "dispatch bf16 expanded, handle",
            dispatch(bf16, True, **expand),
            num_sent * bf16_bytes,
            expanded * bf16_bytes,
        ),
        Case("combine", combine(False), num_received * bf16_bytes, returned),
        Case("combine expanded", combine(True), num_received * bf16_bytes, returned),
    ]


def all_to_all(bench: Bench, num_bytes: int) -> float:
    """µs of an all_to_all_single of num_bytes in equal parts to the peers, and nothing to oneself."""
    sizes = [0 if rank == bench.rank else num_bytes // max(bench.num_ranks - 1, 1) for rank in range(bench.num_ranks)]
    sent, received = (torch.zeros(sum(sizes), dtype=torch.uint8, device=bench.device) for _ in range(2))
    return bench.time(lambda: dist.all_to_all_single(received, sent, sizes, sizes))


def copies_of(bench: Bench, backend: str, num_bytes: int) -> list[Case]:
    """all_gather of num_bytes of each rank, in place, and num_bytes once round the ring; both take no event."""
    num_ranks, x = bench.num_ranks, torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
    hint = tk_ep.ElasticBuffer.get_agrs_buffer_size_hint(dist.group.WORLD, num_ranks * num_bytes)
    gathering = tk_ep.ElasticBuffer(dist.group.WORLD, num_bytes=hint, backend=backend)
    gathering.agrs_set_config(num_ranks * num_bytes, 1)
    hint = tk_ep.ElasticBuffer.get_pp_buffer_size_hint(num_bytes, 2)
    sending = tk_ep.ElasticBuffer(dist.group.WORLD, num_bytes=hint, backend=backend)
    sending.pp_set_config(num_bytes, 2)

    def all_gather(_: bool) -> None:
        with gathering.agrs_new_session():
            gathering.all_gather(gathering.agrs_get_inplace_tensor((num_bytes,), torch.uint8))[-1]()

    def send_and_receive(_: bool) -> None:
        sending.pp_send(x, (bench.rank + 1) % num_ranks)
        sending.pp_recv(x, (bench.rank - 1) % num_ranks)

    return [
        Case("all_gather", all_gather, (num_ranks - 1) * num_bytes, 0),
        Case("pp_send, pp_recv", send_and_receive, num_bytes, 2 * num_bytes),
    ]


def main(
    tokens: Annotated[list[int], typer.Option(help="Tokens of a rank; may be repeated.")] = (
        1,
        16,
        128,
        1024,
        4096,
        8192,
    ),
    hidden: int = 7168,
    experts: int = 256,
    topk: int = 8,
    sms: Annotated[list[int], typer.Option(help="The most SMs that sending takes; may be repeated.")] = (24, 48),
    copies: Annotated[list[int], typer.Option(help="MiB that all_gather and pp_send move; may be repeated.")] = (1, 64),
    skew: Annotated[float, typer.Option(help="Added to the scores, 0 to 1, of rank 0's experts.")] = 0.0,
    only: Annotated[str, typer.Option(help="A part of the names of calls.")] = "",
    results: Annotated[Path | None, typer.Option(help="A file to which rows are appended, as JSON lines.")] = None,
) -> None:
    """Time dispatch and combine, by both backends, and what bounds them."""
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if is_cuda else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    bench = Bench(device, results)
    backends = {"symmetric": sms, "collective": sms[:1]} if is_cuda else {"collective": sms[:1]}
    rate = bench.copy_rate() if is_cuda else None
    for mib, backend in product(copies if bench.num_ranks > 1 else (), backends):
        for case in copies_of(bench, backend, mib << 20):
            if only in case.name:
                row = {"call": case.name, "backend": backend, "mib": mib}
                bench.write(row | bounds(bench, case, backend == "symmetric", rate))
    for num_tokens in tokens:
        topk_idx = choose_experts(bench, num_tokens, experts, topk, skew)
        sizes = {"num_max_tokens_per_rank": num_tokens, "hidden": hidden, "num_topk": topk}
        for backend, counts in backends.items():
            in_graph = backend == "symmetric"
            for reduces in (True, False):
                options = {"backend": backend, "allow_multiple_reduction": reduces}
                buffer = tk_ep.ElasticBuffer(dist.group.WORLD, **sizes, **options)
                barrier_us = bench.time(buffer.barrier, in_graph)
                for num_sms in counts:
                    for case in cases_of(bench, buffer, topk_idx, hidden, experts, num_sms):
                        if only in case.name:
                            row = {"call": case.name, "backend": backend, "tokens": num_tokens, "num_sms": num_sms}
                            row |= {"hidden": hidden, "experts": experts, "topk": topk, "skew": skew}
                            row["barrier_us"] = barrier_us
                            bench.write(row | measure(bench, case, in_graph, rate))
                buffer.destroy()
    dist.destroy_process_group()


def bounds(bench: Bench, case: Case, in_graph: bool, rate: float | None) -> dict[str, Any]:
    """A case's time, and what bounds it on GPUs."""
    row: dict[str, Any] = {"us": bench.time(lambda: case.run(False), in_graph)}
    row["remote_bytes"], row["local_bytes"] = (int(bench.most(each)) for each in case[2:])
    if rate is None or bench.num_ranks == 1:
        return row
    row["copy_engine_us"], row["local_us"] = bench.copy_engine(row["remote_bytes"]), row["local_bytes"] / rate
    row["of_bound"] = row["us"] / (row["copy_engine_us"] + row["local_us"])
    return row


def measure(bench: Bench, case: Case, in_graph: bool, rate: float | None) -> dict[str, Any]:
    """A case's time and bounds, and on GPUs what its kernels take, and what it takes beside a product."""
    row = bounds(bench, case, in_graph, rate)
    if "of_bound" not in row:
        return row
    if not in_graph:
        return row | {"all_to_all_us": all_to_all(bench, row["remote_bytes"])}
    row["kernels_us"] = bench.kernels(lambda: case.run(False))
    if push := [us for name, us in row["kernels_us"].items() if name.startswith("push_")]:
        row["of_copy_engine"] = row["copy_engine_us"] / push[0]
    a = torch.randn((PRODUCT, PRODUCT), device=bench.device).bfloat16()

    def beside() -> None:
        *_, event = case.run(True)
        a @ a
        event.current_stream_wait()

    return row | {"product_us": bench.time(lambda: a @ a), "beside_product_us": bench.time(beside)}


if __name__ == "__main__":
    typer.run(main)
