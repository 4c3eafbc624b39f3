"""The kernel of per_token_cast and per_block_cast, and `cast_out`, which launches it.

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
from tk_core.op import op
from tk_core.tiles import DIRECT_COPIES
from tk_quant.lib.cast_config import TileConfig
from tk_quant.lib.cast_formats import ELEMENTS, CastInput, CastScales, flags_of, layout_of
from tk_quant.lib.least_amax import least_amax_of
from tk_quant.lib.outputs import for_vectors
from tk_quant.lib.quantize import BITS

# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}


def _tiles_across(num_cols: int, in_bytes: bool, across: int) -> int:
    """Tiles along channels, of `across` blocks each; they cover one-byte scale factors to the end of the last word."""
    return 1 if across >= num_cols else ceil_div(align(num_cols, 4) if in_bytes else num_cols, across)


@kernel(pass_configs=_PASS_CONFIGS)
def cast_kernel(
    source: CastInput,
    hidden: int,
    fmt: str,
    block_size: tuple[int, int],
    scales: CastScales,
    makes: str,
    config: TileConfig,
    arch: Arch,
) -> Any:
    """Build `cast(x, x_sf, tensor_sf, data, sf, least_amax)`; a caller passes None for a tensor that it lacks.

    `makes` says what the kernel writes: "sf", "data" (it reads a given float32 sf), or "both".
    """
    import tilelang.language as T

    from tk_quant.lib import cast_tiles as tiles
    from tk_quant.lib.division import quick_scale_of_amax
    from tk_quant.lib.scales_io import (
        nvfp4_scale_of_amax,
        raised,
        scale_of_bounded_amax,
        scale_rows,
        scales_type,
        store_scales,
    )

    block_tokens, block_channels = block_size
    splits, (down, across) = config.splits(block_size), config.blocks_of_tile(block_size)
    num_cols = ceil_div(hidden, block_channels)
    num_tiles = _tiles_across(num_cols, scales.in_bytes, across)
    num_tokens = T.dynamic("num_tokens")
    sf_rows = num_tokens if block_tokens == 1 else T.dynamic("sf_rows")

    of_bf16 = source.dtype is torch.bfloat16 and block_channels >= 8
    by_power = fmt == "e2m1" and of_bf16 and scales.round_sf and not arch.has_fp4_convert
    are_bounded = makes == "both" and not scales.of_tensor

    def scale_of(amax: Any, tensor_sf: T.Buffer) -> tuple[Any, Any]:
        if scales.of_tensor:
            return nvfp4_scale_of_amax(amax, tensor_sf[0])
        if fmt == "e2m1" and not scales.round_sf:
            return quick_scale_of_amax(amax, fmt, False)
        return scale_of_bounded_amax(amax, fmt, scales.round_sf)

    @T.prim_func
    def cast(
        x: tiles.input_type(source, num_tokens, hidden),
        x_sf: tiles.input_scales_type(source, hidden),
        tensor_sf: T.Tensor((1,), "float32"),
        data: T.Tensor((num_tokens, hidden * BITS[fmt] // 8), ELEMENTS[fmt]),
        sf: scales_type(sf_rows, num_cols, scales.layout, scales.byte_dtype),
        least_amax: T.float32,
    ) -> None:
        num_rows = T.ceildiv(num_tokens, block_tokens)
        with T.Kernel(T.ceildiv(scale_rows(num_rows, scales.layout), down) * num_tiles, threads=config.threads) as tile:
            if config.blocks_per_sm:
                T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            block_row, block_col = tile // num_tiles * down, tile % num_tiles * across
            row, col = block_row * block_tokens, block_col * block_channels
            values = T.alloc_fragment(config.tile, tiles.values_dtype(source))
            factors = T.alloc_fragment(config.parts, "float32")
            T.annotate_layout({values: tiles.layout_of_tile(config)})
            tiles.load_values(x, x_sf, values, row, col, source, config)
            if makes == "data":
                for i, g in T.Parallel(*config.parts):
                    token, channel = row + i * config.block_tokens, col + g * config.block_channels
                    # Clamped to a valid index, as TileLang may load before it tests the condition.
                    sf_row, sf_col = T.min(token, num_tokens - 1) // block_tokens, T.min(channel, hidden - 1)
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
                if splits and not scales.of_tensor:
                    whole = raised(whole, least_amax)
                elif not scales.of_tensor:
                    for i, g in T.Parallel(*config.parts):
                        amax[i, g] = raised(amax[i, g], least_amax)
                for i, g in T.Parallel(down, across):
                    block_sf[i, g] = scale_of(whole if splits else amax[i, g], tensor_sf)[0]
                store_scales(sf, block_sf, block_row, block_col, num_rows, num_cols, scales.layout)
                if makes == "both":
                    for i, g in T.Parallel(*config.parts):
                        factors[i, g] = scale_of(whole if splits else amax[i, g], tensor_sf)[1]
            if makes != "sf":
                tiles.store_codes(values, factors, data, row, col, fmt, are_bounded, by_power, config)

    return cast


@op(
    "tk_quant::cast_out",
    mutates=("out", "out_sf"),
    reference="lib.cast.cast",
    translate=lambda call: {
        "x": call.x if call.x_sf is None else (call.x, call.x_sf),
        "block_size": (call.block_tokens, call.block_channels),
        "x_block_size": (call.x_block_tokens, call.x_block_channels),
        **({} if call.out_sf is None else flags_of(call.out_sf)),
    },
)
def cast_out(
    x: Tensor,
    x_sf: Tensor | None,
    sf: Tensor | None,
    tensor_sf: Tensor | None,
    out: Tensor | None,
    out_sf: Tensor | None,
    fmt: str,
    block_tokens: int,
    block_channels: int,
    x_block_tokens: int,
    x_block_channels: int,
    round_sf: bool,
    sf_clamp_min: float | None,
) -> None:
    """Write `out` and `out_sf`, or one of them; `out` alone is scaled by `sf`. `x_sf` belongs to a pair x."""
    if x.shape[0] == 0:
        return
    block_size = (block_tokens, block_channels)
    arch, source = get_arch(x.device), CastInput.of(x, x_sf, (x_block_tokens, x_block_channels))
    hidden = x.shape[1] * 8 * x.dtype.itemsize // source.bits
    written_data, written_sf = for_vectors(out), for_vectors(out_sf)
    makes = "data" if out_sf is None else "sf" if out is None else "both"
    scales = CastScales(layout_of(sf if out_sf is None else out_sf), round_sf, tensor_sf is not None)
    config = TileConfig.best(hidden, block_size, source.bits, fmt, makes, scales.in_bytes, arch)
    cast = cast_kernel(source, hidden, fmt, block_size, scales, makes, config, arch)
    cast(x, x_sf, tensor_sf, written_data, sf if out_sf is None else written_sf, least_amax_of(fmt, sf_clamp_min))
    if written_data is not out:
        out.copy_(written_data)
    if written_sf is not out_sf:
        out_sf.copy_(written_sf)
