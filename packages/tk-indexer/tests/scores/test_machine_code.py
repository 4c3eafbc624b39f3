"""Machine code of the scores' kernels on Hopper: what ptxas makes of a step decides how fast it is."""

import re

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.testing.sass import count, loops_with
from tk_core.testing.usage import ResourceUsage, machine_code
from tk_indexer.scores.dense import dense_logits_kernel
from tk_indexer.scores.paged import paged_logits_kernel

pytestmark = pytest.mark.compile

ARCH = arch_from_name("sm_90a")


@pytest.mark.parametrize(
    ("num_heads", "dim", "dtype", "most"),
    [(64, 128, torch.float32, 370), (32, 64, torch.bfloat16, 415), (16, 32, torch.float32, 475)],
)
def test_a_step(num_heads: int, dim: int, dtype: torch.dtype, most: int) -> None:
    """A loop for each warpgroup, of two products: for each of 128 elements an addition and a fused multiply-add."""
    sass, usage = machine_code(dense_logits_kernel, num_heads, dim, dtype, ARCH)
    loops = loops_with(sass, "GMMA")
    assert len(loops) == 3
    for loop in loops:
        found = count(loop)
        assert found["QGMMA"] == 2 * dim // 32
        # A product's last instruction signals: if each one does, ptxas makes each wait.
        assert sum("GMMA" in code and "gsb0" in code for code in loop) == 2
        assert found["SHFL"] == 6 * 64 // num_heads
        check_fold(loop, 128)
        assert found["LDG"] == 0
        assert found["R2UR"] <= 4, "expected descriptors in uniform registers"
        assert len(loop) <= most
    check_resources(sass, usage)


@pytest.mark.parametrize(
    ("num_heads", "dim", "is_fp4", "next_n", "block_kv", "dtype", "elements", "most"),
    [
        (64, 128, False, 1, 64, torch.float32, 32, 155),
        (64, 128, False, 3, 64, torch.bfloat16, 64, 245),
        (16, 32, False, 5, 32, torch.float32, 40, 220),
        (32, 64, False, 3, 128, torch.float32, 48, 215),
        (64, 128, True, 1, 64, torch.float32, 32, 290),
    ],
)
def test_a_chunk_of_pages(
    num_heads: int, dim: int, is_fp4: bool, next_n: int, block_kv: int, dtype: torch.dtype, elements: int, most: int
) -> None:
    """A loop for each warpgroup, of one product: for each element of a lane an addition and a fused multiply-add."""
    sass, usage = machine_code(paged_logits_kernel, num_heads, dim, is_fp4, next_n, block_kv, dtype, ARCH)
    loops = loops_with(sass, "GMMA")
    assert len(loops) == 3
    for loop in loops:
        found = count(loop)
        assert found["QGMMA"] == dim // 32
        if is_fp4:  # 64 bytes a thread, 16 at a time
            assert found["STS"] == 4
        assert sum("GMMA" in code and "gsb0" in code for code in loop) == 1
        check_fold(loop, elements)
        assert found["LDG"] == 0
        assert len(loop) <= most
    check_resources(sass, usage)


def check_fold(loop: list[str], elements: int) -> None:
    assert sum(bool(re.search(r"FADD.*\|R\d+\|", code)) for code in loop) == count(loop)["FFMA"] == elements
    assert count(loop)["FMNMX"] == 0, "a maximum takes twice an addition's cycles"


def check_resources(sass: str, usage: dict[str, ResourceUsage]) -> None:
    assert not re.search(r"\b(STL|LDL)\b", sass), "registers were spilled"
    (used,) = usage.values()
    assert used.stack_bytes == 0
    assert used.shared_bytes <= ARCH.shared_memory_each(1)
