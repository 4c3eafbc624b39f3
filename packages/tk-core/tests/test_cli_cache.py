"""`tk cache`: nothing but whole entries is exported, and an import adds whole entries or changes nothing."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tk_core.cli import app, cache

RUNNER = CliRunner()
FILES = ("device_kernel.cu", "executable.so", "host_kernel.cu", "params.json")


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _facts(data: bytes) -> dict[str, object]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def add_kernel(root: Path, name: str, version: str = "0.1.15") -> Path:
    """An entry as TileLang writes it."""
    folder = root / version / "linux-x86_64" / "kernels" / _key(name)
    folder.mkdir(parents=True)
    contents = {file: f"{file} of {name}".encode() for file in FILES}
    for file, data in contents.items():
        (folder / file).write_bytes(data)
    manifest = {"version": 1, "files": {file: _facts(data) for file, data in contents.items()}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def add_binary(root: Path, name: str, version: str = "0.1.15") -> Path:
    """A device binary as TileLang writes it."""
    folder = root / version / "cuda-binaries" / _key(name)
    folder.mkdir(parents=True)
    data = f"cubin of {name}".encode()
    (folder / "kernel.cubin").write_bytes(data)
    (folder / "metadata.json").write_text(json.dumps({"format": "tilelang.cuda-binary-cache.v1", **_facts(data)}))
    return folder


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this machine, with two kernels and a binary."""
    root = tmp_path / "here"
    add_kernel(root, "a")
    add_kernel(root, "b")
    add_binary(root, "a")
    (root / "0.1.15" / ".staging" / "cuda-binaries").mkdir(parents=True)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(root))
    return root


