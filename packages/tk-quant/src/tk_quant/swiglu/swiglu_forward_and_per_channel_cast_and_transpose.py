"""swiglu_forward_and_per_channel_cast_and_transpose: SwiGLU, rounded to bfloat16, quantized down each channel.

For x = [l | r], in float32, evaluated left to right, and for each channel of each block of num_per_tokens tokens:

    activation = bfloat16(l / (1 + exp(-l)) * r)          with a clamp value c: l to (-inf, c], r to [-c, c] first
    amax = max(max |activation|, 1e-4);   sf = amax / 448;   data = round(activation * (448 / amax))
    with round_sf:    sf = least power of two >= that quotient;   data = round(activation * (1 / sf))

x bfloat16 (num_tokens, 2 * hidden); data float8_e4m3fn (hidden, num_tokens), or (num_tokens, hidden) where
`without_transpose`; sf float32 (num_tokens / num_per_tokens, hidden).

A block takes 128 tokens by 64 channels. A thread has `rows` tokens of 8 channels, 16 bytes of l and of r in each, and
keeps the activation in registers. Three meetings in shared memory:

                 8 lanes x 8 channels
               ┌────┬────┬─  ─┬────┐        1. amax of each thread's channels
     row lanes │ t0 │ t1 │ …  │ t7 │        2. one thread for each channel and block makes sf and the factor of it
     × rows    ├────┼────┼─  ─┼────┤        3. the codes, four tokens of a channel a word, in a tile that is read
               │ t8 │ …  │    │    │           the other way: 8 lanes store 128 tokens of a channel
               └────┴────┴─  ─┴────┘
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.lib.cast_formats import CastInput
from tk_quant.lib.column_factors import ColumnFactors
from tk_quant.lib.quantize import OWN_GUARDS_AND_BARRIERS, element, encode_macro, load_macro
from tk_quant.lib.swiglu_arguments import check_clamp_value
from tk_quant.lib.transposed_tile import TILE_TOKENS, transposed_tile_macros
from tk_quant.swiglu.swiglu_forward import Given

_CHANNELS = 64
_COL_LANES = 8


@dataclass(frozen=True)
class SwigluForwardAndPerChannelCastAndTransposeConfig:
    """Launch knobs: how much a thread takes, and how many registers."""

    rows: int
    """Tokens of a thread: 4, 8 or 16."""
    blocks_per_sm: int
    """Blocks that registers must suffice for."""

    @staticmethod
    @cache
    def best(alignment: int, arch: Arch) -> "SwigluForwardAndPerChannelCastAndTransposeConfig":
        """The configuration for what the address of every row is a multiple of."""
        # 64 registers, which four blocks of 256 threads leave each thread, are too few for loads of two bytes.
        return SwigluForwardAndPerChannelCastAndTransposeConfig(rows=4, blocks_per_sm=2 if alignment == 2 else 4)


# H200, 16384 x 2 * 2048: 42.3 us where a tile-level kernel takes 48.0; docs/tuning/tile-level/swiglu.md.
# Tiles are whole, so nothing needs a guard. With each shared array for one purpose only, the barriers below are enough.
@kernel(pass_configs=OWN_GUARDS_AND_BARRIERS)
def _swiglu_forward_and_per_channel_cast_and_transpose_kernel(
    hidden: int,
    alignment: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    clamped: bool,
    config: SwigluForwardAndPerChannelCastAndTransposeConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    from tk_quant.lib.swiglu_forward_and_per_token_cast_steps import activate

    rows, source = config.rows, CastInput(torch.bfloat16, alignment)
    given = Given(weights=False, experts=False, clamp=clamped)
    row_lanes = TILE_TOKENS // rows
    threads = row_lanes * _COL_LANES
    blocks = TILE_TOKENS // num_per_tokens
    col_tiles = hidden // _CHANNELS
    columns = ColumnFactors(torch.bfloat16, _CHANNELS, blocks, row_lanes // blocks, threads, hidden, round_sf)
    share_amax, make_factors = columns.macros()
    load = load_macro(4, 2, alignment)
    put_codes, store_tile = transposed_tile_macros(_CHANNELS, threads)
    encode = encode_macro("e4m3", rows if transpose else 8)

    num_tokens, sf_rows, row_stride = T.dynamic("num_tokens"), T.dynamic("sf_rows"), T.dynamic("row_stride")
    out_shape = (hidden, num_tokens) if transpose else (num_tokens, hidden)

    @T.prim_func
    def swiglu_forward_and_per_channel_cast_and_transpose(
        x: T.StridedTensor((num_tokens, 2 * hidden), (row_stride, 1), "bfloat16"),
        out: T.Tensor(out_shape, "float8_e4m3fn"),
        sf: T.Tensor((sf_rows, hidden), "float32"),
        clamp_value: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, TILE_TOKENS) * col_tiles, threads=threads) as tile:
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            # Checked by the op; vector stores need to know.
            T.assume(num_tokens % TILE_TOKENS == 0)
            # Variables, so that the tile is divided by once, in 32 bits.
            first_token, first_col = T.alloc_var("int32"), T.alloc_var("int32")
            first_token, first_col = tile // col_tiles * TILE_TOKENS, tile % col_tiles * _CHANNELS
            thread = T.get_thread_binding()
            row_lane = thread // _COL_LANES
            row = row_lane * rows
            col = thread % _COL_LANES * 8
            gate = T.alloc_local((rows, 4), "uint32")
            value = T.alloc_local((rows, 4), "uint32")
            activated, rounded = T.alloc_local((rows, 8), "float32"), T.alloc_local((rows, 8), "bfloat16")
            words = T.view(rounded, (rows, 4), "uint32")
            parts = T.alloc_shared((row_lanes, _CHANNELS // 2), "uint32")
            factors = T.alloc_shared((blocks, _CHANNELS), "float32")
            tile_codes = T.alloc_shared((_CHANNELS, TILE_TOKENS // 4) if transpose else (1, 4), "uint32")
            factor = T.alloc_local((8,), "float32")
            scaled = T.alloc_local((rows if transpose else 8,), "float32")
            codes = T.alloc_local((rows // 4 if transpose else 2,), "uint32")

            for i in T.unroll(rows):
                load(x, gate, i, first_token + row + i, first_col + col, True)
                load(x, value, i, first_token + row + i, hidden + first_col + col, True)
            for i in T.unroll(rows):
                activate(gate, value, activated, i, T.float32(1), clamp_value, source, given)
                for j in T.vectorized(8):
                    rounded[i, j] = T.cast(activated[i, j], "bfloat16")
            share_amax(words, parts, row_lane, col // 2)
            T.sync_threads()
            make_factors(parts, factors, sf, first_token // num_per_tokens, first_col)
            T.sync_threads()

            for j in T.vectorized(8):
                factor[j] = factors[row // num_per_tokens, col + j]
            if transpose:
                for j in T.unroll(8):
                    for i in T.unroll(rows):
                        scaled[i] = element(words, i, j, True) * factor[j]
                    encode(scaled, codes)
                    put_codes(tile_codes, T.view(codes, (1, rows // 4)), 0, col + j, row // 4)
                T.sync_threads()
                store_tile(tile_codes, out, first_col, first_token, hidden)
            else:
                for i in T.unroll(rows):
                    for j in T.unroll(8):
                        scaled[j] = element(words, i, j, True) * factor[j]
                    encode(scaled, codes)
                    T.stg64(out[first_token + row + i, first_col + col], codes[0:2])

    return swiglu_forward_and_per_channel_cast_and_transpose


@op(
    "tk_quant::swiglu_forward_and_per_channel_cast_and_transpose_out",
    mutates=("out", "sf"),
    reference="swiglu_forward_and_per_channel_cast_and_transpose",
    translate=lambda call: {"fmt": "e4m3"},
)
def _swiglu_forward_and_per_channel_cast_and_transpose_out(
    x: Tensor,
    out: Tensor,
    sf: Tensor,
    num_per_tokens: int,
    round_sf: bool,
    without_transpose: bool,
    swiglu_clamp_value: float | None,
) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    hidden = x.shape[1] // 2
    alignment, clamped = check.row_alignment(x), swiglu_clamp_value is not None
    config = SwigluForwardAndPerChannelCastAndTransposeConfig.best(alignment, arch)
    args = (hidden, alignment, num_per_tokens, round_sf, not without_transpose, clamped, config, arch)
    cast = _swiglu_forward_and_per_channel_cast_and_transpose_kernel(*args)
    cast(x, out, sf, swiglu_clamp_value if clamped else 0.0)


@replayable
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, then quantized by blocks of one channel, and transposed.

    For x = [l | r]: activation = bfloat16(l / (1 + exp(-l)) * r), evaluated in float32 from left to right. For each
    block: amax = max(max |activation|, 1e-4), sf = amax / 448, data = round(activation * (448 / amax)); with
    `round_sf`: sf = the least power of two at least amax / 448, data = round(activation * (1 / sf)). Name, arguments
    and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 (num_tokens, 2 * hidden), the gate l in the left half; num_tokens a multiple of 128, hidden of 64;
            rows may be strided.
        fmt: "e4m3".
        num_per_tokens: tokens of a block, 32 or 128.
        round_sf: whether scale factors are powers of two.
        without_transpose: whether data stays (num_tokens, hidden).
        swiglu_clamp_value: c, 2**-126 to infinity: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.

    Returns:
        `(data, sf)`: float8_e4m3fn (hidden, num_tokens) or, without transposing, (num_tokens, hidden); float32
        (num_tokens / num_per_tokens, hidden); both contiguous, data * sf (of its block) standing for the activation. A
        block with an infinity or a NaN has that for sf.

    Raises:
        TypeError: x is no bfloat16 tensor, or a flag, num_per_tokens or swiglu_clamp_value has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt,
            num_per_tokens or swiglu_clamp_value is none of those above.
    """
    num_tokens, width = check.tensor("x", x, (torch.bfloat16,), ("num_tokens", "2 * hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_TOKENS)
    check.require(width > 0 and width % (2 * _CHANNELS) == 0, "x.shape[1]", "a positive multiple of 128", width)
    check.one_of("fmt", fmt, ("e4m3",))
    check.integer("num_per_tokens", num_per_tokens)
    check.one_of("num_per_tokens", num_per_tokens, (32, 128))
    for name, flag in (("round_sf", round_sf), ("without_transpose", without_transpose)):
        check.flag(name, flag)
    check_clamp_value(swiglu_clamp_value)
    if swiglu_clamp_value is not None:
        swiglu_clamp_value = None if swiglu_clamp_value == math.inf else float(swiglu_clamp_value)
    hidden = width // 2
    out = x.new_empty((num_tokens, hidden) if without_transpose else (hidden, num_tokens), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    _swiglu_forward_and_per_channel_cast_and_transpose_out(
        x, out, sf, num_per_tokens, round_sf, without_transpose, swiglu_clamp_value
    )
    return out, sf
