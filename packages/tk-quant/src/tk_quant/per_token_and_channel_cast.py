"""per_token_and_channel_cast: quantize along rows and down columns, from one read of x.

What a linear layer's backward pass wants of a gradient or an activation: the cast of `per_token_cast`, blocks of
(1, num_per_channels), for the product over channels, and that of `per_channel_cast`, blocks of (num_per_tokens, 1), or
of `per_channel_cast_and_transpose`, for the product over tokens. For each block of either kind, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x bfloat16 or float32 (num_tokens, hidden); both data float8_e4m3fn, that of channels transposed if wanted.

A block takes tiles of 128 x 128 elements, one after the other, and reads the next while it works on one. A tile is in
registers, `rows` tokens of 8 channels a thread. Everything is told through shared memory, the same for both directions:

                 16 lanes x 8 channels
               ┌────┬────┬─  ─┬─────┐       1. amax of each thread's rows and of its columns
     row lanes │    │    │    │     │       2. one thread for each row or column of each block makes sf and the factor
     × rows    ├────┼────┼─  ─┼─────┤       3. codes of the rows are stored as they are, eight bytes a thread; those of
               │    │    │    │     │          the columns too, or through a tile that is read the other way
               └────┴────┴─  ─┴─────┘
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import ScaleLayout, empty_scales, scale_layout
from tk_quant.prefetch import PREFETCH_SOURCE, prefetch_macro
from tk_quant.quantize import LIMITS, encode_macro, float_bits, scale_macro
from tk_quant.transposed_tile import TILE_TOKENS, transposed_tile_macros

_CHANNELS = 128
_COL_LANES = 16
_GROUPS = (32, 128)

# A word of packed exponents may belong to several blocks, each with bytes of its own.
_STORE_EXPONENT = r"""
__device__ __forceinline__ void tk_store_exponent(int *word, int index, unsigned sf) {
  reinterpret_cast<unsigned char *>(word)[index] = static_cast<unsigned char>(sf >> 23);
}
"""


@dataclass(frozen=True, eq=False)
class PerTokenAndChannelCastConfig:
    """Launch knobs: how much a thread takes, and how many blocks there are."""

    rows: int
    """Tokens of a thread: 4, 8 or 16."""
    blocks_per_sm: int
    """Blocks on a multiprocessor, each of which takes tile after tile."""

    @staticmethod
    @cache
    def best(itemsize: int, transpose: bool, arch: Arch) -> "PerTokenAndChannelCastConfig":
        """The configuration for an input's element size and either order of the channels' data on an architecture."""
        return PerTokenAndChannelCastConfig(rows=8, blocks_per_sm=3 if itemsize == 2 else 2)


# Each access has what guard it needs. With each shared array for one purpose only, the barriers below are enough.
@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_shared_memory_reuse": True,
        "tl.disable_thread_storage_sync": True,
    }
)
def _per_token_and_channel_cast_kernel(
    hidden: int,
    dtype: torch.dtype,
    alignment: int,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    layout: ScaleLayout,
    transpose: bool,
    config: PerTokenAndChannelCastConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    is_bf16 = dtype is torch.bfloat16
    rows = config.rows
    row_lanes = TILE_TOKENS // rows
    threads = row_lanes * _COL_LANES
    per_word = 2 if is_bf16 else 1
    words_per_row = 8 // per_word
    row_words = rows // per_word
    row_pitch = TILE_TOKENS // per_word + 4
    amax_dtype = "uint16" if is_bf16 else "uint32"
    col_blocks, row_groups = TILE_TOKENS // num_per_tokens, _CHANNELS // num_per_channels
    col_parts, row_parts = num_per_tokens // rows, num_per_channels // 8
    num_col_factors, num_row_factors = col_blocks * _CHANNELS, row_groups * TILE_TOKENS
    num_groups = ceil_div(hidden, num_per_channels)
    col_tiles = ceil_div(hidden, _CHANNELS)
    is_ragged = hidden % _CHANNELS != 0
    packed = layout is ScaleLayout.PACKED_UE8M0
    least_amax = float_bits(LIMITS["e4m3"][1])
    prefetch = prefetch_macro(words_per_row, per_word, alignment)
    scale_of = scale_macro("e4m3", round_sf)
    put_codes, store_tile = transposed_tile_macros(_CHANNELS, threads)
    encode_row, encode_four = encode_macro("e4m3", 8), encode_macro("e4m3", 4)

    num_tokens, num_blocks, row_stride = T.dynamic("num_tokens"), T.dynamic("num_blocks"), T.dynamic("row_stride")
    sf_row_stride, sf_col_stride = T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
    token_sf_shape = (num_tokens, ceil_div(num_groups, 4) if packed else num_groups)
    channel_shape = (hidden, num_tokens) if transpose else (num_tokens, hidden)

    @T.macro
    def take_amax(words: T.Buffer, col_amax: T.Buffer, row_amax: T.Buffer) -> None:
        """The largest |x| of each column and each row of a thread, as bits: so compared, NaN is above infinity."""
        for j in T.unroll(words_per_row):
            col_amax[j] = T.uint32(0)
        if is_bf16:
            pair = T.alloc_local((rows,), "uint32")
            for i in T.unroll(rows):
                pair[i] = T.uint32(0)
                for j in T.unroll(4):
                    magnitude = words[i, j] & T.uint32(0x7FFF7FFF)
                    col_amax[j] = T.call_extern("uint32", "__vmaxu2", col_amax[j], magnitude)
                    pair[i] = T.call_extern("uint32", "__vmaxu2", pair[i], magnitude)
            for i in T.unroll(rows // 2):
                low = T.call_extern("uint32", "__byte_perm", pair[2 * i], pair[2 * i + 1], 0x5410)
                high = T.call_extern("uint32", "__byte_perm", pair[2 * i], pair[2 * i + 1], 0x7632)
                row_amax[i] = T.call_extern("uint32", "__vmaxu2", low, high)
        else:
            for i in T.unroll(rows):
                row_amax[i] = T.uint32(0)
                for j in T.unroll(8):
                    magnitude = words[i, j] & T.uint32(0x7FFFFFFF)
                    col_amax[j] = T.max(col_amax[j], magnitude)
                    row_amax[i] = T.max(row_amax[i], magnitude)

    @T.macro
    def scale_of_parts(parts: T.Buffer, num_parts: int, first: T.int32, index: T.int32, scale: T.Buffer) -> None:
        amax = T.alloc_var("uint32")
        amax = T.uint32(0)
        for i in T.unroll(num_parts):
            amax = T.max(amax, T.cast(parts[first + i, index], "uint32"))
        scale_of(T.max(T.reinterpret(amax << T.uint32(16 if is_bf16 else 0), "int32"), least_amax), scale)

    def value_of(words: T.Buffer, i: T.int32, j: T.int32) -> T.float32:
        """The element of row i and column j of a thread."""
        if not is_bf16:
            return T.reinterpret(words[i, j], "float32")
        low, high = words[i, j // 2] << T.uint32(16), words[i, j // 2] & T.uint32(0xFFFF0000)
        return T.reinterpret(T.if_then_else(j % 2 == 0, low, high), "float32")

    @T.macro
    def store_exponent(sf: T.Buffer, token: T.int32, group: T.int32, value: T.uint32) -> None:
        T.call_extern("void", "tk_store_exponent", T.access_ptr(sf[token, group // 4], "w"), group % 4, value)

    @T.prim_func
    def per_token_and_channel_cast(
        x: T.StridedTensor((num_tokens, hidden), (row_stride, 1), T.dtype(dtype)),
        token_data: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        token_sf: T.StridedTensor(token_sf_shape, (sf_row_stride, sf_col_stride), "int32" if packed else "float32"),
        channel_data: T.Tensor(channel_shape, "float8_e4m3fn"),
        channel_sf: T.Tensor((num_blocks, hidden), "float32"),
        num_thread_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_thread_blocks, threads=threads) as thread_block:
            T.import_source(PREFETCH_SOURCE + _STORE_EXPONENT)
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            # Checked by the op; vector stores need to know.
            T.assume(num_tokens % TILE_TOKENS == 0)
            thread = T.get_thread_binding()
            # Half a warp has eight lanes of two rows, which suits writing to the tile; a warp has whole rows.
            row_lane = thread // 32 * 2 + thread // 8 % 2
            col_lane = thread % 8 + thread // 16 % 2 * 8
            row, col = row_lane * rows, col_lane * 8
            num_tiles = num_tokens // TILE_TOKENS * col_tiles
            stage = T.alloc_shared((rows, threads, words_per_row), "uint32")
            words = T.alloc_local((rows, words_per_row), "uint32")
            col_amax = T.alloc_local((words_per_row,), "uint32")
            row_amax = T.alloc_local((row_words,), "uint32")
            col_parts_amax = T.alloc_shared((row_lanes, _CHANNELS // per_word), "uint32")
            row_parts_amax = T.alloc_shared((_COL_LANES, row_pitch), "uint32")
            col_halves = T.view(col_parts_amax, (row_lanes, _CHANNELS), amax_dtype)
            row_halves = T.view(row_parts_amax, (_COL_LANES, row_pitch * per_word), amax_dtype)
            col_factors = T.alloc_shared((col_blocks, _CHANNELS), "float32")
            row_factors = T.alloc_shared((row_groups, TILE_TOKENS), "float32")
            tile_codes = T.alloc_shared((_CHANNELS, TILE_TOKENS // 4) if transpose else (1, 4), "uint32")
            scale = T.alloc_local((2,), "uint32")
            row_factor = T.alloc_local((4,), "float32")
            col_factor = T.alloc_local((8,), "float32")
            across = T.alloc_local((8,), "float32")
            codes = T.alloc_local((2,), "uint32")
            down = T.alloc_local((4,), "float32")
            word = T.alloc_local((1,), "uint32")

            # Variables, so that tiles are divided by once, in 32 bits.
            first_token, first_col = T.alloc_var("int32"), T.alloc_var("int32")
            next_token, next_col = T.alloc_var("int32"), T.alloc_var("int32")
            next_token, next_col = thread_block // col_tiles * TILE_TOKENS, thread_block % col_tiles * _CHANNELS
            wanted = next_col + col < hidden if is_ragged else True
            for i in T.unroll(rows):
                prefetch(x, stage, i, thread, next_token + row + i, next_col + col, wanted)
            for turn in T.serial(T.ceildiv(num_tiles - thread_block, num_thread_blocks)):
                next_tile = thread_block + (turn + 1) * num_thread_blocks
                first_token, first_col = next_token, next_col
                next_token, next_col = next_tile // col_tiles * TILE_TOKENS, next_tile % col_tiles * _CHANNELS
                wanted_next = next_tile < num_tiles and (next_col + col < hidden if is_ragged else True)
                inside = first_col + col < hidden if is_ragged else True
                T.call_extern("void", "tk_wait_for_copies")
                for i in T.unroll(rows):
                    for j in T.vectorized(words_per_row):
                        words[i, j] = stage[i, thread, j]
                    if is_ragged:
                        for j in T.unroll(words_per_row):
                            words[i, j] = T.if_then_else(inside, words[i, j], T.uint32(0))
                    prefetch(x, stage, i, thread, next_token + row + i, next_col + col, wanted_next)
                take_amax(words, col_amax, row_amax)
                for j in T.vectorized(words_per_row):
                    col_parts_amax[row_lane, col // per_word + j] = col_amax[j]
                for j in T.vectorized(row_words):
                    row_parts_amax[col_lane, row // per_word + j] = row_amax[j]
                T.sync_threads()

                for k in T.serial(ceil_div(num_col_factors, threads)):
                    index = k * threads + thread
                    if num_col_factors % threads == 0 or index < num_col_factors:
                        block, channel = index // _CHANNELS, index % _CHANNELS
                        scale_of_parts(col_halves, col_parts, block * col_parts, channel, scale)
                        if first_col + channel < hidden:
                            sf_row = first_token // num_per_tokens + block
                            channel_sf[sf_row, first_col + channel] = T.reinterpret(scale[0], "float32")
                        col_factors[block, channel] = T.reinterpret(scale[1], "float32")
                for k in T.serial(ceil_div(num_row_factors, threads)):
                    # The other half of the threads first, in case there is work for one half only.
                    index = k * threads + (thread + threads // 2) % threads
                    if num_row_factors % threads == 0 or index < num_row_factors:
                        # Neighbouring threads write to neighbouring places.
                        by_row = layout is ScaleLayout.COL_MAJOR
                        token = index % TILE_TOKENS if by_row else index // row_groups
                        group = index // TILE_TOKENS if by_row else index % row_groups
                        scale_of_parts(row_halves, row_parts, group * row_parts, token, scale)
                        sf_col = first_col // num_per_channels + group
                        if sf_col < num_groups:
                            if packed:
                                store_exponent(token_sf, first_token + token, sf_col, scale[0])
                                if sf_col == num_groups - 1:
                                    for i in T.unroll(-num_groups % 4):
                                        store_exponent(token_sf, first_token + token, num_groups + i, T.uint32(0))
                            else:
                                token_sf[first_token + token, sf_col] = T.reinterpret(scale[0], "float32")
                        row_factors[group, token] = T.reinterpret(scale[1], "float32")
                T.sync_threads()

                for j in T.vectorized(8):
                    col_factor[j] = col_factors[row // num_per_tokens, col + j]
                for quad in T.unroll(rows // 4):
                    # Four rows at a time, so that not all of the elements are floats at once.
                    for i in T.vectorized(4):
                        row_factor[i] = row_factors[col // num_per_channels, row + quad * 4 + i]
                    for i in T.unroll(4):
                        token = first_token + row + quad * 4 + i
                        for j in T.unroll(8):
                            across[j] = value_of(words, quad * 4 + i, j) * row_factor[i]
                        encode_row(across, codes)
                        if inside:
                            T.stg64(token_data[token, first_col + col], codes[0:2])
                        if not transpose:
                            for j in T.unroll(8):
                                across[j] = value_of(words, quad * 4 + i, j) * col_factor[j]
                            encode_row(across, codes)
                            if inside:
                                T.stg64(channel_data[token, first_col + col], codes[0:2])
                    if transpose:
                        for j in T.unroll(8):
                            for i in T.unroll(4):
                                down[i] = value_of(words, quad * 4 + i, j) * col_factor[j]
                            encode_four(down, word)
                            put_codes(tile_codes, T.view(word, (1, 1)), 0, col + j, row // 4 + quad)
                if transpose:
                    T.sync_threads()
                    store_tile(tile_codes, channel_data, first_col, first_token, hidden)

    return per_token_and_channel_cast


def _reference(
    x: torch.Tensor,
    token_data: torch.Tensor,
    token_sf: torch.Tensor,
    channel_data: torch.Tensor,
    channel_sf: torch.Tensor,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    col_major: bool,
) -> None:
    from tk_quant.reference.per_token_and_channel_cast import per_token_and_channel_cast as whole

    packed = token_sf.dtype is torch.int32
    groups = (num_per_channels, num_per_tokens)
    by_token, by_channel = whole(x, "e4m3", *groups, round_sf, transpose, col_major, packed)
    for out, result in zip((token_data, token_sf, channel_data, channel_sf), (*by_token, *by_channel)):
        out.copy_(result)


@op(
    "tk_quant::per_token_and_channel_cast_out",
    mutates=("token_data", "token_sf", "channel_data", "channel_sf"),
    reference=_reference,
)
def _per_token_and_channel_cast_out(
    x: torch.Tensor,
    token_data: torch.Tensor,
    token_sf: torch.Tensor,
    channel_data: torch.Tensor,
    channel_sf: torch.Tensor,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose: bool,
    col_major: bool,
) -> None:
    if token_data.numel() == 0:
        return
    arch = get_arch(x.device)
    num_tokens, hidden = x.shape
    config = PerTokenAndChannelCastConfig.best(x.dtype.itemsize, transpose, arch)
    num_tiles = num_tokens // TILE_TOKENS * ceil_div(hidden, _CHANNELS)
    _per_token_and_channel_cast_kernel(
        hidden,
        x.dtype,
        check.row_alignment(x),
        num_per_channels,
        num_per_tokens,
        round_sf,
        scale_layout(col_major, round_sf, token_sf.dtype is torch.int32),
        transpose,
        config,
        arch,
    )(
        *(x, token_data, token_sf, channel_data, channel_sf),
        min(num_tiles, config.blocks_per_sm * get_num_sms(x.device)),
    )


@replayable
def _cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    num_per_tokens: int,
    round_sf: bool,
    transpose_channel_data: bool,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The public function, its results in a flat tuple."""
    num_tokens, hidden = check.tensor("x", x, (torch.bfloat16, torch.float32), ("num_tokens", "hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_TOKENS)
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check.one_of("fmt", fmt, ("e4m3",))
    for name, value in (("num_per_channels", num_per_channels), ("num_per_tokens", num_per_tokens)):
        check.integer(name, value)
        check.one_of(name, value, _GROUPS)
    for name, flag in (("round_sf", round_sf), ("transpose_channel_data", transpose_channel_data)):
        check.require_type(isinstance(flag, bool), name, "a bool", flag)
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    token_data = x.new_empty((num_tokens, hidden), dtype=torch.float8_e4m3fn)
    token_sf = empty_scales(x, num_tokens, ceil_div(hidden, num_per_channels), layout)
    channel_shape = (hidden, num_tokens) if transpose_channel_data else (num_tokens, hidden)
    channel_data = x.new_empty(channel_shape, dtype=torch.float8_e4m3fn)
    channel_sf = x.new_empty((num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    _per_token_and_channel_cast_out(
        *(x, token_data, token_sf, channel_data, channel_sf, num_per_channels, num_per_tokens),
        *(round_sf, transpose_channel_data, layout is not ScaleLayout.ROW_MAJOR),
    )
    return token_data, token_sf, channel_data, channel_sf


def per_token_and_channel_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int = 128,
    num_per_tokens: int = 128,
    round_sf: bool = False,
    transpose_channel_data: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Quantize a tensor twice, by blocks of one token and by blocks of one channel, reading it once.

    Bit for bit what `per_token_cast(x, fmt, num_per_channels)` and `per_channel_cast(x, fmt, num_per_tokens)`, or
    `per_channel_cast_and_transpose`, return with the same `round_sf`. For each block: amax = max(max |x|, 1e-4),
    sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf = the least power of two at least amax / 448,
    data = round(x * (1 / sf)). TileKernels has no such op.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64; rows may be strided.
        fmt: "e4m3".
        num_per_channels: channels of a block of one token, 32 or 128; the last block of a token may be shorter.
        num_per_tokens: tokens of a block of one channel, 32 or 128.
        round_sf: whether scale factors are powers of two.
        transpose_channel_data: whether the data that is quantized by channels is transposed to (hidden, num_tokens).
        use_tma_aligned_col_major_sf: whether the scale factors of tokens are column major, columns on 16 bytes.
        use_packed_ue8m0: whether they are packed exponents, four an int32; needs that flag and `round_sf`.

    Returns:
        `((token_data, token_sf), (channel_data, channel_sf))`: token_data float8_e4m3fn (num_tokens, hidden); token_sf
        float32 (num_tokens, ceil(hidden / num_per_channels)) or packed int32 (num_tokens, a fourth of it), in the
        layout that the flags ask for; channel_data float8_e4m3fn (num_tokens, hidden) or (hidden, num_tokens);
        channel_sf float32 (num_tokens / num_per_tokens, hidden), contiguous. A block with an infinity or a NaN has
        that for sf (packed: 255).

    Raises:
        TypeError: x is no bfloat16 or float32 tensor, or a flag or a size of blocks has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt or
            a size of blocks is none of those above; `use_packed_ue8m0` comes without the flags that it needs.
    """
    flags = (round_sf, transpose_channel_data, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    token_data, token_sf, channel_data, channel_sf = _cast(x, fmt, num_per_channels, num_per_tokens, *flags)
    return (token_data, token_sf), (channel_data, channel_sf)
