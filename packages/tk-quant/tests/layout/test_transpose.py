"""transpose and batched_transpose."""

from typing import Any

import pytest
import torch

import tk_quant
from tk_core.testing import tiers
from tk_quant.testing.layout.transpose import BATCHED_SPEC, SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)
test_batched_cpu = tiers.cpu_tests(BATCHED_SPEC)
test_batched_compile = tiers.compile_tests(BATCHED_SPEC)
test_batched_gpu = tiers.gpu_tests(BATCHED_SPEC)
test_batched_gpu_modes = tiers.gpu_mode_tests(BATCHED_SPEC)


def test_by_hand() -> None:
    x = torch.arange(16 * 32, dtype=torch.int32).view(16, 32)
    out = tk_quant.transpose(x)
    assert out.shape == (32, 16)
    assert out.is_contiguous()
    assert all(out[n, m] == 32 * m + n for m in range(16) for n in range(32))


def test_batched_by_hand() -> None:
    x = torch.arange(2 * 16 * 16, dtype=torch.uint8).view(2, 16, 16)
    out = tk_quant.batched_transpose(x)
    assert all(out[b, n, m] == x[b, m, n] for b in range(2) for m in range(16) for n in range(16))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1.0]], TypeError, "x: expected a torch.Tensor"),
        (torch.zeros(16, 16, dtype=torch.float64), TypeError, "x: expected dtype"),
        (torch.zeros(16), ValueError, r"x: expected shape \(num_rows, num_cols\)"),
        (torch.zeros(16, 8), ValueError, r"x.shape\[1\]: expected a multiple of 16, got 8"),
        (torch.zeros(17, 16), ValueError, r"x.shape\[0\]: expected a multiple of 16, got 17"),
        (torch.zeros(16, 32)[:, ::2], ValueError, "x: expected stride 1 in the last dimension"),
    ],
)
def test_bad_input(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tk_quant.transpose(x)
    if isinstance(x, torch.Tensor):
        with pytest.raises(
            error, match=message.replace("(num_rows", "(batch, num_rows").replace("[1", "[2").replace("[0", "[1")
        ):
            tk_quant.batched_transpose(x.unsqueeze(0))
