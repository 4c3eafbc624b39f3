"""m_grouped_bf16_gemm_nt_contiguous and nn."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.testing import tiers
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.testing.lib.inputs import bf16, ids, psum
from tk_gemm.testing.m_grouped.m_grouped_bf16_gemm_nt_contiguous import SPEC
from tk_gemm.testing.m_grouped.m_grouped_fp8_gemm_nt_contiguous import ODD, ODD_ROWS

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


def test_against_a_float64_product() -> None:
    a, b, groups = bf16(ODD_ROWS, 64, device="cpu"), bf16(len(ODD), 8, 64, device="cpu"), ids(ODD, ODD_ROWS, "cpu")
    a[groups < 0] = torch.nan
    d = tk_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, groups)
    ends = psum(ODD, "cpu")
    assert_equal(tk_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, ends, use_psum_layout=True), d)
    assert_equal(tk_gemm.m_grouped_bf16_gemm_nn_contiguous(a, b.mT.contiguous(), None, groups), d)
    assert not d[groups < 0].any()
    for group in range(len(ODD)):
        rows = groups == group
        assert calc_diff(d[rows], a[rows].double() @ b[group].double().T) < 1e-5


A, B, LAYOUT = bf16(256, 64, device="cpu"), bf16(2, 8, 64, device="cpu"), ids((3, 1), 256, "cpu")


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": A.half()}),
        (ValueError, "b", {"b": B[0]}),
        (ValueError, "b", {"b": B[:, :, :32]}),
        (TypeError, "d", {"d": torch.empty(256, 8)}),
        (ValueError, "d", {"d": A[:, :8]}),
        (TypeError, "grouped_layout", {"grouped_layout": None}),
        (ValueError, "grouped_layout", {"grouped_layout": LAYOUT[1:]}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.m_grouped_bf16_gemm_nt_contiguous(**{"a": A, "b": B, "d": None, "grouped_layout": LAYOUT, **changes})
