"""m_grouped_bf16_gemm_nt_masked."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.testing import tiers
from tk_gemm.testing.lib.inputs import bf16
from tk_gemm.testing.m_grouped.m_grouped_bf16_gemm_nt_masked import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

COUNTS = torch.tensor([3, 0], dtype=torch.int32)
A, B = bf16(2, 5, 64, device="cpu"), bf16(2, 8, 64, device="cpu")


def test_by_hand() -> None:
    d = torch.full((2, 5, 8), 7.0, dtype=torch.bfloat16)
    tk_gemm.m_grouped_bf16_gemm_nt_masked(torch.ones_like(A), torch.ones_like(B) / 2, d, COUNTS, 3)
    assert d[0, :3].tolist() == [[32.0] * 8] * 3
    assert (d[0, 3:] == 7).all()
    assert (d[1] == 7).all()


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": A.float()}),
        (ValueError, "a", {"a": A[0]}),
        (ValueError, "b", {"b": B[:1]}),
        (ValueError, "b", {"b": B[:, :4]}),
        (TypeError, "d", {"d": torch.empty(2, 5, 8)}),
        (TypeError, "masked_m", {"masked_m": [3, 0]}),
        (TypeError, "expected_m", {"expected_m": 1.0}),
        (TypeError, "compiled_dims", {"compiled_dims": 1}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.m_grouped_bf16_gemm_nt_masked(
            **{"a": A, "b": B, "d": None, "masked_m": COUNTS, "expected_m": 3, **changes}
        )
