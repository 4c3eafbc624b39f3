"""Machine code of the dense scores' kernel on Hopper: what ptxas makes of a step decides how fast it is."""

import re

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.testing.sass import count, loops_with
from tk_core.testing.usage import machine_code
from tk_indexer.scores.dense import dense_logits_kernel

pytestmark = pytest.mark.compile

ARCH = arch_from_name("sm_90a")


@pytest.mark.parametrize(
    ("num_heads", "dim", "dtype", "most"),
    [(64, 128, torch.float32, 440), (32, 64, torch.bfloat16, 480), (16, 32, torch.float32, 530)],
)
def test_a_step(num_heads: int, dim: int, dtype: torch.dtype, most: int) -> None:
    """A loop for each warpgroup, of two products: for each of 128 elements a maximum and a fused multiply-add."""
    sass, usage = machine_code(dense_logits_kernel, num_heads, dim, dtype, ARCH)
    loops = loops_with(sass, "GMMA")
    assert len(loops) == 2
    for loop in loops:
        found = count(loop)
        assert found["QGMMA"] == 2 * dim // 32
        # A product's last instruction signals: if each one does, ptxas makes each wait.
        assert sum("GMMA" in code and "gsb0" in code for code in loop) == 2
        assert found["FMNMX"] == found["FFMA"] == 128
        assert found["SHFL"] == 6 * 64 // num_heads
        assert found["LDG"] == 0
        assert found["R2UR"] <= 4, "expected descriptors in uniform registers"
        assert len(loop) <= most
    assert "FMNMX.NAN" in sass
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"
    (used,) = usage.values()
    assert used.stack_bytes == 0
    assert used.shared_bytes <= ARCH.shared_memory_each(1)
