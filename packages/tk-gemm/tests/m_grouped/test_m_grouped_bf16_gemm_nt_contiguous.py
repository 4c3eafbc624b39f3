"""m_grouped_bf16_gemm_nt_contiguous and nn."""

from typing import Any

import torch

import tk_gemm
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff

from ..compare import assert_close
from ..inputs import bf16, ids, psum
from .test_m_grouped_fp8_gemm_nt_contiguous import ODD, ODD_ROWS, UNEVEN, shared_cases


def make(
    counts: tuple[int, ...], num_rows: int, n: int, k: int, *, with_psum: bool = False, transposed: bool = False
) -> Make:
    """Arguments for groups of these counts in a buffer of num_rows rows; d has sevens in it. b may be a view."""

    def build(device: str) -> dict[str, Any]:
        shape = (len(counts), k, n) if transposed else (len(counts), n, k)
        b = bf16(*shape, device=device)
        return {
            "a": bf16(num_rows, k, device=device),
            "b": b.mT if transposed else b,
            "d": torch.full((num_rows, n), 7.0, dtype=torch.bfloat16, device=device),
            "grouped_layout": psum(counts, device) if with_psum else ids(counts, num_rows, device),
            "use_psum_layout": with_psum,
        }

    return build


SPEC = OpSpec(
    op=tk_gemm.m_grouped_bf16_gemm_nt_contiguous,
    compare=assert_close,
    mutates=("d",),
    cases=(
        *shared_cases(make, 8, 64),
        Case("g6-n4096-k320", make(UNEVEN, 4096, 4096, 320)),
        Case("g6-n4096-k320-psum", make(UNEVEN, 4096, 4096, 320, with_psum=True)),
        Case("g6-n136-k7168", make(ODD, ODD_ROWS, 136, 7168)),
        Case("g256-n512-k128", make((5,) * 256, 256 * 128, 512, 128)),
        Case("g256-n512-k128-psum", make((5,) * 256, 256 * 128, 512, 128, with_psum=True)),
        Case("g2-n8-k64-nn", make((3, 1), 256, 8, 64, transposed=True), small=True, modes=True),
        Case("g6-n4096-k320-nn", make(UNEVEN, 4096, 4096, 320, transposed=True), compile=True),
        Case("g6-n136-k7168-psum-nn", make(ODD, ODD_ROWS, 136, 7168, with_psum=True, transposed=True), compile=True),
        bench_case("g32-n4096-k7168-nn", make((1024,) * 32, 32768, 4096, 7168, transposed=True)),
    ),
)


test_tiers = tiers.tests(SPEC)


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


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": None, "grouped_layout": LAYOUT},
    [
        ({"b": B[:, :, :32]}, ValueError, "^b"),
        ({"b": B[:0]}, ValueError, "^b: .*one group"),
        ({"d": A[:, :8]}, ValueError, "^d"),
        ({"grouped_layout": LAYOUT[1:]}, ValueError, "^grouped_layout"),
    ],
)
