"""m_grouped_fp8_gemm_nt_contiguous and nn."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk_gemm
from tk_core import env
from tk_core.math import align
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal

from ..compare import assert_close
from ..inputs import activations, ids, psum, weights

ODD = (0, 1, 127, 128, 129, 0)
ODD_ROWS = 640
UNEVEN = (1000, 0, 129, 1408, 7, 1280)


def routed_counts(num_tokens: int, num_topk: int, num_experts: int) -> tuple[int, ...]:
    """How many tokens each expert has where some are twice as popular as others, as with a trained router."""
    drawn = random.Random(0)
    popularity = [drawn.lognormvariate(0, 0.28) for _ in range(num_experts)]
    counts = Counter(drawn.choices(range(num_experts), popularity, k=num_tokens * num_topk))
    return tuple(counts[expert] for expert in range(num_experts))


ROUTED = routed_counts(4096, 8, 256)
ROUTED_ROWS = sum(align(count, 128) for count in ROUTED)


def make(
    counts: tuple[int, ...], num_rows: int, n: int, k: int, *, layout: str = "column", with_psum: bool = False
) -> Make:
    """Arguments for groups of these counts in a buffer of num_rows rows; d has sevens in it."""

    def build(device: str) -> dict[str, Any]:
        return {
            "a": activations(num_rows, k, device, layout),
            "b": weights(n, k, device, len(counts), packed=layout == "packed"),
            "d": torch.full((num_rows, n), 7.0, dtype=torch.bfloat16, device=device),
            "grouped_layout": psum(counts, device) if with_psum else ids(counts, num_rows, device),
            "use_psum_layout": with_psum,
        }

    return build


def shared_cases(make: Callable[..., Make], n: int, k: int) -> list[Case]:
    """Cases of make(counts, num_rows, n, k, with_psum=…) for rows by expert; the small ones have this n and k."""
    return [
        Case(f"g2-n{n}-k{k}", make((3, 1), 256, n, k), small=True, modes=True),
        Case(f"g6-n{n}-k{k}-odd", make(ODD, ODD_ROWS, n, k), small=True),
        Case(f"g6-n{n}-k{k}-odd-psum", make(ODD, ODD_ROWS, n, k, with_psum=True), small=True, modes=True),
        Case(f"g2-n{n}-k{k}-past-the-end", make((3, 130), 200, n, k, with_psum=True), small=True),
        Case(f"g2-n{n}-k{k}-no-rows", make((0, 0), 0, n, k), small=True),
        *(
            bench_case(f"g{g}-m{g * m}-n{n}-k{k}", make((m,) * g, g * m, n, k))
            for g, m in ((4, 8192), (32, 1024), (256, 128))
            for n, k in ((4096, 7168), (7168, 2048))
        ),
    ]


SPEC = OpSpec(
    op=tk_gemm.m_grouped_fp8_gemm_nt_contiguous,
    compare=assert_close,
    mutates=("d",),
    archs=("sm_90a",),
    cases=(
        *shared_cases(make, 16, 128),
        Case("g2-n144-k256-row-major", make((3, 130), 384, 144, 256, layout="row"), small=True),
        *(
            Case(f"g2-n144-k640{name}-packed", build, small=True, compile=True, archs=("sm_100a",), gpu=False)
            for name, build in (
                ("", make((3, 130), 384, 144, 640, layout="packed")),
                ("-psum", make((3, 130), 384, 144, 640, layout="packed", with_psum=True)),
            )
        ),
        Case("g6-n4096-k512", make(UNEVEN, 4096, 4096, 512), compile=True),
        Case("g6-n4096-k512-psum", make(UNEVEN, 4096, 4096, 512, with_psum=True)),
        Case("g6-n144-k7168", make(ODD, ODD_ROWS, 144, 7168)),
        Case("g6-n2048-k256-psum", make(ODD, ODD_ROWS, 2048, 256, with_psum=True)),
        Case("g256-n512-k256", make((5,) * 256, 256 * 128, 512, 256)),
        Case("g256-n512-k256-psum", make((5,) * 256, 256 * 128, 512, 256, with_psum=True)),
        Case("g4-n1024-k256-one-group", make((0, 0, 2000, 0), 2048, 1024, 256, with_psum=True)),
        *(
            bench_case(f"g256-routed-n{n}-k{k}", make(ROUTED, ROUTED_ROWS, n, k))
            for n, k in ((4096, 7168), (7168, 2048))
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


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


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": None, "grouped_layout": LAYOUT},
    [
        ({"a": A[0]}, TypeError, "^a"),
        ({"a": (A[0], torch.ones(256, 4))}, ValueError, r"^a\[1\]"),
        ({"b": (B[0][:0], B[1][:0])}, ValueError, r"^b\[0\]"),
        ({"b": (B[0], B[1][:1])}, ValueError, r"^b\[1\]"),
        ({"grouped_layout": LAYOUT[:255]}, ValueError, "^grouped_layout"),
        ({"use_psum_layout": True}, ValueError, "^grouped_layout"),
        ({"recipe": (1, 1, 128)}, ValueError, "^recipe"),
        ({"recipe_b": (1, 128)}, ValueError, "^recipe_b"),
    ],
)
