"""`tk cache`: what TileLang's kernel cache holds, and carrying it to another machine.

The layout is TileLang's own: <version>/<platform>/kernels/<key>/ with manifest.json, which gives the size and hash of
each file beside it, and <version>/cuda-binaries/<key>/ with metadata.json, which does so for the one binary beside it.
TileLang publishes an entry by renaming a finished folder, and so does an import.
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look into the cache of compiled kernels, or carry it to another machine.")

_INDEX = "tk-cache.json"
_FORMAT = 1
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_KEY = r"[0-9a-f]{64}"
_ENTRY = re.compile(rf"(?P<version>{_NAME})/(?:(?P<platform>{_NAME})/kernels|cuda-binaries)/{_KEY}")
_MEMBER = re.compile(rf"(?P<entry>{_ENTRY.pattern})/(?P<file>{_NAME})")
_REQUIRED = ("executable.so", "params.json", "device_kernel.cu", "host_kernel.cu")


class BadArchiveError(ValueError):
    """An archive that `tk cache export` did not write, or that was damaged since."""


@dataclass(frozen=True)
class Entry:
    """One folder of the cache."""

    path: str
    """Below the cache folder, with forward slashes."""
    files: tuple[str, ...]
    size: int

    @property
    def version(self) -> str:
        """Version of TileLang that made it."""
        return self.path.partition("/")[0]

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel that can be loaded, rather than only a device binary."""
        return "/kernels/" in self.path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_entry(root: Path, path: str) -> Entry | None:
    """The entry at `path` below a cache folder; None unless it is complete and every file is as it was written."""
    folder = root / path
    try:
        names = {child.name for child in folder.iterdir() if child.is_file() and not child.name.startswith(".")}
        if "/kernels/" in path:
            record = "manifest.json"
            files = json.loads((folder / record).read_text())["files"]
            if not files.keys() >= set(_REQUIRED) or not names >= files.keys():
                return None
        else:
            record = "metadata.json"
            metadata = json.loads((folder / record).read_text())
            (binary,) = names - {record}
            files = {binary: metadata}
        for name, expected in files.items():
            file = folder / name
            if file.stat().st_size != expected["size"] or _sha256(file) != expected["sha256"]:
                return None
        kept = (record, *sorted(files))
        return Entry(path, kept, sum((folder / name).stat().st_size for name in kept))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def entry_paths(root: Path) -> Iterator[str]:
    """Every folder below a cache folder that an entry may be in, whole or not."""
    for pattern in ("*/*/kernels/*", "*/cuda-binaries/*"):
        for folder in sorted(root.glob(pattern)):
            path = folder.relative_to(root).as_posix()
            if folder.is_dir() and _ENTRY.fullmatch(path):
                yield path


