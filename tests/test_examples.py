"""The examples, run as a user runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STAGES = ("score", "gate", "normalize", "map", "quantize", "expand", "dequantize", "experts", "reduce")


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_moe_layer(seed: str) -> None:
    result = run_example("moe_layer.py", "--device", "cpu", "--seed", seed, "--tokens", "100")
    assert result.returncode == 0, result.stderr
    for stage in STAGES:
        assert re.search(rf"^│ {stage} ", result.stdout, re.MULTILINE), f"{stage} is missing from\n{result.stdout}"
    assert len(re.findall(r"│ reference ", result.stdout)) == len(STAGES) - 2
    assert len(re.findall(r"│ torch ", result.stdout)) == 2
    error = float(re.search(r"relative error against plain bf16 PyTorch: ([\d.]+)", result.stdout)[1])
    # Six seeds gave 0.0194 to 0.0229. e4m3 is off by 2 to 3 % of a value (rms) and keeps a block's largest value, so
    # half or twice the usual figure means that something is wrong.
    assert 0.01 < error < 0.04


def test_moe_layer_names_a_bad_option() -> None:
    result = run_example("moe_layer.py", "--device", "cpu", "--hidden", "100")
    assert result.returncode == 2
    assert "--hidden" in result.stderr
