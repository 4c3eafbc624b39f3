"""Worker processes of `tk warmup` that compile kernels. None is left when the command ends, however it ends."""

import multiprocessing
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Literal, NoReturn

from tk_core.cli.plan import Job


@dataclass(frozen=True)
class Result:
    """How the compilation of one kernel ended."""

    outcome: Literal["compiled", "cached", "failed"]
    why: str = ""
    seconds: float = 0.0


class TerminatedError(BaseException):
    """This process was asked to end by SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within it, SIGTERM raises TerminatedError, so that the workers are ended first."""

    def stop(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def summary(error: BaseException) -> str:
    """The lines of an error that say what failed; the message of a compiler error contains the whole source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)] if len(lines) > 3 else lines
    return f"{type(error).__name__}: {' | '.join((telling or lines[-1:])[:3])}"


def compile_job(job: Job) -> Result:
    """Compile one kernel in a worker process, or find it in the cache."""
    from tk_core import compat

    start, before = time.perf_counter(), compat.num_compilations
    try:
        module, _, name = job.kernel.rpartition(".")
        compiled = getattr(import_module(module), name).compile(*job.args)
    except Exception as error:
        return Result("failed", summary(error))
    # If a kernel could not be stored, TileLang raises nothing and only logs it.
    if compiled.library is None or not compiled.library.exists():
        return Result("failed", f"compiled but not stored in {compat.cache_dir()}: full, read-only or switched off?")
    seconds = time.perf_counter() - start
    return Result("compiled" if compat.num_compilations > before else "cached", seconds=seconds)


def _start_worker() -> None:
    # A process group of its own, so that a worker can be killed with its compiler. Ctrl-C is for the parent.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)


def _end_workers() -> None:
    for child in multiprocessing.active_children():
        # A worker that has not run _start_worker yet is still in this process' group.
        with suppress(ProcessLookupError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.kill()


def run(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Result]]:
    """Compile in `workers` processes and yield each result as it comes.

    A compiler that takes its process down fails its own kernel only. Closing the iterator early ends the workers and
    their compilers; the cache stays good, since TileLang publishes an entry by one rename.
    """
    waiting, alone = deque(jobs), deque[Job]()
    while waiting or alone:
        # When a pool breaks, any kernel being compiled may be the cause, so each of them is tried again alone.
        queue, size = (alone, 1) if alone else (waiting, min(workers, len(waiting)))
        # Forking would copy whatever CUDA and TileLang state this process has.
        pool = ProcessPoolExecutor(size, multiprocessing.get_context("spawn"), _start_worker)
        running: dict[Future[Result], Job] = {}
        try:
            while queue or running:
                while queue and len(running) < size:
                    running[pool.submit(compile_job, queue[0])] = queue[0]
                    queue.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, result = running[future], future.result()
                    del running[future]
                    yield job, result
        except BrokenProcessPool:
            if queue is waiting:
                alone.extend(running.values())
            elif running:
                yield next(iter(running.values())), Result("failed", "the compiler's process died")
        finally:
            if running:
                _end_workers()
            pool.shutdown(wait=True, cancel_futures=True)
