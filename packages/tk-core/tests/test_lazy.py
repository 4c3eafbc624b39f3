"""Lazy package namespaces."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tk_core import lazy


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that can be imported, of which nothing is: two functions, one as its file; a submodule; a secret."""
    files = {
        "__init__.py": "from tk_core.lazy import export_stub\nexport_stub(__name__, __file__)\n",
        "__init__.pyi": "from . import part as part\nfrom .double import double as double\n"
        "from .double import triple as triple\nfrom .double import __doc__\nfrom .hidden import secret\n",
        "part.py": "def half(x):\n    return x // 2\n",
        "double.py": "def double(x):\n    return 2 * x\n\ndef triple(x):\n    return 3 * x\n",
        "hidden.py": "secret = 1\n",
    }
    (tmp_path / "lazy_sample").mkdir()
    for name, text in files.items():
        (tmp_path / "lazy_sample" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_sample"]:
        del sys.modules[name]


ORDERS = (
    "import lazy_sample; assert 'lazy_sample.double' not in sys.modules; assert lazy_sample.double(2) == 4",
    "import lazy_sample.double, lazy_sample; assert lazy_sample.double(2) == 4 and lazy_sample.triple(2) == 6",
    "from lazy_sample.double import triple; import lazy_sample; assert lazy_sample.double(2) == 4",
    "from lazy_sample import triple, double; assert triple(1) == 3 and double(1) == 2",
    "import lazy_sample; assert 'lazy_sample.part' not in sys.modules; assert lazy_sample.part.half(2) == 1",
)


@pytest.mark.parametrize("code", ORDERS)
def test_functions_are_not_hidden_by_their_files(package: None, code: str) -> None:
    exec(code, {"sys": sys})


def test_a_stub_is_the_table_of_what_is_public(package: None) -> None:
    """Before and after everything in it has been imported."""
    import lazy_sample

    assert lazy_sample.__all__ == ["double", "triple"]
    for _ in range(2):
        assert [name for name in dir(lazy_sample) if not name.startswith("__")] == ["double", "part", "triple"]
        assert {"__all__", "__doc__", "__name__", "__path__", "__version__"} <= set(dir(lazy_sample))
        assert lazy_sample.secret + lazy_sample.double(1) + lazy_sample.triple(1) + lazy_sample.part.half(2) == 7


def test_version(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the distribution, looked up when it is asked for; a namespace within a package has none."""
    asked = []
    monkeypatch.setattr(lazy.importlib.metadata, "version", lambda name: asked.append(name) or "1.2.3")
    import lazy_sample

    assert asked == []
    assert lazy_sample.__version__ == "1.2.3"
    assert lazy_sample.__version__ == "1.2.3"
    assert asked == ["lazy-sample"]
    reference = importlib.import_module("tk_quant.reference")
    assert not hasattr(reference, "__version__")


def test_unknown_name(package: None) -> None:
    import lazy_sample

    with pytest.raises(AttributeError, match="module 'lazy_sample' has no attribute 'half'"):
        _ = lazy_sample.half
