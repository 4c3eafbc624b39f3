"""Casts by blocks: the kernel of per_token_cast, per_block_cast and their relatives, and its launch.

A block is the elements that share a scale factor: some channels of one token or of several. A thread block loads a
tile of whole blocks and keeps it in registers until the store. A thread holds 8 or 16 neighbouring channels:

                tile of blocks x channels of a block       e.g. bfloat16, blocks of 1 x 128, 16 channels a thread:
              ┌───────────┬───────────┬─   ─┬────────┐
    blocks ×  │ block     │ block     │  …  │        │       thread  0 … 7   8 … 15   16 … 23   24 … 31
    tokens    │ t0 … t7   │ t8 … t15  │     │        │       block      0        1         2         3
              └───────────┴───────────┴─   ─┴────────┘       in blocks of 128 x 128, threads 0, 8 … 248 form a column

A block that takes more than a warp, such as a whole row or 128 x 128, is split in parts of a warp each. Each part is
reduced like a block, then the maxima of the parts are reduced.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.tiles import DIRECT_COPIES
from tk_quant.cast.config import CastInput, CastSf, TileConfig, layout_of
from tk_quant.cast.format import BITS, DTYPES, least_amax_of

# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}


def tiles_across(num_cols: int, in_bytes: bool, across: int) -> int:
    """Tiles along channels, of `across` blocks each; they cover one-byte scale factors to the end of the last word."""
    return 1 if across >= num_cols else ceil_div(align(num_cols, 4) if in_bytes else num_cols, across)


@kernel(pass_configs=_PASS_CONFIGS)
def cast_kernel(
    source: CastInput,
    hidden: int,
    fmt: str,
    block_size: tuple[int, int],
    of_sf: CastSf,
    with_data: bool,
    config: TileConfig,
    arch: Arch,
) -> Any:
    """Build `cast(x, x_sf, tensor_sf, data, sf, least_amax)`; a caller passes None for a tensor that is not there.

    The kernel writes sf unless it is given, and data `with_data`, which it is wherever sf is given.
    """
    import tilelang.language as T

    from tk_core.macros import quantize
    from tk_quant.cast import e2m1, e4m3, e5m6, scales
    from tk_quant.cast import tile as tiles

    block_tokens, block_channels = block_size
    splits, (down, across) = config.splits(block_size), config.blocks_of_tile(block_size)
    num_cols = ceil_div(hidden, block_channels)
    num_tiles = tiles_across(num_cols, of_sf.in_bytes, across)
    num_tokens = T.dynamic("num_tokens")
    sf_rows = num_tokens if block_tokens == 1 else T.dynamic("sf_rows")

    of_bf16 = source.dtype is torch.bfloat16 and block_channels >= 8
    by_power = of_bf16 and of_sf.round_sf and not arch.has_fp4_convert
    # Factors that are made from the values' amax let no finite value saturate.
    are_bounded = not of_sf.is_given and not of_sf.is_nvfp4 and not of_sf.is_e4m3

    @T.prim_func
    def cast(
        x: tiles.input_type(source, num_tokens, hidden),
        x_sf: tiles.input_sf_type(source, hidden),
        tensor_sf: T.Tensor((1,), "float32"),
        data: T.Tensor((num_tokens, hidden * BITS[fmt] // 8), T.dtype(DTYPES[fmt])),
        sf: scales.sf_type(sf_rows, num_cols, of_sf.layout, of_sf.byte_dtype),
        least_amax: T.float32,
    ) -> None:
        num_rows = T.ceildiv(num_tokens, block_tokens)
        tiles_down = T.ceildiv(scales.rows_of_sf(num_rows, of_sf.layout), down)
        with T.Kernel(tiles_down * num_tiles, threads=config.threads) as index:
            if config.blocks_per_sm:
                T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            block_row, block_col = index // num_tiles * down, index % num_tiles * across
            row, col = block_row * block_tokens, block_col * block_channels
            values = T.alloc_fragment(config.tile, tiles.values_dtype(source))
            factors = T.alloc_fragment(config.parts, "float32")
            T.annotate_layout({values: tiles.layout_of_tile(config)})
            tiles.load_values(x, x_sf, values, row, col, source, config)
            if of_sf.is_given:
                for i, g in T.Parallel(*config.parts):
                    token, channel = row + i * config.block_tokens, col + g * config.block_channels
                    # Clamped to a valid index, as TileLang may load before it tests the condition.
                    sf_row, sf_col = T.min(token, num_tokens - 1) // block_tokens, T.min(channel, hidden - 1)
                    if of_sf.is_e4m3:
                        code = T.cast(sf[sf_row, sf_col // block_channels], "float32")
                        factors[i, g] = T.float32(1) / T.if_then_else(token < num_tokens, code, T.float32(1))
                    else:
                        given = T.if_then_else(token < num_tokens, sf[sf_row, sf_col // block_channels], T.float32(1))
                        factors[i, g] = T.float32(1) / given
            else:
                whole = T.alloc_var("int32", init=0)
                amax = T.alloc_fragment(config.parts, "int32")
                block_sf = T.alloc_fragment((down, across), "float32")
                tiles.block_amax(values, amax, config)
                if splits:
                    tiles.amax_of_parts(amax, whole)
                # Here, and not where it is used: nvcc would do so twice, with nearly twice the instructions for 1 x 1.
                if splits and not of_sf.is_nvfp4:
                    whole = quantize.raised(whole, least_amax)
                elif not of_sf.is_nvfp4:
                    for i, g in T.Parallel(*config.parts):
                        amax[i, g] = quantize.raised(amax[i, g], least_amax)
                for i, g in T.Parallel(down, across):
                    block_sf[i, g] = scales.sf_of_group(whole if splits else amax[i, g], tensor_sf, fmt, of_sf)[0]
                scales.store_sf(sf, block_sf, block_row, block_col, num_rows, num_cols, of_sf.layout)
                if with_data:
                    for i, g in T.Parallel(*config.parts):
                        factors[i, g] = scales.sf_of_group(whole if splits else amax[i, g], tensor_sf, fmt, of_sf)[1]
            if with_data and fmt == "e4m3":
                e4m3.store_e4m3(values, factors, data, row, col, num_tokens, config)
            elif with_data and fmt == "e5m6":
                e5m6.store_e5m6(values, factors, data, row, col, config)
            elif with_data and by_power:
                e2m1.store_e2m1_by_power(values, factors, data, row, col, num_tokens, config)
            elif with_data:
                e2m1.store_e2m1(values, factors, data, row, col, num_tokens, are_bounded, config)

    return cast


def launch_cast(
    x: Tensor,
    data: Tensor | None,
    sf: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    *,
    x_sf: Tensor | None = None,
    x_block_size: tuple[int, int] = (0, 0),
    tensor_sf: Tensor | None = None,
    round_sf: bool = False,
    sf_clamp_min: float | None = None,
    sf_is_given: bool = False,
    use_e4m3_sf: bool = False,
) -> None:
    """Write data and sf of x, or of the pair (x, x_sf); sf alone if data is None, data alone if `sf_is_given`."""
    arch, source = get_arch(x.device), CastInput.of(x, x_sf, x_block_size)
    hidden = x.shape[1] * 8 * x.dtype.itemsize // source.bits
    with_data = data is not None
    of_sf = CastSf(layout_of(sf), round_sf, tensor_sf is not None, sf_is_given, use_e4m3_sf)
    config = TileConfig.best(hidden, block_size, source.bits, fmt, with_data, of_sf.in_bytes, arch)
    cast = cast_kernel(source, hidden, fmt, block_size, of_sf, with_data, config, arch)
    cast(x, x_sf, tensor_sf, data, sf, least_amax_of(fmt, sf_clamp_min, use_e4m3_sf))
