"""Lazy package namespaces."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk_core import lazy


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "lazy_sample"
    folder.mkdir()
    (folder / "__init__.py").write_text("from tk_core.lazy import export_stub\nexport_stub(__name__, __file__)\n")
    names = ("double", "triple")
    stub = "from . import part as part\n" + "".join(f"from .double import {name} as {name}\n" for name in names)
    (folder / "__init__.pyi").write_text(stub)
    (folder / "part.py").write_text("def half(x):\n    return x // 2\n")
    (folder / "double.py").write_text("def double(x):\n    return 2 * x\n\ndef triple(x):\n    return 3 * x\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_sample"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "code",
    [
        "import lazy_sample; assert 'lazy_sample.double' not in sys.modules; assert lazy_sample.double(2) == 4",
        "import lazy_sample.double, lazy_sample; assert lazy_sample.double(2) == 4 and lazy_sample.triple(2) == 6",
        "from lazy_sample.double import triple; import lazy_sample; assert lazy_sample.double(2) == 4",
        "from lazy_sample import triple, double; assert triple(1) == 3 and double(1) == 2",
        "import lazy_sample; assert 'lazy_sample.part' not in sys.modules; assert lazy_sample.part.half(2) == 1",
    ],
)
def test_functions_are_not_hidden_by_their_files(package: Path, code: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package)!r}); {code}"], check=True)


def test_a_stub_is_the_table(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = package / "lazy_sample" / "__init__.pyi"
    stub.write_text(f"{stub.read_text()}from .double import __doc__\n")
    monkeypatch.syspath_prepend(str(package))
    import lazy_sample

    assert lazy_sample.__all__ == ["double", "triple"]
    assert "lazy_sample.double" not in sys.modules
    assert lazy_sample.double(2) == 4
    assert lazy_sample.triple(2) == 6


def test_dir_shows_what_is_public(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after everything in it has been imported."""
    stub = package / "lazy_sample" / "__init__.pyi"
    stub.write_text(f"{stub.read_text()}from .hidden import secret\n")
    (package / "lazy_sample" / "hidden.py").write_text("secret = 1\n")
    monkeypatch.syspath_prepend(str(package))
    import lazy_sample

    for _ in range(2):
        assert [name for name in dir(lazy_sample) if not name.startswith("__")] == ["double", "part", "triple"]
        assert {"__all__", "__doc__", "__name__", "__path__", "__version__"} <= set(dir(lazy_sample))
        assert lazy_sample.secret + lazy_sample.double(1) + lazy_sample.triple(1) + lazy_sample.part.half(2) == 7


def test_version(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the distribution, looked up when it is asked for; a namespace within a package has none."""
    monkeypatch.syspath_prepend(str(package))
    asked = []
    monkeypatch.setattr(lazy.importlib.metadata, "version", lambda name: asked.append(name) or "1.2.3")
    import lazy_sample

    assert asked == []
    assert lazy_sample.__version__ == "1.2.3"
    assert lazy_sample.__version__ == "1.2.3"
    assert asked == ["lazy-sample"]
    reference = importlib.import_module("tk_quant.reference")
    assert not hasattr(reference, "__version__")


def test_unknown_name(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package))
    import lazy_sample

    with pytest.raises(AttributeError, match="module 'lazy_sample' has no attribute 'half'"):
        _ = lazy_sample.half
