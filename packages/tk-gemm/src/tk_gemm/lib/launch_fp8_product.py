"""Launches of the FP8 products' kernels."""

from torch import Tensor

from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_gemm.lib.archs import arch_of_factors
from tk_gemm.lib.fp8_k_product import CONFIG as K_CONFIG
from tk_gemm.lib.fp8_k_product import fp8_k_product_kernel
from tk_gemm.lib.fp8_k_product_blackwell import fp8_k_product_blackwell_kernel
from tk_gemm.lib.fp8_product import fp8_product_kernel
from tk_gemm.lib.fp8_product_blackwell import BLOCK, fp8_product_blackwell_kernel
from tk_gemm.lib.fp8_product_config import WIDE, Kind, product_config
from tk_gemm.lib.fp8_product_wide import fp8_product_wide_kernel
from tk_gemm.lib.tma import for_tma, takes_tma


def launch_fp8_product(
    op: str,
    kind: Kind,
    a: Tensor,
    a_sf: Tensor,
    b: Tensor,
    b_sf: Tensor,
    layout: Tensor | None,
    c: Tensor | None,
    d: Tensor,
    num_rows: int | None = None,
    b_is_per_row: bool = False,
) -> None:
    """Launch for a (G, M, K), a_sf (G, M, K/128), b (groups, N, K), b_sf (groups, ⌈N/128⌉, K/128), c and d (G, M, N).

    Packed factors have ⌈K/512⌉ words in place of K/128; with `b_is_per_row`, for packed ones only, b_sf has N rows.
    `num_rows`: expected rows of a group, only to choose the tile.
    """
    arch = arch_of_factors(op, a_sf)
    num_groups, max_rows, _ = a.shape
    num_cols = b.shape[1]
    num_sms = get_num_sms(a.device)
    if arch.has_tcgen05:
        num_tiles = num_groups * ceil_div(max_rows, BLOCK) * ceil_div(num_cols, BLOCK)
        launch = fp8_product_blackwell_kernel(kind, d.dtype, b_is_per_row, c is not None, arch)
        b_factors = for_tma(b_sf.mT) if b_is_per_row else b_sf.mT
        c, d = None if c is None else for_tma(c), for_tma(d)
        launch(for_tma(a), for_tma(a_sf.mT), for_tma(b), b_factors, layout, c, d, min(num_sms, num_tiles))
        return
    config = product_config(num_groups, min(num_rows or max_rows, max_rows), num_cols, num_sms)
    num_tiles = num_groups * ceil_div(max_rows, config.block_m) * ceil_div(num_cols, config.block_n)
    factors = for_tma(a_sf.mT)
    sf_by_tma = takes_tma(factors)
    if config == WIDE:
        launch = fp8_product_wide_kernel(kind, d.dtype, sf_by_tma, c is not None, arch)
    else:
        launch = fp8_product_kernel(kind, config, d.dtype, sf_by_tma, c is not None, arch)
    launch(
        for_tma(a),
        factors if sf_by_tma else a_sf.mT,
        for_tma(b),
        b_sf.contiguous().view(-1),
        layout,
        None if c is None else for_tma(c),
        for_tma(d),
        min(num_sms, num_tiles),
    )


def launch_fp8_k_product(
    op: str, a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, ends: Tensor, c: Tensor | None, d: Tensor
) -> None:
    """Launch for a (M, K), a_sf (K/128, M), b (N, K), b_sf (K/128, N), ends (G) along K, c and d (G, M, N).

    Packed factors are (⌈K/512⌉, M) and (⌈K/512⌉, N).
    """
    arch = arch_of_factors(op, a_sf)
    num_groups, num_rows, num_cols = d.shape
    num_tiles = num_groups * ceil_div(num_rows, K_CONFIG.block_m) * ceil_div(num_cols, K_CONFIG.block_n)
    num_blocks = min(num_tiles, get_num_sms(a.device))
    operands = [for_tma(x) for x in (a, a_sf, b, b_sf)]
    c, d = None if c is None else for_tma(c), for_tma(d)
    if arch.has_tcgen05:
        launch = fp8_k_product_blackwell_kernel(d.dtype, c is not None, arch)
    else:
        launch = fp8_k_product_kernel(d.dtype, c is not None, arch)
    launch(*operands, ends, c, d, num_blocks)
