"""Launch of the FP8 products' kernel for any of the ways to find a row's weights."""

from torch import Tensor

from tk_core.arch import UnsupportedArchError, get_arch
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_gemm.lib.fp8_product import fp8_product_kernel
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
) -> None:
    """Launch for a (G, M, K), a_sf (G, M, K/128), b (groups, N, K), b_sf of blocks or (N, K/128), c and d (G, M, N).

    `num_rows`: how many rows of a group there may be, for the tile's size alone.
    """
    arch = get_arch(a.device)
    if not arch.has_wgmma:
        raise UnsupportedArchError(op, arch.name, "sm_90a, or the reference backend")
    num_groups, max_rows, _ = a.shape
    num_cols = b.shape[1]
    num_sms = get_num_sms(a.device)
    config = product_config(num_groups, min(num_rows or max_rows, max_rows), num_cols, d.dtype, num_sms)
    num_tiles = num_groups * ceil_div(max_rows, config.block_m) * ceil_div(num_cols, config.block_n)
    factors = for_tma(a_sf.mT)
    sf_by_tma = takes_tma(factors)
    b_is_per_row = b_sf.ndim == 2
    if b_is_per_row:
        b_sf = for_tma(b_sf.mT)
        b_sf = b_sf if takes_tma(b_sf) else b_sf.contiguous()  # N % 16 = 0: on 16 bytes.
    else:
        b_sf = b_sf.contiguous().view(-1)
    if config == WIDE:
        launch = fp8_product_wide_kernel(kind, d.dtype, sf_by_tma, c is not None, arch)
    else:
        launch = fp8_product_kernel(kind, config, d.dtype, sf_by_tma, b_is_per_row, c is not None, arch)
    launch(
        for_tma(a),
        factors if sf_by_tma else a_sf.mT,
        for_tma(b),
        b_sf,
        layout,
        None if c is None else for_tma(c),
        for_tma(d),
        min(num_sms, num_tiles),
    )
