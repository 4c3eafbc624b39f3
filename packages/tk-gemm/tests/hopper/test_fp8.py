"""The FP8 products' kernel: a row's bits depend on that row and its weights alone, not on the op or the tile."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import tk_gemm
from tk_core.arch import get_arch
from tk_core.math import align, ceil_div
from tk_core.testing.numeric import assert_equal, calc_diff
from tk_gemm.hopper.fp8 import fp8_product_kernel
from tk_gemm.hopper.tiles import BY_K, BY_K_TILES, FEW_ROWS, TILES, WIDE_LONG, TileShape
from tk_gemm.tma import for_tma

from ..inputs import activations, dequantized, ids, psum, weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [128, 7168])
def test_tiles_have_equal_bits(k: int) -> None:
    m, n = 300, 528
    (a, a_sf), (b, b_sf) = activations(m, k, "cuda"), weights(n, k, "cuda")
    expected = tk_gemm.fp8_gemm_nt((a, a_sf), (b, b_sf))
    arch = get_arch(a.device)
    for tile in (*TILES, WIDE_LONG):
        d = torch.full((1, m, n), 7.0, dtype=torch.bfloat16, device="cuda")
        launch = fp8_product_kernel("dense", tile, d.dtype, True, None, arch)
        num_tiles = ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n)
        for num_blocks in (1, 3, 132):
            launch(a[None], a_sf.mT[None], b[None], b_sf.flatten(), None, None, d, min(num_blocks, num_tiles))
            assert_equal(d[0], expected, name=f"{tile}, {num_blocks} thread blocks")


def test_tiles_of_masked_rows() -> None:
    """Tiles that are full, that have some rows below masked_m, and that have none."""
    counts, max_rows, n, k = (192, 20, 0, 256, 64, 129), 256, 528, 384
    (a, a_sf), (b, b_sf) = activations(len(counts) * max_rows, k, "cuda"), weights(n, k, "cuda", len(counts))
    a, a_sf = a.view(len(counts), max_rows, k), a_sf.unflatten(0, (len(counts), max_rows))
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    expected = torch.full((len(counts), max_rows, n), 7.0, dtype=torch.bfloat16, device="cuda")
    for group, count in enumerate(counts):
        rows = a[group, :count], a_sf[group, :count]
        expected[group, :count] = tk_gemm.fp8_gemm_nt(rows, (b[group], b_sf[group]))
    for tile in (*TILES, WIDE_LONG):
        d = torch.full_like(expected, 7.0)
        launch = fp8_product_kernel("masked", tile, d.dtype, True, None, get_arch(a.device))
        for num_blocks in (1, 132):
            launch(a, a_sf.mT, b, b_sf.flatten(), masked_m, None, d, num_blocks)
            assert_equal(d, expected, name=f"{tile}, {num_blocks} thread blocks")


@pytest.mark.parametrize("m", [1, 8, 9, 32])
def test_few_rows_have_the_bits_of_many(m: int) -> None:
    """Tiles of which most rows are not loaded, so that these have what shared memory had."""
    n, k = 528, 1024
    (a, a_sf), (b, b_sf) = activations(300, k, "cuda"), weights(n, k, "cuda")
    expected = tk_gemm.fp8_gemm_nt((a, a_sf), (b, b_sf))[:m]
    rows = a[:m], tk_gemm.get_mn_major_tma_aligned_tensor(a_sf[:m])
    for tile, few in product(TILES, FEW_ROWS):
        if m > few:
            continue
        tile = replace(tile, max_rows=few)
        d = torch.full((1, m, n), 7.0, dtype=torch.bfloat16, device="cuda")
        launch = fp8_product_kernel("dense", tile, d.dtype, True, None, get_arch(a.device))
        launch(rows[0][None], for_tma(rows[1].mT[None]), b[None], b_sf.flatten(), None, None, for_tma(d), 3)
        assert_equal(d[0], expected, name=f"{tile}")
    assert_equal(tk_gemm.fp8_gemm_nt(rows, (b, b_sf)), expected)


@pytest.mark.parametrize(
    ("by_k", "tile"), [(False, tile) for tile in TILES] + [(True, tile) for tile in BY_K_TILES], ids=str
)
def test_sums_added_by_tma_have_the_bits_of_others(by_k: bool, tile: TileShape) -> None:
    m, n, k = 300, 528, 1024
    (a, a_sf), (b, b_sf) = activations(m, k, "cuda"), activations(n, k, "cuda") if by_k else weights(n, k, "cuda")
    factors = b_sf.mT.contiguous()[None] if by_k else b_sf.flatten()
    layout = torch.tensor([384, 384, k], dtype=torch.int32, device="cuda") if by_k else None
    c = torch.randn((3 if by_k else 1, m, n), device="cuda")
    results = []
    for addend in ("c", "d"):
        kind, of_threads = ("k", BY_K) if by_k else ("dense", tile)
        launch = fp8_product_kernel(
            kind, tile if addend == "d" else of_threads, torch.float32, True, addend, get_arch(a.device)
        )
        for num_blocks in (1, 3):
            d = c.clone() if addend == "d" else torch.full_like(c, 7.0)
            launch(a[None], a_sf.mT[None], b[None], factors, layout, c, d, num_blocks)
            results.append(d)
    for result in results[1:]:
        assert_equal(result, results[0])


def test_ops_have_equal_bits() -> None:
    counts, n, k = (0, 1, 127, 128, 129, 300), 528, 1024
    rows = sum(align(count, 128) for count in counts)
    (a, a_sf), (b, b_sf) = activations(rows, k, "cuda"), weights(n, k, "cuda", len(counts))
    by_id = tk_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_sf), (b, b_sf), None, ids(counts, rows, "cuda"))
    ends = psum(counts, "cuda")
    by_end = tk_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_sf), (b, b_sf), None, ends, use_psum_layout=True)
    assert_equal(by_end, by_id)
    first = 0
    for group, count in enumerate(counts):
        kept = slice(first, first + count)
        if count:
            rows_a, rows_sf = a[kept], a_sf[kept]
            assert_equal(tk_gemm.fp8_gemm_nt((rows_a, rows_sf), (b[group], b_sf[group])), by_id[kept])
            masked_m = torch.tensor([count], dtype=torch.int32, device="cuda")
            of_group = (b[group : group + 1], b_sf[group : group + 1])
            masked = tk_gemm.m_grouped_fp8_gemm_nt_masked(
                (rows_a[None], rows_sf[None]), of_group, None, masked_m, count
            )
            assert_equal(masked[0], by_id[kept], name=f"group {group}, masked")
        assert not by_id[first + count : align(first + count, 128)].any()
        first = align(first + count, 128)


def test_padding_may_be_nan() -> None:
    counts, n, k = (5, 130), 144, 256
    (a, a_sf), b = activations(384, k, "cuda"), weights(n, k, "cuda", 2)
    layout = ids(counts, 384, "cuda")
    expected = tk_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_sf), b, None, layout)
    a.view(torch.uint8)[layout < 0] = 0x7F
    a_sf[layout < 0] = torch.nan
    assert_equal(tk_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_sf), b, None, layout), expected)


@pytest.mark.parametrize("positive", [False, True])
def test_against_a_float64_product(positive: bool) -> None:
    limit = 1e-6 if positive else 1e-7
    for m, n, k in ((129, 272, 128), (300, 512, 7168), (64, 144, 16384)):
        a, b = activations(m, k, "cuda", positive=positive), weights(n, k, "cuda", positive=positive)
        exact = dequantized(a) @ dequantized(b).T
        assert calc_diff(tk_gemm.fp8_gemm_nt(a, b, torch.empty(m, n, device="cuda")), exact) < limit
        assert calc_diff(tk_gemm.fp8_gemm_nt(a, b), exact) < 3e-6


def test_masked_m_changes_between_replays_of_a_graph() -> None:
    (a, a_sf), b = activations(4 * 256, 512, "cuda"), weights(272, 512, "cuda", 4)
    operand = (a.view(4, 256, 512), a_sf.unflatten(0, (4, 256)))
    masked_m = torch.zeros(4, dtype=torch.int32, device="cuda")
    d = torch.full((4, 256, 272), 7.0, dtype=torch.bfloat16, device="cuda")
    tk_gemm.m_grouped_fp8_gemm_nt_masked(operand, b, d, masked_m, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tk_gemm.m_grouped_fp8_gemm_nt_masked(operand, b, d, masked_m, 128)
    for counts in ((0, 0, 0, 0), (256, 1, 0, 129), (3, 200, 256, 256)):
        masked_m.copy_(torch.tensor(counts))
        d.fill_(7.0)
        graph.replay()
        for group, count in enumerate(counts):
            assert (d[group, count:] == 7.0).all(), f"group {group}: a row past {count} was written"
            rows, rows_sf = operand[0][group, :count], operand[1][group, :count]
            assert_equal(d[group, :count], tk_gemm.fp8_gemm_nt((rows, rows_sf), (b[0][group], b[1][group])))


def test_many_runs_have_equal_bits() -> None:
    a, b = activations(4096, 2048, "cuda"), weights(7168, 2048, "cuda")
    expected = tk_gemm.fp8_gemm_nt(a, b)
    for _ in range(200):
        assert torch.equal(tk_gemm.fp8_gemm_nt(a, b), expected)
