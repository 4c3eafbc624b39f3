"""Named cases of fp8_gemm_nt."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_gemm import reference
from tk_gemm.dense.fp8_gemm_nt import fp8_gemm_nt
from tk_gemm.testing.lib.compare import assert_close
from tk_gemm.testing.lib.inputs import activations, weights

SHAPES = (
    (4096, 7168, 16384),
    (4096, 4096, 7168),
    (4096, 24576, 1536),
    (4096, 7168, 2048),
    (4096, 2112, 7168),
    (4096, 32768, 512),
    (8192, 8192, 8192),
    (64, 7168, 16384),
    (128, 4096, 7168),
    (128, 7168, 2048),
)


def make(
    m: int,
    n: int,
    k: int,
    *,
    layout: str = "column",
    dtype: torch.dtype = torch.bfloat16,
    with_c: bool = False,
    per_row: bool = False,
) -> Callable[[str], dict[str, Any]]:
    """Arguments of fp8_gemm_nt; d is given, with sevens in it."""

    def build(device: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "a": activations(m, k, device, layout),
            "b": activations(n, k, device, layout) if per_row else weights(n, k, device, packed=layout == "packed"),
            "d": torch.full((m, n), 7.0, dtype=dtype, device=device),
        }
        if with_c:
            arguments["c"] = torch.randn((m, n), device=device).to(dtype)
        if per_row:
            arguments["recipe"] = (1, 1, 128)
        return arguments

    return build


SPEC = OpSpec(
    op=fp8_gemm_nt,
    reference=reference.fp8_gemm_nt,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        Case("m3-n144-k256", make(3, 144, 256), small=True, modes=True),
        Case("m0-n16-k128", make(0, 16, 128), small=True),
        Case("m1-n16-k128", make(1, 16, 128), small=True),
        Case("m3-n144-k256-row-major", make(3, 144, 256, layout="row"), small=True),
        Case("m3-n144-k256-sliced", make(3, 144, 256, layout="sliced"), small=True),
        Case("m5-n32-k384-float32-c", make(5, 32, 384, dtype=torch.float32, with_c=True), small=True, modes=True),
        Case("m5-n32-k384-c", make(5, 32, 384, with_c=True), small=True),
        Case("m16-n48-k256-per-row", make(16, 48, 256, dtype=torch.float32, per_row=True), small=True),
        Case("m4096-n4096-k256", make(4096, 4096, 256), compile=True),
        Case("m2048-n2048-k384-c", make(2048, 2048, 384, with_c=True), compile=True),
        Case("m4096-n4096-k256-float32", make(4096, 4096, 256, dtype=torch.float32), compile=True),
        Case("m129-n64-k128", make(129, 64, 128), compile=True),
        Case("m63-n32768-k256", make(63, 32768, 256)),
        Case("m64-n7168-k16384", make(64, 7168, 16384), compile=True),
        Case("m1-n2112-k7168-row-major", make(1, 2112, 7168, layout="row")),
        Case("m4096-n2112-k1024-row-major", make(4096, 2112, 1024, layout="row"), compile=True),
        Case("m1000-n272-k7168-sliced", make(1000, 272, 7168, layout="sliced")),
        Case("m300-n528-k7168-float32-c", make(300, 528, 7168, dtype=torch.float32, with_c=True), compile=True),
        Case("m129-n400-k16384-per-row", make(129, 400, 16384, dtype=torch.float32, per_row=True), compile=True),
        Case(
            "m130-n144-k256-per-row-row-major",
            make(130, 144, 256, dtype=torch.float32, per_row=True, layout="row", with_c=True),
        ),
        Case("m16-n48-k128-per-row-off", make(16, 48, 128, dtype=torch.float32, per_row=True, layout="off")),
        Case("m16-n48-k128-off", make(16, 48, 128, layout="off")),
        *(
            Case(f"{name}-packed", build, small=True, compile=True, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("m3-n144-k640", make(3, 144, 640, layout="packed")),
                ("m3-n144-k128-float32-c", make(3, 144, 128, dtype=torch.float32, with_c=True, layout="packed")),
                ("m5-n48-k640-per-row", make(5, 48, 640, dtype=torch.float32, per_row=True, layout="packed")),
            )
        ),
        *(Case(f"m{m}-n{n}-k{k}-bench", make(m, n, k), bench=True, gpu=False) for m, n, k in SHAPES),
    ),
)
