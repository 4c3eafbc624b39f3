"""tk_core.ledger."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk_core import ledger

_F = '''
"""About f."""

from tk_core import check
from tk_core.scales import ScaleLayout
from tk_zz.helper import help_out
from tk_zz import reference
from tk_zz.reference.f import f as reference_f

def f(x: int, *, y: int = 2) -> int:
    """f of x."""
    # a comment
    return help_out(x) + y
'''


@pytest.fixture
def zz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tk_zz"]:
            del sys.modules[name]
        ledger._source.cache_clear()

    package = tmp_path / "tk_zz"
    files = {
        "__init__.py": "from tk_core.lazy import export_stub\nexport_stub(__name__, __file__)\n",
        "__init__.pyi": "from .f import f as f\nfrom .f import g as g\nfrom .h import h as h\n",
        "f.py": f"{_F}\n\ndef g(x):\n    return x\n",
        "h.py": "from tk_zz import g\n\ndef h(x):\n    return g(x)\n",
        "helper.py": "from .deeper import one\n\ndef help_out(x):\n    return x + one\n",
        "deeper.py": "one = 1\n",
        "unrelated.py": "two = 2\n",
        "reference/__init__.py": "",
        "reference/f.py": "def f(x, *, y=2):\n    return x + 1 + y\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield package
    forget()


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    ledger._source.cache_clear()


def test_what_a_hash_covers(zz: Path) -> None:
    always = ["tk_core.kernel", "tk_core.math", "tk_core.scales", "tk_core.stored"]
    assert ledger.source_modules("tk_zz.f") == [*always, "tk_zz.deeper", "tk_zz.f", "tk_zz.helper"]
    assert ledger.source_modules("tk_zz.h") == [*always, "tk_zz.deeper", "tk_zz.f", "tk_zz.h", "tk_zz.helper"]


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("f.py", "# a comment", "# another", False),
        ("f.py", '"""f of x."""', '"""f of x, said in another way."""', False),
        ("f.py", '"""About f."""', "", False),
        ("f.py", "(x: int, *, y", "(\n    x: int,\n    *,\n    y", False),
        ("f.py", "y: int = 2", "y: int = 3", True),
        ("helper.py", "x + one", "one + x", True),
        ("deeper.py", "1", "1.0", True),
        ("unrelated.py", "2", "3", False),
        ("reference/f.py", "1", "2", False),
    ],
)
def test_what_changes_a_hash(zz: Path, file: str, old: str, new: str, changes: bool) -> None:
    before = ledger.source_hash("tk_zz.f")
    edit(zz / file, old, new)
    assert (ledger.source_hash("tk_zz.f") != before) == changes


_EVERY_KIND_OF_SYNTAX = '''
@decorate(1, key=None)
class C(B, metaclass=M):
    x: int = 1_000
    """What x is."""

    async def f(self, a, /, b=1.5, *c, d, e=b"x", **g) -> "text":
        """Docstring."""
        async with a as b, c:
            pass
        try:
            yield [y for x in {**a, 1: 2} if not x for y in (x, *x)]
        except (E, F) as e:
            raise e from None
        finally:
            del x[1:2, ..., None]
        match a:
            case {"k": [1, *_], **rest} | None:
                return f"{a!r:>{b}} {c=}" "more" + 'q"'
        global z
        z = lambda *, k: (k := -1j) if a < b <= c is not d else not True
'''


def test_hashes_are_the_same_under_every_python() -> None:
    canonical = ledger._canonical(ast.parse(_EVERY_KIND_OF_SYNTAX))
    # From Python 3.11. The GPU that verifies may be on a machine with a newer one, which must not differ.
    assert (
        hashlib.sha256(canonical.encode()).hexdigest()
        == "c9312b77334d658ca3d55de47ec5051a4a56afc6c1af6fdd2a3866bcfa3e3a0c"
    )


def test_states(zz: Path) -> None:
    assert ledger.status("tk_zz.f") == ledger.Status("missing", "never verified on a GPU", None)
    ledger.mark_pending("tk_zz.f", " no GPU yet ")
    assert ledger.status("tk_zz.f").state == "pending"
    assert ledger.status("tk_zz.f").reason == "no GPU yet"

    ledger.record("tk_zz.f", {"gpu": "H200", "date": "2026-11-21", "cases": 3})
    verified = ledger.status("tk_zz.f")
    assert (verified.state, verified.reason) == ("verified", "compute-sanitizer has not run")
    assert verified.entry == {
        "gpu": "H200",
        "date": "2026-11-21",
        "cases": 3,
        "hash": ledger.source_hash("tk_zz.f"),
        "sanitizer": None,
    }

    edit(zz / "deeper.py", "1", "2")
    assert ledger.status("tk_zz.f").state == "stale"
    assert ledger.status("tk_zz.f").reason == "source changed since 2026-11-21"
    assert ledger.status("tk_zz.h").state == "missing"


def test_sanitizer_results_outlive_runs_without_it(zz: Path) -> None:
    ledger.record("tk_zz.f", {"sanitizer": {"memcheck": 3}})
    ledger.record("tk_zz.f", {"cases": 4})
    assert ledger.status("tk_zz.f") == ledger.Status("verified", None, ledger.entries("tk_zz")["tk_zz.f"])
    edit(zz / "f.py", "y: int = 2", "y: int = 3")
    ledger.record("tk_zz.f", {"cases": 4})
    assert ledger.entries("tk_zz")["tk_zz.f"]["sanitizer"] is None


def test_a_renewed_record_is_that_of_an_earlier_source(zz: Path) -> None:
    ledger.mark_pending("tk_zz.f", "why")
    ledger.record("tk_zz.f", {"unchanged_since": "abc", "gpu": "a", "hash": "of then", "sanitizer": {"memcheck": 1}})
    status = ledger.status("tk_zz.f")
    assert status.state == "verified"
    kept = {"gpu": "a", "sanitizer": {"memcheck": 1}}
    assert status.entry == {**kept, "hash": ledger.source_hash("tk_zz.f"), "unchanged_since": "abc"}
    # Renewed again, it is still the first commit whose source ran.
    ledger.record("tk_zz.f", {"unchanged_since": "def", **status.entry})
    assert ledger.status("tk_zz.f").entry == status.entry


def test_the_file_is_stable(zz: Path) -> None:
    ledger.record("tk_zz.h", {"b": 1, "a": "µ"})
    ledger.record("tk_zz.f", {"b": 1})
    text = ledger.path("tk_zz").read_text(encoding="utf-8")
    assert ledger.path("tk_zz") == zz / "gpu-verified.json"
    ledger.record("tk_zz.f", {"b": 1})
    assert ledger.path("tk_zz").read_text(encoding="utf-8") == text
    assert text.index('"tk_zz.f"') < text.index('"tk_zz.h"')
    assert text.index('"a": "µ"') < text.rindex('"b": 1')
    assert text.endswith("}\n")


def test_bad_arguments(zz: Path) -> None:
    for bad in ("tk_zz", "tk_zz.", "tk_zz.reference.f", "tk_zz.nothing"):
        with pytest.raises(ValueError, match=f'op: expected a name such as "tk_quant.transpose", got {bad!r}'):
            ledger.status(bad)
        with pytest.raises(ValueError, match=f"op: expected .* got {bad!r}"):
            ledger.mark_pending(bad, "why")
    with pytest.raises(ValueError, match="reason: expected why"):
        ledger.mark_pending("tk_zz.f", " ")
    for bad in ("tk_not_there", "tk_not_there.f"):
        with pytest.raises(ModuleNotFoundError, match="No module named 'tk_not_there'"):
            ledger.status(bad)


def test_hash_covers_cuda_headers_beside_a_module(zz: Path) -> None:
    before = ledger.source_hash("tk_zz.f")
    device = zz / "device"
    device.mkdir()
    (device / "memory.py").write_text("three = 3\n")
    (device / "memory.cuh").write_text("// one\n")
    assert ledger.source_hash("tk_zz.f") == before

    edit(zz / "deeper.py", "one = 1", "from tk_zz.device.memory import three\none = 1")
    included = ledger.source_hash("tk_zz.f")
    assert included != before
    (device / "memory.cuh").write_text("// two\n")
    assert ledger.source_hash("tk_zz.f") != included
