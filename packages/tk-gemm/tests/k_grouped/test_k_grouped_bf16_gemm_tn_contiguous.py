"""k_grouped_bf16_gemm_tn_contiguous."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.testing import tiers
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.testing.k_grouped.k_grouped_bf16_gemm_tn_contiguous import SPEC, make
from tk_gemm.testing.lib.inputs import bf16

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

KS = [128, 0, 256]
A, B = bf16(384, 8, device="cpu"), bf16(384, 16, device="cpu")


def test_against_a_float64_product() -> None:
    d = tk_gemm.k_grouped_bf16_gemm_tn_contiguous(A, B, None, KS)
    assert d.dtype == torch.float32
    for group, rows in enumerate((slice(0, 128), slice(0, 0), slice(128, 384))):
        assert calc_diff(d[group], A[rows].double().T @ B[rows].double()) < 1e-12
    ends = torch.tensor([128, 128, 384], dtype=torch.int32)
    assert_equal(tk_gemm.k_grouped_bf16_gemm_tn_contiguous(A, B, None, ends), d)


def test_c_may_be_d() -> None:
    c = torch.randn(3, 8, 16)
    expected = tk_gemm.k_grouped_bf16_gemm_tn_contiguous(A, B, None, KS) + c
    before = c.clone()
    assert tk_gemm.k_grouped_bf16_gemm_tn_contiguous(A, B, c, KS, c=c) is c
    assert_equal(c, expected)
    assert_equal(c[1], before[1])


@pytest.mark.gpu
def test_bits_are_those_of_the_dense_product() -> None:
    ks = (256, 0, 128, 1024)
    arguments = make(ks, 136, 520)("cuda")
    d = tk_gemm.k_grouped_bf16_gemm_tn_contiguous(**arguments)
    first = 0
    for group, size in enumerate(ks):
        rows = slice(first, first + size)
        if size:
            expected = torch.empty_like(d[group])
            tk_gemm.bf16_gemm_tn(arguments["a"][rows], arguments["b"][rows], expected)
            assert_equal(d[group], expected, name=f"group {group}")
        else:
            assert not d[group].any()
        first += size


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": A.float()}),
        (ValueError, "a", {"a": A[:320]}),
        (ValueError, "b", {"b": B[:256]}),
        (ValueError, "b", {"b": B[:, :4]}),
        (ValueError, "ks", {"ks": [384, 128]}),
        (ValueError, "d", {"d": torch.empty(3, 16, 8)}),
        (ValueError, "c", {"c": torch.empty(3, 16, 8)}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.k_grouped_bf16_gemm_tn_contiguous(**{"a": A, "b": B, "d": None, "ks": KS, **changes})
