"""Shares the memory of a GPU among the processes that run tests on it: each test takes what it declares, or waits.

A GPU's memory is a file with one byte for each GiB, of which a test locks as many as it needs. The locks are the
operating system's: they end with the process, however it ends.
"""

import fcntl
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tk_core.math import ceil_div

_GIB = 2**30
_PROCESS_GIB = 0.75
"""What a process holds outside torch's allocator, its context and kernels: at most 0.74 GiB (H100, 16 processes)."""
_QUEUE = 0
"""The byte that a process locks while it waits, so that a test that needs much is not overtaken for ever."""


def shared_gib(total_bytes: int, num_processes: int) -> int:
    """GiB of a GPU that `num_processes` processes can share out among their tests, at least 1."""
    return max(math.floor(total_bytes / _GIB - num_processes * _PROCESS_GIB), 1)


@contextmanager
def taken(path: Path, gib: int, available: int) -> Iterator[None]:
    """Lock `gib` of the `available` bytes that stand for a GPU's memory, all if there are fewer; wait until it can be.

    The locks belong to the process, so only one of its threads may call this at a time.
    """
    wanted = min(gib, available)
    with path.open("ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, _QUEUE)
        while len(locked := _lock_free_bytes(file.fileno(), wanted, available)) < wanted:
            for byte in locked:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
            time.sleep(0.02)
        fcntl.lockf(file, fcntl.LOCK_UN, 1, _QUEUE)
        yield


def _lock_free_bytes(file: int, count: int, available: int) -> list[int]:
    """Lock up to `count` bytes that no other process has locked; returns their positions."""
    locked: list[int] = []
    for byte in range(1, available + 1):
        if len(locked) == count:
            break
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            continue
        locked.append(byte)
    return locked


@contextmanager
def gpu_memory(gib: float, num_workers: int) -> Iterator[None]:
    """Take `gib` of the current GPU's memory for a test, and give all back to the GPU afterwards.

    `num_workers` processes of the same test run share the machine's GPUs. Raises AssertionError if the test took more.
    """
    import torch  # processes that only wait for their turn start without it

    device = torch.cuda.get_device_properties()
    # One more process is the one that started the workers.
    num_processes = ceil_div(num_workers, torch.cuda.device_count()) + 1
    path = Path(tempfile.gettempdir(), f"tk-gpu-memory-{os.getuid()}-{device.uuid}")
    with taken(path, math.ceil(gib), shared_gib(device.total_memory, num_processes)):
        torch.cuda.reset_peak_memory_stats()
        yield
        peak = torch.cuda.max_memory_reserved() / _GIB
        gc.collect()
        # cuBLAS keeps 32 MiB, perhaps within a segment of gigabytes, which would stay with it.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    assert peak <= gib, f"took {peak:.2f} GiB of GPU memory, and declares {gib:.4g}"
