"""swiglu_forward_and_per_channel_cast_and_transpose: SwiGLU, rounded to bfloat16, quantized down each channel.

A thread block takes 128 tokens by 64 channels. A thread has 8 channels of four tokens, 16 bytes of l and of r in each,
and keeps the activation in registers. Threads exchange three things through shared memory:

                 8 lanes x 8 channels
               ┌────┬────┬─  ─┬────┐        1. amax of each thread's channels
     row lanes │ t0 │ t1 │ …  │ t7 │        2. sf and the factor, made by one thread for each channel of a block
     × 4 rows  ├────┼────┼─  ─┼────┤        3. to transpose, the codes, in words of four tokens of a channel; then
               │ t8 │ …  │    │    │           8 lanes store 128 tokens of a channel
               └────┴────┴─  ─┴────┘
"""

import math
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_quant.cast.config import OWN_GUARDS_AND_BARRIERS, TILE_ROWS, CastInput
from tk_quant.cast.format import check_channel_blocks, least_amax_of
from tk_quant.swiglu.arguments import SwigluOptions, check_clamp_value

_CHANNELS = 64
_VEC = 8
_COL_LANES = _CHANNELS // _VEC
_ROWS = 4
"""Tokens of a thread."""
_ROW_LANES = TILE_ROWS // _ROWS
_THREADS = _ROW_LANES * _COL_LANES