def export_cache(root: Path, archive: Path) -> list[Entry]:
    """Write every whole entry of a cache folder to a gzipped tar, which appears only when it is finished."""
    entries = [entry for path in entry_paths(root) if (entry := read_entry(root, path))]
    index = json.dumps({"format": _FORMAT, "entries": [entry.path for entry in entries]}).encode()
    descriptor, name = tempfile.mkstemp(prefix=f".{archive.name}.", dir=archive.parent)
    try:
        with os.fdopen(descriptor, "wb") as raw:
            # Neither times nor owners go in, so the same cache gives the same archive.
            with gzip.GzipFile("", "wb", 6, raw, 0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
                _add(tar, _INDEX, io.BytesIO(index), len(index))
                for entry in entries:
                    for file in entry.files:
                        path = root / entry.path / file
                        with path.open("rb") as content:
                            _add(tar, f"{entry.path}/{file}", content, path.stat().st_size)
            raw.flush()
            os.fsync(raw.fileno())
        os.chmod(name, 0o644)
        os.replace(name, archive)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return entries


def _add(tar: tarfile.TarFile, name: str, content: io.BufferedIOBase | io.BytesIO, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o755 if name.endswith(".so") else 0o644
    tar.addfile(member, content)


def import_cache(root: Path, archive: Path) -> tuple[list[Entry], list[Entry]]:
    """Unpack an archive into a cache folder; returns the entries that are new and those that were there already.

    The whole archive is unpacked beside the cache and checked first, so a bad one changes nothing.
    Raises BadArchiveError for an archive with anything in it that is no whole entry.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tk-import-", dir=root) as folder:
        staging = Path(folder)
        entries = _unpack(archive, staging)
        imported, kept = [], []
        for entry in entries:
            new = _publish(staging / entry.path, root / entry.path, read_entry(root, entry.path) is not None, staging)
            (imported if new else kept).append(entry)
    return imported, kept


def _unpack(archive: Path, staging: Path) -> list[Entry]:
    try:
        with tarfile.open(archive, "r:*") as tar:
            first = tar.next()
            if first is None or first.name != _INDEX or not first.isreg():
                raise BadArchiveError(f"{archive}: expected {_INDEX} first, as tk cache export writes it")
            index = json.loads(tar.extractfile(first).read())
            if index["format"] != _FORMAT:
                raise BadArchiveError(f"{archive}: expected format {_FORMAT}, got {index['format']}")
            while (member := tar.next()) is not None:
                match = _MEMBER.fullmatch(member.name)
                # Nothing but plain files in known places, so no path and no link can lead out of the cache.
                if match is None or not member.isreg() or ".." in PurePosixPath(member.name).parts:
                    raise BadArchiveError(f"{archive}: expected files of cache entries only, got {member.name!r}")
                target = staging / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as file:
                    shutil.copyfileobj(tar.extractfile(member), file)
                    file.flush()
                    os.fsync(file.fileno())
                if target.suffix == ".so":
                    target.chmod(0o755)
    except BadArchiveError:
        raise
    except FileExistsError as error:
        raise BadArchiveError(f"{archive}: has a file twice") from error
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError, KeyError, TypeError) as error:
        raise BadArchiveError(f"{archive}: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno is None:
            raise BadArchiveError(f"{archive}: {error}") from error
        raise
    entries = []
    for path in index["entries"]:
        entry = read_entry(staging, path) if isinstance(path, str) and _ENTRY.fullmatch(path) else None
        if entry is None:
            raise BadArchiveError(f"{archive}: entry {path!r} is damaged or not there")
        entries.append(entry)
    unnamed = set(entry_paths(staging)) - {entry.path for entry in entries}
    if unnamed:
        raise BadArchiveError(f"{archive}: entries that its index does not name: {', '.join(sorted(unnamed))}")
    return entries


def _publish(source: Path, target: Path, is_there: bool, staging: Path) -> bool:
    """Move a checked entry to its place by one rename, unless a whole one is there."""
    if is_there:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.rename(target, Path(tempfile.mkdtemp(dir=staging), target.name))
    try:
        os.rename(source, target)
    except OSError:
        # Somebody compiled the same kernel at this moment.
        if not target.is_dir():
            raise
        return False
    return True


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _summary(entries: Iterable[Entry]) -> str:
    entries = list(entries)
    kernels = sum(entry.is_kernel for entry in entries)
    size = size_text(sum(entry.size for entry in entries))
    return f"{kernels} kernels and {len(entries) - kernels} device binaries, {size}"


@app.command("info")
def info(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show the folder, the number of kernels, their size and the versions of TileLang that made them."""
    from tk_core.compat import cache_dir

    root = cache_dir()
    paths = list(entry_paths(root))
    entries = [entry for path in paths if (entry := read_entry(root, path))]
    versions = sorted({entry.version for entry in entries})
    by_version = {v: sum(entry.is_kernel for entry in entries if entry.version == v) for v in versions}
    broken = len(paths) - len(entries)
    size = sum(entry.size for entry in entries)
    if as_json:
        kernels = sum(by_version.values())
        facts = {"folder": str(root), "kernels": kernels, "binaries": len(entries) - kernels, "bytes": size}
        typer.echo(json.dumps({**facts, "tilelang": by_version, "broken": broken}, indent=2))
        return
    typer.echo(f"folder    {root}")
    typer.echo(f"holds     {_summary(entries)}")
    typer.echo(f"TileLang  {', '.join(f'{v} ({n} kernels)' for v, n in by_version.items()) or 'nothing yet'}")
    if broken:
        typer.echo(f"broken    {broken} entries; TileLang compiles those again")


@app.command("export")
def export_command(file: Annotated[Path, typer.Argument(help="Archive to write (a gzipped tar).")]) -> None:
    """Pack every whole entry of the cache into one file. Exit code 1 if there is none."""
    from tk_core.compat import cache_dir

    root = cache_dir()
    if not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{file}: its folder does not exist")
    if not any(read_entry(root, path) for path in entry_paths(root)):
        typer.echo(f"nothing exported: {root} holds no kernel; compile some with tk warmup", err=True)
        raise typer.Exit(1)
    try:
        entries = export_cache(root, file.absolute())
    except OSError as error:
        why = error.strerror or error
        typer.echo(f"nothing exported: {file}: {why}. Run: tk cache export FOLDER/{file.name}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"exported {_summary(entries)}, from {root} to {file} ({size_text(file.stat().st_size)})")


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="Archive that tk cache export wrote.", exists=True, dir_okay=False)],
) -> None:
    """Unpack an archive into the cache. What is there already stays; a bad archive changes nothing.

    An archive holds machine code that will run here: import only what you trust. Exit code 1 for a bad archive, or a
    cache folder that can't be written.
    """
    from tk_core.compat import cache_dir, tilelang_version
    from tk_core.faults import cache_fault

    root = cache_dir()
    try:
        imported, kept = import_cache(root, file)
    except BadArchiveError as error:
        typer.echo(f"nothing imported: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"not imported: {cache_fault(root) or error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"imported {_summary(imported)}, into {root}; {len(kept)} entries were there already")
    versions = {entry.version for entry in (*imported, *kept)}
    installed = tilelang_version()
    if versions and installed and not any(version.startswith(installed) for version in versions):
        typer.echo(f"note: made by TileLang {', '.join(sorted(versions))}; {installed}, installed here, won't use them")
