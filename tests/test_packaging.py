"""The packages as installed: each wheel alone, in an environment of its own."""

import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tk_core import compat, env

ROOT = Path(__file__).resolve().parents[1]
PROJECTS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text())["project"]
    for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
DEPENDANTS = sorted(PROJECTS.keys() - {"tk-core"})
DOMAINS = sorted(PROJECTS.keys() - {"tk-core", "tk-modeling"})

# Another project on the public index is named tk-core. These are releases of it, and some that may follow.
STRANGERS = ("1.0", "1.0.0a1", "1.0.0rc1", "1.0.dev1", "1.1.8", "1.2.0", "1.3.4", "1.5.0", "1.5.1.post1", "2.0")

# A call that tk-gemm's reference serves on the CPU; the other packages' are the first examples in their READMEs.
GEMM_CALL = """
import torch
from tk_gemm import fp8_gemm_nt
ones = torch.ones(16, 256).to(torch.float8_e4m3fn)
a = ones[:2], torch.tensor([[1.0, 2.0], [3.0, 4.0]])
d = fp8_gemm_nt(a, (ones, torch.tensor([[0.5, 0.25]])))
assert torch.equal(d.float(), torch.tensor([[128.0], [320.0]]).expand(2, 16))
"""


def _import_name(package: str) -> str:
    return package.replace("-", "_")


def _requirements(package: str) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, PROJECTS[package]["dependencies"])}