# H200, 16384 x 2 * 2048: 42.3 us where a tile-level kernel takes 48.0; docs/tuning/tile-level/swiglu.md.
# Tiles are whole, so nothing needs a guard. No shared array is reused, so the barriers below are enough.
@kernel(pass_configs=OWN_GUARDS_AND_BARRIERS)
def _swiglu_forward_and_per_channel_cast_and_transpose_kernel(
    hidden: int, alignment: int, num_per_tokens: int, round_sf: bool, transpose: bool, clamped: bool, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_core.macros.quantize import encode_e4m3
    from tk_quant.cast import channel_words as steps
    from tk_quant.cast.words import element, load_words
    from tk_quant.swiglu.activation import Scalars
    from tk_quant.swiglu.forward_steps import activate

    source, options = CastInput(torch.bfloat16, alignment), SwigluOptions(weights=False, experts=False, clamp=clamped)
    blocks, col_tiles = TILE_ROWS // num_per_tokens, hidden // _CHANNELS

    num_tokens, sf_rows = T.dynamic("num_tokens"), T.dynamic("sf_rows")
    row_stride = T.dynamic("row_stride", "int64")
    out_shape = (hidden, num_tokens) if transpose else (num_tokens, hidden)

    @T.prim_func
    def swiglu_forward_and_per_channel_cast_and_transpose(
        x: T.StridedTensor((num_tokens, 2 * hidden), (row_stride, 1), "bfloat16"),
        out: T.Tensor(out_shape, "float8_e4m3fn"),
        sf: T.Tensor((sf_rows, hidden), "float32"),
        clamp_value: T.float32,
        least_amax: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, TILE_ROWS) * col_tiles, threads=_THREADS) as tile:
            # Four thread blocks an SM leave a thread 64 registers, too few for loads of two bytes.
            T.annotate_min_blocks_per_sm(2 if alignment == 2 else 4)
            # Checked by the op; vector stores need to know.
            T.assume(num_tokens % TILE_ROWS == 0)
            # Variables, so that the index of the tile is divided once, in 32 bits.
            first_token, first_col = T.alloc_var("int32"), T.alloc_var("int32")
            first_token, first_col = tile // col_tiles * TILE_ROWS, tile % col_tiles * _CHANNELS
            thread = T.get_thread_binding()
            row, col = thread // _COL_LANES * _ROWS, thread % _COL_LANES * _VEC
            gate = T.alloc_local((_ROWS, _VEC // 2), "uint32")
            value = T.alloc_local((_ROWS, _VEC // 2), "uint32")
            activated, rounded = T.alloc_local((_ROWS, _VEC), "float32"), T.alloc_local((_ROWS, _VEC), "bfloat16")
            words = T.view(rounded, (_ROWS, _VEC // 2), "uint32")
            parts = T.alloc_shared((_ROW_LANES, _CHANNELS // 2), "uint32")
            factors = T.alloc_shared((blocks, _CHANNELS), "float32")
            tile_codes = T.alloc_shared((_CHANNELS, TILE_ROWS // 4) if transpose else (1, 4), "uint32")
            factor = T.alloc_local((_VEC,), "float32")
            scaled = T.alloc_local((_ROWS if transpose else _VEC,), "float32")
            codes = T.alloc_local((1 if transpose else 2,), "uint32")

            for i in T.unroll(_ROWS):
                load_words(x, gate, i, first_token + row + i, first_col + col, True, alignment)
                load_words(x, value, i, first_token + row + i, hidden + first_col + col, True, alignment)
            for i in T.unroll(_ROWS):
                activate(gate, value, activated, i, T.float32(1), Scalars(clamp_value, 1.0), source, options)
                for j in T.vectorized(_VEC):
                    rounded[i, j] = T.cast(activated[i, j], "bfloat16")
            steps.share_amax(words, parts, True)
            T.sync_threads()
            block_row = first_token // num_per_tokens
            steps.make_factors(parts, factors, sf, block_row, first_col, least_amax, hidden, _THREADS, True, round_sf)
            T.sync_threads()

            for j in T.vectorized(_VEC):
                factor[j] = factors[row // num_per_tokens, col + j]
            if transpose:
                for j in T.unroll(_VEC):
                    for i in T.unroll(_ROWS):
                        scaled[i] = element(words, i, j, True) * factor[j]
                    encode_e4m3(scaled, codes)
                    steps.put_codes(tile_codes, codes, col + j, row // 4, _VEC)
                T.sync_threads()
                steps.store_tile(tile_codes, out, first_col, first_token, hidden, _THREADS, _VEC)
            else:
                for i in T.unroll(_ROWS):
                    for j in T.unroll(_VEC):
                        scaled[j] = element(words, i, j, True) * factor[j]
                    encode_e4m3(scaled, codes)
                    T.stg64(out[first_token + row + i, first_col + col], codes[0:2])

    return swiglu_forward_and_per_channel_cast_and_transpose


@op(aligned=())
def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    sf_clamp_min: float | None = None,
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
        sf_clamp_min: the least amax instead of 1e-4; at least 448 * 2**-126.

    Returns:
        `(data, sf)`: float8_e4m3fn (hidden, num_tokens) or, without transposing, (num_tokens, hidden); float32
        (num_tokens / num_per_tokens, hidden); both contiguous; data * sf (of its block) is close to the activation. A
        block with NaN or infinity in it has NaN or infinity for its sf.

    Raises:
        TypeError: x is no bfloat16 tensor, or another argument has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt,
            num_per_tokens, swiglu_clamp_value or sf_clamp_min is none of those above.
    """
    num_tokens, width = check.tensor("x", x, (torch.bfloat16,), ("num_tokens", "2 * hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_ROWS)
    check.require(width > 0 and width % (2 * _CHANNELS) == 0, "x.shape[1]", "a positive multiple of 128", width)
    check_channel_blocks(fmt, num_per_tokens, (32, 128), round_sf, sf_clamp_min)
    check.flag("without_transpose", without_transpose)
    check_clamp_value(swiglu_clamp_value)
    if swiglu_clamp_value is not None:
        swiglu_clamp_value = None if swiglu_clamp_value == math.inf else float(swiglu_clamp_value)
    hidden = width // 2
    shape = (num_tokens, hidden) if without_transpose else (hidden, num_tokens)
    out = new(x.new_empty, shape, dtype=torch.float8_e4m3fn)
    sf = new(x.new_empty, (num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    if launching(out, sf):
        alignment, clamped = check.row_alignment(x), swiglu_clamp_value is not None
        args = (hidden, alignment, num_per_tokens, round_sf, not without_transpose, clamped, get_arch(x.device))
        cast = _swiglu_forward_and_per_channel_cast_and_transpose_kernel(*args)
        cast(x, out, sf, swiglu_clamp_value if clamped else 0.0, least_amax_of("e4m3", sf_clamp_min))
    return out, sf
