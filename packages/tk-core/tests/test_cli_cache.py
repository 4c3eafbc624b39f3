"""`tk cache`: nothing but whole kernels is exported, and an import adds whole kernels or changes nothing."""

import hashlib
import json
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tk_core.cli import app

RUNNER = CliRunner()
FILES = ("device_kernel.cu", "executable.so", "host_kernel.cu", "params.json")


def _key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _facts(data: bytes) -> dict[str, object]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def add_kernel(root: Path, name: str, version: str = "0.1.15") -> Path:
    """A kernel as TileLang writes it."""
    folder = root / version / "linux-x86_64" / "kernels" / _key(name)
    folder.mkdir(parents=True)
    contents = {file: f"{file} of {name}".encode() for file in FILES}
    for file, data in contents.items():
        (folder / file).write_bytes(data)
    manifest = {"version": 1, "files": {file: _facts(data) for file, data in contents.items()}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this machine, with two kernels."""
    root = tmp_path / "here"
    add_kernel(root, "a")
    add_kernel(root, "b")
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
    archive = tmp_path / "kernels.zip"
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
    assert (facts["folder"], facts["kernels"], facts["broken"]) == (str(here), 3, 1)
    assert facts["bytes"] == sum(len(data) for path, data in tree(here).items() if _key("broken") not in path)
    assert facts["tilelang"] == {"0.1.14": 1, "0.1.15": 2}
    text = RUNNER.invoke(app, ["cache", "info"]).output
    shown = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in text.splitlines()}
    assert shown == {**{name: str(value) for name, value in facts.items()}, "tilelang": "0.1.14, 0.1.15"}


def test_info_of_a_cache_that_is_not_there(there: Callable[[], Path]) -> None:
    folder = there()
    result = RUNNER.invoke(app, ["cache", "info"])
    assert result.exit_code == 0
    assert "kernels   0" in result.output
    assert not folder.exists()


def test_carry(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    archive = _export(tmp_path)
    target = there()
    code, output = _import(archive)
    assert code == 0
    assert "imported 2 kernels" in output
    assert tree(target) == tree(here)
    code, output = _import(archive)
    assert code == 0
    assert "imported 0 kernels" in output
    assert "2 were there already" in output
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


@pytest.mark.parametrize("folder", ["none", "file"])
def test_export_into_no_folder(here: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    result = RUNNER.invoke(app, ["cache", "export", str(tmp_path / folder / "x.zip")])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith(f"nothing exported: {tmp_path / folder / 'x.zip'}: No")


Members = list[tuple[zipfile.ZipInfo, bytes]]


def _repack(archive: Path, change: Callable[[Members], None]) -> None:
    """Write an archive again with other members."""
    with zipfile.ZipFile(archive) as packed:
        members, comment = [(member, packed.read(member)) for member in packed.infolist()], packed.comment
    change(members)
    with zipfile.ZipFile(archive, "w") as packed:
        for member, data in members:
            packed.writestr(member, data)
        packed.comment = comment


def _add_member(name: str, kind: int = stat.S_IFREG) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        member = zipfile.ZipInfo(name)
        member.external_attr = (kind | 0o644) << 16
        members.append((member, b"/etc/passwd" if kind == stat.S_IFLNK else b""))

    return change


def _link_library(members: Members) -> None:
    """Let a kernel's library be a link to another file."""
    index = next(index for index, (member, _) in enumerate(members) if member.filename.endswith("executable.so"))
    member = zipfile.ZipInfo(members[index][0].filename)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    members[index] = member, b"/etc/passwd"


_INSIDE = f"0.1.15/linux-x86_64/kernels/{_key('a')}"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_add_member("../../escape"), id="above"),
        pytest.param(_add_member("/tmp/tk-escape"), id="absolute"),
        pytest.param(_add_member(f"/{_INSIDE}/params.json"), id="absolute-inside"),
        pytest.param(_add_member(f"{_INSIDE}/../../../../../escape"), id="above-from-inside"),
        pytest.param(_add_member(f"{_INSIDE}/sub/file"), id="subfolder"),
        pytest.param(_add_member(f"{_INSIDE}/more.so"), id="unrecorded"),
        pytest.param(_add_member("0.1.15/readme.txt"), id="stray"),
        pytest.param(_add_member(f"../linux-x86_64/kernels/{_key('z')}/manifest.json"), id="version-is-parent"),
        pytest.param(_add_member(f"{_INSIDE}/link.so", stat.S_IFLNK), id="symlink"),
        pytest.param(_link_library, id="library-is-symlink"),
        pytest.param(_add_member(f"{_INSIDE}/fifo", stat.S_IFIFO), id="fifo"),
        pytest.param(_add_member("0.1.15/linux-x86_64/", stat.S_IFDIR), id="folder"),
        pytest.param(_add_member(f"{_INSIDE}/manifest.json"), id="twice"),
        pytest.param(_add_member(f"0.1.15/linux-x86_64/kernels/{_key('z')}/params.json"), id="part-of-a-kernel"),
        pytest.param(lambda members: members.pop(), id="file-missing"),
        pytest.param(lambda members: members.__delitem__(slice(5)), id="kernel-missing"),
        pytest.param(lambda members: members.clear(), id="empty"),
        pytest.param(lambda members: members.__setitem__(0, (members[0][0], b"[]")), id="manifest-of-another-kind"),
        pytest.param(lambda members: members.__setitem__(0, (members[0][0], b"{")), id="manifest-no-json"),
        pytest.param(lambda members: members.__setitem__(3, (members[3][0], b"evil")), id="contents-changed"),
    ],
)
def test_bad_archive_changes_nothing(
    here: Path, there: Callable[[], Path], tmp_path: Path, change: Callable[[Members], None]
) -> None:
    archive = _export(tmp_path)
    _repack(archive, change)
    target = there()
    add_kernel(target, "mine")
    before, around = tree(target), {path.name for path in tmp_path.iterdir()}
    code, output = _import(archive)
    assert code == 1
    (line,) = output.splitlines()
    assert line.startswith(f"nothing imported: {archive} is damaged or not what tk cache export writes: ")
    assert line.endswith(". Run: tk cache export kernels.zip, where its kernels were compiled")
    assert tree(target) == before
    assert {path.name for path in tmp_path.iterdir()} == around
    assert not Path("/tmp/tk-escape").exists()


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


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04"], ids=["empty", "text", "no-zip"])
def test_no_archive(there: Callable[[], Path], tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "x.zip"
    archive.write_bytes(data)
    there()
    assert _import(archive)[0] == 1


def test_export_of_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "none"))
    result = RUNNER.invoke(app, ["cache", "export", str(tmp_path / "x.zip")])
    assert result.exit_code == 1
    assert "tk warmup" in result.output
    assert not (tmp_path / "x.zip").exists()


