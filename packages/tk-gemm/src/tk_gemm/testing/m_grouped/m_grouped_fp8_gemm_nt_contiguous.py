"""Named cases of m_grouped_fp8_gemm_nt_contiguous."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import align
from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.m_grouped.m_grouped_fp8_gemm_nt_contiguous import m_grouped_fp8_gemm_nt_contiguous
from tk_gemm.testing.lib.compare import assert_close
from tk_gemm.testing.lib.inputs import activations, ids, psum, weights

ODD = (0, 1, 127, 128, 129, 0)
ODD_ROWS = 640
UNEVEN = (1000, 0, 129, 1408, 7, 1280)


def routed_counts(num_tokens: int, num_topk: int, num_experts: int) -> tuple[int, ...]:
    """How many tokens each expert has where some are twice as popular as others, as with a trained router."""
    drawn = random.Random(0)
    popularity = [drawn.lognormvariate(0, 0.28) for _ in range(num_experts)]
    counts = Counter(drawn.choices(range(num_experts), popularity, k=num_tokens * num_topk))
    return tuple(counts[expert] for expert in range(num_experts))


ROUTED = routed_counts(4096, 8, 256)
ROUTED_ROWS = sum(align(count, 128) for count in ROUTED)


def make(
    counts: tuple[int, ...], num_rows: int, n: int, k: int, *, layout: str = "column", with_psum: bool = False
) -> Callable[[str], dict[str, Any]]:
    """Arguments for groups of these counts in a buffer of num_rows rows; d has sevens in it."""

    def build(device: str) -> dict[str, Any]:
        return {
            "a": activations(num_rows, k, device, layout),
            "b": weights(n, k, device, len(counts), packed=layout == "packed"),
            "d": torch.full((num_rows, n), 7.0, dtype=torch.bfloat16, device=device),
            "grouped_layout": psum(counts, device) if with_psum else ids(counts, num_rows, device),
            "use_psum_layout": with_psum,
        }

    return build


SPEC = OpSpec(
    op=m_grouped_fp8_gemm_nt_contiguous,
    reference=reference.m_grouped_fp8_gemm_nt_contiguous,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        Case("g2-n16-k128", make((3, 1), 256, 16, 128), small=True, modes=True),
        Case("g6-n16-k128-odd", make(ODD, ODD_ROWS, 16, 128), small=True),
        Case("g6-n16-k128-odd-psum", make(ODD, ODD_ROWS, 16, 128, with_psum=True), small=True, modes=True),
        Case("g2-n144-k256-row-major", make((3, 130), 384, 144, 256, layout="row"), small=True),
        Case("g2-n16-k128-past-the-end", make((3, 130), 200, 16, 128, with_psum=True), small=True),
        Case("g2-n16-k128-no-rows", make((0, 0), 0, 16, 128), small=True),
        *(
            Case(f"g2-n144-k640{name}-packed", build, small=True, compile=True, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("", make((3, 130), 384, 144, 640, layout="packed")),
                ("-psum", make((3, 130), 384, 144, 640, layout="packed", with_psum=True)),
            )
        ),
        Case("g6-n4096-k512", make(UNEVEN, 4096, 4096, 512), compile=True),
        Case("g6-n4096-k512-psum", make(UNEVEN, 4096, 4096, 512, with_psum=True), compile=True),
        Case("g6-n144-k7168", make(ODD, ODD_ROWS, 144, 7168)),
        Case("g6-n2048-k256-psum", make(ODD, ODD_ROWS, 2048, 256, with_psum=True)),
        Case("g256-n512-k256", make((5,) * 256, 256 * 128, 512, 256)),
        Case("g256-n512-k256-psum", make((5,) * 256, 256 * 128, 512, 256, with_psum=True)),
        Case("g4-n1024-k256-one-group", make((0, 0, 2000, 0), 2048, 1024, 256, with_psum=True)),
        *(
            Case(f"g{g}-m{g * m}-n{n}-k{k}-bench", make((m,) * g, g * m, n, k), bench=True, gpu=False)
            for g, m in ((4, 8192), (32, 1024), (256, 128))
            for n, k in ((4096, 7168), (7168, 2048))
        ),
        *(
            Case(f"g256-routed-n{n}-k{k}-bench", make(ROUTED, ROUTED_ROWS, n, k), bench=True, gpu=False)
            for n, k in ((4096, 7168), (7168, 2048))
        ),
    ),
)
