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


@pytest.fixture
def archive(here: Path, tmp_path: Path) -> Path:
    """What is exported here."""
    return _export(tmp_path)


def _tk_cache(*arguments: str | Path) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["cache", *map(str, arguments)])
    return result.exit_code, result.output


def _export(tmp_path: Path) -> Path:
    code, output = _tk_cache("export", tmp_path / "kernels.zip")
    assert code == 0, output
    return tmp_path / "kernels.zip"


def _refusal(*arguments: str | Path) -> str:
    """The one line that a command prints that does nothing."""
    code, output = _tk_cache(*arguments)
    assert code == 1, output
    (line,) = output.splitlines()
    return line


def test_info(here: Path) -> None:
    add_kernel(here, "old", version="0.1.14")
    (add_kernel(here, "broken") / "executable.so").unlink()
    facts = json.loads(_tk_cache("info", "--json")[1])
    assert (facts["folder"], facts["kernels"], facts["broken"]) == (str(here), 3, 1)
    assert facts["bytes"] == sum(len(data) for path, data in tree(here).items() if _key("broken") not in path)
    assert facts["tilelang"] == {"0.1.14": 1, "0.1.15": 2}
    lines = _tk_cache("info")[1].splitlines()
    shown = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}
    assert shown == {**{name: str(value) for name, value in facts.items()}, "tilelang": "0.1.14, 0.1.15"}


def test_info_of_a_cache_that_is_not_there(there: Callable[[], Path]) -> None:
    folder = there()
    code, output = _tk_cache("info")
    assert code == 0
    assert "kernels   0" in output
    assert not folder.exists()


