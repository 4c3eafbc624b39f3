"""tests/tables.py, which writes the tables in the READMEs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tk_core import ledger
from tk_core.testing import OpSpec

from . import tables


def transpose(x: Any) -> Any:
    """Transpose a matrix: a | b.

    More.
    """
    return x


def row(case: str, **other: Any) -> dict[str, Any]:
    return {
        "op": "tk_zz.transpose",
        "case": case,
        "model_shape": True,
        "us": 58.4,
        "gbps": 4021.0,
        "of_copy": 0.97,
        "eager_us": 117.0,
        "compiled_us": None,
        "host_us": 9.6,
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11.0",
        "cuda": "13.0",
        "tilelang": "0.1.15",
        "date": "2026-11-21",
        **other,
    }


def test_ops_table(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"gpu": "NVIDIA H200", "date": "2026-11-21"}
    monkeypatch.setattr(ledger, "status", lambda op: ledger.Status("verified", None, entry))
    spec = OpSpec(transpose, transpose, ())
    lines = tables.ops_table({"tk_zz.transpose": spec}).splitlines()
    assert lines[0] == "| op | what | architectures | verified on a GPU |"
    assert lines[2:] == ["| `transpose` | Transpose a matrix: a \\| b | – | NVIDIA H200, 2026-11-21 |"]
    monkeypatch.setattr(ledger, "status", lambda op: ledger.Status("pending", "no GPU yet", entry))
    assert tables.ops_table({"tk_zz.transpose": spec}).endswith("| pending: no GPU yet |")


def test_chain_table() -> None:
    rows = [row("t8", timer="latency", compiled_us=117.0), row("other", timer="cupti")]
    lines = tables.chain_table(rows).splitlines()
    assert lines[0] == "| case | µs | of a copy's rate | torch.compile | host µs |"
    assert lines[2:4] == ["| t8 | 58.4 | 97% | 117 µs (2.0×) | 9.6 |", ""]
    assert lines[4].startswith("Measured with: NVIDIA H200, ")
    assert tables.chain_table(rows[1:]) == "No figures yet."


def test_figures_table() -> None:
    rows = [row("bf16"), row("fp8", eager_us=None, compiled_error="no"), row("odd", model_shape=False)]
    lines = tables.figures_table(rows).splitlines()
    assert lines[2] == "| `transpose` | bf16 | 58.4 | 4.02 | 97% | 117 µs (2.0×) | – | 9.6 |"
    assert lines[3] == "| `transpose` | fp8 | 58.4 | 4.02 | 97% | – | fails | 9.6 |"
    assert lines[4:] == [
        "",
        "Measured with: NVIDIA H200, driver 580.1, torch 2.11.0, CUDA 13.0, TileLang 0.1.15, 2026-11-21.",
    ]
    assert tables.figures_table([]) == "No figures yet."


def test_the_newest_row_counts(tmp_path: Path) -> None:
    for name, rows in {
        "a.jsonl": [row("bf16", us=1.0, date="2026-11-22"), row("fp8", us=2.0)],
        "b.jsonl": [row("bf16", us=3.0), row("fp8", us=4.0)],
    }.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    assert {each["case"]: each["us"] for each in tables.read_rows(tmp_path)} == {"bf16": 1.0, "fp8": 4.0}
    assert tables.read_rows(tmp_path / "none") == []


def test_blocks_are_replaced() -> None:
    text = "a\n<!-- tk:ops -->\nold\n<!-- /tk:ops -->\nb\n"
    new = tables.replace_block(text, "ops", "| \\1 |")
    assert new == "a\n<!-- tk:ops -->\n\n| \\1 |\n\n<!-- /tk:ops -->\nb\n"
    assert tables.replace_block(new, "ops", "| \\1 |") == new
    assert tables.replace_block(text, "figures", "x") == text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "packages" / "tk-zz" / "README.md"
    (readme.parent / "benchmarks" / "results").mkdir(parents=True)
    (readme.parent / "benchmarks" / "results" / "h200.jsonl").write_text(json.dumps(row("bf16")))
    readme.write_text("# tk-zz\n<!-- tk:figures -->\n<!-- /tk:figures -->\n", encoding="utf-8")
    assert tables.main(["--check", str(tmp_path)]) == 1
    assert "README.md: out of date" in capsys.readouterr().out
    assert tables.main([str(tmp_path)]) == 0
    assert "`transpose`" in readme.read_text(encoding="utf-8")
    assert tables.main(["--check", str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        tables.main([str(tmp_path / "packages")])


def test_baselines_of_an_earlier_run(tmp_path: Path) -> None:
    later = row("bf16", us=39.0, eager_us=None)
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row('bf16'))}\n{json.dumps(later)}\n{json.dumps(row('fp8'))}\n")
    rows = tables.read_rows(tmp_path)
    assert [each["us"] for each in rows] == [39.0, 58.4]
    lines = tables.figures_table(rows).splitlines()
    assert "| 117 µs (3.0×) † |" in lines[2]
    assert "| 117 µs (2.0×) |" in lines[3]
    assert lines[-1].endswith("†: PyTorch measured in an earlier run.")
