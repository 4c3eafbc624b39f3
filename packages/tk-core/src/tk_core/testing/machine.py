"""The GPU and versions with which a result was measured or verified."""

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from tk_core import env


def versions() -> dict[str, str | None]:
    """GPU, driver and versions of everything that a result depends on, and today's date; None for what is absent."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "tilelang": _version("tilelang"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(distribution: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=distribution)), None)


def _printed(*command: str) -> str | None:
    """First line that a program prints; None if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _commit() -> str | None:
    commit = env.get("TK_COMMIT") or _printed("git", "rev-parse", "--short=12", "HEAD")
    # With uncommitted changes the commit alone does not identify the sources.
    if commit and not env.get("TK_COMMIT") and _printed("git", "status", "--porcelain", "--untracked-files=no"):
        commit += "+changes"
    return commit
