"""bf16_gemm_nt, nn, tn and tt."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.arch import UnsupportedArchError, arch_from_name
from tk_core.kernel import Kernel, capture
from tk_core.testing import tiers
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.lib.bf16_product import bf16_product_kernel
from tk_gemm.lib.bf16_product_blackwell import bf16_product_blackwell_kernel
from tk_gemm.testing.dense.bf16_gemm_nt import SPEC
from tk_gemm.testing.lib.inputs import bf16

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


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


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": A.float()}),
        (ValueError, "a", {"a": A[:, :96]}),
        (ValueError, "a", {"a": A[0]}),
        (ValueError, "a", {"a": bf16(3, 132, device="cpu")[:, :128]}),
        (ValueError, "a", {"a": bf16(3 * 128 + 1, device="cpu")[1:].view(3, 128)}),
        (ValueError, "d", {"d": A[:, :16]}),
        (ValueError, "b", {"b": B[:12]}),
        (ValueError, "b", {"b": B[:, :64]}),
        (ValueError, "d", {"d": torch.empty(3, 8)}),
        (TypeError, "d", {"d": torch.empty(3, 16).half()}),
        (TypeError, "c", {"c": torch.empty(3, 16), "d": torch.empty(3, 16).bfloat16()}),
        (TypeError, "compiled_dims", {"compiled_dims": None}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.bf16_gemm_nt(**{"a": A, "b": B, **changes})