def test_import_into_a_cache_that_can_not_be_written(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _export(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, output = _import(archive)
    assert code == 1
    (line,) = output.splitlines()
    assert line.startswith(f"nothing imported: the cache of kernels, {tmp_path / 'file' / 'cache'}, can't be written: ")
    assert ". Run: export TILELANG_CACHE_DIR=" in line


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_import_onto_a_full_disk_changes_nothing(
    here: Path, there: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _export(tmp_path)
    target = there()
    monkeypatch.setattr(zipfile.shutil, "copyfileobj", _full)
    code, output = _import(archive)
    assert code == 1
    (line,) = output.splitlines()
    message = (
        f"nothing imported: the cache of kernels, {target}, can't be written: No space left on device. Run: export "
    )
    assert line.startswith(message)
    assert not list(target.iterdir())


def test_import_that_stops_halfway_changes_nothing(
    here: Path, there: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _export(tmp_path)
    target = there()
    add_kernel(target, "mine")
    before, rename, moved = tree(target), Path.rename, []

    def rename_once(path: Path, to: Path) -> Path:
        if moved:
            _full()
        moved.append(to)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", rename_once)
    assert _import(archive)[0] == 1
    assert len(moved) == 1
    assert tree(target) == before


@pytest.mark.parametrize("before", [None, b"an older archive"])
def test_export_that_can_not_be_written(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    archive = tmp_path / "x.zip"
    if before:
        archive.write_bytes(before)
    around = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(zipfile.ZipFile, "write", _full)
    result = RUNNER.invoke(app, ["cache", "export", str(archive)])
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line == f"nothing exported: {archive}: No space left on device. Run: tk cache export FOLDER/x.zip"
    assert {path.name for path in tmp_path.iterdir()} == around
    assert archive.read_bytes() == before if before else not archive.exists()


def test_an_imported_cache_can_ship_read_only(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    """TileLang makes the folder .staging as it is imported, and fails where it can't."""
    archive = _export(tmp_path)
    target = there()
    _import(archive)
    assert (target / "0.1.15" / "linux-x86_64" / ".staging").is_dir()


def test_note_about_another_tilelang(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    for folder in list(here.iterdir()):
        folder.rename(here / "0.0.1")
    archive = _export(tmp_path)
    there()
    code, output = _import(archive)
    assert code == 0
    assert "made by TileLang 0.0.1" in output
