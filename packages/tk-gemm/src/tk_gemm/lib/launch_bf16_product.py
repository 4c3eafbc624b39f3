"""Launch of the BF16 products' kernels, for any kind of groups."""

from torch import Tensor

from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_gemm.lib.archs import hopper_or_blackwell
from tk_gemm.lib.bf16_product import bf16_product_kernel
from tk_gemm.lib.bf16_product_blackwell import bf16_product_blackwell_kernel
from tk_gemm.lib.bf16_product_config import Kind, bf16_product_config
from tk_gemm.lib.fp8_product_blackwell import BLOCK
from tk_gemm.lib.tma import for_tma


def launch_bf16_product(
    op: str,
    kind: Kind,
    a: Tensor,
    b: Tensor,
    layout: Tensor | None,
    c: Tensor | None,
    d: Tensor,
    *,
    a_is_transposed: bool = False,
    b_is_transposed: bool = False,
    num_rows: int | None = None,
) -> None:
    """Launch for a (G, M, K) or transposed (G, K, M), b (groups, N, K) or (groups, K, N), c and d (G, M, N).

    With kind "k" a and b have one group. `num_rows`: expected rows of a group, only to choose the tile.
    """
    arch = hopper_or_blackwell(op, a)
    num_groups, max_rows, num_cols = d.shape
    num_sms = get_num_sms(a.device)
    if arch.has_tcgen05:
        block_m = block_n = BLOCK
        launch = bf16_product_blackwell_kernel(kind, d.dtype, a_is_transposed, b_is_transposed, c is not None, arch)
    else:
        config = bf16_product_config(num_groups, min(num_rows or max_rows, max_rows), num_cols, num_sms)
        block_m, block_n = config.block_m, config.block_n
        launch = bf16_product_kernel(kind, config, d.dtype, a_is_transposed, b_is_transposed, c is not None, arch)
    num_tiles = num_groups * ceil_div(max_rows, block_m) * ceil_div(num_cols, block_n)
    c = None if c is None else for_tma(c)
    launch(for_tma(a), for_tma(b), layout, c, for_tma(d), min(num_sms, num_tiles))
