"""What keeps kernels from being compiled or kept on a machine: a sentence each, and the command that mends it."""

import platform
import re
import shlex
import tempfile
from pathlib import Path


class FaultError(RuntimeError):
    """Something about this machine that keeps kernels from being compiled, kept or run."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found, fix)
        self.found = found
        self.fix = fix
        """The command that mends it."""

    def __str__(self) -> str:
        return f"{self.found.rstrip('.')}. Run: {self.fix}"


def os_family() -> str:
    """Names that the Linux distribution goes by, such as "ubuntu debian"."""
    try:
        about = platform.freedesktop_os_release()
    except OSError:
        return ""
    return f"{about.get('ID', '')} {about.get('ID_LIKE', '')}"


def uses_rpm(family: str) -> bool:
    """Whether a distribution of these names installs with dnf rather than apt-get."""
    return any(name in family for name in ("fedora", "rhel", "suse"))


def no_host_compiler(named: str | None, family: str) -> FaultError:
    """The fault of a C++ compiler that is not there: one that CXX or CC names, or any at all."""
    if named:
        return FaultError(f"CXX or CC names a C++ compiler that is not there, {named}", "unset CXX CC")
    install = "sudo dnf install --assumeyes gcc-c++" if uses_rpm(family) else "sudo apt-get install --yes g++"
    return FaultError("there is no C++ compiler: no g++, clang++ or c++ on PATH", install)


def cache_fault(folder: Path) -> FaultError | None:
    """Why nothing can be written to the cache folder; None if it can."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return unwritable_cache(folder, error.strerror or str(error))
    return None


def unwritable_cache(folder: Path, why: str) -> FaultError:
    """The fault of a cache folder that takes no file."""
    # Under a home that can't be written, another folder of it would not do either.
    below_home = folder.is_relative_to(Path.home())
    other = Path(tempfile.gettempdir(), "tilelang") if below_home else Path.home() / ".cache" / "tilelang"
    return FaultError(
        f"the cache of kernels, {folder}, can't be written: {why}",
        f"export TILELANG_CACHE_DIR={shlex.quote(str(other))}",
    )


def first_error(printed: str) -> str:
    """The first error in what a compiler printed, without the place that it names."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)]
    first = next(iter([*errors, *lines, "no output"]))
    return re.sub(r"^.*?(fatal error|error)\s*:\s*(#error\s*)?", "", first) or first
