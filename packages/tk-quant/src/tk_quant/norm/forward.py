"""norm_forward: RMSNorm of each row, with a sum with a residual before it.

    h = x, or x + residual rounded to the dtype;  rstd = 1 / sqrt(Σ h² / H + eps)
    out = (h · rstd) · ((weight + weight_offset) · out_scale), rounded to the dtype

A thread block takes a row, or more of them where rows are narrow, and keeps it in registers from the load to the store;
tile.py says which thread holds what, and in what order the squares are summed. The order depends on hidden and the
dtype alone, so a row's bits depend on no other row, and on no option.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES
from tk_quant.norm.arguments import (
    NormOptions,
    check_factors,
    check_residual,
    check_weight,
    check_x,
    folded,
    given_rows,
    rows_of_weight,
)
from tk_quant.norm.tile import row_tile


# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True})
def _norm_forward_kernel(hidden: int, options: NormOptions, with_rstd: bool, arch: Arch) -> Any:
    import tilelang.language as T

    from tk_quant.cast.tile import layout_of_tile
    from tk_quant.norm import steps

    dtype, config = T.dtype(options.dtype), row_tile(hidden, options.dtype)
    num_batches, num_rows = T.dynamic("num_batches"), T.dynamic("num_rows")
    shape, block_rows = (num_batches, num_rows, hidden), config.blocks_down

    @T.prim_func
    def norm_forward(
        x: steps.rows_type("x", shape, options.dtype),
        residual: steps.rows_type("residual", shape, options.dtype),
        weight: steps.weight_type(hidden, options),
        out: steps.rows_type("out", shape, options.dtype),
        residual_out: steps.rows_type("residual_out", shape, options.dtype),
        rstd: T.Tensor((num_batches * num_rows,), "float32"),
        eps: T.float32,
        out_scale: T.float32,
        weight_offset: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_batches * num_rows, block_rows), threads=config.threads) as block:
            first = block * block_rows
            row_at = steps.rows_from(first, num_batches, num_rows)
            tile = T.alloc_fragment(config.tile, dtype)
            weights = T.alloc_fragment(config.tile, T.dtype(options.loaded_weight))
            rstds = T.alloc_fragment((block_rows,), "float32")
            T.annotate_layout({tile: layout_of_tile(config), weights: layout_of_tile(config)})
            steps.load_rows(x, tile, row_at, options)
            if options.has_residual:
                steps.add_residual(tile, residual, row_at, options, config)
                steps.store_rows(tile, residual_out, row_at, options)
            if options.has_weight:
                steps.load_weights(weight, weights, row_at, options)
            steps.rstd_of_rows(tile, rstds, eps, hidden, config)
            if with_rstd:
                for i in T.Parallel(block_rows):
                    if first + i < num_batches * num_rows:
                        rstd[first + i] = rstds[i]
            steps.normalize(tile, weights, rstds, tile, out_scale, weight_offset, options)
            steps.store_rows(tile, out, row_at, options)

    return norm_forward


@op(
    writes=("out", "residual_out"),
    aligned=("weight",),
    in_place={"out": ("x",), "residual_out": ("x", "residual")},
)
def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """RMSNorm of each row, after a sum with a residual where there is one, in the same pass.

    Every step in float32, rounded to nearest with ties to even, from left to right:

        h = x, or x + residual, rounded to x's dtype
        rstd = 1 / sqrt(Σ h² / H + eps), the sum by fused multiply-adds in an order fixed by H and the dtype
        out = (h * rstd) * ((weight + weight_offset) * out_scale), rounded to x's dtype

    Every bit equals the reference's, whatever the other rows and options are. Names and formula are those of DeepSeek's
    TileKernels 2.1.0; weight_offset and round_before_weight are not in it.

    Args:
        x: (..., T, H) bfloat16 or float32, at least two dimensions, H a multiple of 8 up to 16384. Strides are free but
            for the last, which is 1; dimensions before the last two must fold into one.
        weight: (H), or (G, H) with one weight for each x[..., g, :], contiguous, of x's dtype or float32; None for 1.
        eps: At least 0.
        residual: Like x.
        out_scale: A factor of the weight.
        out: Like x, to write into; may be x.
        residual_out: Like x, to write h into; may be x or residual. Not used without residual.
        with_rstd: Return rstd too, as `norm_backward` needs it.
        weight_offset: Added to the weight, in float32, unless it is 0; Gemma's norms have 1.
        round_before_weight: Round h * rstd to x's dtype before it is multiplied by the weight, as most of Hugging
            Face's models do.

    Returns:
        `(out, rstd, norm_input)`: rstd float32 (..., T) or None; norm_input is h, in residual_out or a new tensor, or
        x itself without residual.

    Raises:
        TypeError: An argument is not a tensor, a number or a bool as described, or has another dtype.
        ValueError: Any other argument is not as described, is on another device, or shares memory with one that is
            written, but for those named above.
    """
    leading, hidden = check_x(x, 8)
    check_weight(weight, x)
    check_factors(out_scale, weight_offset, eps)
    check.flag("with_rstd", with_rstd)
    check.flag("round_before_weight", round_before_weight)
    check_residual(residual, x)
    out = given_rows("out", out, x)
    rstd = new(x.new_empty, leading, dtype=torch.float32) if with_rstd else None
    norm_input = x if residual is None else given_rows("residual_out", residual_out, x)
    if launching(out):
        written = out, None if residual is None else norm_input
        options = NormOptions.of(x, weight, (residual, *written), residual is not None, round_before_weight)
        _norm_forward_kernel(hidden, options, with_rstd, get_arch(x.device))(
            *(folded(x), folded(residual), rows_of_weight(weight), *map(folded, written)),
            *(None if rstd is None else rstd.view(-1), float(eps), float(out_scale), float(weight_offset)),
        )
    return out, rstd, norm_input
