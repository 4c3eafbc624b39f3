"""Named cases of bf16_gemm_nt, whose operands may be transposed views."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.dense.bf16_gemm_nt import bf16_gemm_nt
from tk_gemm.testing.dense.fp8_gemm_nt import SHAPES
from tk_gemm.testing.lib.compare import assert_close
from tk_gemm.testing.lib.inputs import bf16


def make(
    m: int,
    n: int,
    k: int,
    order: str = "nt",
    *,
    dtype: torch.dtype = torch.bfloat16,
    with_c: bool = False,
    sliced: bool = False,
) -> Callable[[str], dict[str, Any]]:
    """Arguments of bf16_gemm_nt; d is given, with sevens in it. Operands are transposed views as `order` says."""

    def operand(rows: int, cols: int, device: str) -> torch.Tensor:
        return bf16(rows, cols + 8, device=device)[:, :cols] if sliced else bf16(rows, cols, device=device)

    def build(device: str) -> dict[str, Any]:
        c = torch.randn((m, n), device=device).to(dtype) if with_c else None
        d = torch.full((m, n), 7.0, dtype=dtype, device=device)
        a = operand(m, k, device) if order[0] == "n" else operand(k, m, device).t()
        b = operand(n, k, device) if order[1] == "t" else operand(k, n, device).t()
        return {"a": a, "b": b, "d": d, "c": c}

    return build


SPEC = OpSpec(
    op=bf16_gemm_nt,
    reference=reference.bf16_gemm_nt,
    compare=assert_close,
    mutates=("d",),
    cases=(
        Case("m3-n136-k192", make(3, 136, 192), small=True, modes=True),
        Case("m0-n8-k64", make(0, 8, 64), small=True),
        Case("m0-n8-k64-tn", make(0, 8, 64, "tn"), small=True),
        Case("m1-n8-k64", make(1, 8, 64), small=True),
        Case("m5-n24-k128-float32-c", make(5, 24, 128, dtype=torch.float32, with_c=True), small=True, modes=True),
        Case("m5-n24-k128-c", make(5, 24, 128, with_c=True), small=True),
        Case("m5-n24-k128-sliced", make(5, 24, 128, sliced=True), small=True),
        Case("m4096-n4096-k320", make(4096, 4096, 320), compile=True),
        Case("m4096-n2112-k1024", make(4096, 2112, 1024), compile=True),
        Case("m2048-n2048-k384-c", make(2048, 2048, 384, with_c=True), compile=True),
        Case("m129-n264-k64", make(129, 264, 64), compile=True),
        Case("m64-n7168-k16384", make(64, 7168, 16384), compile=True),
        Case("m1000-n520-k7168-sliced", make(1000, 520, 7168, sliced=True)),
        Case("m300-n4104-k7168-float32-c", make(300, 4104, 7168, dtype=torch.float32, with_c=True), compile=True),
        *(
            case
            for order in ("nn", "tn", "tt")
            for case in (
                Case(f"m8-n136-k192-{order}", make(8, 136, 192, order), small=True, modes=True),
                Case(f"m8-n24-k128-{order}-c", make(8, 24, 128, order, dtype=torch.float32, with_c=True), small=True),
                Case(f"m136-n264-k64-{order}-sliced", make(136, 264, 64, order, sliced=True), compile=True),
                Case(f"m4096-n4096-k320-{order}", make(4096, 4096, 320, order), compile=True),
                Case(f"m4096-n2112-k1024-{order}", make(4096, 2112, 1024, order), compile=True),
                Case(f"m128-n7168-k2048-{order}", make(128, 7168, 2048, order), compile=True),
                Case(f"m4096-n4096-k7168-{order}-bench", make(4096, 4096, 7168, order), bench=True, gpu=False),
            )
        ),
        *(Case(f"m{m}-n{n}-k{k}-bench", make(m, n, k), bench=True, gpu=False) for m, n, k in SHAPES),
    ),
)
