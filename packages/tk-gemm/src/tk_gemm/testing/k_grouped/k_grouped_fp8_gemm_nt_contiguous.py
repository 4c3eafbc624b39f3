"""Named cases of k_grouped_fp8_gemm_nt_contiguous."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import align
from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.k_grouped.k_grouped_fp8_gemm_nt_contiguous import k_grouped_fp8_gemm_nt_contiguous
from tk_gemm.testing.lib.compare import assert_close
from tk_gemm.testing.lib.inputs import e4m3, packed_factors, psum


def make(
    ks: tuple[int, ...],
    m: int,
    n: int,
    *,
    flat: bool = False,
    with_psum: bool = False,
    with_c: bool = False,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
) -> Callable[[str], dict[str, Any]]:
    """Arguments for groups of these sizes along K; with_psum, of these counts, each padded to 128 with zeros."""

    def build(device: str) -> dict[str, Any]:
        sizes = [align(size, 128) for size in ks]
        total = sum(sizes)

        def operand(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            sf = torch.rand((total // 128, num_rows), device=device) + 0.5
            if packed:
                sf = packed_factors(num_rows, total // 128, device=device).t()
            data = e4m3(num_rows, total, device=device)
            first, parts = 0, []
            for size, count in zip(sizes, ks):
                data.view(torch.uint8)[:, first + count : first + size] = 0
                parts.append(data.view(torch.uint8)[:, first : first + size].flatten())
                first += size
            return (torch.cat(parts).view(data.dtype), sf.t()) if flat else (data, sf)

        shape = (len(ks), m, n)
        return {
            "a": operand(m),
            "b": operand(n),
            "d": torch.full(shape, 7.0, dtype=dtype, device=device),
            "ks": psum(ks, device) if with_psum else sizes,
            "c": torch.randn(shape, device=device).to(dtype) if with_c else None,
        }

    return build


SPEC = OpSpec(
    op=k_grouped_fp8_gemm_nt_contiguous,
    reference=reference.k_grouped_fp8_gemm_nt_contiguous,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        Case("g3-m16-n32", make((128, 0, 256), 16, 32), small=True, modes=True),
        Case("g3-m16-n32-c", make((128, 0, 256), 16, 32, with_c=True), small=True, modes=True),
        Case("g3-m16-n32-bfloat16", make((128, 0, 256), 16, 32, dtype=torch.bfloat16), small=True),
        Case("g3-m16-n32-bfloat16-c", make((128, 0, 256), 16, 32, dtype=torch.bfloat16, with_c=True), small=True),
        Case("g3-m16-n32-flat", make((128, 0, 256), 16, 32, flat=True), small=True, modes=True),
        Case("g5-m16-n32-psum", make((0, 1, 127, 128, 129), 16, 32, with_psum=True), small=True, modes=True),
        Case("g5-m16-n32-flat-psum", make((0, 1, 127, 128, 129), 16, 32, flat=True, with_psum=True), small=True),
        Case("g1-m16-n16-no-k", make((0,), 16, 16), small=True),
        Case("g2-m16-n16-no-k-c", make((0, 0), 16, 16, with_c=True), small=True),
        *(
            Case(f"{name}-packed", build, small=True, compile=True, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("g3-m16-n32", make((128, 0, 768), 16, 32, packed=True)),
                ("g5-m16-n32-psum-c", make((0, 1, 127, 700, 129), 16, 32, with_psum=True, with_c=True, packed=True)),
                ("g3-m16-n32-flat", make((128, 0, 768), 16, 32, flat=True, dtype=torch.bfloat16, packed=True)),
            )
        ),
        Case("g4-m272-n400", make((1024, 128, 0, 4096), 272, 400, flat=True), compile=True),
        Case("g4-m272-n400-c", make((1024, 128, 0, 4096), 272, 400, with_c=True), compile=True),
        Case("g4-m272-n400-bfloat16", make((1024, 128, 0, 4096), 272, 400, dtype=torch.bfloat16), compile=True),
        Case(
            "g4-m144-n2064-bfloat16-c",
            make((1024, 128, 0, 4096), 144, 2064, dtype=torch.bfloat16, with_c=True),
            compile=True,
        ),
        Case("g64-m256-n512-psum", make((200, 0, 3, 128) * 16, 256, 512, with_psum=True)),
        Case("g4-m4096-n7168-k8192-bench", make((8192,) * 4, 4096, 7168), bench=True, gpu=False),
        Case("g4-m4096-n7168-k8192-flat-bench", make((8192,) * 4, 4096, 7168, flat=True), bench=True, gpu=False),
        Case("g32-m7168-n2048-k1024-bench", make((1024,) * 32, 7168, 2048), bench=True, gpu=False),
    ),
)
