"""Lazy package namespaces."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tk_core import lazy


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "lazy_sample"
    folder.mkdir()
    (folder / "__init__.py").write_text("from tk_core.lazy import export_stub\nexport_stub(__name__, __file__)\n")
    names = ("double", "triple")
    (folder / "__init__.pyi").write_text("".join(f"from .double import {name} as {name}\n" for name in names))
    (folder / "double.py").write_text("def double(x):\n    return 2 * x\n\ndef triple(x):\n    return 3 * x\n")
    return tmp_path


@pytest.mark.parametrize(
    "code",
    [
        "import lazy_sample; assert 'lazy_sample.double' not in sys.modules; assert lazy_sample.double(2) == 4",
        "import lazy_sample.double, lazy_sample; assert lazy_sample.double(2) == 4 and lazy_sample.triple(2) == 6",
        "from lazy_sample.double import triple; import lazy_sample; assert lazy_sample.double(2) == 4",
        "from lazy_sample import triple, double; assert triple(1) == 3 and double(1) == 2",
        "import lazy_sample; assert {'double', 'triple'} <= set(dir(lazy_sample))",
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
