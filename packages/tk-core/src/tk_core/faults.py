"""Why a machine cannot compile or cache kernels: a sentence for each cause, and the command that fixes it."""

import platform
import re
import shlex
import tempfile
from pathlib import Path


class FaultError(RuntimeError):
    """This machine cannot compile, cache or run kernels."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found, fix)
        self.found = found
        self.fix = fix
        """The command that fixes it."""

    def __str__(self) -> str:
        return f"{self.found.rstrip('.')}. Run: {self.fix}"


def os_family() -> str:
    """ID and ID_LIKE of the Linux distribution, such as "ubuntu debian"."""
    try:
        about = platform.freedesktop_os_release()
    except OSError:
        return ""
    return f"{about.get('ID', '')} {about.get('ID_LIKE', '')}"


def no_host_compiler(named: str | None, family: str) -> FaultError:
    """The error for a missing C++ compiler: none at all, or not the one that CXX or CC names."""
    if named:
        return FaultError(f"CXX or CC names a C++ compiler that is not there, {named}", "unset CXX CC")
    has_dnf = any(name in family for name in ("fedora", "rhel", "suse"))
    install = "sudo dnf install --assumeyes gcc-c++" if has_dnf else "sudo apt-get install --yes g++"
    return FaultError("there is no C++ compiler: no g++, clang++ or c++ on PATH", install)


def cache_fault(folder: Path) -> FaultError | None:
    """The error for a cache folder that cannot be written; None if it can."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return unwritable_cache(folder, error.strerror or str(error))
    return None


def unwritable_cache(folder: Path, why: str) -> FaultError:
    """The error for a cache folder that cannot be written because of `why`; its fix names another folder."""
    # If the folder is in the home directory, that may be unwritable as a whole: suggest one outside.
    below_home = folder.is_relative_to(Path.home())
    other = Path(tempfile.gettempdir(), "tilelang") if below_home else Path.home() / ".cache" / "tilelang"
    return FaultError(
        f"the cache of kernels, {folder}, can't be written: {why}",
        f"export TILELANG_CACHE_DIR={shlex.quote(str(other))}",
    )


def first_error(printed: str) -> str:
    """The first error in a compiler's output, without file and line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
    first = next(iter([*errors, *lines, "no output"]))
    return re.sub(r"^.*?(fatal error|error)\s*:\s*(#error\s*)?", "", first) or first
