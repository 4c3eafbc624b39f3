"""bf16_gemm_nt, nn, tn and tt."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import Kernel, capture
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.blackwell.bf16 import bf16_product_blackwell_kernel
from tk_gemm.hopper.bf16 import bf16_product_kernel

from ..compare import assert_close
from ..inputs import bf16
from .test_fp8_gemm_nt import SHAPES


def make(
    m: int,
    n: int,
    k: int,
    order: str = "nt",
    *,
    dtype: torch.dtype = torch.bfloat16,
    with_c: bool = False,
    sliced: bool = False,
) -> Make:
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
    op=tk_gemm.bf16_gemm_nt,
    compare=assert_close,
    mutates=("d",),
    cases=(
        # hopper/test_bf16_machine_code.py compiles each tile, so that the compile tier needs not.
        Case("m3-n136-k192", make(3, 136, 192), small=True, modes=True),
        Case("m0-n8-k64", make(0, 8, 64), small=True),
        Case("m0-n8-k64-tn", make(0, 8, 64, "tn"), small=True),
        Case("m1-n8-k64", make(1, 8, 64), small=True),
        Case("m5-n24-k128-float32-c", make(5, 24, 128, dtype=torch.float32, with_c=True), small=True, modes=True),
        Case("m5-n24-k128-c", make(5, 24, 128, with_c=True), small=True),
        Case("m5-n24-k128-sliced", make(5, 24, 128, sliced=True), small=True),
        Case("m3-n24-k128-new", lambda device: {**make(3, 24, 128)(device), "d": None}, small=True, gpu=False),
        Case("m4096-n4096-k320", make(4096, 4096, 320)),
        Case("m4096-n2112-k1024", make(4096, 2112, 1024)),
        Case("m2048-n2048-k384-c", make(2048, 2048, 384, with_c=True), compile=True),
        Case("m129-n264-k64", make(129, 264, 64), compile=True),
        Case("m64-n7168-k16384", make(64, 7168, 16384)),
        Case("m1000-n520-k7168-sliced", make(1000, 520, 7168, sliced=True)),
        Case("m300-n4104-k7168-float32-c", make(300, 4104, 7168, dtype=torch.float32, with_c=True)),
        *(
            case
            for order in ("nn", "tn", "tt")
            for case in (
                Case(f"m8-n136-k192-{order}", make(8, 136, 192, order), small=True, modes=True),
                Case(f"m8-n24-k128-{order}-c", make(8, 24, 128, order, dtype=torch.float32, with_c=True), small=True),
                Case(f"m136-n264-k64-{order}-sliced", make(136, 264, 64, order, sliced=True), compile=order == "tt"),
                Case(f"m4096-n4096-k320-{order}", make(4096, 4096, 320, order), compile=order == "tt"),
                Case(f"m4096-n2112-k1024-{order}", make(4096, 2112, 1024, order), compile=order == "nn"),
                Case(f"m128-n7168-k2048-{order}", make(128, 7168, 2048, order)),
                bench_case(f"m4096-n4096-k7168-{order}", make(4096, 4096, 7168, order)),
            )
        ),
        *(bench_case(f"m{m}-n{n}-k{k}", make(m, n, k)) for m, n, k in SHAPES),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_against_a_float64_product() -> None:
    a, b = bf16(8, 320, device="cpu"), bf16(24, 320, device="cpu")
    expected = a.double() @ b.double().T
    assert calc_diff(tk_gemm.bf16_gemm_nt(a, b), expected) < 1e-5
    assert calc_diff(tk_gemm.bf16_gemm_nt(a, b, torch.empty(8, 24)), expected) < 1e-12


def test_other_orders() -> None:
    a, b = bf16(8, 320, device="cpu"), bf16(24, 320, device="cpu")
    expected = tk_gemm.bf16_gemm_nt(a, b)
    assert_equal(tk_gemm.bf16_gemm_nn(a, b.t().contiguous()), expected)
    assert_equal(tk_gemm.bf16_gemm_tn(a.t().contiguous(), b.t().contiguous()), expected)
    assert_equal(tk_gemm.bf16_gemm_tt(a.t().contiguous(), b), expected)


def test_by_hand() -> None:
    """Row 0 of a is 1 in channel 0 and 2 in channel 64, b's row n is n in all channels."""
    a, b = torch.zeros(2, 128), torch.arange(8.0)[:, None].expand(8, 128)
    a[0, 0], a[0, 64] = 1, 2
    d = tk_gemm.bf16_gemm_nt(a.bfloat16(), b.bfloat16().contiguous(), c=torch.full((2, 8), 0.5))
    assert d.dtype == torch.float32
    assert d.tolist() == [[3.0 * n + 0.5 for n in range(8)], [0.5] * 8]


def test_c_may_be_d() -> None:
    a, b, c = bf16(3, 128, device="cpu"), bf16(16, 128, device="cpu"), torch.randn(3, 16)
    expected = tk_gemm.bf16_gemm_nt(a, b, c=c)
    assert tk_gemm.bf16_gemm_nt(a, b, c, c) is c
    assert_equal(c, expected)


def test_a_transposed_operand_has_columns_on_16_bytes() -> None:
    a, b = bf16(64, 12, device="cpu"), bf16(16, 64, device="cpu")
    with pytest.raises(ValueError, match=r"^a: expected strides that are multiples of 8 elements, got stride 12"):
        tk_gemm.bf16_gemm_tt(a, b)
    for wrong, error in ((a[0], ValueError), (None, TypeError)):
        with pytest.raises(error, match=r"^a: expected"):
            tk_gemm.bf16_gemm_tt(wrong, b)


@pytest.mark.parametrize(
    ("arch", "kernel"), [("sm_90a", bf16_product_kernel), ("sm_100a", bf16_product_blackwell_kernel)]
)
def test_each_architecture_has_a_kernel_of_its_own(arch: str, kernel: Kernel) -> None:
    a, b = bf16(3, 128, device="meta"), bf16(16, 128, device="meta")
    with capture(arch_from_name(arch)) as launched:
        tk_gemm.bf16_gemm_nt(a, b)
    assert [request.kernel for request in launched] == [kernel]


@pytest.mark.parametrize("arch", ["sm_89", "sm_120a"])
def test_other_architectures_are_refused(arch: str) -> None:
    a, b = bf16(3, 128, device="meta"), bf16(16, 128, device="meta")
    with capture(arch_from_name(arch)), pytest.raises(UnsupportedArchError, match=f"found {arch}"):
        tk_gemm.bf16_gemm_nt(a, b)


A, B = bf16(3, 128, device="cpu"), bf16(16, 128, device="cpu")


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B},
    [
        ({"a": A[:, :96]}, ValueError, "^a"),
        ({"a": bf16(3, 132, device="cpu")[:, :128]}, ValueError, "^a"),
        ({"a": bf16(3 * 128 + 1, device="cpu")[1:].view(3, 128)}, ValueError, "^a"),
        ({"d": A[:, :16]}, ValueError, "^d"),
        ({"b": B[:12]}, ValueError, "^b"),
        ({"b": B[:, :64]}, ValueError, "^b"),
        ({"d": torch.empty(3, 8)}, ValueError, "^d"),
        ({"c": torch.empty(3, 16), "d": torch.empty(3, 16).bfloat16()}, TypeError, "^c"),
    ],
)
