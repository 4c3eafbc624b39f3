"""Runs functions in the processes of a group on CPUs or GPUs, which are started once for many functions."""

import contextlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tk_core.testing import poisoned_allocations

ROOT = Path(__file__).resolve().parents[3]


class Here(NamedTuple):
    """A process: its place in the world, and in the group of all odd ranks, if it is one of them."""

    world: dist.ProcessGroup
    rank: int
    num_ranks: int
    odd: dist.ProcessGroup | None
    device: torch.device
    backend: str
    """Of buffers"""


Case = Callable[[Here], None]


def run(
    cases: Sequence[Case],
    num_ranks: int,
    folder: Path,
    limit: float,
    ended: Sequence[int] = (),
    device: str = "cpu",
    backend: str = "collective",
) -> None:
    """Run cases, functions of a module's top level, one after the other on all ranks, each with a GPU if device="cuda".

    Raises AssertionError with the traceback of each rank that raised, or that had not finished after `limit` seconds
    and was killed. Ranks in `ended` are expected to end on the way.
    """
    context = multiprocessing.get_context("forkserver")
    # One process imports torch, and the ranks are its forks.
    context.set_forkserver_preload(["torch.distributed", "tk_ep.buffer", "tk_ep.reference.combine", "tk_core.testing"])
    deadline = time.monotonic() + limit
    sys.path.append(str(ROOT))  # The ranks import this file by the name that pytest has given it.
    try:
        ranks = [
            context.Process(target=_rank, args=(list(cases), rank, num_ranks, folder, device, backend), daemon=True)
            for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
    finally:
        sys.path.remove(str(ROOT))
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
    # All at once: a rank that lost its peers first would write of that.
    for each in ranks:
        each.kill()
    faults = []
    for rank, process in enumerate(ranks):
        process.join()
        log = folder / f"rank{rank}.json"
        ran = json.loads(log.read_text()) if log.exists() else {}
        if rank not in ended and ("error" in ran or len(ran["done"]) < len(cases)):
            after = f"rank {rank}, after {ran.get('done')}, with exit code {process.exitcode}"
            faults.append(f"{after}:\n{ran.get('error', 'killed past the limit')}")
    assert not faults, "\n".join(faults)


def _rank(cases: list[Case], rank: int, num_ranks: int, folder: Path, kind: str, backend: str) -> None:
    torch.set_num_threads(1)
    ran: dict[str, object] = {"done": []}

    def note() -> None:
        # Whole, or not at all, if the rank is killed meanwhile.
        written = folder / f"rank{rank}.new"
        written.write_text(json.dumps(ran))
        written.replace(folder / f"rank{rank}.json")

    try:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        device = torch.device(kind, rank if kind == "cuda" else None)
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
        odd = dist.new_group(list(range(1, num_ranks, 2)))
        here = Here(dist.group.WORLD, rank, num_ranks, odd if rank % 2 else None, device, backend)
        for case in cases:
            note()
            with poisoned_allocations():
                case(here)
            ran["done"].append(getattr(case, "__name__", str(case)))
    except BaseException:
        ran["error"] = traceback.format_exc()
    note()
    # At once: the group's threads may wait for peers that are gone.
    os._exit("error" in ran)


@contextlib.contextmanager
def raises(kind: type[Exception], *parts: str) -> Iterator[None]:
    """Like pytest.raises, which a process without pytest has not: the message has each of these parts."""
    raised = ""
    try:
        yield
    except kind as error:
        raised = str(error)
    assert raised, f"no {kind.__name__}"
    missing = [part for part in parts if part not in raised]
    assert not missing, f"no {missing} in {raised}"


def capturing(graph: torch.cuda.CUDAGraph) -> contextlib.AbstractContextManager[None]:
    """Like torch.cuda.graph, while NCCL's own thread may look at its events."""
    return torch.cuda.graph(graph, capture_error_mode="thread_local")
