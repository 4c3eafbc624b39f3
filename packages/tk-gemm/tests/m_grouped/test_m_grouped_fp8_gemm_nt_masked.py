"""m_grouped_fp8_gemm_nt_masked."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import env
from tk_core.testing import tiers
from tk_core.testing.numeric import assert_equal
from tk_gemm.testing.lib.inputs import e4m3, weights
from tk_gemm.testing.m_grouped.m_grouped_fp8_gemm_nt_masked import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

COUNTS = torch.tensor([3, 0, 9], dtype=torch.int32)
A, B = (e4m3(3, 5, 128, device="cpu"), torch.rand(3, 5, 1)), weights(16, 128, "cpu", 3)


def test_rows_are_those_of_the_dense_product_and_others_stay() -> None:
    d = torch.full((3, 5, 16), 7.0, dtype=torch.bfloat16)
    sf = A[1].clone()
    sf[0, 3:] = torch.nan
    sf[1] = torch.nan
    assert tk_gemm.m_grouped_fp8_gemm_nt_masked((A[0], sf), B, d, COUNTS, 3) is d
    for group, count in enumerate((3, 0, 5)):
        dense = tk_gemm.fp8_gemm_nt((A[0][group], A[1][group]), (B[0][group], B[1][group]))
        assert_equal(d[group, :count], dense[:count])
        assert (d[group, count:] == 7).all()


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": None}),
        (ValueError, r"a\[0\]", {"a": (A[0][0], A[1])}),
        (ValueError, r"a\[1\]", {"a": (A[0], A[1][:, :4])}),
        (ValueError, r"b\[0\]", {"b": (B[0][:2], B[1][:2])}),
        (TypeError, "d", {"d": torch.empty(3, 5, 16)}),
        (ValueError, "d", {"d": torch.empty(3, 4, 16).bfloat16()}),
        (TypeError, "masked_m", {"masked_m": COUNTS.long()}),
        (ValueError, "masked_m", {"masked_m": COUNTS[:2]}),
        (TypeError, "expected_m", {"expected_m": None}),
        (ValueError, "expected_m", {"expected_m": -1}),
        (ValueError, "recipe", {"recipe": (1, 1, 128)}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.m_grouped_fp8_gemm_nt_masked(
            **{"a": A, "b": B, "d": None, "masked_m": COUNTS, "expected_m": 3, **changes}
        )


def test_debug_mode_refuses_negative_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    with pytest.raises(ValueError, match="masked_m"):
        tk_gemm.m_grouped_fp8_gemm_nt_masked(A, B, None, COUNTS - 1, 3)
