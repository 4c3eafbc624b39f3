"""norm_forward_and_per_token_cast: RMSNorm of each row, and the cast of the rounded result by groups, in one pass.

`norm_forward`, then `per_token_cast` of its result, bit for bit. Lanes, and the order of the sum, are those of tile.py;
a group is owned by neighbouring lanes of a warp, or, if it is a whole row, by all lanes of the row:

    bfloat16, hidden 7168     lane 0 … 7   8 … 15   16 … 23   …   440 … 447
    groups of 128                  0         1         2      …       55

A tile's rows are of one batch, as each batch has scale factors of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import given_or_new, launching, new, op
from tk_core.scales import ScaleLayout, empty_scales
from tk_core.tiles import DIRECT_COPIES
from tk_quant.cast.config import CastSf, layout_of
from tk_quant.cast.format import BITS, DTYPES, least_amax_of, pair_of, sf_output
from tk_quant.cast.per_token import check_sf
from tk_quant.norm.arguments import (
    NormOptions,
    RowCast,
    check_factors,
    check_residual,
    check_weight,
    check_x,
    folded,
    given_rows,
    rows_of_weight,
)
from tk_quant.norm.tile import GROUPS, row_tile

_FORMATS = ("e4m3", "e2m1")
_COLUMN_MAJOR = (ScaleLayout.COL_MAJOR, ScaleLayout.PACKED_UE8M0)


@kernel(pass_configs={**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True})
def _norm_forward_and_per_token_cast_kernel(
    hidden: int,
    options: NormOptions,
    cast: RowCast,
    with_out_bf16: bool,
    with_rstd: bool,
    with_mega_moe_sf: bool,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    from tk_quant.cast.scales import rows_of_sf, sf_type
    from tk_quant.cast.tile import layout_of_tile
    from tk_quant.norm import steps

    config = row_tile(hidden, options.dtype, cast.num_per_channels)
    num_batches, num_rows, bf16 = T.dynamic("num_batches"), T.dynamic("num_rows"), torch.bfloat16
    shape, block_rows = (num_batches, num_rows, hidden), config.blocks_down
    num_cols, row_bytes = ceil_div(hidden, cast.num_per_channels), hidden * BITS[cast.fmt] // 8
    by_power = cast.fmt == "e2m1" and options.dtype is bf16 and cast.sf.round_sf and not arch.has_fp4_convert

    @T.prim_func
    def norm_forward_and_per_token_cast(
        x: steps.rows_type("x", shape, options.dtype),
        residual: steps.rows_type("residual", shape, options.dtype),
        weight: steps.weight_type(hidden, options),
        tensor_sf: T.Tensor((1,), "float32"),
        data: T.Tensor((num_batches * num_rows, row_bytes), T.dtype(DTYPES[cast.fmt])),
        sf: sf_type(T.dynamic("sf_rows"), num_cols, cast.sf.layout, cast.sf.byte_dtype),
        out_bf16: steps.rows_type("out_bf16", shape, bf16),
        rstd: T.Tensor((num_batches * num_rows,), "float32"),
        residual_out: steps.rows_type("residual_out", shape, options.dtype),
        mega_moe_sf: sf_type(T.dynamic("mega_moe_rows"), hidden // 32, ScaleLayout.PACKED_UE8M0, prefix="mega_moe_"),
        eps: T.float32,
        out_scale: T.float32,
        weight_offset: T.float32,
        least_amax: T.float32,
        sf_pitch: T.int32,
        mega_moe_block: T.int32,
    ) -> None:
        tiles_of_batch = T.ceildiv(rows_of_sf(num_rows, cast.sf.layout), block_rows)
        with T.Kernel(num_batches * tiles_of_batch, threads=config.threads) as block:
            # Variables: in indices TileLang would simplify the division, and divide by its guess of a bound, 0.
            batch, first = T.alloc_var("int32"), T.alloc_var("int32")
            batch = T.truncdiv(block, tiles_of_batch)
            first = T.truncmod(block, tiles_of_batch) * block_rows
            row_at = steps.rows_of_batch(batch, first, num_rows)
            tile = T.alloc_fragment(config.tile, T.dtype(options.dtype))
            weights = T.alloc_fragment(config.tile, T.dtype(options.loaded_weight))
            rstds = T.alloc_fragment((block_rows,), "float32")
            T.annotate_layout({tile: layout_of_tile(config), weights: layout_of_tile(config)})
            steps.load_rows(x, tile, row_at, options)
            if options.has_residual:
                steps.add_residual(tile, residual, row_at, options, config)
                steps.store_rows(tile, residual_out, row_at, options)
            if options.has_weight:
                steps.load_weights(weight, weights, steps.rows_up_to_last(first, num_rows), options)
            steps.rstd_of_rows(tile, rstds, eps, hidden, config)
            if with_rstd:
                for i in T.Parallel(block_rows):
                    if first + i < num_rows:
                        rstd[batch * num_rows + first + i] = rstds[i]
            steps.normalize(tile, weights, rstds, tile, out_scale, weight_offset, options)
            if with_out_bf16:
                steps.store_rows(tile, out_bf16, row_at, options)
            to = steps.CastOutput(data, sf, batch, first, num_rows, sf_pitch)
            block_sf = steps.cast_rows(tile, to, tensor_sf, least_amax, hidden, cast, config, by_power)
            if with_mega_moe_sf:
                steps.store_mega_moe_sf(mega_moe_sf, block_sf, first, num_rows, mega_moe_block, hidden)

    return norm_forward_and_per_token_cast


def _sf_of_batches(
    name: str,
    given: Any,
    like: Tensor,
    leading: tuple[int, ...],
    num_cols: int,
    layout: ScaleLayout,
    dtype: torch.dtype | None,
) -> Tensor:
    """The scale factors to write, for each batch as for a matrix of its own: `given`, checked, or a new tensor."""
    *batches, num_rows = leading
    if not batches:
        return sf_output(name, given, like, num_rows, num_cols, layout, dtype)
    one = empty_scales(torch.empty((), device="meta"), num_rows, num_cols, layout, dtype)
    shape, strides = (*batches, *one.shape), (_pitch_of(one), *one.stride())
    for size in reversed(batches[1:]):
        strides = (size * strides[0], *strides)
    if given is None:
        return new(like.new_empty_strided, shape, strides, dtype=one.dtype)
    check.tensor(name, given, (one.dtype,), shape, layout="any", device=like.device)
    check.require(given.stride() == strides or given.numel() == 0, name, "strides {}", given.stride(), strides)
    return given


def _pitch_of(sf: Tensor) -> int:
    """Elements of memory that a matrix of scale factors takes, with the padding of its columns."""
    return max(size * stride for size, stride in zip(sf.shape, sf.stride()))


def _sf_of_matrix(sf: Tensor, leading: tuple[int, ...], layout: ScaleLayout) -> tuple[Tensor, int]:
    """`(sf of all batches as for one matrix, rows from one batch to the next)`, as the kernel takes them."""
    *batches, num_rows = leading
    if not batches:
        return sf, 0
    if layout is ScaleLayout.SWIZZLED:
        return sf.flatten(0, -5), align(num_rows, 128)
    if layout not in _COLUMN_MAJOR:
        return sf.flatten(0, -2), num_rows
    width, pitch = sf.shape[-1], sf.stride(-3)
    num_batches = sf.numel() // (num_rows * width)
    return sf.as_strided(((num_batches - 1) * pitch + num_rows, width), (1, sf.stride(-1))), pitch


def _check_mega_moe(
    x: Tensor, mega_moe_sf: Tensor | None, mega_moe_block_m: int, num_per_channels: int, round_sf: bool
) -> None:
    """Check the second copy of sf: beside a block size only, and with room for each row of a column."""
    check.in_range("mega_moe_block_m", mega_moe_block_m, 0, 2**30)
    if mega_moe_sf is None:
        check.require(mega_moe_block_m == 0, "mega_moe_block_m", "0 without mega_moe_sf", mega_moe_block_m)
        return
    num_rows, hidden = x.shape[-2:]
    check.require(mega_moe_block_m > 0, "mega_moe_block_m", "a positive number beside mega_moe_sf", mega_moe_block_m)
    check.require(x.ndim == 2, "x", "two dimensions with mega_moe_sf", x.ndim)
    check.require(hidden % 128 == 0, "x", "a multiple of 128 channels with mega_moe_sf", hidden)
    check.require(num_per_channels == 32, "num_per_channels", "32 with mega_moe_sf", num_per_channels)
    check.require(round_sf, "round_sf", "True with mega_moe_sf", round_sf)
    shape = ("num_rows", hidden // 128)
    found = check.tensor("mega_moe_sf", mega_moe_sf, (torch.int32,), shape, layout="any", device=x.device)
    check.require(found[0] >= num_rows, "mega_moe_sf", "at least {} rows", found[0], num_rows)
    fewest, strides = ceil_div(num_rows, mega_moe_block_m) * align(mega_moe_block_m, 128), mega_moe_sf.stride()
    fits = strides[0] == 1 and (strides[1] >= fewest or found[1] == 1)
    check.require(fits, "mega_moe_sf", "strides 1 and at least {}", strides, fewest)
    if is_compiling():  # Dynamo knows no storages; the operator looks again.
        return
    last = mega_moe_sf.storage_offset() + (found[1] - 1) * strides[1] + fewest
    held = mega_moe_sf.untyped_storage().nbytes() // 4
    check.require(last <= held, "mega_moe_sf", "memory of {} elements, with the padding of rows", held, last)


@op(
    writes=("out", "out_bf16", "residual_out", "mega_moe_sf"),
    aligned=("weight", "out", "mega_moe_sf"),
    in_place={"residual_out": ("x", "residual")},
)
def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    out_bf16: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_moe_sf: Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
    *,
    use_swizzled_sf: bool = False,
    use_e4m3_sf: bool = False,
    tensor_sf: Tensor | None = None,
    sf_clamp_min: float | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor | None, Tensor]:
    """`norm_forward`, and `per_token_cast` of its rounded result, in one pass and bit for bit.

    Source: DeepSeek's TileKernels 2.1.0, which has e4m3 in groups of 32.

    Args:
        x, weight, eps, residual, out_scale, residual_out, with_rstd, weight_offset, round_before_weight: See
            `norm_forward`; H is a multiple of 64.
        fmt: "e4m3" or "e2m1".
        num_per_channels: Channels of a group: 16, 32, 64, 128 or H.
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf, use_e4m3_sf, tensor_sf, sf_clamp_min:
            See `per_token_cast`. With more than two dimensions each batch x[..., :, :] has sf as if it were cast alone.
        with_out_bf16: Return norm_forward's result too, rounded to bfloat16 (once more where x is float32).
        out: `(data, sf)` to write into, with the dtypes, shapes and strides that a new result would have.
        out_bf16: bfloat16 (..., T, H) to write into, with any strides but the last; it is written without
            with_out_bf16, too.
        mega_moe_sf: int32 (at least T, H / 128), strides (1, R), to which the packed exponents are written a second
            time, as DeepGEMM's fused MoE reads them: byte c % 4 of word c // 4 is that of group c, and token t is in
            row t // m * M + i // 128 * 128 + i % 32 * 4 + i % 128 // 32, with m = mega_moe_block_m, M = m rounded up to
            128 and i = t % m. R is at least ceil(T / m) * M, and columns of R rows lie in its memory. Other rows are
            left alone. Needs x of two dimensions, groups of 32, H a multiple of 128, and round_sf.
        mega_moe_block_m: Rows of a block of mega_moe_sf; 0 without it.

    Returns:
        `((data, sf), out_bf16, rstd, norm_input)`: data float8_e4m3fn (..., T, H), or int8 (..., T, H / 2); sf as
        per_token_cast's for each batch, a column-major one with a batch stride of C * align(T, 4), C its columns, in
        e4m3 of C * align(T, 16); out_bf16 and rstd None if not asked for; norm_input as norm_forward's.

    Raises:
        TypeError: An argument is not a tensor, a number or a bool as described, or has another dtype.
        ValueError: Any other argument is not as described, is on another device, or shares memory with one that is
            written, but for residual_out with x or residual.
    """
    leading, hidden = check_x(x, 64)
    check_weight(weight, x)
    check_factors(out_scale, weight_offset, eps)
    check.flag("with_out_bf16", with_out_bf16)
    check.flag("with_rstd", with_rstd)
    check.flag("round_before_weight", round_before_weight)
    check_residual(residual, x)
    check.one_of("fmt", fmt, _FORMATS)
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, (*GROUPS, hidden))
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    layout, sf_dtype, tensor_sf = check_sf(x, fmt, num_per_channels, *flags, tensor_sf, sf_clamp_min, use_e4m3_sf)
    _check_mega_moe(x, mega_moe_sf, mega_moe_block_m, num_per_channels, round_sf)
    data, sf = (None, None) if out is None else pair_of("out", out)
    if out is not None:
        check.plain("out[0]", data)
        check.plain("out[1]", sf)
    data = given_or_new("out[0]", data, x, (*leading, hidden * BITS[fmt] // 8), DTYPES[fmt])
    sf = _sf_of_batches("out[1]", sf, x, leading, ceil_div(hidden, num_per_channels), layout, sf_dtype)
    if with_out_bf16 or out_bf16 is not None:
        out_bf16 = given_rows("out_bf16", out_bf16, x, torch.bfloat16)
    rstd = new(x.new_empty, leading, dtype=torch.float32) if with_rstd else None
    norm_input = x if residual is None else given_rows("residual_out", residual_out, x)
    if launching(data):
        written = None if residual is None else norm_input
        options = NormOptions.of(x, weight, (residual, out_bf16, written), residual is not None, round_before_weight)
        matrix, pitch = _sf_of_matrix(sf, leading, layout)
        of_sf = CastSf(layout_of(matrix), round_sf, tensor_sf is not None, is_e4m3=use_e4m3_sf)
        cast = RowCast(fmt, num_per_channels, of_sf)
        present = out_bf16 is not None, with_rstd, mega_moe_sf is not None
        _norm_forward_and_per_token_cast_kernel(hidden, options, cast, *present, get_arch(x.device))(
            *(folded(x), folded(residual), rows_of_weight(weight), tensor_sf, data.view(-1, data.shape[-1]), matrix),
            *(folded(out_bf16), None if rstd is None else rstd.view(-1), folded(written), mega_moe_sf),
            *(float(eps), float(out_scale), float(weight_offset), least_amax_of(fmt, sf_clamp_min, use_e4m3_sf)),
            *(pitch, mega_moe_block_m),
        )
    return (data, sf), out_bf16, rstd, norm_input
