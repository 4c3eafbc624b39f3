"""per_token_and_channel_cast: quantize along rows and down columns, from one read of x.

A linear layer's backward pass needs two casts of a gradient or an activation: that of `per_token_cast`, blocks of
(1, num_per_channels), for the product over channels; and that of `per_channel_cast`, blocks of (num_per_tokens, 1), or
of `per_channel_cast_and_transpose`, for the product over tokens.

A thread block takes 128 tokens by 128 channels, a warp 8 or 16 of these tokens, a thread 4 channels in registers.

                    32 lanes x 4 channels    1. columns: each thread stores the amax of its channels in shared memory
              ┌────┬────┬────┬─  ─┬─────┐    2. rows, eight at a time: lanes of a group reduce amax by shuffles; lane i
       warp 0 │ t0 │ t1 │ t2 │    │ t31 │       makes sf and the factor of row i % 8; of each row a lane stores four
              ├────┼────┼────┼─  ─┼─────┤       codes, a warp 128 bytes
       warp 1 │    │    │    │    │     │    3. columns: one thread for each column of a block makes sf and the factor
              ├────┼────┼────┼─  ─┼─────┤    4. columns: the codes are stored like those of rows; or they go through a
          …   │    │    │    │    │     │       tile in shared memory, from which eight lanes store 128 tokens of a
              └────┴────┴────┴─  ─┴─────┘       channel
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.memory import prefetch_line
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.cast.config import OWN_GUARDS_AND_BARRIERS, TILE_ROWS
from tk_quant.cast.format import PLAIN_DTYPES, check_sf_clamp_min, least_amax_of

_GROUPS = (32, 128)
_SECTOR = 8
"""float32 in a sector of memory, 32 bytes."""


@dataclass(frozen=True)
class TwoCasts:
    """The arguments of the public function that a kernel is compiled for."""

    num_per_channels: int
    num_per_tokens: int
    round_sf: bool
    layout: ScaleLayout
    """Layout of token_sf."""
    transpose: bool


# Thread level: H200, 8192 x 7168 bfloat16, 64 µs; at tile level 81 to 88; docs/tuning/tile-level/per_channel.md.
# Each access has the guard that it needs. No shared array is reused, so the barriers below are enough.
@kernel(pass_configs=OWN_GUARDS_AND_BARRIERS)
def _per_token_and_channel_cast_kernel(
    hidden: int, dtype: torch.dtype, alignment: int, casts: TwoCasts, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_core.macros.quantize import encode_e4m3
    from tk_quant.cast import channel_words as steps
    from tk_quant.cast.channel_words import CHANNELS, VEC, is_inside
    from tk_quant.cast.scales import sf_type
    from tk_quant.cast.words import element, load_words

    is_bf16, transpose = dtype is torch.bfloat16, casts.transpose
    # Registers suffice for three thread blocks an SM with 16 rows a warp, for two with eight; narrow loads need more.
    is_small = is_bf16 and casts.num_per_channels == 128 and alignment >= 4
    rows, blocks_per_sm = (16, 3) if is_small else (8, 2 if alignment >= 4 else 1)
    threads = TILE_ROWS // rows * 32
    per_word = 2 if is_bf16 else 1
    num_groups, col_tiles = ceil_div(hidden, casts.num_per_channels), ceil_div(hidden, CHANNELS)
    num_tokens, num_blocks = T.dynamic("num_tokens"), T.dynamic("num_blocks")
    row_stride = T.dynamic("row_stride", "int64")

    @T.prim_func
    def per_token_and_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        token_data: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        token_sf: sf_type(num_tokens, num_groups, casts.layout),
        channel_data: T.Tensor((hidden, num_tokens) if transpose else (num_tokens, hidden), "float8_e4m3fn"),
        channel_sf: T.Tensor((num_blocks, hidden), "float32"),
        least_amax: T.float32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, TILE_ROWS) * col_tiles, threads=threads) as block:
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            # Checked by the op; vector stores need to know.
            T.assume(num_tokens % TILE_ROWS == 0)
            thread = T.get_thread_binding()
            # Variables, so that the index of the block is divided once, in 32 bits.
            first_token, first_col = T.alloc_var("int32"), T.alloc_var("int32")
            first_token, first_col = block // col_tiles * TILE_ROWS, block % col_tiles * CHANNELS
            row, lane_col = thread // 32 * rows, thread % 32 * VEC
            words = T.alloc_local((rows, VEC // per_word), "uint32")
            parts = T.alloc_shared((threads // 32, CHANNELS // per_word), "uint32")
            factors = T.alloc_shared((TILE_ROWS // casts.num_per_tokens, CHANNELS), "float32")
            tile_codes = T.alloc_shared((CHANNELS, TILE_ROWS // 4) if transpose else (1, 4), "uint32")
            factor = T.alloc_local((VEC,), "float32")
            across = T.alloc_local((VEC,), "float32")
            code = T.alloc_local((1,), "uint32")
            down = T.alloc_local((rows,), "float32")
            codes = T.alloc_local((rows // 4,), "uint32")

            # A tile writes only parts of the sectors of a row-major sf: faster if L2 already holds them.
            is_first = thread < TILE_ROWS and first_col % (_SECTOR * casts.num_per_channels) == 0
            if casts.layout is ScaleLayout.ROW_MAJOR and is_first:
                prefetch_line(T.address_of(token_sf[first_token + thread, first_col // casts.num_per_channels]))
            for i in T.unroll(rows):
                load_words(
                    *(x, words, i, first_token + row + i, first_col + lane_col),
                    *(is_inside(first_col + lane_col, hidden), alignment),
                )
            steps.share_amax(words, parts, is_bf16)
            steps.cast_rows(
                words, token_data, token_sf, first_token + row, first_col, least_amax, hidden, is_bf16, casts
            )
            T.sync_threads()
            block_row = first_token // casts.num_per_tokens
            options = least_amax, hidden, threads, is_bf16, casts.round_sf
            steps.make_factors(parts, factors, channel_sf, block_row, first_col, *options)
            T.sync_threads()
            for j in T.vectorized(VEC):
                factor[j] = factors[row // casts.num_per_tokens, lane_col + j]
            if transpose:
                for j in T.unroll(VEC):
                    for i in T.unroll(rows):
                        down[i] = element(words, i, j, is_bf16) * factor[j]
                    encode_e4m3(down, codes)
                    steps.put_codes(tile_codes, codes, lane_col + j, row // 4, VEC)
                T.sync_threads()
                steps.store_tile(tile_codes, channel_data, first_col, first_token, hidden, threads, VEC)
            else:
                for i in T.unroll(rows):
                    for j in T.unroll(VEC):
                        across[j] = element(words, i, j, is_bf16) * factor[j]
                    encode_e4m3(across, code)
                    if is_inside(first_col + lane_col, hidden):
                        T.stg32(channel_data[first_token + row + i, first_col + lane_col], code[0])

    return per_token_and_channel_cast


@op(aligned=())
def per_token_and_channel_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int = 128,
    num_per_tokens: int = 128,
    round_sf: bool = False,
    transpose_channel_data: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Quantize a tensor twice, by blocks of one token and by blocks of one channel, reading it once.

    The same bits as from `per_token_cast(x, fmt, num_per_channels)` and `per_channel_cast(x, fmt, num_per_tokens)`, or
    `per_channel_cast_and_transpose`, where they take such x and sizes, with the same `round_sf`. For each block:
    amax = max(max |x|, 1e-4), sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf = the least power of
    two at least amax / 448, data = round(x * (1 / sf)). TileKernels has no such op.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64; rows may be strided.
        fmt: "e4m3".
        num_per_channels: channels of a block of one token, 32 or 128; the last block of a token may be shorter.
        num_per_tokens: tokens of a block of one channel, 32 or 128.
        round_sf: whether scale factors are powers of two.
        transpose_channel_data: whether the data that is quantized by channels is transposed to (hidden, num_tokens).
        use_tma_aligned_col_major_sf: whether token_sf is column major, with columns aligned to 16 bytes.
        use_packed_ue8m0: whether token_sf is packed exponents, four an int32; needs `round_sf`.
        sf_clamp_min: the least amax instead of 1e-4; at least 448 * 2**-126.

    Returns:
        `((token_data, token_sf), (channel_data, channel_sf))`: token_data float8_e4m3fn (num_tokens, hidden); token_sf
        float32 (num_tokens, C), C = ceil(hidden / num_per_channels), or packed int32 (num_tokens, ceil(C / 4)), in the
        layout that the flags ask for; channel_data float8_e4m3fn (num_tokens, hidden) or (hidden, num_tokens);
        channel_sf float32 (num_tokens / num_per_tokens, hidden), contiguous. A block with NaN or infinity in it has NaN
        or infinity for its sf (packed: 255).

    Raises:
        TypeError: x is no bfloat16 or float32 tensor, or a flag or a size of blocks has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt or
            a size of blocks is none of those above; `use_packed_ue8m0` comes without the flags that it needs.
    """
    num_tokens, hidden = check.tensor("x", x, PLAIN_DTYPES, ("num_tokens", "hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_ROWS)
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check.one_of("fmt", fmt, ("e4m3",))
    for name, value in (("num_per_channels", num_per_channels), ("num_per_tokens", num_per_tokens)):
        check.integer(name, value)
        check.one_of(name, value, _GROUPS)
    for name, flag in (("round_sf", round_sf), ("transpose_channel_data", transpose_channel_data)):
        check.flag(name, flag)
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    check_sf_clamp_min(sf_clamp_min, fmt)
    token_data = new(x.new_empty, (num_tokens, hidden), dtype=torch.float8_e4m3fn)
    token_sf = new(empty_scales, x, num_tokens, ceil_div(hidden, num_per_channels), layout)
    channel_shape = (hidden, num_tokens) if transpose_channel_data else (num_tokens, hidden)
    channel_data = new(x.new_empty, channel_shape, dtype=torch.float8_e4m3fn)
    channel_sf = new(x.new_empty, (num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    if launching(token_data, token_sf, channel_data, channel_sf):
        # Strides of packed words are arguments of the kernel.
        layout = ScaleLayout.PACKED_UE8M0 if layout is ScaleLayout.PACKED_ROW_MAJOR else layout
        casts = TwoCasts(num_per_channels, num_per_tokens, round_sf, layout, transpose_channel_data)
        arguments = hidden, x.dtype, check.row_alignment(x), casts, get_arch(x.device)
        cast = _per_token_and_channel_cast_kernel(*arguments)
        cast(x, token_data, token_sf, channel_data, channel_sf, least_amax_of("e4m3", sf_clamp_min))
    return (token_data, token_sf), (channel_data, channel_sf)
