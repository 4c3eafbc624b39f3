"""The BF16 products' kernel: a row's bits depend on that row and its weights alone, not on the op or the tile."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import tk_gemm
from tk_core.arch import get_arch
from tk_core.math import align, ceil_div
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.hopper.bf16 import bf16_product_kernel
from tk_gemm.hopper.tiles import FEW_ROWS, TILES

from ..inputs import bf16, ids, psum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [64, 7168])
@pytest.mark.parametrize("a_is_transposed", [False, True])
@pytest.mark.parametrize("b_is_transposed", [False, True])
def test_tiles_and_orders_have_equal_bits(a_is_transposed: bool, b_is_transposed: bool, k: int) -> None:
    m, n = 304, 520
    a, b = bf16(m, k, device="cuda"), bf16(n, k, device="cuda")
    expected = tk_gemm.bf16_gemm_nt(a, b)
    lies_a = a.t().contiguous() if a_is_transposed else a
    lies_b = b.t().contiguous() if b_is_transposed else b
    for tile, num_blocks in product(TILES, (1, 3, 132)):
        d = torch.full((1, m, n), 7.0, dtype=torch.bfloat16, device="cuda")
        orders = (a_is_transposed, b_is_transposed)
        launch = bf16_product_kernel("dense", tile, d.dtype, *orders, None, get_arch(a.device))
        num_tiles = ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n)
        launch(lies_a[None], lies_b[None], None, None, d, min(num_blocks, num_tiles))
        assert_equal(d[0], expected, name=f"{tile}, {num_blocks} thread blocks")


@pytest.mark.parametrize("m", [1, 8, 9, 32])
def test_few_rows_have_the_bits_of_many(m: int) -> None:
    n, k = 520, 1024
    a, b = bf16(300, k, device="cuda"), bf16(n, k, device="cuda")
    expected = tk_gemm.bf16_gemm_nt(a, b)[:m]
    for tile, few in product(TILES, FEW_ROWS):
        if m <= few:
            d = torch.full((1, m, n), 7.0, dtype=torch.bfloat16, device="cuda")
            tile = replace(tile, max_rows=few)
            launch = bf16_product_kernel("dense", tile, d.dtype, False, False, None, get_arch(a.device))
            launch(a[None, :m], b[None], None, None, d, 3)
            assert_equal(d[0], expected, name=f"{tile}")
    assert_equal(tk_gemm.bf16_gemm_nt(a[:m], b), expected)


def test_ops_have_equal_bits() -> None:
    counts, n, k = (0, 1, 127, 128, 129, 300), 520, 1024
    rows = sum(align(count, 128) for count in counts)
    a, b = bf16(rows, k, device="cuda"), bf16(len(counts), n, k, device="cuda")
    by_id = tk_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, ids(counts, rows, "cuda"))
    ends = psum(counts, "cuda")
    assert_equal(tk_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, ends, use_psum_layout=True), by_id)
    transposed = b.mT.contiguous()
    assert_equal(tk_gemm.m_grouped_bf16_gemm_nn_contiguous(a, transposed, None, ids(counts, rows, "cuda")), by_id)
    first = 0
    for group, count in enumerate(counts):
        kept = slice(first, first + count)
        if count:
            assert_equal(tk_gemm.bf16_gemm_nt(a[kept], b[group]), by_id[kept])
            masked_m = torch.tensor([count], dtype=torch.int32, device="cuda")
            masked = tk_gemm.m_grouped_bf16_gemm_nt_masked(a[None, kept], b[group, None], None, masked_m, count)
            assert_equal(masked[0], by_id[kept], name=f"group {group}, masked")
        assert not by_id[first + count : align(first + count, 128)].any()
        first = align(first + count, 128)


def test_padding_may_be_nan() -> None:
    a, b = bf16(384, 256, device="cuda"), bf16(2, 136, 256, device="cuda")
    layout = ids((5, 130), 384, "cuda")
    expected = tk_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, layout)
    a[layout < 0] = torch.nan
    assert_equal(tk_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, None, layout), expected)


@pytest.mark.parametrize("positive", [False, True])
def test_against_a_float64_product(positive: bool) -> None:
    for m, n, k in ((129, 264, 64), (300, 512, 7168), (64, 136, 16384)):
        a, b = bf16(m, k, device="cuda"), bf16(n, k, device="cuda")
        if positive:
            a, b = a.abs(), b.abs()
        exact = a.double() @ b.double().T
        assert calc_diff(tk_gemm.bf16_gemm_nt(a, b, torch.empty(m, n, device="cuda")), exact) < 1e-7
        assert calc_diff(tk_gemm.bf16_gemm_nt(a, b), exact) < 3e-6


def test_masked_m_changes_between_replays_of_a_graph() -> None:
    a, b = bf16(4, 256, 512, device="cuda"), bf16(4, 264, 512, device="cuda")
    masked_m = torch.zeros(4, dtype=torch.int32, device="cuda")
    d = torch.full((4, 256, 264), 7.0, dtype=torch.bfloat16, device="cuda")
    tk_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tk_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, 128)
    for counts in ((0, 0, 0, 0), (256, 1, 0, 129), (3, 200, 256, 256)):
        masked_m.copy_(torch.tensor(counts))
        d.fill_(7.0)
        graph.replay()
        for group, count in enumerate(counts):
            assert (d[group, count:] == 7.0).all(), f"group {group}: a row past {count} was written"
            assert_equal(d[group, :count], tk_gemm.bf16_gemm_nt(a[group, :count], b[group]))


def test_many_runs_have_equal_bits() -> None:
    a, b = bf16(4096, 2048, device="cuda"), bf16(7168, 2048, device="cuda")
    expected = tk_gemm.bf16_gemm_nt(a, b)
    for _ in range(200):
        assert torch.equal(tk_gemm.bf16_gemm_nt(a, b), expected)
