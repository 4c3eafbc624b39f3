"""per_block_cast_lossless: e2m1 with power-of-two scale factors to e4m3 with fewer of them, the values unchanged.

With the e and E of the public function: 6 * 2**6 = 384 still fits e4m3, whose least step is 2**-9; so .5 is exact down
to e = E - 14. Past that data rounds.

A thread takes 16 channels of `pieces` rows, with all its loads in flight before the threads of a block of the output
reduce E: by shuffles among lanes, through shared memory among warps. For each row it casts the eight e2m1 magnitudes
to e4m3 once; they fill two words, a table in which prmt looks up four codes at a time.

                lanes x 16 channels              e.g. (1, 32) to (128, 128), 16 lanes x 8 rows of threads x 16 pieces
             ┌────┬────┬─   ─┬────┐
      pieces │    │    │     │    │   t0 has `pieces` rows, one under another
             │ t0 │ t1 │  …  │    │
             ├────┼────┼─   ─┼────┤
      pieces │    │    │     │    │   a block of the output takes channels / 16 lanes and tokens / pieces rows of
             │    │    │     │    │   threads; if it has fewer tokens than `pieces`, a thread has rows of several
             └────┴────┴─   ─┴────┘
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.e2m1 import e4m3_of_e2m1_magnitudes, e4m3_of_e2m1x8
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, check_scales, empty_scales, scale_layout
from tk_core.views import aligned
from tk_quant.cast.config import layout_of
from tk_quant.cast.format import BLOCK_SIDES, E2M1_DTYPES, block_size_of, pair_of

_CHANNELS = 16
"""Channels of a piece, which is one row of a thread: 16 bytes of the output."""
_EXACT_RATIO = 14


# Thread level, on words of codes: 9 instructions an element; at tile level 14 to 16; docs/tuning/tile-level.md.
# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _lossless_kernel(
    alignment: int,
    hidden: int,
    x_block_size: tuple[int, int],
    x_sf_layout: ScaleLayout,
    out_block_size: tuple[int, int],
    sf_layout: ScaleLayout,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    from tk_quant.cast.scales import sf_bytes, sf_index, sf_type
    from tk_quant.cast.words import load_words

    x_tokens, x_channels = x_block_size
    out_tokens, out_channels = out_block_size
    # Threads side by side along a row, rows of threads, and neighbouring rows of a thread, its pieces.
    # H200, 8192 x 7168, 1 x 32 to 128 x 128: 26.0 us with 16 pieces, 26.6 with 8, 27.3 with 4. To 1 x 128:
    # 32 lanes with 2 pieces 27.4, with 4 27.6, with 8 28.3; 16 lanes 28.7, 29.1 and 29.5.
    if out_tokens == 1 and hidden % (32 * _CHANNELS) == 0:
        lanes, rows, pieces = 32, 8, 2
    else:
        lanes, pieces = 16 if hidden > 128 else 8, 16 if out_tokens == 128 else 8
        rows = max(128 // lanes, out_tokens // pieces)
    threads, tile_rows = lanes * rows, rows * pieces
    col_tiles = ceil_div(hidden, lanes * _CHANNELS)
    x_lanes, out_lanes = x_channels // _CHANNELS, out_channels // _CHANNELS
    # A thread's pieces lie in `groups` blocks of the output; a block takes `block_rows` rows of threads.
    group_pieces = min(out_tokens, pieces)
    groups = pieces // group_pieces
    block_rows = max(out_tokens // pieces, 1)
    warp_rows = 32 // lanes
    block_warps = max(block_rows // warp_rows, 1)
    x_sf_cols, out_sf_cols = ceil_div(hidden, x_channels), ceil_div(hidden, out_channels)
    x_packed, swizzled = x_sf_layout is ScaleLayout.PACKED_UE8M0, x_sf_layout is ScaleLayout.SWIZZLED
    packed = sf_layout is ScaleLayout.PACKED_UE8M0
    assert threads % 32 == 0
    assert lanes % out_lanes == 0
    assert tile_rows % out_tokens == 0

    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride", "int64")

    @T.macro
    def load_sf(x_sf: T.Buffer, sf_words: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        sf_row, sf_col = row // x_tokens, col // x_channels
        if swizzled:
            tile_row, tile_col = sf_row // 128, sf_col // 4
            sf_words[piece] = T.ldg32(x_sf[tile_row, tile_col, sf_row % 32, sf_row % 128 // 32, 0], pred=valid)
        else:
            sf_words[piece] = T.ldg32(x_sf[sf_row, sf_col // 4 if x_packed else sf_col], pred=valid)

    @T.macro
    def largest_of_blocks(exponents: T.Buffer, largest: T.Buffer, shared: T.Buffer, thread: T.int32) -> None:
        for g in T.unroll(groups):
            largest[g] = exponents[g * group_pieces]
            for i in T.unroll(1, group_pieces):
                largest[g] = T.max(largest[g], exponents[g * group_pieces + i])
            for j in T.unroll(out_lanes.bit_length() - x_lanes.bit_length()):
                largest[g] = T.max(largest[g], T.shfl_xor(largest[g], x_lanes << j))
            for j in T.unroll(min(block_rows, warp_rows).bit_length() - 1):
                largest[g] = T.max(largest[g], T.shfl_xor(largest[g], lanes << j))
        if block_warps > 1:
            warp, lane = thread // 32, thread % 32
            if lane < lanes and lane % out_lanes == 0:
                shared[warp, lane // out_lanes] = largest[0]
            T.sync_threads()
            for j in T.unroll(block_warps):
                other = shared[warp // block_warps * block_warps + j, lane % lanes // out_lanes]
                largest[0] = T.max(largest[0], other)

    @T.macro
    def store_sf(sf: T.Buffer, row: T.int32, col: T.int32, largest: T.int32, out_exponent: T.int32) -> None:
        sf_row, sf_col = row // out_tokens, col // out_channels
        exponent = T.if_then_else(largest == 255, 255, out_exponent)
        if packed:
            exponents = sf_bytes(sf, sf_layout)
            exponents[sf_index(sf_row, sf_col, sf_layout)] = T.cast(exponent, "uint8")
            if sf_col == out_sf_cols - 1:
                for i in T.unroll(-out_sf_cols % 4):
                    exponents[sf_index(sf_row, out_sf_cols + i, sf_layout)] = T.uint8(0)
        else:
            bits = T.if_then_else(largest == 255, 0x7FC00000, exponent << 23)
            sf[sf_row, sf_col] = T.reinterpret(bits, "float32")

    @T.prim_func
    def per_block_cast_lossless(
        x: T.StridedTensor((num_tokens, hidden // 2), (x_stride, 1), "int8"),
        x_sf: sf_type(T.dynamic("x_sf_rows"), x_sf_cols, x_sf_layout, prefix="x_"),
        out: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        sf: sf_type(T.dynamic("sf_rows"), out_sf_cols, sf_layout),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, tile_rows) * col_tiles, threads=threads) as block:
            thread = T.get_thread_binding()
            first_row = block // col_tiles * tile_rows + thread // lanes * pieces
            col = (block % col_tiles * lanes + thread % lanes) * _CHANNELS
            inside = col < hidden
            words = T.alloc_local((pieces, _CHANNELS // 8), "uint32")
            sf_words = T.alloc_local((pieces,), "uint32")
            exponents = T.alloc_local((pieces,), "int32")
            largest = T.alloc_local((groups,), "int32")
            bytes_ = T.alloc_local((_CHANNELS // 4,), "uint32")
            low, high = T.alloc_var("uint32"), T.alloc_var("uint32")
            shared = T.alloc_shared((threads // 32, lanes // out_lanes), "int32")
            for i in T.unroll(pieces):
                load_sf(x_sf, sf_words, i, first_row + i, col, inside and first_row + i < num_tokens)
            for i in T.unroll(pieces):
                load_words(x, words, i, first_row + i, col // 2, inside and first_row + i < num_tokens, alignment)
            # Without this barrier ptxas moves loads of data below the first use of an sf.
            T.sync_threads()
            shift = col // x_channels % 4 * 8 if x_packed or swizzled else 23
            for i in T.unroll(pieces):
                exponents[i] = T.reinterpret((sf_words[i] >> T.cast(shift, "uint32")) & T.uint32(0xFF), "int32")
            largest_of_blocks(exponents, largest, shared, thread)
            for g in T.unroll(groups):
                row = first_row + g * group_pieces
                out_exponent = T.max(largest[g] - 6, 1)
                if thread // lanes % block_rows == 0 and thread % out_lanes == 0 and inside and row < num_tokens:
                    store_sf(sf, row, col, largest[g], out_exponent)
                for i in T.unroll(group_pieces):
                    piece = g * group_pieces + i
                    e4m3_of_e2m1_magnitudes(exponents[piece] - out_exponent, low, high)
                    for j in T.unroll(_CHANNELS // 8):
                        e4m3_of_e2m1x8(words[piece, j], low, high, T.address_of(bytes_[2 * j]))
                    T.stg128(out[row + i, col], bytes_[0:4], pred=inside and row + i < num_tokens)

    return per_block_cast_lossless


def _check_block_size(name: str, block_size: tuple[int, int]) -> tuple[int, int]:
    tokens, channels = block_size_of(name, block_size)
    fits = tokens in BLOCK_SIDES and channels in BLOCK_SIDES and channels >= _CHANNELS
    check.require(fits, name, f"powers of two, tokens from 1 and channels from {_CHANNELS} to 128", block_size)
    return tokens, channels


def _check_exact(data: Tensor, sf: Tensor, x_block_size: tuple[int, int], out_block_size: tuple[int, int]) -> None:
    """With TK_DEBUG: raise if a nonzero block's sf is too far below the largest sf in its block of the output."""
    from tk_core.reference.quantize import decode_e2m1
    from tk_quant.reference.formats import expand_blocks
    from tk_quant.reference.lossless import sf_exponents
    from tk_quant.reference.quantizer import block_amax

    amax = block_amax(decode_e2m1(data), x_block_size)
    exponents = sf_exponents(sf, *amax.shape)
    ratio = (out_block_size[0] // x_block_size[0], out_block_size[1] // x_block_size[1])
    largest = expand_blocks(block_amax(exponents, ratio), ratio, *amax.shape)
    # If the largest sf is below 2**-120 the output's is 2**-126; but then no sf is 2**14 below the largest.
    below = torch.where((amax > 0) & (largest < 255), largest - exponents, 0).max().item()
    check.require(
        below <= _EXACT_RATIO,
        "x[1]",
        f"scale factors of nonzero blocks at most 2**{_EXACT_RATIO} below the largest in their block of the output",
        f"2**{int(below)} below",
    )


@op(aligned=())
def per_block_cast_lossless(
    x: tuple[Tensor, Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """e2m1 with power-of-two scale factors to e4m3 with larger blocks, the values unchanged.

    With e the biased exponent of the sf of a block of x, and E the largest e in its block of the output:

        out exponent = max(E - 6, 1)
        data = e4m3 nearest to code * 2**(e - out exponent);   sf = 2**(out exponent - 127)

    Every value is exact while no block of x with a nonzero code has an sf more than 2**14 below the largest in its
    block of the output. Past that data rounds to nearest, ties to even; TK_DEBUG=1 raises instead. If E is 255 (an sf
    that is NaN or infinite), the sf of the output's block is NaN, so that all of it reads back as NaN; its data follows
    the formula as if 255 were any exponent. The name is that of DeepSeek's TileKernels 1.0.0.

    Args:
        x: `(data, sf)`. data: e2m1 in int8 or float4_e2m1fn_x2 (num_tokens, hidden / 2), the even channel in the low
            nibble; hidden a multiple of 32, rows may be strided. sf: one for each block, positive powers of two, in any
            layout of tk_core.scales: packed UE8M0, swizzled float8_e8m0fnu, or float32, which counts by its exponent
            bits alone (0 and subnormals as 2**-127).
        fmt: Format of the output, "e4m3".
        x_block_size: (tokens, channels) of a block of x, powers of two: 1 to 128 tokens, 16 to 128 channels.
        out_block_size: The same for the output, multiples of those of x, such as (1, 128), (32, 32), (128, 128).
        use_tma_aligned_col_major_sf: The output's sf column major, see tk_core.scales.
        round_sf: The output's sf is a power of two either way; `use_packed_ue8m0` needs it.
        use_packed_ue8m0: The output's sf as packed UE8M0 words.

    Returns:
        `(data, sf)`: float8_e4m3fn (num_tokens, hidden), contiguous, and one sf for each block of the output, edge
        blocks being smaller.

    Raises:
        TypeError: x is no pair of tensors, data or sf has another dtype, or a block size is no pair of ints.
        ValueError: Any other argument is not as described, or is on another device.
    """
    if fmt != "e4m3":
        check.one_of("fmt", fmt, ("e4m3",))
    data, x_sf = pair_of("x", x)
    num_tokens, num_bytes = check.tensor("x[0]", data, E2M1_DTYPES, ("num_tokens", "hidden / 2"), layout="rows")
    hidden = 2 * num_bytes
    if hidden <= 0 or hidden % 32:
        check.require(False, "x", "a positive multiple of 32 channels", hidden)
    x_block_size = x_tokens, x_channels = _check_block_size("x_block_size", x_block_size)
    out_block_size = out_tokens, out_channels = _check_block_size("out_block_size", out_block_size)
    if out_tokens % x_tokens or out_channels % x_channels:
        check.require(False, "out_block_size", f"multiples of x_block_size {x_block_size}", out_block_size)
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    x_sf_rows, x_sf_cols = ceil_div(num_tokens, x_tokens), ceil_div(hidden, x_channels)
    check_scales("x[1]", x_sf, x_sf_rows, x_sf_cols, data.device, (torch.float8_e8m0fnu,))
    if data.dtype is not torch.int8:
        data = data.view(torch.int8)
    if check.reads_data(data) and data.numel():
        _check_exact(data, x_sf, x_block_size, out_block_size)
    out = new(data.new_empty, (num_tokens, hidden), dtype=torch.float8_e4m3fn)
    sf = new(empty_scales, data, ceil_div(num_tokens, out_tokens), ceil_div(hidden, out_channels), layout)
    if launching(out, sf):
        blocks = x_block_size, layout_of(x_sf), out_block_size, layout_of(sf)
        cast = _lossless_kernel(check.row_alignment(data), hidden, *blocks, get_arch(data.device))
        cast(data, aligned(x_sf, 4), out, sf)  # A swizzled x_sf is bytes, which the kernel reads as words.
    return out, sf
