"""`import tk_gemm as deep_gemm`: calls of DeepGEMM 2.6's users on Hopper, with its arguments in its order."""

import inspect
from collections.abc import Iterator

import pytest
import torch

import tk_gemm as deep_gemm
from tk_core.math import align, ceil_div
from tk_core.testing.numeric import calc_diff

from .inputs import bf16, ids, psum

Pair = tuple[torch.Tensor, torch.Tensor]
M, N, K = 200, 272, 384
NUM_GROUPS, MAX_M = 4, 256
COUNTS = (0, 1, 128, 131)
KS = [256, 0, 128, 384]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.manual_seed(0)
    with torch.device(request.param):
        yield request.param


def cast(x: torch.Tensor, num_rows: int = 1) -> Pair:
    """bfloat16 (…, rows, K) to e4m3 with a factor for each block of num_rows × 128."""
    blocks = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[-2] % num_rows))
    blocks = blocks.unflatten(-2, (-1, num_rows)).unflatten(-1, (-1, 128))
    sf = blocks.abs().amax((-3, -1)).clamp(min=1e-4) / 448
    data = (blocks / sf[..., None, :, None]).flatten(-2).flatten(-3, -2)[..., : x.shape[-2], :]
    return data.to(torch.float8_e4m3fn), sf


def assert_product(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> None:
    """d is a · bᵀ (+ c) as far as 8 bits of an operand allow."""
    expected = a.double() @ b.double().mT
    if c is not None:
        expected = expected + c.double()
    assert calc_diff(d, expected) < 1e-3


@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
def test_fp8_gemm(device: str, order: str) -> None:
    """Transposed operands are views: Hopper's FP8 products need memory that is contiguous along K."""
    a, b = bf16(M, K, device=device), bf16(N, K, device=device)
    a_fp8, b_fp8 = cast(a), cast(b, 128)
    a_given = a_fp8 if order[0] == "n" else (a_fp8[0].T, a_fp8[1].T)
    b_given = b_fp8 if order[1] == "t" else (b_fp8[0].T, b_fp8[1].T)
    d = torch.empty(M, N, dtype=torch.bfloat16)
    function = getattr(deep_gemm, f"fp8_gemm_{order}")
    function(a_given, b_given, d, c=None, disable_ue8m0_cast=True, recipe=(1, 128, 128))
    assert_product(d, a, b)
    function(a_given, b_given, d, disable_ue8m0_cast=True, recipe=None, recipe_a=(1, 128), recipe_b=(128, 128))
    assert_product(d, a, b)


@pytest.mark.parametrize("order", ["nn", "tn", "tt"])
def test_views_show_the_arguments_of_their_op(order: str) -> None:
    grouped = ["m_grouped_fp8_gemm_{}_contiguous", "m_grouped_bf16_gemm_{}_contiguous"] if order == "nn" else []
    for name in ("fp8_gemm_{}", "bf16_gemm_{}", *grouped):
        view, op = (getattr(deep_gemm, name.format(each)) for each in (order, "nt"))
        assert inspect.signature(view) == inspect.signature(op)


def test_fp8_gemm_that_adds(device: str) -> None:
    a, b = bf16(M, K, device=device), bf16(N, K, device=device)
    d = torch.randn(M, N) * 32
    before = d.clone()
    deep_gemm.fp8_gemm_nt(cast(a), cast(b, 128), d, c=d, disable_ue8m0_cast=True)
    assert_product(d, a, b, before)


def test_weight_gradient(device: str) -> None:
    a, b = bf16(M, K, device=device), bf16(N, K, device=device)
    d = torch.randn(M, N)
    before = d.clone()
    deep_gemm.fp8_gemm_nt(cast(a), cast(b), d, c=d, recipe=(1, 1, 128))
    assert_product(d, a, b, before)


@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_gemm(device: str, order: str, dtype: torch.dtype) -> None:
    a, b, c = bf16(M, K, device=device), bf16(N, K, device=device), torch.randn(M, N, dtype=dtype)
    a_given = a if order[0] == "n" else a.T.contiguous()
    b_given = b if order[1] == "t" else b.T.contiguous()
    d = torch.empty(M, N, dtype=dtype)
    getattr(deep_gemm, f"bf16_gemm_{order}")(a_given, b_given, d, c=c)
    assert_product(d, a, b, c)


@pytest.mark.parametrize("order", ["nt", "nn"])
@pytest.mark.parametrize("by_psum", [False, True])
@pytest.mark.parametrize("fp8", [True, False])
def test_m_grouped_contiguous(device: str, order: str, by_psum: bool, fp8: bool) -> None:
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    num_rows = sum(align(count, alignment) for count in COUNTS)
    groups = ids(COUNTS, num_rows, device, alignment)
    a, b = bf16(num_rows, K, device=device), bf16(NUM_GROUPS, N, K, device=device)
    d = torch.empty(num_rows, N, dtype=torch.bfloat16)
    layout = {"use_psum_layout": by_psum, "expected_m_for_psum_layout": 65 if by_psum else None}
    grouped_layout = psum(COUNTS, device, alignment) if by_psum else groups
    if fp8:
        weights = cast(b, 128)
        weights = weights if order == "nt" else (weights[0].mT, weights[1].mT)
        function = getattr(deep_gemm, f"m_grouped_fp8_gemm_{order}_contiguous")
        function(cast(a), weights, d, grouped_layout, disable_ue8m0_cast=True, **layout)
    else:
        function = getattr(deep_gemm, f"m_grouped_bf16_gemm_{order}_contiguous")
        function(a, b if order == "nt" else b.mT.contiguous(), d, grouped_layout, **layout)
    for group in range(NUM_GROUPS):
        rows = groups == group
        if rows.any():
            assert_product(d[rows], a[rows], b[group])
    assert not d[groups < 0].any()


@pytest.mark.parametrize("fp8", [True, False])
def test_m_grouped_masked(device: str, fp8: bool) -> None:
    a, b = bf16(NUM_GROUPS, MAX_M, K, device=device), bf16(NUM_GROUPS, N, K, device=device)
    masked_m = torch.tensor(COUNTS, dtype=torch.int32)
    d = torch.empty(NUM_GROUPS, MAX_M, N, dtype=torch.bfloat16)
    if fp8:
        data, sf = cast(a)
        pair = data, deep_gemm.get_mn_major_tma_aligned_tensor(sf)
        deep_gemm.m_grouped_fp8_gemm_nt_masked(pair, cast(b, 128), d, masked_m, 65, disable_ue8m0_cast=True)
    else:
        deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, 65)
    for group, count in enumerate(COUNTS):
        if count:
            assert_product(d[group, :count], a[group, :count], b[group])


