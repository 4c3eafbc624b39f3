"""Named cases of k_grouped_bf16_gemm_tn_contiguous."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import align
from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.k_grouped.k_grouped_bf16_gemm_tn_contiguous import k_grouped_bf16_gemm_tn_contiguous
from tk_gemm.testing.lib.compare import assert_close
from tk_gemm.testing.lib.inputs import bf16, psum


def make(
    ks: tuple[int, ...],
    m: int,
    n: int,
    *,
    with_psum: bool = False,
    with_c: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[[str], dict[str, Any]]:
    """Arguments for groups of these sizes along K; with_psum, of these counts, each padded to 128 with zeros."""

    def build(device: str) -> dict[str, Any]:
        sizes = [align(size, 128) for size in ks]
        a, b = bf16(sum(sizes), m, device=device), bf16(sum(sizes), n, device=device)
        first = 0
        for size, count in zip(sizes, ks):
            a[first + count : first + size] = 0
            b[first + count : first + size] = 0
            first += size
        shape = (len(ks), m, n)
        return {
            "a": a,
            "b": b,
            "d": torch.full(shape, 7.0, dtype=dtype, device=device),
            "ks": psum(ks, device) if with_psum else sizes,
            "c": torch.randn(shape, device=device).to(dtype) if with_c else None,
        }

    return build


SPEC = OpSpec(
    op=k_grouped_bf16_gemm_tn_contiguous,
    reference=reference.k_grouped_bf16_gemm_tn_contiguous,
    compare=assert_close,
    mutates=("d",),
    cases=(
        Case("g3-m8-n16", make((128, 0, 256), 8, 16), small=True, modes=True),
        Case("g3-m8-n16-c", make((128, 0, 256), 8, 16, with_c=True), small=True),
        Case("g3-m8-n16-bfloat16-c", make((128, 0, 256), 8, 16, dtype=torch.bfloat16, with_c=True), small=True),
        Case("g5-m8-n16-psum", make((0, 1, 127, 128, 129), 8, 16, with_psum=True), small=True, modes=True),
        Case("g1-m8-n8-no-k", make((0,), 8, 8), small=True),
        Case("g4-m264-n392", make((1024, 128, 0, 4096), 264, 392), compile=True),
        Case("g4-m264-n392-c", make((1024, 128, 0, 4096), 264, 392, with_c=True)),
        Case("g8-m2048-n2048", make((1024, 128, 0, 512) * 2, 2048, 2048, with_c=True), compile=True),
        Case("g8-m2048-n2048-bfloat16", make((1024, 128, 0, 512) * 2, 2048, 2048, dtype=torch.bfloat16), compile=True),
        Case("g64-m256-n512-psum", make((200, 0, 3, 128) * 16, 256, 512, with_psum=True)),
        Case("g4-m4096-n7168-k8192-bench", make((8192,) * 4, 4096, 7168), bench=True, gpu=False),
        Case("g32-m7168-n2048-k1024-bench", make((1024,) * 32, 7168, 2048), bench=True, gpu=False),
    ),
)