def test_carry(here: Path, archive: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    assert _export(tmp_path).read_bytes() == archive.read_bytes(), "same cache, same archive"
    target = there()
    for counts in ("imported 2 kernels into {}; 0 were", "imported 0 kernels into {}; 2 were"):
        code, output = _tk_cache("import", archive)
        assert code == 0
        assert counts.format(target) in output
        assert tree(target) == tree(here)
    assert not list(target.glob(".tk-import-*"))
    # TileLang makes the folder .staging as it is imported, and fails where it can't: in a cache that ships read-only.
    assert (target / "0.1.15" / "linux-x86_64" / ".staging").is_dir()


def test_whole_existing_entries_stay_and_broken_ones_are_replaced(
    here: Path, archive: Path, there: Callable[[], Path]
) -> None:
    target = there()
    mine = add_kernel(target, "a")
    (add_kernel(target, "b") / "executable.so").write_bytes(b"")
    before = mine.stat().st_ino
    assert "imported 1 kernels" in _tk_cache("import", archive)[1]
    assert mine.stat().st_ino == before
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
    archive, target = _export(tmp_path), there()
    assert _tk_cache("import", archive)[0] == 0
    assert tree(target) == whole


Members = list[tuple[zipfile.ZipInfo, bytes]]


Spoil = Callable[[Path], object]


def _repack(archive: Path, change: Callable[[Members], object]) -> None:
    with zipfile.ZipFile(archive) as packed:
        members, comment = [(member, packed.read(member)) for member in packed.infolist()], packed.comment
    change(members)
    with zipfile.ZipFile(archive, "w") as packed:
        for member, data in members:
            packed.writestr(member, data)
        packed.comment = comment


def _changed(change: Callable[[Members], object]) -> Spoil:
    """Write an archive again with other members."""
    return lambda archive: _repack(archive, change)


def _add_member(name: str, kind: int = stat.S_IFREG) -> Spoil:
    def change(members: Members) -> None:
        member = zipfile.ZipInfo(name)
        member.external_attr = (kind | 0o644) << 16
        members.append((member, b"/etc/passwd" if kind == stat.S_IFLNK else b""))

    return _changed(change)


def _link_library(members: Members) -> None:
    """Let a kernel's library be a link to another file."""
    index = next(index for index, (member, _) in enumerate(members) if member.filename.endswith("executable.so"))
    member = zipfile.ZipInfo(members[index][0].filename)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    members[index] = member, b"/etc/passwd"


def _cut(part: float) -> Spoil:
    return lambda archive: archive.write_bytes(archive.read_bytes()[: int(part * archive.stat().st_size)])


_INSIDE, _OTHER = (f"0.1.15/linux-x86_64/kernels/{_key(name)}" for name in "az")
SPOILED: dict[str, Spoil] = {
    "above": _add_member("../../escape"),
    "absolute": _add_member("/tmp/tk-escape"),
    "absolute-inside": _add_member(f"/{_INSIDE}/params.json"),
    "above-from-inside": _add_member(f"{_INSIDE}/../../../../../escape"),
    "subfolder": _add_member(f"{_INSIDE}/sub/file"),
    "unrecorded": _add_member(f"{_INSIDE}/more.so"),
    "stray": _add_member("0.1.15/readme.txt"),
    "version-is-parent": _add_member(f"../linux-x86_64/kernels/{_key('z')}/manifest.json"),
    "symlink": _add_member(f"{_INSIDE}/link.so", stat.S_IFLNK),
    "library-is-symlink": _changed(_link_library),
    "fifo": _add_member(f"{_INSIDE}/fifo", stat.S_IFIFO),
    "folder": _add_member("0.1.15/linux-x86_64/", stat.S_IFDIR),
    "twice": _add_member(f"{_INSIDE}/manifest.json"),
    "part-of-a-kernel": _add_member(f"{_OTHER}/params.json"),
    "file-missing": _changed(lambda members: members.pop()),
    "kernel-missing": _changed(lambda members: members.__delitem__(slice(5))),
    "no-member": _changed(lambda members: members.clear()),
    "manifest-of-another-kind": _changed(lambda members: members.__setitem__(0, (members[0][0], b"[]"))),
    "manifest-no-json": _changed(lambda members: members.__setitem__(0, (members[0][0], b"{"))),
    "contents-changed": _changed(lambda members: members.__setitem__(3, (members[3][0], b"evil"))),
    "empty": _cut(0),
    **{f"first-{part:.0%}": _cut(part) for part in (0.01, 0.3, 0.6, 0.9)},
    "text": lambda archive: archive.write_bytes(b"no archive"),
    "no-zip": lambda archive: archive.write_bytes(b"PK\x03\x04"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("how", SPOILED)
def test_bad_archive_changes_nothing(archive: Path, there: Callable[[], Path], tmp_path: Path, how: str) -> None:
    SPOILED[how](archive)
    target = there()
    add_kernel(target, "mine")
    before, around = tree(target), {path.name for path in tmp_path.iterdir()}
    line = _refusal("import", archive)
    assert line.startswith(f"nothing imported: {archive} is damaged or not what tk cache export writes: ")
    assert line.endswith(". Run: tk cache export kernels.zip, where its kernels were compiled")
    assert tree(target) == before
    assert {path.name for path in tmp_path.iterdir()} == around
    assert not Path("/tmp/tk-escape").exists()


def test_damaged_archive_imports_nothing_wrong(here: Path, archive: Path, there: Callable[[], Path]) -> None:
    data, whole, target = archive.read_bytes(), tree(here), there()
    for at in range(0, len(data) - 8, max(1, len(data) // 40)):
        archive.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        code, output = _tk_cache("import", archive)
        assert code in (0, 1), output
        assert tree(target) == (whole if code == 0 else {}), f"byte {at}"
        shutil.rmtree(target)


def test_export_of_nothing_fails(there: Callable[[], Path], tmp_path: Path) -> None:
    there()
    assert "tk warmup" in _refusal("export", tmp_path / "x.zip")
    assert not (tmp_path / "x.zip").exists()


@pytest.mark.parametrize("folder", ["none", "file"])
def test_export_into_no_folder(here: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    archive = tmp_path / folder / "x.zip"
    assert _refusal("export", archive).startswith(f"nothing exported: {archive}: No")


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("before", [None, b"an older archive"])
def test_export_that_can_not_be_written(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    archive = tmp_path / "x.zip"
    if before:
        archive.write_bytes(before)
    around = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(zipfile.ZipFile, "write", _full)
    line = f"nothing exported: {archive}: No space left on device. Run: tk cache export FOLDER/x.zip"
    assert _refusal("export", archive) == line
    assert {path.name for path in tmp_path.iterdir()} == around
    assert archive.read_bytes() == before if before else not archive.exists()


@pytest.mark.parametrize("why", ["Not a directory", "No space left on device"])
def test_import_into_a_cache_that_can_not_be_written(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / ("file" if why.startswith("Not") else "other") / "cache"
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(cache))
    monkeypatch.setattr(zipfile.shutil, "copyfileobj", _full)
    line = f"nothing imported: the cache of kernels, {cache}, can't be written: {why}. Run: export TILELANG_CACHE_DIR="
    assert _refusal("import", archive).startswith(line)
    assert not cache.is_dir() or not list(cache.iterdir())


def test_import_that_stops_halfway_changes_nothing(
    archive: Path, there: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = there()
    add_kernel(target, "mine")
    before, rename, moved = tree(target), Path.rename, []

    def rename_once(path: Path, to: Path) -> Path:
        if moved:
            _full()
        moved.append(to)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", rename_once)
    _refusal("import", archive)
    assert len(moved) == 1
    assert tree(target) == before


def test_note_about_another_tilelang(here: Path, there: Callable[[], Path], tmp_path: Path) -> None:
    for folder in list(here.iterdir()):
        folder.rename(here / "0.0.1")
    archive = _export(tmp_path)
    there()
    code, output = _tk_cache("import", archive)
    assert code == 0
    assert "made by TileLang 0.0.1" in output
