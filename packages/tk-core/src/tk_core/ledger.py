"""Which ops were verified on a GPU, and whether they launch the same there now: gpu-verified.json in each package.

`pytest -m gpu --tk-record` writes a line for an op whose tests all passed: the run, and a hash of what each case
launches (`tk_core.testing.launches`).
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tk_core import compat

_NUM_NAMED = 3


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


def status(op: str, hashes: dict[str, str] | None = None) -> Status:
    """An op's state: verified, pending, missing (never verified), or, given the hashes of its cases, perhaps stale.

    An op is stale if a case that its record has launches something else now. Other cases are new.
    """
    entry = entries(op).get(op)
    if entry is None:
        return Status("missing", "never verified on a GPU", None)
    if reason := entry.get("pending"):
        return Status("pending", reason, entry)
    recorded, hashes = _hashes_in(entry), hashes or {}
    if other := _differing(recorded, hashes):
        return Status("stale", f"launches something else since {entry['date']} in {_some(other)}", entry)
    new = [case for case in hashes if case not in recorded]
    lacking = [f"not run on a GPU yet: {_some(new)}"] if new else []
    if not entry.get("sanitizer"):
        lacking.append("compute-sanitizer has not run")
    return Status("verified", "; ".join(lacking) or None, entry)


def not_comparable(op: str) -> str | None:
    """Why the hashes in an op's record can't be compared with those of this process; None if they can."""
    recorded, installed = entries(op).get(op, {}).get("tilelang"), compat.tilelang_version()
    if recorded in (None, installed):
        return None
    return f"hashes recorded with TileLang {recorded} are not compared with those of TileLang {installed}"


def record(op: str, run: dict[str, Any], hashes: dict[str, str]) -> None:
    """Write an op's record. Keeps the earlier compute-sanitizer result if no case launches anything else since."""
    before = entries(op).get(op, {})
    kept = None if _differing(_hashes_in(before), hashes) else before.get("sanitizer")
    cases = " ".join(f"{case}:{digest}" for case, digest in hashes.items())
    _write(op, {**run, "sanitizer": run.get("sanitizer") or kept, "cases": cases})


def mark_pending(op: str, reason: str) -> None:
    """Record that an op waits for its verification, and why."""
    _write(op, {**entries(op).get(op, {}), "pending": reason})


def _write(op: str, entry: dict[str, Any]) -> None:
    # The cases come last: the line is long, and what a reader looks for is before them.
    found = {**entries(op), op: dict(sorted(entry.items(), key=lambda item: item[0] == "cases"))}
    lines = (f"{json.dumps(name)}: {json.dumps(found[name], ensure_ascii=False)}" for name in sorted(found))
    path(op).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _hashes_in(entry: dict[str, Any]) -> dict[str, str]:
    return dict(item.split(":") for item in entry.get("cases", "").split())


def _differing(recorded: dict[str, str], hashes: dict[str, str]) -> list[str]:
    return [case for case, digest in hashes.items() if recorded.get(case, digest) != digest]


def _some(cases: Sequence[str]) -> str:
    more = f" and {len(cases) - _NUM_NAMED} more" if len(cases) > _NUM_NAMED else ""
    return ", ".join(cases[:_NUM_NAMED]) + more