def test_k_grouped_fp8(device: str) -> None:
    """One contiguous matrix after the other, sums of float32 added to what is there."""
    parts = [(bf16(M - 8, k, device=device), bf16(N, k, device=device)) for k in KS]
    operands = []
    for side in (0, 1):
        pairs = [cast(part[side]) for part in parts if part[side].numel()]
        sf = torch.cat([sf.T for _, sf in pairs]).contiguous().T
        operands.append(
            (torch.cat([data.flatten().view(torch.uint8) for data, _ in pairs]).view(pairs[0][0].dtype), sf)
        )
    c = torch.randn(NUM_GROUPS, M - 8, N)
    d = c.clone()
    ks = torch.tensor(KS, dtype=torch.int32)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*operands, d, KS, ks, d, (1, 1, 128))
    for group, (a, b) in enumerate(parts):
        assert_product(d[group], a, b, c[group])


def test_k_grouped_bf16(device: str) -> None:
    a, b = bf16(sum(KS), M, device=device), bf16(sum(KS), N, device=device)
    c = torch.randn(NUM_GROUPS, M, N)
    d = c.clone()
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, KS, torch.tensor(KS, dtype=torch.int32), c=d)
    for group, (a_rows, b_rows) in enumerate(zip(a.split(KS), b.split(KS), strict=True)):
        assert_product(d[group], a_rows.T, b_rows.T, c[group])


def test_layouts_of_factors(device: str) -> None:
    data, sf = cast(bf16(M, K, device=device))
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(sf)
    assert aligned.stride() == (1, align(M, 4))
    assert torch.equal(aligned, sf)
    required = deep_gemm.transform_sf_into_required_layout(
        sf, mn=M, k=K, recipe=(1, 128, 128), is_sfa=True, disable_ue8m0_cast=True
    )
    assert required.stride() == aligned.stride()
    b_sf = cast(bf16(NUM_GROUPS, N, K, device=device), 128)[1]
    required = deep_gemm.transform_sf_into_required_layout(
        b_sf, mn=N, k=K, recipe=(1, 128, 128), num_groups=NUM_GROUPS, is_sfa=False, disable_ue8m0_cast=True
    )
    assert required.shape == (NUM_GROUPS, ceil_div(N, 128), K // 128)
    assert torch.equal(required, b_sf)
    assert data.shape == (M, K)


def test_alignment() -> None:
    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    assert alignment == deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


@pytest.mark.gpu
def test_number_of_multiprocessors() -> None:
    before = deep_gemm.get_num_sms()
    try:
        deep_gemm.set_num_sms(64)
        assert deep_gemm.get_num_sms() == 64
    finally:
        deep_gemm.set_num_sms(None)
    assert deep_gemm.get_num_sms() == before
