"""CUDA that TileLang cannot express, in headers (*.cuh), each beside a Python module of typed macros that call it.

    _CACHE_HINTS = Header(__file__)                    # in cache_hints.py, beside cache_hints.cuh

    def prefetch(address: Any) -> Any:
        '''Bring the cache line of `address` into L2.'''
        return _CACHE_HINTS.call("void", "tk_prefetch", address)

If a kernel's builder calls such a macro, the header's text is put before the kernel's CUDA. So the kernel's cache key
covers that text, and no kernel names a header. A header may include others of its own folder or of tk_core/device.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)
_SHARED = Path(__file__).parent / "device"

_called: ContextVar[set[Path] | None] = ContextVar("_called", default=None)
"""Headers whose functions the kernel being built has called so far."""


class Header:
    """The CUDA header beside a module: `Header(__file__)` in memory.py stands for memory.cuh."""

    def __init__(self, module: str) -> None:
        self._path = Path(module).with_suffix(".cuh")

    def call(self, dtype: str, function: str, *args: Any) -> Any:
        """Emit a call of one of the header's functions in the kernel being built; `dtype` is that of its result."""
        import tilelang.language as T

        called = _called.get()
        if called is None:
            raise RuntimeError(f"{function}: expected to be called in a builder under @kernel, which adds its header")
        called.add(self._path)
        return T.call_extern(dtype, function, *args)


def builtin(dtype: str, function: str, *args: Any) -> Any:
    """Emit a call of a function that needs no header: CUDA's own, such as __byte_perm, or TileLang's, in tl::."""
    import tilelang.language as T

    return T.call_extern(dtype, function, *args)


@contextmanager
def collected() -> Iterator[set[Path]]:
    """Collect the headers whose functions are called within a with block."""
    before = _called.set(set())
    try:
        yield _called.get()
    finally:
        _called.reset(before)


def with_includes(paths: Iterable[Path]) -> list[Path]:
    """The headers and all that they include, each once, ordered so that a header follows those that it includes."""
    ordered: dict[Path, None] = {}
    for path in sorted(paths):
        names = _INCLUDE.findall(path.read_text(encoding="utf-8"))
        beside = [path.with_name(name) for name in names]
        ordered |= dict.fromkeys(with_includes(found if found.exists() else _SHARED / found.name for found in beside))
        ordered[path] = None
    return list(ordered)


def prelude(paths: Iterable[Path]) -> str:
    """The text of headers and of what they include, as one piece of CUDA source."""
    texts = (path.read_text(encoding="utf-8") for path in with_includes(paths))
    return "".join(_INCLUDE.sub("", text).replace("#pragma once\n", "") for text in texts)
