"""tk_core.testing.memory: tests that share a GPU take no more memory than it has, and no more than they declare."""

import signal
import subprocess
import sys
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

with taken(Path(sys.argv[1]), int(sys.argv[2]), 10):
    print("taken", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holding(path: Path, gib: int) -> Iterator[subprocess.Popen[str]]:
    """A process that asks for so many of 10 GiB, and holds them until its standard input ends."""
    command = [sys.executable, "-c", _HOLD, str(path), str(gib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_taken(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"


def is_waiting(process: subprocess.Popen[str]) -> bool:
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    return True


def test_processes_wait_for_memory_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "gpu"
    with holding(path, 6) as first, holding(path, 4) as second:
        wait_until_taken(first)
        wait_until_taken(second)
        # More than there is means all of it. Whoever comes later does not overtake, though 1 GiB gets free first.
        with holding(path, 99) as third:
            assert is_waiting(third)
            second.kill()
            with holding(path, 1) as fourth:
                assert is_waiting(third)
                assert is_waiting(fourth)
                first.send_signal(signal.SIGKILL)
                wait_until_taken(third)
                assert is_waiting(fourth)
                third.kill()
                wait_until_taken(fourth)


def test_memory_of_the_processes_is_not_shared_out() -> None:
    assert memory.shared_gib(80 * _GIB, 16) == 68
    assert memory.shared_gib(24 * _GIB, 8) == 18
    assert memory.shared_gib(4 * _GIB, 16) == 1


@pytest.mark.parametrize("declared", [1, 3])
def test_a_test_that_takes_more_than_it_declares_fails(
    declared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(total_memory=80 * _GIB, uuid="none")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2 * _GIB)

    def run() -> None:
        with memory.gpu_memory(declared, 16):
            pass

    if declared < 2:
        with pytest.raises(AssertionError, match=r"took 2\.00 GiB of GPU memory, and declares 1"):
            run()
    else:
        run()
