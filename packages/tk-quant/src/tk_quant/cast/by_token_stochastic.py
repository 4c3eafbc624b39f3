"""The kernel of per_token_cast with stochastic rounding (stochastic.py), and its launch.

Tiles are those of by_block.py, in which a thread holds 8 or 16 neighbouring channels, whole quads. A quad's index is
that in its row; with a seed it is that in the tensor, so that equal rows round differently.
"""

from typing import Any

from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.tiles import DIRECT_COPIES
from tk_quant.cast.by_block import tiles_across
from tk_quant.cast.config import CastInput, CastSf, TileConfig
from tk_quant.cast.format import BITS, DTYPES, least_amax_of

_QUAD = 4
# Each access has a guard of its own, so TileLang's bounds checks would only repeat them.
_PASS_CONFIGS = {**DIRECT_COPIES, "tl.disable_safe_memory_legalize": True}


@kernel(pass_configs=_PASS_CONFIGS)
def stochastic_per_token_cast_kernel(
    source: CastInput, hidden: int, fmt: str, num_per_channels: int, of_sf: CastSf, seed_from: str, arch: Arch
) -> Any:
    """Build `cast(x, x_sf, tensor_sf, data, sf, least_amax, seed, seed_tensor)`; None for a tensor that is not there.

    seed_from: "nothing", "argument" or "memory", which is seed_tensor.
    """
    import tilelang.language as T

    from tk_core.macros import quantize
    from tk_quant.cast import scales, stochastic
    from tk_quant.cast import tile as tiles

    config = TileConfig.best(hidden, (1, num_per_channels), source.bits, "e4m3", True, of_sf.in_bytes, arch)
    splits, (down, across) = config.splits((1, num_per_channels)), config.blocks_of_tile((1, num_per_channels))
    num_cols = ceil_div(hidden, num_per_channels)
    num_tiles = tiles_across(num_cols, of_sf.in_bytes, across)
    num_tokens = T.dynamic("num_tokens")
    # Quads of a word, words of a thread's vector, and of a row.
    quads = 8 // BITS[fmt]
    vector, row_words = config.vec // (_QUAD * quads), hidden // (_QUAD * quads)

    @T.macro
    def round_words(
        values: T.Buffer, factors: T.Buffer, words: T.Buffer, row: T.int32, col: T.int32, of_seed: T.uint32
    ) -> None:
        size = config.block_channels
        for i, t, w in T.Parallel(*words.shape):
            scaled, codes = T.alloc_local((quads * _QUAD,), "float32"), T.alloc_local((quads,), "uint32")
            channel = w * quads * _QUAD
            for k in T.unroll(quads * _QUAD):
                value = T.cast(values[i, t, (channel + k) // size, (channel + k) % size], "float32")
                scaled[k] = value * factors[i, channel // size]
            for q in tuple(range(quads)):
                four, random = T.alloc_local((_QUAD,), "float32"), T.alloc_local((1,), "uint32")
                for k in T.unroll(_QUAD):
                    four[k] = scaled[q * _QUAD + k]
                index = T.cast((col + channel) // _QUAD + q, "uint32")
                if seed_from != "nothing":
                    index = index + T.cast(row + i, "uint32") * T.uint32(hidden // _QUAD)
                stochastic.hash_of_quad(four, index, of_seed, random)
                codes[q] = stochastic.codes_of_quad(four, random[0], fmt)
            words[i, t, w] = codes[0] | codes[1] << T.uint32(16) if quads == 2 else codes[0]

    @T.macro
    def store_words(words: T.Buffer, data: T.Buffer, row: T.int32, col: T.int32) -> None:
        out = T.view(data, (num_tokens, row_words), "uint32")
        for i, t, v in T.Parallel(words.shape[0], words.shape[1], words.shape[2] // vector):
            token, word = row + i, col // (_QUAD * quads) + v * vector
            # Without this copy nvcc would split the vector store, as the words were computed one by one.
            copied = T.alloc_local((vector,), "uint32")
            for k in T.unroll(vector):
                copied[k] = words[i, t, v * vector + k]
            if token < num_tokens and word < row_words:
                if vector == 1:
                    T.stg32(out[token, word], copied[0])
                elif vector == 2:
                    T.stg64(out[token, word], copied[0:2])
                else:
                    T.stg128(out[token, word], copied[0:4])

    @T.prim_func
    def cast(
        x: tiles.input_type(source, num_tokens, hidden),
        x_sf: tiles.input_sf_type(source, hidden),
        tensor_sf: T.Tensor((1,), "float32"),
        data: T.Tensor((num_tokens, hidden * BITS[fmt] // 8), T.dtype(DTYPES[fmt])),
        sf: scales.sf_type(num_tokens, num_cols, of_sf.layout, of_sf.byte_dtype),
        least_amax: T.float32,
        seed: T.int64,
        seed_tensor: T.Tensor((1,), "int64"),
    ) -> None:
        tiles_down = T.ceildiv(scales.rows_of_sf(num_tokens, of_sf.layout), down)
        with T.Kernel(tiles_down * num_tiles, threads=config.threads) as index:
            row, block_col = index // num_tiles * down, index % num_tiles * across
            col = block_col * num_per_channels
            of_seed = T.alloc_var("uint32", init=0)
            if seed_from != "nothing":
                of_seed = stochastic.hash_of_seed(seed_tensor[0] if seed_from == "memory" else seed)
            values = T.alloc_fragment(config.tile, tiles.values_dtype(source))
            factors = T.alloc_fragment(config.parts, "float32")
            words = T.alloc_fragment((config.blocks_down, 1, config.channels // (_QUAD * quads)), "uint32")
            T.annotate_layout({values: tiles.layout_of_tile(config)})
            T.annotate_layout({words: tiles.layout_of_rows(config, _QUAD * quads)})
            tiles.load_values(x, x_sf, values, row, col, source, config)
            whole = T.alloc_var("int32", init=0)
            amax = T.alloc_fragment(config.parts, "int32")
            block_sf = T.alloc_fragment((down, across), "float32")
            tiles.block_amax(values, amax, config)
            if splits:
                tiles.amax_of_parts(amax, whole)
            if splits and not of_sf.is_nvfp4:
                whole = quantize.raised(whole, least_amax)
            elif not of_sf.is_nvfp4:
                for i, g in T.Parallel(*config.parts):
                    amax[i, g] = quantize.raised(amax[i, g], least_amax)
            for i, g in T.Parallel(down, across):
                block_sf[i, g] = scales.sf_of_group(whole if splits else amax[i, g], tensor_sf, fmt, of_sf, False)[0]
            scales.store_sf(sf, block_sf, row, block_col, num_tokens, num_cols, of_sf.layout)
            for i, g in T.Parallel(*config.parts):
                factors[i, g] = scales.sf_of_group(whole if splits else amax[i, g], tensor_sf, fmt, of_sf, False)[1]
            round_words(values, factors, words, row, col, of_seed)
            store_words(words, data, row, col)

    return cast


def launch_stochastic_cast(
    pair: tuple[Tensor, Tensor | None],
    x_block_size: tuple[int, int],
    data: Tensor,
    sf: Tensor,
    fmt: str,
    num_per_channels: int,
    of_sf: CastSf,
    tensor_sf: Tensor | None,
    sf_clamp_min: float | None,
    seed: Tensor | int | None,
) -> None:
    """Write data and sf of x, or of the pair (x, x_sf)."""
    x, x_sf = pair
    source = CastInput.of(x, x_sf, x_block_size)
    hidden = x.shape[1] * 8 * x.dtype.itemsize // source.bits
    in_memory = isinstance(seed, Tensor)
    seed_from = "memory" if in_memory else "nothing" if seed is None else "argument"
    rounding = (seed or 0, None) if not in_memory else (0, seed.view(1))
    options = fmt, num_per_channels, of_sf, seed_from, get_arch(x.device)
    cast = stochastic_per_token_cast_kernel(source, hidden, *options)
    cast(x, x_sf, tensor_sf, data, sf, least_amax_of(fmt, sf_clamp_min, of_sf.is_e4m3), *rounding)
