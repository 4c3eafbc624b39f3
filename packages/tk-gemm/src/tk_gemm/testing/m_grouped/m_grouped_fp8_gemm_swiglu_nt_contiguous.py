"""Named cases of m_grouped_fp8_gemm_swiglu_nt_contiguous."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.m_grouped.m_grouped_fp8_gemm_swiglu_nt_contiguous import m_grouped_fp8_gemm_swiglu_nt_contiguous
from tk_gemm.testing.lib.compare import assert_close_pairs
from tk_gemm.testing.lib.inputs import activations, ids, psum, weights
from tk_gemm.testing.m_grouped.m_grouped_fp8_gemm_nt_contiguous import ODD, ODD_ROWS, UNEVEN


def make(
    counts: tuple[int, ...],
    num_rows: int,
    inner: int,
    k: int,
    *,
    layout: str = "column",
    with_psum: bool = False,
    weighted: bool = False,
    clamp: float | None = None,
) -> Callable[[str], dict[str, Any]]:
    """Arguments for groups of these counts in a buffer of num_rows rows; factors such that gates are about 1."""

    def build(device: str) -> dict[str, Any]:
        packed = layout == "packed"
        a = activations(num_rows, k, device, layout)
        b = weights(2 * inner, k, device, len(counts), packed=packed)
        if packed:  # 2**-18 of the factors: less from each of the four bytes of a word.
            a[1].sub_(12 * 0x01010101)
            b[1].sub_(6 * 0x01010101)
        else:
            a[1].mul_(1e-3 * k**-0.5)
            b[1].mul_(1e-1)
        arguments: dict[str, Any] = {
            "a": a,
            "b": b,
            "grouped_layout": psum(counts, device) if with_psum else ids(counts, num_rows, device),
            "use_psum_layout": with_psum,
            "swiglu_clamp_value": clamp,
        }
        if weighted:
            arguments["pos_to_token_topk"] = torch.arange(num_rows, dtype=torch.int32, device=device) - 1
            arguments["topk_weights"] = torch.rand((max(1, num_rows // 2), 1), device=device)
        return arguments

    return build


SPEC = OpSpec(
    op=m_grouped_fp8_gemm_swiglu_nt_contiguous,
    reference=reference.m_grouped_fp8_gemm_swiglu_nt_contiguous,
    compare=assert_close_pairs,
    archs=("sm_90a",),
    cases=(
        Case("g2-i128-k128", make((3, 1), 256, 128, 128), small=True, modes=True),
        Case("g2-i128-k128-weighted", make((3, 1), 256, 128, 128, weighted=True), small=True),
        Case("g2-i128-k128-clamp", make((3, 1), 256, 128, 128, clamp=0.5), small=True),
        Case(
            "g2-i128-k128-psum-weighted-clamp",
            make((3, 1), 256, 128, 128, with_psum=True, weighted=True, clamp=0.5),
            small=True,
            modes=True,
        ),
        Case("g2-i128-k128-row-major", make((3, 1), 256, 128, 128, layout="row"), small=True),
        *(
            Case(f"g2-i{name}-packed", build, small=True, compile=True, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("640-k640", make((3, 130), 384, 640, 640, layout="packed")),
                ("128-k128-psum-clamp", make((3, 1), 256, 128, 128, layout="packed", with_psum=True, clamp=0.5)),
                ("128-k128-weighted", make((3, 1), 256, 128, 128, layout="packed", weighted=True)),
            )
        ),
        Case("g2-i128-k128-no-rows", make((0, 0), 0, 128, 128), small=True),
        Case("g6-i2048-k512", make(UNEVEN, 4096, 2048, 512), compile=True),
        Case("g6-i2048-k512-weighted-clamp", make(UNEVEN, 4096, 2048, 512, weighted=True, clamp=1.0), compile=True),
        Case("g6-i256-k7168-psum", make(ODD, ODD_ROWS, 256, 7168, with_psum=True), compile=True),
        Case("g6-i384-k256-row-major-clamp", make(ODD, ODD_ROWS, 384, 256, layout="row", clamp=0.3), compile=True),
        Case("g32-m32768-i2048-k7168-bench", make((1024,) * 32, 32768, 2048, 7168), bench=True, gpu=False),
    ),
)
