"""Kernels out of the disk cache without TileLang, which takes seconds to import and a tenth of one to trace a kernel.

Once TileLang has compiled a kernel, or found it, a note tells later processes where: <cache>/tk/<key> holds the
kernel's folder and its function's name. The key is made of all that a kernel follows from: its builder's name and
arguments, its options, the sources of all packages that the builder may import, and TileLang's version and settings.
Without a note, or where the folder is not as TileLang wrote it, TileLang does the work and mends it.
"""

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tk_core import compat, env

_IMPORT = re.compile(r"^\s*(?:from|import) (tk_\w+)", re.MULTILINE)
_REQUIRED = {"device_kernel.cu", "executable.so", "host_kernel.cu", "params.json"}


def whole_files(folder: Path) -> list[Path]:
    """The files of a kernel's folder, with its manifest; none if they are not as TileLang wrote them."""
    try:
        recorded = json.loads((folder / "manifest.json").read_text())["files"]
        found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}
        facts = {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in found.items()}
    except (OSError, ValueError, LookupError, TypeError):
        return []
    is_whole = facts == recorded and facts.keys() >= _REQUIRED
    return [folder / name for name in ("manifest.json", *sorted(facts))] if is_whole else []


def read_note(path: Path) -> tuple[Path, str] | None:
    """The kernel's folder, below the cache's, and its function's name; None if there is no such note."""
    try:
        folder, name = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return Path(folder), name


@cache
def _sources(package: str) -> str | None:
    """Hash of the sources of a package and of all tk packages that it imports; None for what is no package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    files = sorted(file for file in root.rglob("*") if file.suffix in {".py", ".cuh"})
    texts = {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}
    # What a kernel can't import is left out: tests, references and the command line.
    texts = {name: text for name, text in texts.items() if not name.startswith(("testing", "reference", "cli"))}
    others = {name for text in texts.values() for name in _IMPORT.findall(text)} - {package}
    return sha256(repr((sorted(texts.items()), [_sources(name) for name in sorted(others)])).encode()).hexdigest()


def note_path(
    builder: Any, args: tuple[Any, ...], pass_configs: Mapping[str, Any], flags: tuple[str, ...]
) -> Path | None:
    """Where the note of a kernel is, or goes; None for a builder that may depend on more than a package's sources."""
    sources = _sources(builder.__module__.partition(".")[0])
    if sources is None or "<locals>" in builder.__qualname__:
        return None
    kernel = (builder.__module__, builder.__qualname__, args, sorted(pass_configs.items()), flags)
    key = repr((kernel, sources, compat.tilelang_version(), os.uname().machine, env.tilelang_settings()))
    return compat.cache_dir() / "tk" / sha256(key.encode()).hexdigest()


def load(path: Path) -> compat.CompiledKernel | None:
    """The kernel of a note, or None."""
    note = read_note(path)
    if note is None or not whole_files(folder := compat.cache_dir() / note[0]):
        return None
    function = compat.load_function(folder / "executable.so", note[1])
    return compat.CompiledKernel(note[1], function, folder / "executable.so", (folder / "device_kernel.cu").read_text)


def write_note(path: Path, compiled: compat.CompiledKernel) -> None:
    """Note where a kernel is stored, if it is and the cache can be written."""
    root = compat.cache_dir()
    if compiled.library is None or not compiled.library.is_relative_to(root):
        return
    text = f"{compiled.library.parent.relative_to(root)} {compiled.name}\n"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
    except OSError:
        pass  # Read-only or full: the next process traces the kernel again.
