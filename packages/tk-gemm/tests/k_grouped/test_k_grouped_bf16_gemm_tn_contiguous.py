"""k_grouped_bf16_gemm_tn_contiguous."""

from typing import Any

import pytest
import torch

import tk_gemm
from tk_core.math import align
from tk_core.testing import Case, Make, OpSpec, bench_case, tiers
from tk_core.testing.numeric import assert_equal, calc_diff

from ..compare import assert_close
from ..inputs import bf16, psum


def make(
    ks: tuple[int, ...],
    m: int,
    n: int,
    *,
    with_psum: bool = False,
    with_c: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Make:
    """Arguments for groups of these sizes along K; with_psum, of these counts, each padded to 128 with zeros."""

    def build(device: str) -> dict[str, Any]:
        sizes = [align(size, 128) for size in ks]
        a, b = bf16(sum(sizes), m, device=device), bf16(sum(sizes), n, device=device)
        first = 0
        for size, count in zip(sizes, ks):
            a[first + count : first + size] = 0
            b[first + count : first + size] = 0
            first += size
        shape = (len(ks), m, n)
        return {
            "a": a,
            "b": b,
            "d": torch.full(shape, 7.0, dtype=dtype, device=device),
            "ks": psum(ks, device) if with_psum else sizes,
            "c": torch.randn(shape, device=device).to(dtype) if with_c else None,
        }

    return build


SPEC = OpSpec(
    op=tk_gemm.k_grouped_bf16_gemm_tn_contiguous,
    compare=assert_close,
    mutates=("d",),
    cases=(
        Case("g3-m8-n16", make((128, 0, 256), 8, 16), small=True, modes=True),
        Case("g3-m8-n16-c", make((128, 0, 256), 8, 16, with_c=True), small=True),
        Case("g3-m8-n16-bfloat16-c", make((128, 0, 256), 8, 16, dtype=torch.bfloat16, with_c=True), small=True),
        Case("g5-m8-n16-psum", make((0, 1, 127, 128, 129), 8, 16, with_psum=True), small=True, modes=True),
        Case("g1-m8-n8-no-k", make((0,), 8, 8), small=True),
        Case("g4-m264-n392", make((1024, 128, 0, 4096), 264, 392), compile=True),
        Case("g4-m264-n392-c", make((1024, 128, 0, 4096), 264, 392, with_c=True)),
        Case("g8-m2048-n2048", make((1024, 128, 0, 512) * 2, 2048, 2048, with_c=True)),
        Case("g8-m2048-n2048-bfloat16", make((1024, 128, 0, 512) * 2, 2048, 2048, dtype=torch.bfloat16), compile=True),
        Case("g64-m256-n512-psum", make((200, 0, 3, 128) * 16, 256, 512, with_psum=True)),
        bench_case("g4-m4096-n7168-k8192", make((8192,) * 4, 4096, 7168)),
        bench_case("g32-m7168-n2048-k1024", make((1024,) * 32, 7168, 2048)),
    ),
)


test_tiers = tiers.tests(SPEC)

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


test_bad_input = tiers.bad_input(
    SPEC,
    {"a": A, "b": B, "d": None, "ks": KS},
    [
        ({"a": A[:320]}, ValueError, "^a"),
        ({"b": B[:256]}, ValueError, "^b"),
        ({"b": B[:, :4]}, ValueError, "^b"),
        ({"ks": [384, 128]}, ValueError, "^ks"),
        ({"d": torch.empty(3, 16, 8)}, ValueError, "^d"),
        ({"c": torch.empty(3, 16, 8)}, ValueError, "^c"),
    ],
)
