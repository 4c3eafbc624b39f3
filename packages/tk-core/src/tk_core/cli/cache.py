"""`tk cache`: the kernels in TileLang's disk cache, and a zip to carry them to another machine.

A kernel is a folder <TileLang>/<platform>/kernels/<key> with a manifest.json. The rest of the cache is for compiling.
"""

import json
import shutil
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tk_core.faults import FaultError, unwritable_cache

app = typer.Typer(no_args_is_help=True, help="Look into the cache of compiled kernels, or carry it to another machine.")


def _kernels(root: Path) -> dict[str, list[Path]]:
    """The files of each kernel, by its folder relative to `root`; no files for a kernel that is damaged."""
    from tk_core.stored import whole_files

    return {str(folder.relative_to(root)): whole_files(folder) for folder in sorted(root.glob("*/*/kernels/*"))}


def _notes(root: Path, kernels: dict[str, list[Path]]) -> list[Path]:
    """The notes of `tk_core.stored` that name one of these kernels."""
    from tk_core.stored import read_note

    return [path for path in sorted(root.glob("tk/*")) if (note := read_note(path)) and kernels.get(str(note[0]))]


def _fail(what: str, fault: FaultError) -> NoReturn:
    typer.echo(f"nothing {what}: {fault}", err=True)
    raise typer.Exit(1)


@app.command("info")
def info(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Show the folder, its kernels, their bytes, the versions of TileLang that made them, and how many are damaged."""
    from tk_core.compat import cache_dir

    kernels = _kernels(cache_dir())
    versions = Counter(path.partition("/")[0] for path, files in kernels.items() if files)
    size = sum(file.stat().st_size for files in kernels.values() for file in files)
    whole, broken = versions.total(), len(kernels) - versions.total()
    facts = {"folder": str(cache_dir()), "kernels": whole, "bytes": size, "tilelang": versions, "broken": broken}
    text = "\n".join(f"{name:<9} {value}" for name, value in (facts | {"tilelang": ", ".join(versions)}).items())
    typer.echo(json.dumps(facts, indent=2) if as_json else text)


@app.command("export")
def export(file: Annotated[Path, typer.Argument(help="Archive to write (a zip).", dir_okay=False)]) -> None:
    """Pack the kernels of the cache into one file, all but damaged ones. Exit code 1 if there is none."""
    from tk_core.compat import cache_dir

    found = _kernels(cache_dir())
    if not (kernels := [files for files in found.values() if files]):
        _fail("exported", FaultError(f"{cache_dir()} holds no kernel", "tk warmup"))
    try:
        with tempfile.TemporaryDirectory(prefix=".tk-export-", dir=file.parent) as folder:
            unfinished = Path(folder, file.name)
            with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as packed:
                for path in (path for files in (*kernels, _notes(cache_dir(), found)) for path in files):
                    packed.write(path, path.relative_to(cache_dir()))
                packed.comment = b"%d kernels" % len(kernels)
            unfinished.replace(file)
    except OSError as error:
        _fail("exported", FaultError(f"{file}: {error.strerror}", f"tk cache export FOLDER/{file.name}"))
    typer.echo(f"exported {len(kernels)} kernels from {cache_dir()} to {file}")


@app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="What export wrote.", exists=True, dir_okay=False)]) -> None:
    """Add an archive's kernels to the cache, all or none (exit code 1). They will run here: import what you trust."""
    from tk_core.compat import cache_dir, compiler_version
    from tk_core.stored import whole_files

    root, added = cache_dir(), []
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tk-import-", dir=root) as folder:
            kernels = _unpack(file, Path(folder))
            for kernel in (kernel for kernel in kernels if not whole_files(root / kernel)):
                # TileLang makes .staging when it is imported; a cache that is read-only from now on must have it.
                for needed in ("kernels", ".staging"):
                    (root / kernel).parent.with_name(needed).mkdir(parents=True, exist_ok=True)
                shutil.rmtree(root / kernel, ignore_errors=True)
                Path(folder, kernel).rename(root / kernel)
                added.append(root / kernel)
            (root / "tk").mkdir(exist_ok=True)
            for note in Path(folder).glob("tk/*"):
                note.replace(root / "tk" / note.name)
    except OSError as error:
        for target in added:
            shutil.rmtree(target, ignore_errors=True)
        _fail("imported", unwritable_cache(root, error.strerror))
    typer.echo(f"imported {len(added)} kernels into {root}; {len(kernels) - len(added)} were there already")
    maker, installed = kernels[0].partition("/")[0], compiler_version() or ""
    if not any(kernel.startswith(installed) for kernel in kernels):
        typer.echo(f"note: made by TileLang {maker}; here those of {installed} are used")


def _unpack(archive: Path, folder: Path) -> list[str]:
    """Unpack an archive and return its kernels; reject it if a kernel is damaged or anything else is in it."""
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)  # it writes nothing outside of the folder, and no links
        kernels, names = _kernels(folder), {folder / name for name in packed.namelist()}
        is_whole = names == {file for files in (*kernels.values(), _notes(folder, kernels)) for file in files}
        if not is_whole or not kernels or packed.comment != b"%d kernels" % len(kernels):
            raise zipfile.BadZipFile("it holds other files than its kernels have, or fewer")
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds over damaged bytes
        why = f"{archive} is damaged or not what tk cache export writes: {error or 'it ends too early'}"
        _fail("imported", FaultError(why, f"tk cache export {archive.name}, where its kernels were compiled"))
    return list(kernels)
