"""tk_core.testing.memory: tests that share a GPU take no more memory than it has, and no more than they declare."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tk_core.testing import memory

_GIB = 2**30
_HOLD = """
import sys
from pathlib import Path
from tk_core.testing.memory import taken

gpu, gib, mark = sys.argv[1:]
Path(mark + "-asks").touch()
with taken(Path(gpu), int(gib), 10):
    Path(mark + "-holds").touch()
    sys.stdin.read()
"""


@contextmanager
def holding(gpu: Path, gib: int, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that asks for so many of 10 GiB and holds them; it makes the files `mark`-asks and `mark`-holds."""
    command = [sys.executable, "-c", _HOLD, str(gpu), str(gib), str(gpu.with_name(mark))]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            wait_for(gpu.with_name(f"{mark}-asks"))
            yield process
        finally:
            process.kill()


def wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, f"{file.name} has not come"
        time.sleep(0.01)


def test_processes_wait_for_memory_in_turn(tmp_path: Path) -> None:
    gpu = tmp_path / "gpu"
    with holding(gpu, 6, "first") as first, holding(gpu, 4, "second") as second:
        wait_for(tmp_path / "first-holds")
        wait_for(tmp_path / "second-holds")
        # More than there is means all of it. Whoever comes later does not overtake, though 4 GiB get free first.
        with holding(gpu, 99, "third") as third:
            time.sleep(0.3)
            second.kill()
            with holding(gpu, 1, "fourth"):
                time.sleep(0.3)
                assert not (tmp_path / "third-holds").exists()
                assert not (tmp_path / "fourth-holds").exists()
                first.kill()
                wait_for(tmp_path / "third-holds")
                time.sleep(0.3)
                assert not (tmp_path / "fourth-holds").exists()
                third.kill()
                wait_for(tmp_path / "fourth-holds")


def test_memory_of_the_processes_is_not_shared_out() -> None:
    assert memory.shared_gib(80 * _GIB, 16) == 68
    assert memory.shared_gib(24 * _GIB, 8) == 18
    assert memory.shared_gib(4 * _GIB, 16) == 1


def test_a_test_that_takes_more_than_it_declares_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(total_memory=80 * _GIB, uuid="none")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * _GIB)

    with memory.gpu_memory(3, 16):
        pass
    too_much = pytest.raises(AssertionError, match=r"took 2\.00 GiB of GPU memory, and declares 1")
    with too_much, memory.gpu_memory(1, 16):
        pass
