"""tk_core.ledger: the records of ops."""

from pathlib import Path

import pytest

from tk_core import compat, ledger
from tk_core.testing import launches

_RUN = {"date": "2026-11-26", "gpu": "H100", "tilelang": "0.1.15", "sanitizer": {"version": "2025.3", "cases": 2}}
_HASHES = {"bf16-h64": "0a1b2c3d", "fp8-h64": "00000000"}


@pytest.fixture(autouse=True)
def zz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without ops; its records."""
    (tmp_path / "tk_zz").mkdir()
    (tmp_path / "tk_zz" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "tilelang_version", lambda: "0.1.15")
    path = ledger.path("tk_zz")
    path.unlink(missing_ok=True)
    return path


def test_states() -> None:
    assert ledger.status("tk_zz.f") == ledger.Status("missing", "never verified on a GPU", None)
    ledger.mark_pending("tk_zz.f", "no GPU yet")
    assert ledger.status("tk_zz.f")[:2] == ("pending", "no GPU yet")
    ledger.record("tk_zz.f", _RUN, _HASHES)
    assert ledger.status("tk_zz.f", _HASHES)[:2] == ("verified", None)
    entry = {**_RUN, "cases": "bf16-h64:0a1b2c3d fp8-h64:00000000"}
    assert ledger.status("tk_zz.f").entry == entry
    ledger.mark_pending("tk_zz.f", "other tiles")
    assert ledger.status("tk_zz.f", {"bf16-h64": "1"}) == (
        "pending",
        "other tiles",
        {**entry, "pending": "other tiles"},
    )


def test_one_case_makes_no_other_stale() -> None:
    ledger.record("tk_zz.f", _RUN, _HASHES)
    new = {"h1": "1", **_HASHES, "h2": "2", "h3": "3", "h4": "4", "h5": "5"}
    assert ledger.status("tk_zz.f", new)[:2] == ("verified", "not run on a GPU yet: h1, h2, h3 and 2 more")
    assert ledger.status("tk_zz.f", {"fp8-h64": "00000000"})[:2] == ("verified", None)
    stale = ("stale", "launches something else since 2026-11-26 in bf16-h64")
    assert ledger.status("tk_zz.f", {**new, "bf16-h64": "0a1b2c3e"})[:2] == stale


def test_sanitizer_results_outlive_runs_without_it() -> None:
    without = {**_RUN, "sanitizer": None}
    ledger.record("tk_zz.f", _RUN, _HASHES)
    ledger.record("tk_zz.f", without, {**_HASHES, "new": "1"})
    assert ledger.status("tk_zz.f").entry["sanitizer"] == _RUN["sanitizer"]
    ledger.record("tk_zz.f", without, {**_HASHES, "fp8-h64": "1"})
    assert ledger.status("tk_zz.f")[:2] == ("verified", "compute-sanitizer has not run")


def test_hashes_are_compared_under_one_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.record("tk_zz.f", _RUN, _HASHES)
    ledger.mark_pending("tk_zz.g", "why")
    monkeypatch.setattr(launches, "hashes_of", lambda op, arch=None: {"bf16-h64": "1"})
    states = {op: status.state for op, status in launches.compared(["tk_zz.e", "tk_zz.f", "tk_zz.g"])}
    assert states == {"tk_zz.e": "missing", "tk_zz.f": "stale", "tk_zz.g": "pending"}
    monkeypatch.setattr(compat, "tilelang_version", lambda: "0.1.16")
    assert dict(launches.compared(["tk_zz.f"]))["tk_zz.f"].state == "verified"
    why = "hashes recorded with TileLang 0.1.15 are not compared with those of TileLang 0.1.16"
    assert [ledger.not_comparable(op) for op in ("tk_zz.e", "tk_zz.f", "tk_zz.g")] == [None, why, None]


def test_the_file_has_a_line_for_each_op(zz: Path) -> None:
    ledger.record("tk_zz.h", {**_RUN, "gpu": "µ"}, _HASHES)
    ledger.record("tk_zz.f", _RUN, {})
    ledger.mark_pending("tk_zz.h", "why")
    lines = zz.read_text(encoding="utf-8").splitlines()
    assert [line[:10] for line in lines] == ["{", '"tk_zz.f":', '"tk_zz.h":', "}"]
    assert '"gpu": "µ"' in lines[2]
    assert lines[2].endswith('"pending": "why", "cases": "bf16-h64:0a1b2c3d fp8-h64:00000000"}')
    ledger.record("tk_zz.f", _RUN, {})
    assert zz.read_text(encoding="utf-8").splitlines() == lines
    with pytest.raises(ModuleNotFoundError, match="No module named 'tk_not_there'"):
        ledger.status("tk_not_there.f")
