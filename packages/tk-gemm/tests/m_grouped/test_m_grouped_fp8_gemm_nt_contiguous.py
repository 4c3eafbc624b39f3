"""m_grouped_fp8_gemm_nt_contiguous and nn."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import env
from tk_core.testing import tiers
from tk_core.testing.numeric import assert_equal
from tk_gemm.testing.lib.inputs import activations, ids, psum, weights
from tk_gemm.testing.m_grouped.m_grouped_fp8_gemm_nt_contiguous import ODD, ODD_ROWS, SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


@pytest.mark.parametrize("with_psum", [False, True])
def test_rows_are_those_of_the_dense_product_and_padding_is_zero(with_psum: bool) -> None:
    (data, sf), b = activations(ODD_ROWS, 128, "cpu"), weights(16, 128, "cpu", len(ODD))
    groups = ids(ODD, ODD_ROWS, "cpu")
    padding = groups < 0
    # Nothing that padding rows hold may reach d.
    sf[padding] = torch.nan
    layout = psum(ODD, "cpu") if with_psum else groups
    d = tk_gemm.m_grouped_fp8_gemm_nt_contiguous((data, sf), b, None, layout, use_psum_layout=with_psum)
    assert not d[padding].any()
    for group in range(len(ODD)):
        dense = tk_gemm.fp8_gemm_nt((data, sf), (b[0][group], b[1][group]))
        assert_equal(d[groups == group], dense[groups == group])


def test_nn_is_a_view() -> None:
    a, b, layout = activations(256, 128, "cpu"), weights(16, 128, "cpu", 2), ids((3, 1), 256, "cpu")
    expected = tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, layout)
    assert_equal(tk_gemm.m_grouped_fp8_gemm_nn_contiguous(a, (b[0].mT, b[1].mT), None, layout), expected)


def test_debug_mode_looks_at_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    a, b = activations(384, 128, "cpu"), weights(16, 128, "cpu", 2)
    tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, ids((3, 129), 384, "cpu"))
    for first_rows, message in (
        ([0, 0, 1], "expected groups that begin at multiples of 128, got one that begins at row 2"),
        ([1, 1, 0], "expected groups in ascending order, got group 0 in row 2, after group 1"),
        ([0, -1, 0], "expected -1 only after a group's last row, got -1 in row 1, within a group"),
        ([2], "expected groups below 2, got 2"),
    ):
        wrong = ids((0, 0), 384, "cpu")
        wrong[: len(first_rows)] = torch.tensor(first_rows)
        with pytest.raises(ValueError, match=f"^grouped_layout: {message}$"):
            tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, wrong)
    tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, ids((0, 0), 384, "cpu"))
    ends = torch.tensor([130, 200], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^grouped_layout\[1\]: expected at least 256, .* got 200$"):
        tk_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, None, ends, use_psum_layout=True)


def test_alignment() -> None:
    assert tk_gemm.get_mk_alignment_for_contiguous_layout() == 128
    for wrong, error in ((64, ValueError), (256, ValueError), (0, ValueError), (128.0, TypeError)):
        with pytest.raises(error, match="new_alignment"):
            tk_gemm.set_mk_alignment_for_contiguous_layout(wrong)
    tk_gemm.set_mk_alignment_for_contiguous_layout(128)
    assert tk_gemm.get_mk_alignment_for_contiguous_layout() == 128


A, B, LAYOUT = activations(256, 128, "cpu"), weights(16, 128, "cpu", 2), ids((3, 1), 256, "cpu")


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "a", {"a": A[0]}),
        (ValueError, r"a\[1\]", {"a": (A[0], torch.ones(256, 4))}),
        (ValueError, r"b\[0\]", {"b": (B[0][0], B[1])}),
        (ValueError, r"b\[0\]", {"b": (B[0][:0], B[1][:0])}),
        (ValueError, r"b\[1\]", {"b": (B[0], B[1][:1])}),
        (TypeError, "grouped_layout", {"grouped_layout": LAYOUT.long()}),
        (ValueError, "grouped_layout", {"grouped_layout": LAYOUT[:255]}),
        (ValueError, "grouped_layout", {"use_psum_layout": True}),
        (TypeError, "d", {"d": torch.empty(256, 16)}),
        (ValueError, "recipe", {"recipe": (1, 1, 128)}),
        (ValueError, "recipe_b", {"recipe_b": (1, 128)}),
        (TypeError, "use_psum_layout", {"use_psum_layout": 1}),
        (TypeError, "ensure_zero_padding", {"ensure_zero_padding": None}),
        (TypeError, "expected_m_for_psum_layout", {"expected_m_for_psum_layout": 1.5}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{name}"):
        tk_gemm.m_grouped_fp8_gemm_nt_contiguous(**{"a": A, "b": B, "d": None, "grouped_layout": LAYOUT, **changes})
