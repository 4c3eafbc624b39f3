"""What was verified on a GPU, and whether the source is still what was verified: gpu-verified.json in each package.

An op is verified by a run of its whole gpu tier (`pytest -m gpu --tk-record`). The record holds a hash of the source
that decides what the op computes; comments, docstrings and layout do not count. Where the hash differs, it is stale.
"""

import ast
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

FILE_NAME = "gpu-verified.json"

# These decide generated code whether an op imports them or not.
_ALWAYS = ("tk_core.kernel", "tk_core.math")
# Of tk_core, what an op imports counts too, but not what only checks, dispatches or asks the device.
_INFRASTRUCTURE = {"arch", "check", "cli", "compat", "env", "lazy", "ledger", "num_sms", "op", "replay", "testing"}


@dataclass(frozen=True)
class Status:
    """What is known of one op's verification."""

    state: Literal["verified", "pending", "stale", "missing"]
    reason: str | None
    """Why it is pending, or what a verified, stale or missing entry lacks."""
    entry: dict[str, Any] | None
    """What gpu-verified.json says."""


def path(package: str) -> Path:
    """Where a package's gpu-verified.json is. Raises ModuleNotFoundError for a package that is not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package: expected an importable package, got {package!r}", name=package)
    return Path(spec.submodule_search_locations[0]) / FILE_NAME


def _split(op: str) -> tuple[str, str]:
    package, _, name = op.partition(".")
    if not package or not name or "." in name:
        raise ValueError(f'op: expected a name such as "tk_quant.transpose", got {op!r}')
    return package, name


def entries(package: str) -> dict[str, dict[str, Any]]:
    """All entries of a package, by op."""
    file = path(package)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def status(op: str) -> Status:
    """Where an op stands: verified as it is now, pending, stale (changed since), or missing (never verified)."""
    entry = entries(_split(op)[0]).get(op)
    if entry is None:
        return Status("missing", "never verified on a GPU", None)
    if reason := entry.get("pending"):
        return Status("pending", reason, entry)
    if entry.get("hash") != source_hash(op):
        return Status("stale", f"source changed since {entry.get('date')}", entry)
    return Status("verified", None if entry.get("sanitizer") else "compute-sanitizer has not run", entry)


def record(op: str, entry: dict[str, Any]) -> None:
    """Write an op's verification, made now on this source; replaces what was there, a pending mark too.

    A result of compute-sanitizer for the same source stays if `entry` brings none.
    """
    before = entries(_split(op)[0]).get(op, {})
    now = source_hash(op)
    kept = before.get("sanitizer") if before.get("hash") == now else None
    _write(op, {**entry, "hash": now, "sanitizer": entry.get("sanitizer") or kept})


def mark_pending(op: str, reason: str) -> None:
    """Let an op wait for its verification. Raises ValueError without a reason."""
    if not reason.strip():
        raise ValueError(f"reason: expected why {op} waits, got an empty text")
    _module_of(op)
    before = entries(_split(op)[0]).get(op, {})
    _write(op, {**before, "pending": reason.strip()})


def renew(op: str, entry: dict[str, Any], commit: str) -> None:
    """Write the verification of a commit again, for source that was shown to do the same on a GPU."""
    _write(op, {"unchanged_since": commit, **entry, "hash": source_hash(op)})


def _write(op: str, entry: dict[str, Any]) -> None:
    package, _ = _split(op)
    text = json.dumps({**entries(package), op: entry}, indent=2, sort_keys=True, ensure_ascii=False)
    path(package).write_text(f"{text}\n", encoding="utf-8")


def source_hash(op: str) -> str:
    """SHA-256 over the source that decides what an op computes on a GPU; the same under every Python.

    That is the op's file, what it imports of its own package (references and testing apart) and of tk_core (checks and
    dispatch apart), directly or not, the CUDA headers (*.cuh) that lie beside these modules, and how kernels are
    compiled.
    """
    digest = hashlib.sha256()
    for module in source_modules(op):
        digest.update(f"{module}\n{_canonical(_tree(module))}\n".encode())
    for header in cuda_headers(op):
        digest.update(f"{header.name}\n{header.read_text(encoding='utf-8')}\n".encode())
    return digest.hexdigest()


def cuda_headers(op: str) -> list[Path]:
    """The CUDA headers that `source_hash` covers: all that lie beside a module that it covers, sorted."""
    folders = {file.parent for file in map(_file, source_modules(op)) if file is not None}
    return sorted(header for folder in folders for header in folder.glob("*.cuh"))


def source_modules(op: str) -> list[str]:
    """Names of the modules that `source_hash` covers, sorted."""
    package, _ = _split(op)
    found: set[str] = set()
    waiting = [_module_of(op), *_ALWAYS]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting.extend(name for name in _imports(module) if _counts(name, package))
    return sorted(found)


def _module_of(op: str) -> str:
    package, name = _split(op)
    function = getattr(importlib.import_module(package), name, None)
    if function is None:
        raise ValueError(f"op: expected a public name of {package}, got {op!r}")
    return function.__module__


def _counts(module: str, package: str) -> bool:
    root, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if root == "tk_core":
        return bool(first) and first not in _INFRASTRUCTURE
    return root == package and bool(first) and first not in {"reference", "testing"}


def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _tree(module: str) -> ast.Module:
    file = _file(module)
    if file is None:
        raise ModuleNotFoundError(f"module: expected Python source, got none for {module}", name=module)
    return _parse(file, file.stat().st_mtime_ns)


@cache
def _parse(file: Path, _mtime: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(module: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere in its source."""
    file = _file(module)
    is_package = file is not None and file.name == "__init__.py"
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tk_"))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            if base.startswith("tk_"):
                yield from (_defining_module(base, alias.name) for alias in node.names)


def _defining_module(base: str, name: str) -> str:
    """Where `from base import name` gets it: a submodule, or what a package's lazy table says, or base itself."""
    if _file(f"{base}.{name}"):
        return f"{base}.{name}"
    if "." not in base:
        return getattr(getattr(importlib.import_module(base), name, None), "__module__", None) or base
    return base


def _canonical(node: Any) -> str:
    """A syntax tree as text without what does not count, and without what Pythons differ in."""
    if isinstance(node, list):
        return f"[{','.join(_canonical(item) for item in node if not _is_text_statement(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Constant):
        return f"Constant({node.value!r})"
    if isinstance(node, ast.JoinedStr):  # 3.12 ends some format specs with an empty text
        node = ast.JoinedStr([part for part in node.values if not isinstance(part, ast.Constant) or part.value])
    # Newer Pythons have more fields, empty unless newer syntax is used.
    fields = (
        f"{name}={_canonical(value)}"
        for name, value in sorted(ast.iter_fields(node))
        if value is not None and value != [] and name not in {"ctx", "kind", "type_comment", "type_ignores"}
    )
    return f"{type(node).__name__}({','.join(fields)})"


def _is_text_statement(node: Any) -> bool:
    """A docstring, of a module, class, function or attribute: a statement that is nothing but a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
