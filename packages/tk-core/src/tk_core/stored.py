"""Loads kernels from the disk cache without TileLang, which takes seconds to import and 0.1 s to trace a kernel.

After TileLang has compiled a kernel or found it in its cache, tk leaves a note for later processes: the file
<cache>/tk/<key> names the kernel's folder and its function. The key hashes everything that determines the kernel: its
builder's name and arguments, its options, the sources of all packages that the builder may import, the CPU type, and
TileLang's version and settings. If there is no note, or the folder is damaged, TileLang does the work and mends both;
an earlier TileLang that only loads kernels can't, and looks for notes of `compat.COMPILED_BY`.
A kernel of a script, a notebook or a package whose name does not begin with tk_ has no note: its imports are not known.
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
    """The files of a kernel's folder, manifest first; none if a file is missing or differs from what TileLang wrote."""
    try:
        recorded = json.loads((folder / "manifest.json").read_text())["files"]
        found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}
        facts = {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in found.items()}
    except (OSError, ValueError, LookupError, TypeError):
        return []
    is_whole = facts == recorded and facts.keys() >= _REQUIRED
    return [folder / name for name in ("manifest.json", *sorted(facts))] if is_whole else []


def read_note(path: Path) -> tuple[Path, str] | None:
    """The kernel's folder, relative to the cache folder, and its function's name; None if the note can't be read."""
    try:
        folder, name = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return Path(folder), name


@cache
def _sources(package: str) -> str | None:
    """Hash of the sources of a package and of all tk packages that it imports; None if `package` is not a package."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that `import` did not make, which has no spec
        return None
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
    """Path of a kernel's note; None for a builder that may depend on more than the sources of tk packages.

    Such are closures, and builders in a script, a notebook, code passed to `exec` or a package that is not called tk_….
    """
    package = (builder.__module__ or "").partition(".")[0]
    if not package.startswith("tk_") or "<locals>" in builder.__qualname__:
        return None
    sources = _sources(package)
    if sources is None:
        return None
    kernel = (builder.__module__, builder.__qualname__, args, sorted(pass_configs.items()), flags)
    # Settings of the installed TileLang say nothing of kernels that another has compiled.
    settings = [] if compat.only_loads() else env.tilelang_settings()
    key = repr((kernel, sources, compat.compiler_version(), os.uname().machine, settings))
    return compat.cache_dir() / "tk" / sha256(key.encode()).hexdigest()


def load(path: Path) -> compat.CompiledKernel | None:
    """Load the kernel that a note names; None if there is no note or the kernel's folder is damaged."""
    note = read_note(path)
    if note is None or not whole_files(folder := compat.cache_dir() / note[0]):
        return None
    function = compat.load_function(folder / "executable.so", note[1])
    return compat.CompiledKernel(note[1], function, folder / "executable.so", (folder / "device_kernel.cu").read_text)


def write_note(path: Path, compiled: compat.CompiledKernel) -> None:
    """Write a kernel's note, unless the kernel is not stored in the cache or the cache can't be written."""
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
