"""Named cases of m_grouped_bf16_gemm_nt_masked."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.m_grouped.m_grouped_bf16_gemm_nt_masked import m_grouped_bf16_gemm_nt_masked
from tk_gemm.testing.lib.compare import assert_close
from tk_gemm.testing.lib.inputs import bf16


def make(counts: tuple[int, ...], max_m: int, n: int, k: int) -> Callable[[str], dict[str, Any]]:
    """Arguments for groups of these counts; d has sevens in it."""

    def build(device: str) -> dict[str, Any]:
        num_groups = len(counts)
        return {
            "a": bf16(num_groups, max_m, k, device=device),
            "b": bf16(num_groups, n, k, device=device),
            "d": torch.full((num_groups, max_m, n), 7.0, dtype=torch.bfloat16, device=device),
            "masked_m": torch.tensor(counts, dtype=torch.int32, device=device),
            "expected_m": max(1, min(max_m, sum(counts) // num_groups)),
        }

    return build


SPEC = OpSpec(
    op=m_grouped_bf16_gemm_nt_masked,
    reference=reference.m_grouped_bf16_gemm_nt_masked,
    compare=assert_close,
    mutates=("d",),
    cases=(
        Case("g3-n8-k128", make((3, 0, 5), 5, 8, 128), small=True, modes=True),
        Case("g5-n8-k64-odd", make((0, 1, 127, 128, 129), 130, 8, 64), small=True),
        Case("g2-n8-k64-past-the-end", make((9, 2**31 - 1), 8, 8, 64), small=True),
        Case("g2-n8-k64-no-rows", make((0, 3), 0, 8, 64), small=True),
        Case("g8-n4096-k320", make((512, 0, 1, 127, 129, 256, 700, 512), 512, 4096, 320), compile=True),
        Case("g32-n512-k7168", make((20,) * 32, 64, 512, 7168), compile=True),
        Case("g256-n264-k128", make((3, 0, 130, 128) * 64, 192, 264, 128)),
        *(
            Case(f"g{g}-m{m}of{max_m}-n{n}-k{k}-bench", make((m,) * g, max_m, n, k), bench=True, gpu=False)
            for g, m, max_m, n, k in (
                (32, 192, 512, 4096, 7168),
                (6, 1024, 2048, 4096, 7168),
                (32, 20, 512, 4096, 7168),
                (32, 20, 512, 7168, 2048),
            )
        ),
    ),
)
