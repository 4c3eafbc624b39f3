"""m_grouped_fp8_gemm_nt_masked."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import env
from tk_core.math import align
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_core.testing.numeric import assert_equal

from ..compare import assert_close
from ..inputs import e4m3, packed_factors, row_factors, weights
from .test_m_grouped_bf16_gemm_nt_masked import masked_outputs, shared_cases


def make(counts: tuple[int, ...], max_m: int, n: int, k: int, *, layout: str = "column") -> Make:
    """Arguments for groups of these counts."""

    def build(device: str) -> dict[str, Any]:
        num_groups = len(counts)
        if layout == "one-cast":
            sf = row_factors(num_groups * max_m, k // 128, device).unflatten(0, (num_groups, max_m))
        elif layout == "row":
            sf = torch.rand((num_groups, max_m, k // 128), device=device) + 0.5
        elif layout == "packed":
            sf = packed_factors(num_groups, max_m, k // 128, device=device)
        else:
            column = align(max_m, 4)
            strides = (column * (k // 128), 1, column)
            sf = torch.empty_strided((num_groups, max_m, k // 128), strides, device=device).uniform_(0.5, 1.5)
        return {
            "a": (e4m3(num_groups, max_m, k, device=device), sf),
            "b": weights(n, k, device, num_groups, packed=layout == "packed"),
            **masked_outputs(counts, max_m, n, device),
        }

    return build


SPEC = OpSpec(
    op=tk_gemm.m_grouped_fp8_gemm_nt_masked,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        *shared_cases(make, 16, 128),
        Case("g3-n16-k256-one-cast", make((3, 0, 5), 5, 16, 256, layout="one-cast"), small=True),
        Case("g3-n16-k256-row-major", make((3, 0, 5), 5, 16, 256, layout="row"), small=True),
        Case(
            "g3-n144-k640-packed",
            make((3, 0, 5), 8, 144, 640, layout="packed"),
            small=True,
            compile=True,
            archs=("sm_100a",),
            gpu=False,
        ),
        Case("g8-n4096-k512", make((512, 0, 1, 127, 129, 256, 700, 512), 512, 4096, 512), compile=True),
        Case("g256-n256-k256", make((3, 0, 130, 128) * 64, 192, 256, 256)),
        Case("g8-n256-k256-one-cast", make((512, 0, 1, 127, 129, 256, 700, 512), 512, 256, 256, layout="one-cast")),
    ),
)


test_tiers = tiers.tests(SPEC)

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


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": None, "masked_m": COUNTS, "expected_m": 3},
    [
        ({"a": None}, TypeError, "^a"),
        ({"a": (A[0], A[1][:, :4])}, ValueError, r"^a\[1\]"),
        ({"b": (B[0][:2], B[1][:2])}, ValueError, r"^b\[0\]"),
        ({"d": torch.empty(3, 4, 16).bfloat16()}, ValueError, "^d"),
        ({"masked_m": COUNTS[:2]}, ValueError, "^masked_m"),
        ({"expected_m": None}, TypeError, "^expected_m"),
        ({"expected_m": -1}, ValueError, "^expected_m"),
        ({"recipe": (1, 1, 128)}, ValueError, "^recipe"),
    ],
)


def test_debug_mode_refuses_negative_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    with pytest.raises(ValueError, match="masked_m"):
        tk_gemm.m_grouped_fp8_gemm_nt_masked(A, B, None, COUNTS - 1, 3)
