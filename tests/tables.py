"""Updates the tables in the packages' READMEs: `python tests/tables.py [--check]`, in the repository's root.

It rewrites the text between markers: <!-- tk:ops --> … <!-- /tk:ops --> has the package's ops,
<!-- tk:figures --> … <!-- /tk:figures --> the results in benchmarks/results/*.jsonl for the shapes of real models,
<!-- tk:chain --> … <!-- /tk:chain --> those for several ops in one CUDA graph.
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tk_core import ledger
from tk_core.arch import ARCHS, UnsupportedArchError
from tk_core.kernel import capture
from tk_core.testing.specs import OpSpec, load_specs

_BASELINES = ("eager_us", "eager_error", "compiled_us", "compiled_error")


def ops_table(specs: dict[str, OpSpec]) -> str:
    """A package's ops: what each computes, its architectures, and whether it is verified."""
    rows = [
        (f"`{spec.op.__name__}`", _first_line(spec.op), ", ".join(archs_of(spec)) or "–", _state(name))
        for name, spec in sorted(specs.items())
    ]
    return _markdown(("op", "what", "architectures", "verified on a GPU"), rows)


def archs_of(spec: OpSpec) -> list[str]:
    """Architectures that an op has kernels for: those on which some case does not raise UnsupportedArchError.

    It tries the compile tier's cases with `archs` of their own, and the first case without.
    """
    cases = [case for case in spec.cases if case.compile]
    tried = [case for case in cases if case.archs] + [case for case in cases if not case.archs][:1]
    served = []
    for arch in ARCHS.values():
        for case in tried:
            with capture(arch), suppress(UnsupportedArchError):
                spec.op(**case.make("meta"))
                served.append(arch.name)
                break
    return served


def _first_line(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function) or ""
    return text.partition("\n")[0].rstrip(".")


def _state(op: str) -> str:
    status = ledger.status(op)
    if status.state == "verified" and status.entry:
        return f"{status.entry['gpu']}, {status.entry['date']}"
    return f"{status.state}: {status.reason}"


def read_rows(results: Path) -> list[dict[str, Any]]:
    """The newest row of each op and case in a folder of result files; of equal dates, the last one.

    A row measured without PyTorch takes PyTorch's times from the previous row, and has `earlier` set.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(results.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            key = row["op"], row["case"]
            older = newest.get(key)
            if older is not None and row["date"] < older["date"]:
                continue
            if older is not None and row.get("eager_us") is None and older.get("eager_us") is not None:
                row |= {name: older.get(name) for name in _BASELINES} | {"earlier": True}
            newest[key] = row
    return list(newest.values())


def figures_table(rows: Sequence[dict[str, Any]]) -> str:
    """Results at the shapes of real models, and the GPU and versions they were measured with."""
    chosen = [row for row in rows if row["model_shape"]]
    if not chosen:
        return "No figures yet."
    cells = [
        (
            f"`{row['op'].partition('.')[2]}`",
            row["case"],
            f"{row['us']:.1f}",
            f"{row['gbps'] / 1e3:.2f}",
            f"{row['of_copy']:.0%}",
            _baseline(row, "eager"),
            _baseline(row, "compiled"),
            f"{row['host_us']:.1f}",
        )
        for row in sorted(chosen, key=lambda row: row["op"])
    ]
    headings = ("op", "case", "µs", "TB/s", "of a copy's rate", "PyTorch, eager", "torch.compile", "host µs")
    with_what = sorted({_with_what(row) for row in chosen})
    note = " †: PyTorch measured in an earlier run." if any(row.get("earlier") for row in chosen) else ""
    return f"{_markdown(headings, cells, numbers_from=2)}\n\nMeasured with: {'; '.join(with_what)}.{note}"


def chain_table(rows: Sequence[dict[str, Any]]) -> str:
    """Times of several ops as one CUDA graph, gaps between kernels included."""
    chosen = [row for row in rows if row["timer"] == "latency"]
    if not chosen:
        return "No figures yet."
    cells = [
        (row["case"], f"{row['us']:.1f}", f"{row['of_copy']:.0%}", _baseline(row, "compiled"), f"{row['host_us']:.1f}")
        for row in chosen
    ]
    headings = ("case", "µs", "of a copy's rate", "torch.compile", "host µs")
    with_what = sorted({_with_what(row) for row in chosen})
    return f"{_markdown(headings, cells, numbers_from=1)}\n\nMeasured with: {'; '.join(with_what)}."


def _baseline(row: dict[str, Any], name: str) -> str:
    if row.get(f"{name}_error"):
        return "fails"
    value = row.get(f"{name}_us")
    mark = " †" if row.get("earlier") else ""
    return "–" if value is None else f"{value:.0f} µs ({value / row['us']:.1f}×){mark}"


def _with_what(row: dict[str, Any]) -> str:
    parts = f"driver {row['driver']}, torch {row['torch']}, CUDA {row['cuda']}, TileLang {row['tilelang']}"
    return f"{row['gpu']}, {parts}, {row['date']}"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> str:
    numbers_from = len(headings) if numbers_from is None else numbers_from
    rule = ["---" if index < numbers_from else "---:" for index in range(len(headings))]
    lines = (headings, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def replace_block(text: str, name: str, block: str) -> str:
    """`text` with the part between <!-- tk:name --> and <!-- /tk:name --> replaced; unchanged without such markers."""
    pattern = rf"(<!-- tk:{name} -->\n).*?(<!-- /tk:{name} -->)"
    return re.sub(pattern, lambda found: f"{found[1]}\n{block}\n\n{found[2]}", text, flags=re.DOTALL)


def updated(readme: Path) -> str:
    """What a package's README.md should say."""
    package = readme.parent.name.replace("-", "_")
    text = readme.read_text(encoding="utf-8")
    if "<!-- tk:ops -->" in text:
        text = replace_block(text, "ops", ops_table(load_specs(package)))
    rows = read_rows(readme.parent / "benchmarks" / "results")
    for name, table in (("figures", figures_table), ("chain", chain_table)):
        if f"<!-- tk:{name} -->" in text:
            text = replace_block(text, name, table(rows))
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the READMEs, or with --check only say which are out of date (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python tests/tables.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is out of date")
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="repository (default: this folder)")
    options = parser.parse_args(arguments)
    readmes = sorted(options.root.glob("packages/*/README.md"))
    if not readmes:
        parser.error(f"root: expected packages/*/README.md in {options.root.resolve()}, found none")
    stale = [readme for readme in readmes if updated(readme) != readme.read_text(encoding="utf-8")]
    for readme in stale:
        print(f"{readme}: out of date" if options.check else f"{readme}: rewritten")
        if not options.check:
            readme.write_text(updated(readme), encoding="utf-8")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
