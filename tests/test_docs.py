"""The documentation: names and link targets exist, and calls fit; READMEs of packages have no relative links."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(folder.name for folder in ROOT.glob("packages/*"))
READMES = [ROOT / "packages" / package / "README.md" for package in PACKAGES]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
MIGRATING = ROOT / "docs" / "migrating.md"

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAME = re.compile(rf"\b(?:{'|'.join(package.replace('-', '_') for package in PACKAGES)})(?:\.[A-Za-z]\w*)+")
# Names that stand for any op in a table.
_ANY_OP = re.compile(r"\.f(_bwd)?$")


def _is_outside(target: str) -> bool:
    return target.startswith(("https://", "http://", "#"))


def _resolve(name: str) -> Any:
    package, *rest = name.split(".")
    found: Any = importlib.import_module(package)
    for part in rest:
        found = getattr(found, part)
    return found


def _spans(page: Path) -> list[str]:
    """Inline code of a page, without its code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    targets = [target for target in _LINK.findall(page.read_text(encoding="utf-8")) if not _is_outside(target)]
    assert not targets or page not in READMES, f"dead on a package index: {targets}"
    missing = [target for target in targets if not (page.parent / target.partition("#")[0]).exists()]
    assert not missing


_IMPORT_AND_RESOLVE = """
import importlib, sys

packages, names = (text.split() for text in sys.argv[1:])
for package in packages:
    importlib.import_module(package)
loaded = [name for name in sys.modules if name in ("torch", "tilelang") or name.endswith(".reference")]
assert not loaded, f"importing the packages imports {loaded}"
for name in names:
    found = sys.modules[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        if name.startswith("tk_core.") and not hasattr(found, part):  # a file that docs/architecture.md names
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
"""


def test_names_exist() -> None:
    """After `import tk_x` alone, which imports no reference and neither torch nor TileLang."""
    pages = (*PAGES, *READMES)
    names = {name for page in pages for span in _spans(page) for name in _NAME.findall(span)}
    names -= entry_points().groups
    written = sorted(name for name in names if not _ANY_OP.search(name))
    assert {"tk_quant.reference.cast", "tk_engram.reference.make_offsets", "tk_core.testing"} <= set(written)
    packages = [package.replace("-", "_") for package in PACKAGES]
    written += [f"{package}.reference" for package in packages if package != "tk_core"]
    command = [sys.executable, "-c", _IMPORT_AND_RESOLVE, " ".join(packages), " ".join(written)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_calls_of_the_migration_tables_fit_the_signatures() -> None:
    calls = 0
    for span in _spans(MIGRATING):
        if not span.startswith("tk_") or not span.endswith(")"):
            continue
        call = ast.parse(span, mode="eval").body
        assert isinstance(call, ast.Call), span
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        function = _resolve(ast.unparse(call.func))
        inspect.signature(function).bind(*call.args, **keywords)
        calls += 1
    assert calls >= 5


def test_the_migration_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", MIGRATING.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["y"].shape == scope["again"].shape == scope["x"].shape
    assert scope["out"].shape == (256, 512)


def test_the_walk_through_quotes_its_op() -> None:
    text = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
    path, num_lines = re.findall(r"`(packages/\S+\.py)` is an op in (\d+) lines", text)[0]
    source = (ROOT / path).read_text(encoding="utf-8")
    assert len(source.splitlines()) == int(num_lines) < 140
    quoted = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert textwrap.dedent(quoted).strip() in "\n".join(line.strip() for line in source.splitlines())


def test_installing_names_packages_of_ours() -> None:
    text = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    wheels = set(re.findall(r"dist/(\w+)-\*\.whl", text))
    folders = set(re.findall(r"packages/([\w-]+)", text))
    assert {wheel.replace("_", "-") for wheel in wheels} | folders <= set(PACKAGES)
    assert {"tk_core", "tk_quant"} <= wheels
    for line in text.splitlines():
        if re.search(r"pip install .*tk_(?!core)\w+-\*", line):
            assert "dist/tk_core-*.whl" in line, "or pip may take the stranger's"


@pytest.mark.parametrize("readme", [ROOT / "README.md", *READMES], ids=lambda readme: readme.parent.name)
def test_no_readme_installs_from_an_index(readme: Path) -> None:
    for block in re.findall(r"^```\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        assert not re.search(r"pip install +\"?tk-", block), block