def _uv(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # `uv run` sets UV to the path of its uv.
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "these tests need uv: python3 -m pip install uv"
    # Under `uv run` these would name the environment that the tests run in.
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run([uv, *map(str, arguments)], cwd=cwd, env=clean, capture_output=True, text=True)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every package's wheel, built from its source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    # hatchling is in the development environment, so building needs no index.
    built = _uv("build", "--all-packages", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    assert built.returncode == 0, built.stderr
    return folder


def _wheel(dist: Path, package: str) -> Path:
    (wheel,) = dist.glob(f"{_import_name(package)}-*.whl")
    return wheel


@pytest.fixture(scope="session")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions in uv.lock of all packages from elsewhere."""
    file = tmp_path_factory.mktemp("lock") / "constraints.txt"
    options = ("--frozen", "--no-hashes", "--no-emit-workspace", "--no-annotate", "--no-header")
    exported = _uv("export", *options, "--output-file", file)
    assert exported.returncode == 0, exported.stderr
    return file


class Environment:
    """A virtual environment with one wheel and what it depends on."""

    def __init__(self, folder: Path, dist: Path, constraints: Path, package: str) -> None:
        self.folder = folder
        made = _uv("venv", "--python", sys.executable, folder, cwd=folder.parent)
        assert made.returncode == 0, made.stderr
        self._bytecode = folder.parent / "bytecode"
        # Links, never copies: torch and CUDA take gigabytes. The index is asked only for what is not in uv's cache.
        cache = Path(_uv("cache", "dir").stdout.strip())
        link = "hardlink" if cache.stat().st_dev == folder.parent.stat().st_dev else "symlink"
        options = ("--link-mode", link, "--find-links", dist, "--constraints", constraints, "--python", self.python)
        for mode in (("--offline",), ()):
            installed = _uv("pip", "install", *mode, *options, _wheel(dist, package), cwd=folder.parent)
            if installed.returncode == 0:
                break
        assert installed.returncode == 0, installed.stderr

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, code: str) -> str:
        """Run Python code and return what it prints."""
        ran = self.command("python", "-I", "-X", f"pycache_prefix={self._bytecode}", "-c", textwrap.dedent(code))
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, without a GPU."""
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPYCACHEPREFIX": str(self._bytecode)}
        command = [self.folder / "bin" / name, *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def alone(
    request: pytest.FixtureRequest, dist: Path, constraints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A package, with an environment in which it is installed by itself."""
    # All in the same place, one after the other, so that torch's bytecode serves all.
    folder = tmp_path_factory.getbasetemp() / "alone"
    yield request.param, Environment(folder, dist, constraints, request.param)
    shutil.rmtree(folder)


@pytest.mark.parametrize("package", sorted(PROJECTS))
def test_wheel(dist: Path, package: str) -> None:
    project, name = PROJECTS[package], _import_name(package)
    assert list(dist.glob(f"{name}-*.tar.gz"))
    with zipfile.ZipFile(_wheel(dist, package)) as wheel:
        files = set(wheel.namelist())
        info = f"{name}-{project['version']}.dist-info"
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata = email.parser.BytesParser().parsebytes(wheel.read(f"{info}/METADATA"))
    source = ROOT / "packages" / package / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{name}/py.typed" in files
    assert {file for file in files if not file.startswith(info)} == expected, "the package's own files and no others"
    testing = {file for file in files if re.search("test|bench|cases|peers", file)}
    assert all(file.startswith("tk_core/testing/") for file in testing), "tests, their cases and benchmarks stay here"
    _check_metadata(metadata, package)


def _check_metadata(metadata: email.message.Message, package: str) -> None:
    assert metadata["Name"] == package
    assert metadata["Version"] == PROJECTS[package]["version"]
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Summary"]
    readme = metadata.get_payload()
    assert readme.strip(), "the README is the long description"
    assert not re.findall(r"\]\((?!https://|#)[^)]*\)", readme), "links that are dead outside of the repository"
    assert metadata["Author"] == "The TK authors"
    keywords = metadata["Keywords"].split(",")
    assert len(keywords) == len(set(keywords)) >= 5
    assert all(re.fullmatch(r"https://\S+", url.partition(", ")[2]) for url in metadata.get_all("Project-URL", []))
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(">=3.11")
    assert {Requirement(text) for text in metadata.get_all("Requires-Dist")} == set(_requirements(package).values())


@pytest.mark.parametrize("package", sorted(PROJECTS))
def test_torch_and_tilelang_bounds(package: str) -> None:
    requirements = _requirements(package)
    assert requirements["torch"].specifier == SpecifierSet(">=2.10")
    source = ROOT / "packages" / package / "src"
    uses_tilelang = any(
        re.search(r"^\s*(import|from) tilelang\b", file.read_text(), re.MULTILINE) for file in source.rglob("*.py")
    )
    if uses_tilelang or "tilelang" in requirements:
        bounds = requirements["tilelang"].specifier
        assert bounds == SpecifierSet(compat.LOADING_TILELANG)
        assert bounds.contains("0.1.12"), "which vLLM and SGLang pin"
        assert bounds.contains("0.1.15")
        assert not bounds.contains("0.2"), "TileLang changes what kernels are written in, so there is a cap"


@pytest.mark.parametrize("package", sorted(PROJECTS))
def test_bounds_among_our_packages(package: str) -> None:
    """The public index has another tk-core: an install without our wheels must fail, not install that one."""
    assert Version(PROJECTS[package]["version"]) < Version("1.dev0"), "or a bound would take a stranger's"
    requirements = _requirements(package)
    assert ("tk-core" in requirements) == (package in DEPENDANTS)
    for name in requirements.keys() & PROJECTS.keys():
        bounds = requirements[name].specifier
        # uv ignores the bounds that workspace members set for each other.
        assert bounds.contains(PROJECTS[name]["version"]), f"{package} needs {name}{bounds}"
        for version in STRANGERS:
            assert not bounds.contains(version, prereleases=True), f"{name}{bounds} takes {version}"


@pytest.mark.parametrize("package", DOMAINS)
def test_a_domain_depends_on_tk_core_only(package: str) -> None:
    assert _requirements(package).keys() & PROJECTS.keys() == {"tk-core"}
    source = ROOT / "packages" / package / "src"
    others = "|".join(_import_name(name) for name in PROJECTS if name not in ("tk-core", package))
    for file in source.rglob("*.py"):
        assert not re.search(rf"^\s*(import|from) ({others})\b", file.read_text(), re.MULTILINE), file


@pytest.mark.parametrize("package", sorted(PROJECTS))
def test_documents_and_entry_point(package: str) -> None:
    folder, name = ROOT / "packages" / package, _import_name(package)
    entries = PROJECTS[package].get("entry-points", {}).get("tk_core.packages")
    assert entries == ({name: name} if package in DEPENDANTS else None)
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not (folder / "LICENSE").is_symlink(), "a link would not survive in a source distribution"
    assert (folder / "README.md").read_text().startswith(f"# {package}\n")
    changelog = (folder / "CHANGELOG.md").read_text()
    assert re.search(rf"^## .*{re.escape(PROJECTS[package]['version'])}\b", changelog, re.MULTILINE)


@pytest.mark.parametrize("alone", sorted(PROJECTS), indirect=True)
def test_alone(alone: tuple[str, Environment]) -> None:
    """A wheel installs exactly those of our packages that it needs; it can be imported, and its reference runs."""
    package, environment = alone
    expected, todo = {package}, [package]
    while todo:
        needed = (_requirements(todo.pop()).keys() & PROJECTS.keys()) - expected
        expected |= needed
        todo += needed
    name = _import_name(package)
    siblings = sorted(_import_name(other) for other in PROJECTS if other not in (package, "tk-core"))
    readme = (ROOT / "packages" / package / "README.md").read_text()
    examples = [GEMM_CALL] if package == "tk-gemm" else re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    code = f"""
import importlib.metadata, sys
import {name}
names = {{distribution.metadata["Name"].replace("_", "-") for distribution in importlib.metadata.distributions()}}
assert {{name for name in names if name.startswith("tk-")}} == {expected}, names
assert {name}.__file__.startswith(sys.prefix), {name}.__file__
assert {name}.__version__ == {PROJECTS[package]["version"]!r}
loaded = [module for module in {["tilelang", "tvm", *siblings]} if module in sys.modules]
assert not loaded, loaded
{"".join(examples[:1])}
assert "tilelang" not in sys.modules
"""
    environment.run(code)


@pytest.mark.parametrize("alone", ["tk-core", "tk-moe"], indirect=True)
def test_command_alone(alone: tuple[str, Environment]) -> None:
    """The command tk is installed with every package and needs none of the development dependencies."""
    package, environment = alone
    listed = environment.command("tk", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert ('"tk_moe.topk_gate"' in listed.stdout) == (package == "tk-moe")
    assert "tk_quant" not in listed.stdout
    if package == "tk-moe":
        verified = environment.command("tk", "verify", package)
        assert verified.returncode == 2
        assert "tk_moe: its cases are in the repository" in " ".join(verified.stderr.replace("│", " ").split())
    module = environment.command("python", "-m", "tk_core", "--version")
    assert module.stdout == f"tk-core {PROJECTS['tk-core']['version']}\n", module.stderr


@pytest.mark.parametrize("alone", ["tk-moe"], indirect=True)
def test_import_time(alone: tuple[str, Environment]) -> None:
    """Importing a package takes little time beyond that of torch."""
    _, environment = alone
    code = """
        import time
        import torch
        start = time.perf_counter()
        import tk_moe
        print(time.perf_counter() - start)
    """
    assert min(float(environment.run(code)) for _ in range(3)) < 0.2


def test_environment_variables_are_documented() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    listed = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(env.VARIABLES)
    assert len(listed) == len(set(listed))


def test_only_tk_core_env_reads_the_environment() -> None:
    reads = re.compile(r"\bos\.environ\b(?!\[[^]]+\] = )|\bos\.getenv\b|\bfrom os import\b")
    for file in ROOT.glob("packages/*/src/**/*.py"):
        if file.parts[-2:] != ("tk_core", "env.py"):
            assert not reads.search(file.read_text()), file