@pytest.fixture
def there(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Go to another machine, whose cache folder does not exist yet."""

    def go() -> Path:
        monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "there"))
        return tmp_path / "there"

    return go


def _export(tmp_path: Path) -> Path:
    archive = tmp_path / "kernels.tar.gz"
    result = RUNNER.invoke(app, ["cache", "export", str(archive)])
    assert result.exit_code == 0, result.output
    return archive


def _import(archive: Path) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["cache", "import", str(archive)])
    return result.exit_code, result.output


def test_info(here: Path) -> None:
    add_kernel(here, "old", version="0.1.14")
    (add_kernel(here, "broken") / "executable.so").unlink()
    result = RUNNER.invoke(app, ["cache", "info", "--json"])
    facts = json.loads(result.output)
    assert (facts["folder"], facts["kernels"], facts["binaries"], facts["broken"]) == (str(here), 3, 1, 1)
    assert facts["tilelang"] == {"0.1.14": 1, "0.1.15": 2}
    text = RUNNER.invoke(app, ["cache", "info"]).output
    assert str(here) in text
    assert "3 kernels and 1 device binaries" in text
    assert "1 entries" in text


def test_info_of_a_cache_that_is_not_there(there: Callable[[], Path]) -> None:
    folder = there()
    result = RUNNER.invoke(app, ["cache", "info"])
    assert result.exit_code == 0
    assert "0 kernels" in result.output
    assert not folder.exists()


def test_carry(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    archive = _export(tmp_path)
    target = there()
    code, output = _import(archive)
    assert code == 0
    assert "imported 2 kernels and 1 device binaries" in output
    assert tree(target) == tree(here)
    assert next(target.rglob("executable.so")).stat().st_mode & 0o111
    code, output = _import(archive)
    assert code == 0
    assert "imported 0 kernels and 0 device binaries" in output
    assert "3 entries were there already" in output
    assert not list(target.glob(".tk-import-*"))


def test_same_cache_same_archive(here: Path, tmp_path: Path) -> None:
    first = _export(tmp_path).read_bytes()
    assert _export(tmp_path).read_bytes() == first


def test_existing_entries_stay(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    archive = _export(tmp_path)
    mine = add_kernel(there(), "a")
    before = mine.stat().st_ino
    assert "imported 1 kernels" in _import(archive)[1]
    assert mine.stat().st_ino == before


def test_broken_existing_entries_are_replaced(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    archive = _export(tmp_path)
    target = there()
    (add_kernel(target, "a") / "executable.so").write_bytes(b"")
    assert "imported 2 kernels" in _import(archive)[1]
    assert tree(target) == tree(here)


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed", "no-manifest"])
def test_only_whole_entries_are_exported(here: Path, there: Callable[[], Path], tmp_path: Path, damage: str) -> None:
    whole = tree(here)
    library = add_kernel(here, "c") / "executable.so"
    match damage:
        case "missing":
            library.unlink()
        case "truncated":
            library.write_bytes(library.read_bytes()[:-1])
        case "changed":
            library.write_bytes(bytes(reversed(library.read_bytes())))
        case "no-manifest":
            (library.parent / "manifest.json").unlink()
    archive = _export(tmp_path)
    target = there()
    assert _import(archive)[0] == 0
    assert tree(target) == whole


def test_export_into_no_folder(here: Path, tmp_path: Path) -> None:
    assert RUNNER.invoke(app, ["cache", "export", str(tmp_path / "none" / "x.tar.gz")]).exit_code == 2


def _repack(archive: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    """Write an archive again with other members."""
    with tarfile.open(archive) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]
    change(members)
    with tarfile.open(archive, "w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def _add_member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[list], None]:
    def change(members: list) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, link
        members.append((member, b"x" if kind == tarfile.REGTYPE else b""))

    return change


_INSIDE = f"0.1.15/linux-x86_64/kernels/{_key('a')}"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_add_member("../../escape"), id="above"),
        pytest.param(_add_member("/tmp/tk-escape"), id="absolute"),
        pytest.param(_add_member(f"{_INSIDE}/../../../../../escape"), id="above-from-inside"),
        pytest.param(_add_member(f"{_INSIDE}/sub/file"), id="subfolder"),
        pytest.param(_add_member("0.1.15/readme.txt"), id="stray"),
        pytest.param(_add_member(f"../linux-x86_64/kernels/{_key('z')}/manifest.json"), id="version-is-parent"),
        pytest.param(_add_member(f"{_INSIDE}/link.so", tarfile.SYMTYPE, "/etc/passwd"), id="symlink"),
        pytest.param(_add_member(f"{_INSIDE}/hard.so", tarfile.LNKTYPE, "../../x"), id="hardlink"),
        pytest.param(_add_member(f"{_INSIDE}/fifo", tarfile.FIFOTYPE), id="fifo"),
        pytest.param(_add_member("0.1.15/linux-x86_64", tarfile.DIRTYPE), id="folder"),
        pytest.param(_add_member(f"{_INSIDE}/manifest.json"), id="twice"),
        pytest.param(_add_member(f"0.1.15/linux-x86_64/kernels/{_key('z')}/params.json"), id="unnamed-entry"),
        pytest.param(lambda members: members.pop(), id="file-missing"),
        pytest.param(lambda members: members.pop(0), id="no-index"),
        pytest.param(lambda members: members.reverse(), id="index-not-first"),
        pytest.param(lambda members: members.__setitem__(0, (members[0][0], b"[]")), id="index-of-another-kind"),
        pytest.param(lambda members: members.__setitem__(0, (members[0][0], b"{")), id="index-no-json"),
        pytest.param(
            lambda members: members.__setitem__(0, (members[0][0], b'{"format": 99, "entries": []}')), id="format"
        ),
        pytest.param(lambda members: members.__setitem__(3, (members[3][0], b"evil")), id="contents-changed"),
    ],
)
def test_bad_archive_changes_nothing(
    here: Path, there: Callable[[], Path], tmp_path: Path, change: Callable[[list], None]
) -> None:
    archive = _export(tmp_path)
    _repack(archive, change)
    target = there()
    add_kernel(target, "mine")
    before, around = tree(target), {path.name for path in tmp_path.iterdir()}
    code, output = _import(archive)
    assert code == 1
    assert "nothing imported" in output
    assert tree(target) == before
    assert {path.name for path in tmp_path.iterdir()} == around


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.6, 0.9])
def test_truncated_archive_changes_nothing(here: Path, there: Callable[[], Path], tmp_path: Path, part: float) -> None:
    archive = _export(tmp_path)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(part * len(data))])
    target = there()
    code, output = _import(archive)
    assert code == 1, output
    assert not tree(target)


def test_damaged_archive_imports_nothing_wrong(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    archive = _export(tmp_path)
    data, whole, target = archive.read_bytes(), tree(here), there()
    for at in range(0, len(data) - 8, max(1, len(data) // 40)):
        archive.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        code, output = _import(archive)
        assert code in (0, 1), output
        assert tree(target) == (whole if code == 0 else {}), f"byte {at}"
        shutil.rmtree(target)


@pytest.mark.parametrize("data", [b"", b"no archive", gzip.compress(b"no tar")], ids=["empty", "text", "no-tar"])
def test_no_archive(there: Callable[[], Path], tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(data)
    there()
    assert _import(archive)[0] == 1


def test_export_of_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "none"))
    result = RUNNER.invoke(app, ["cache", "export", str(tmp_path / "x.tar.gz")])
    assert result.exit_code == 1
    assert "tk warmup" in result.output
    assert not (tmp_path / "x.tar.gz").exists()


def test_failed_export_leaves_no_file(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(cache, "_add", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.export_cache(here, tmp_path / "x.tar.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_import_into_a_cache_that_can_not_be_written(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _export(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, output = _import(archive)
    assert code == 1
    (line,) = output.splitlines()
    assert line.startswith(f"not imported: the cache of kernels, {tmp_path / 'file' / 'cache'}, can't be written: ")
    assert ". Run: export TILELANG_CACHE_DIR=" in line


def test_import_onto_a_full_disk_changes_nothing(
    here: Path, there: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _export(tmp_path)
    target = there()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.shutil, "copyfileobj", full)
    code, output = _import(archive)
    assert (code, output) == (1, "not imported: [Errno 28] No space left on device\n")
    assert not list(target.iterdir())


def test_export_that_can_not_be_written(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_add", full)
    result = RUNNER.invoke(app, ["cache", "export", str(tmp_path / "x.tar.gz")])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.endswith("x.tar.gz: No space left on device. Run: tk cache export FOLDER/x.tar.gz")
    assert not list(tmp_path.glob("*x.tar.gz*"))


def test_note_about_another_tilelang(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    for folder in list(here.iterdir()):
        folder.rename(here / "0.0.1")
    archive = _export(tmp_path)
    there()
    code, output = _import(archive)
    assert code == 0
    assert "made by TileLang 0.0.1" in output
