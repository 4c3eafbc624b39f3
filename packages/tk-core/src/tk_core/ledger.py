"""Which ops were verified on a GPU, and whether their source has changed since: gpu-verified.json in each package.

`pytest -m gpu --tk-record` writes the record of an op whose tests all passed, with a hash of its code (no comments).
"""

import ast
import hashlib
import json
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tk_core.headers import with_includes

# Modules of tk_core that only check, dispatch or query the device: an op's hash does not cover them.
_IGNORED = {"arch", "check", "cli", "compat", "env", "headers", "lazy", "ledger", "num_sms", "op", "replay", "testing"}


class Status(NamedTuple):
    """Verification of an op: `entry` is its record, `reason` says why it is not verified or what the record lacks."""

    state: Literal["verified", "pending", "stale", "missing"]
    reason: str | None
    entry: dict[str, Any] | None


def path(name: str) -> Path:
    """The gpu-verified.json of a package, or of an op's package. Raises ModuleNotFoundError if that is not there."""
    return Path(import_module(name.partition(".")[0]).__file__).with_name("gpu-verified.json")


def entries(name: str) -> dict[str, dict[str, Any]]:
    """All records of a package, or of an op's package, by op."""
    return json.loads(path(name).read_text(encoding="utf-8")) if path(name).exists() else {}


def status(op: str) -> Status:
    """An op's state: verified with its present source, pending, stale (changed since), or missing (never verified)."""
    now, entry = source_hash(op), entries(op).get(op)
    if entry is None:
        return Status("missing", "never verified on a GPU", None)
    if reason := entry.get("pending"):
        return Status("pending", reason, entry)
    if entry.get("hash") != now:
        return Status("stale", f"source changed since {entry.get('date')}", entry)
    return Status("verified", None if entry.get("sanitizer") else "compute-sanitizer has not run", entry)


def record(op: str, entry: dict[str, Any]) -> None:
    """Write the record of an op's present source. Keeps an earlier compute-sanitizer result of the same source."""
    now, before = source_hash(op), entries(op).get(op, {})
    kept = before.get("sanitizer") if before.get("hash") == now else None
    _write(op, {**entry, "hash": now, "sanitizer": entry.get("sanitizer") or kept})


def mark_pending(op: str, reason: str) -> None:
    """Record that an op waits for its verification, and why. Raises ValueError for an empty reason or an unknown op."""
    if not reason.strip():
        raise ValueError(f"reason: expected why {op} waits, got an empty text")
    _write(op, {**(status(op).entry or {}), "pending": reason.strip()})


def _write(op: str, entry: dict[str, Any]) -> None:
    text = json.dumps({**entries(op), op: entry}, indent=2, sort_keys=True, ensure_ascii=False)
    path(op).write_text(f"{text}\n", encoding="utf-8")


def source_hash(op: str) -> str:
    """SHA-256 of `source_modules`, the CUDA headers beside them and what those include; the same under every Python."""
    sources = [(module, *_source(module)) for module in source_modules(op)]
    texts = [f"{module}\n{_canonical(tree)}\n" for module, _, tree in sources]
    headers = with_includes(header for _, file, _ in sources if (header := file.with_suffix(".cuh")).exists())
    texts += [f"{header.name}\n{header.read_text(encoding='utf-8')}\n" for header in headers]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def source_modules(op: str) -> list[str]:
    """The op's module, those of its package and tk_core that it imports, directly or not, and tk_core.kernel, .math."""
    found, names = set(), [_defining_module(op), "tk_core.kernel", "tk_core.math"]
    ignored = {op.partition(".")[0]: {"", "reference", "testing"}, "tk_core": {"", *_IGNORED}}
    for name in names:  # The loop appends to names.
        package, _, rest = name.partition(".")
        if name in found or package not in ignored or rest.partition(".")[0] in ignored[package]:
            continue
        if (source := _source(name)) is None:  # not a module, but a name in a module
            names.append(name.rpartition(".")[0] if "." in rest else _defining_module(name))
            continue
        found.add(name)
        file, tree = source
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):  # perhaps relative to its package; an __init__.py is its own
                base = util.resolve_name("." * node.level + (node.module or ""), name.removesuffix(f".{file.stem}"))
                names += [f"{base}.{alias.name}" for alias in node.names]
    return sorted(found)


def _defining_module(op: str) -> str:
    package, _, name = op.partition(".")
    if (exported := getattr(import_module(package), name, None)) is None:
        raise ValueError(f'op: expected a name such as "tk_quant.transpose", got {op!r}')
    return getattr(exported, "__module__", package)


@cache
def _source(module: str) -> tuple[Path, ast.Module] | None:
    """File and syntax tree of a module; None for what is not one."""
    stem = path(module).parent.joinpath(*module.split(".")[1:])
    file = next(filter(Path.exists, (stem.with_suffix(".py"), stem / "__init__.py")), None)
    return (file, ast.parse(file.read_text(encoding="utf-8"))) if file else None


def _canonical(node: Any) -> str:
    """A syntax tree as text, without docstrings and without what differs between versions of Python."""
    match node:
        case list():
            return f"[{','.join(filter(None, map(_canonical, node)))}]"
        case ast.Expr(ast.Constant(str())):
            return ""
        case ast.Constant(value):
            return f"Constant({value!r})"
        case ast.JoinedStr(values):  # 3.12 ends some format specs with an empty text
            node = ast.JoinedStr([part for part in values if _canonical(part) != "Constant('')"])
    if not isinstance(node, ast.AST):
        return repr(node)
    # Newer Pythons have more fields, empty unless newer syntax is used.
    fields = sorted((name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name != "ctx")
    return f"{type(node).__name__}({','.join(f'{name}={_canonical(value)}' for name, value in fields)})"
