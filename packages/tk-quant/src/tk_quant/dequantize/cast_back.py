"""cast_back: dequantize, out = data * sf of its block.

x is a pair: data e4m3 (num_tokens, hidden), e2m1 (num_tokens, hidden / 2) or e5m6 (num_tokens, hidden * 3 / 2), and one
sf for each block of x_block_size = (tokens, channels), in any layout; blocks at the edges may be smaller. The product
is rounded to float32 and, for bf16, rounded once more. With NVFP4 a float32 for the whole tensor comes on top:
(data * sf) * tensor_sf. per_token_cast_back is the same with blocks of one token.

It is all memory traffic, most of it stores. So a thread takes as many neighbouring channels as 16 bytes of the output
hold (or a multiple), from `pieces` rows at once so that enough loads are in flight; each store of a warp then writes
512 bytes in a row:

              lanes x vec channels            e.g. e4m3 to float32, vec 4: a warp loads 128 bytes and stores 512
            ┌────┬────┬────┬─   ─┬────┐
     rows × │ t0 │ t1 │ t2 │  …  │    │       pieces of a thread lie `rows` rows apart
     pieces ├────┼────┼────┼─   ─┼────┤
            │    │    │    │  …  │    │
            └────┴────┴────┴─   ─┴────┘

Eight e5m6 codes are three words. Where a thread takes four of them, it loads two words: the first four codes are the
upper 48 bits of words 0 and 1, the others the lower 48 bits of words 1 and 2.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.device.bits import funnel_shift_left
from tk_core.device.memory import load_8_bits
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.scales import check_scales
from tk_core.views import aligned
from tk_quant.device.e5m6 import decode_e5m6x4
from tk_quant.device.fp4 import decode_e2m1x4
from tk_quant.device.fp8 import decode_e4m3, decode_ue8m0
from tk_quant.lib.quantize import BITS, FLOAT4_DTYPE, load_codes_macro

_OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PAIR_DTYPES = (torch.float8_e4m3fn, torch.int8) + ((FLOAT4_DTYPE,) if FLOAT4_DTYPE is not None else ())
_BYTE_SF_DTYPES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)
_BLOCK_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "e2m1", torch.uint8: "e5m6"}
_ELEMENTS = {"e4m3": "float8_e4m3fn", "e2m1": "int8", "e5m6": "uint8"}


@dataclass(frozen=True)
class CastBackConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels of a piece, which one thread takes at once: 16 bytes of the output, or a multiple."""
    pieces: int
    """Rows that a thread takes a piece of."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Threads above each other."""

    @staticmethod
    @cache
    def best(hidden: int, x_bits: int, out_itemsize: int, narrow_blocks: bool, arch: Arch) -> "CastBackConfig":
        """The configuration for a width, bits of a code, an output type, and blocks narrower than a piece or not."""
        # H200, 8192 x 7168: two pieces of 4 bytes or less, e4m3 to fp32 72.6 us and e2m1 to fp32 68.7, to bf16 39.0;
        # four 75.1, 69.4 and 39.7, eight 77.1, 72.3 and 39.4. Of 8 bytes, e4m3 to bf16, four take 44.4, two 45.2. 32
        # bytes of the output in each thread take 112 and more: a store should write whole lines. Hints to the caches
        # gain nothing. Narrow blocks need a sf for each channel, so more rows share them.
        # fp32 of 128 x 1 takes 74.6 us with 4 pieces, 77.1 with 8.
        vec = 16 // out_itemsize
        pieces = 2 if vec * x_bits <= 32 else 4
        if narrow_blocks:
            pieces = 16 // out_itemsize
        num_lanes = hidden // vec
        if num_lanes <= 128:
            # Whole warps, and a power of two, so that the rows of a tile lie in one block where blocks have many rows.
            rows = 32 // gcd(num_lanes, 32)
            while num_lanes * rows < 128:
                rows *= 2
            return CastBackConfig(vec, pieces, num_lanes, rows)
        least = ceil_div(num_lanes, 256)
        for col_tiles in range(least, 2 * least + 1):
            if num_lanes % (32 * col_tiles) == 0:
                return CastBackConfig(vec, pieces, num_lanes // col_tiles, 1)
        return CastBackConfig(vec, pieces, 32 * ceil_div(num_lanes, 32 * least), 1)


def _narrow(x_block_channels: int, hidden: int, vec: int) -> bool:
    """Whether a piece may need several scale factors."""
    return x_block_channels % vec != 0 and x_block_channels < hidden


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _cast_back_kernel(
    x_dtype: torch.dtype,
    alignment: int,
    x_block_size: tuple[int, int],
    sf_dtype: torch.dtype,
    swizzled: bool,
    hidden: int,
    out_dtype: torch.dtype,
    config: CastBackConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    vec, pieces, lanes, rows = config.vec, config.pieces, config.lanes, config.rows
    block_tokens, block_channels = x_block_size
    x_fmt = _FORMATS[x_dtype]
    half_of_e5m6 = x_fmt == "e5m6" and vec == 4
    x_bytes = 8 if half_of_e5m6 else vec * BITS[x_fmt] // 8
    x_words = ceil_div(x_bytes, 4)
    x_element = _ELEMENTS[x_fmt]
    out_element = T.dtype(out_dtype)
    out_words = vec * out_dtype.itemsize // 4
    threads = lanes * rows
    tile_rows = rows * pieces
    col_tiles = ceil_div(hidden, lanes * vec)
    sf_cols = ceil_div(hidden, block_channels)
    sf_per_piece = vec if _narrow(block_channels, hidden, vec) else 1
    # Where a tile lies in one row of blocks, the pieces of a thread have their scale factors in common.
    sf_pieces = 1 if block_tokens % tile_rows == 0 else pieces
    packed = sf_dtype is torch.int32
    is_nvfp4 = sf_dtype is torch.float8_e4m3fn
    load = load_codes_macro(x_element, pieces, x_bytes, min(alignment, 4 if half_of_e5m6 else 16))
    assert threads % 32 == 0
    assert hidden % vec == 0
    assert out_words % 4 == 0

    num_tokens, x_stride = T.dynamic("num_tokens"), T.dynamic("x_stride")
    x_type = T.StridedTensor((num_tokens, hidden * BITS[x_fmt] // 8), (x_stride, 1), x_element)
    sf_rows = T.dynamic("sf_rows")
    if swizzled:
        sf_element = "float8_e4m3fn" if is_nvfp4 else "float8_e8m0fnu"
        sf_type = T.Tensor((sf_rows, ceil_div(sf_cols, 4), 32, 4, 4), sf_element)
    elif is_nvfp4:
        sf_type = T.Tensor((sf_rows, sf_cols), "float8_e4m3fn")
    else:
        sf_row_stride, sf_col_stride = T.dynamic("sf_row_stride"), T.dynamic("sf_col_stride")
        sf_type = T.StridedTensor(
            (sf_rows, ceil_div(sf_cols, 4) if packed else sf_cols),
            (sf_row_stride, sf_col_stride),
            "int32" if packed else "float32",
        )
    out_type = T.Tensor((num_tokens, hidden), out_element)

    @T.macro
    def load_piece(x: T.Buffer, words: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        if half_of_e5m6:
            load(x, words, piece, row, col // 8 * 12 + col // 4 % 2 * 4, valid)
        else:
            load(x, words, piece, row, col * BITS[x_fmt] // 8, valid)

    @T.macro
    def load_sf(x_sf: T.Buffer, sf: T.Buffer, piece: int, row: T.int32, col: T.int32, valid: T.bool) -> None:
        word = T.alloc_var("uint32")
        for j in T.unroll(sf_per_piece):
            sf_row, sf_col = row // block_tokens, (col + j) // block_channels
            if swizzled:
                word = T.ldg32(x_sf[sf_row // 128, sf_col // 4, sf_row % 32, sf_row % 128 // 32, 0], pred=valid)
            elif is_nvfp4:
                word = load_8_bits(T.address_of(x_sf[sf_row, sf_col]), valid)
            else:
                word = T.ldg32(x_sf[sf_row, sf_col // 4 if packed else sf_col], pred=valid)
            if is_nvfp4:
                code = word >> T.cast(sf_col % 4 * 8, "uint32") if swizzled else word
                sf[piece, j] = decode_e4m3(code)
            elif packed or swizzled:
                sf[piece, j] = decode_ue8m0(word, sf_col % 4)
            else:
                sf[piece, j] = T.reinterpret(word, "float32")

    @T.macro
    def decode_piece(words: T.Buffer, values: T.Buffer, piece: int, col: T.int32) -> None:
        if x_fmt == "e4m3":
            elements = T.view(words, (pieces, vec), x_element)
            for j in T.vectorized(vec):
                values[j] = T.cast(elements[piece, j], "float32")
        elif x_fmt == "e2m1":
            for j in T.unroll(vec // 4):
                codes = words[piece, j // 2] if j % 2 == 0 else words[piece, j // 2] >> T.uint32(16)
                decode_e2m1x4(codes, T.address_of(values[4 * j]))
        elif half_of_e5m6:
            shift = T.cast(col // 4 % 2 * 16, "uint32")
            high = funnel_shift_left(words[piece, 1], words[piece, 0], shift)
            decode_e5m6x4(high, words[piece, 1] << shift, T.address_of(values[0]))
        else:
            for j in T.unroll(vec // 8):
                w0, w1, w2 = words[piece, 3 * j], words[piece, 3 * j + 1], words[piece, 3 * j + 2]
                decode_e5m6x4(w0, w1, T.address_of(values[8 * j]))
                w1 = (w1 << T.uint32(16)) | (w2 >> T.uint32(16))
                decode_e5m6x4(w1, w2 << T.uint32(16), T.address_of(values[8 * j + 4]))

    @T.macro
    def store_piece(
        values: T.Buffer,
        sf: T.Buffer,
        tensor_sf: T.float32,
        out: T.Buffer,
        piece: int,
        row: T.int32,
        col: T.int32,
        valid: T.bool,
    ) -> None:
        rounded = T.alloc_local((vec,), out_element)
        for j in T.unroll(vec):
            values[j] = values[j] * sf[piece % sf_pieces, j % sf_per_piece]
            if is_nvfp4:
                values[j] = values[j] * tensor_sf
        for j in T.vectorized(vec):
            rounded[j] = T.cast(values[j], out_element)
        rounded_words = T.view(rounded, (out_words,), "uint32")
        for j in T.unroll(out_words // 4):
            T.stg128(out[row, col + j * (vec * 4 // out_words)], rounded_words[4 * j : 4 * j + 4], pred=valid)

    @T.macro
    def cast_tile(x: T.Buffer, x_sf: T.Buffer, tensor_sf: T.float32, out: T.Buffer, block: T.int32) -> None:
        thread = T.get_thread_binding()
        first_row = (block // col_tiles) * tile_rows + thread // lanes
        col = ((block % col_tiles) * lanes + thread % lanes) * vec
        inside = col < hidden
        words = T.alloc_local((pieces, x_words), "uint32")
        sf = T.alloc_local((sf_pieces, sf_per_piece), "float32")
        values = T.alloc_local((vec,), "float32")
        for i in T.unroll(pieces):
            load_piece(x, words, i, first_row + i * rows, col, inside and first_row + i * rows < num_tokens)
        for i in T.unroll(sf_pieces):
            load_sf(x_sf, sf, i, first_row + i * rows, col, inside and first_row + i * rows < num_tokens)
        for i in T.unroll(pieces):
            row = first_row + i * rows
            decode_piece(words, values, i, col)
            store_piece(values, sf, tensor_sf, out, i, row, col, inside and row < num_tokens)

    num_blocks = T.ceildiv(num_tokens, tile_rows) * col_tiles

    if is_nvfp4:

        @T.prim_func
        def cast_back_nvfp4(x: x_type, x_sf: sf_type, tensor_sf: T.Tensor((1,), "float32"), out: out_type) -> None:
            with T.Kernel(num_blocks, threads=threads) as block:
                cast_tile(x, x_sf, tensor_sf[0], out, block)

        return cast_back_nvfp4

    @T.prim_func
    def cast_back(x: x_type, x_sf: sf_type, out: out_type) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            cast_tile(x, x_sf, T.float32(1), out, block)

    return cast_back


def _cast_back_reference(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    tensor_sf: torch.Tensor | None,
    out: torch.Tensor,
    x_block_tokens: int,
    x_block_channels: int,
) -> None:
    from tk_quant.reference.dequantize.cast_back import cast_back

    fmt = "bf16" if out.dtype is torch.bfloat16 else "fp32"
    special_fmt = "e5m6" if x.dtype is torch.uint8 else None
    out.copy_(cast_back((x, x_sf), fmt, (x_block_tokens, x_block_channels), special_fmt, tensor_sf=tensor_sf))


@op("tk_quant::cast_back_out", mutates=("out",), reference=_cast_back_reference)
def _cast_back_out(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    tensor_sf: torch.Tensor | None,
    out: torch.Tensor,
    x_block_tokens: int,
    x_block_channels: int,
) -> None:
    if out.numel() == 0:
        return
    arch = get_arch(x.device)
    hidden, out_dtype = out.shape[1], out.dtype
    itemsize = out_dtype.itemsize
    narrow = _narrow(x_block_channels, hidden, 16 // itemsize)
    config = CastBackConfig.best(hidden, BITS[_FORMATS[x.dtype]], itemsize, narrow, arch)
    launch = _cast_back_kernel(
        x.dtype,
        check.row_alignment(x),
        (x_block_tokens, x_block_channels),
        x_sf.dtype,
        x_sf.ndim == 5,
        hidden,
        out_dtype,
        config,
        arch,
    )
    x_sf = aligned(x_sf, 4)  # Swizzled ones are bytes, read by fours.
    if tensor_sf is None:
        launch(x, x_sf, out)
    else:
        launch(x, x_sf, tensor_sf, out)


def check_pair(
    x: tuple[torch.Tensor, torch.Tensor], fmt: str, x_special_fmt: str | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Check what does not depend on blocks: `(data, sf, hidden)`, the data of e2m1 as int8; sf is not looked at."""
    check.one_of("fmt", fmt, _OUT_DTYPES)
    if x_special_fmt is not None:
        check.one_of("x_special_fmt", x_special_fmt, (None, "e5m6"))
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        check.require_type(isinstance(x, (tuple, list)), "x", "a pair (data, sf)", type(x).__name__)
        check.require(False, "x", "a pair (data, sf)", f"{len(x)} items")
    data, sf = x
    if x_special_fmt is not None:
        num_bytes = check.tensor("x[0]", data, (torch.uint8,), ("num_tokens", "hidden * 3 / 2"), layout="rows")[1]
        if num_bytes <= 0 or num_bytes % 96:
            check.require(False, "x[0]", "a positive multiple of 96 bytes a row, for 64 channels", num_bytes)
        return data, sf, num_bytes * 2 // 3
    hidden = check.tensor("x[0]", data, _PAIR_DTYPES, ("num_tokens", "hidden"), layout="rows")[1]
    if data.dtype is not torch.float8_e4m3fn:
        hidden *= 2
        if data.dtype is not torch.int8:
            data = data.view(torch.int8)
    if hidden <= 0 or hidden % 64:
        check.require(False, "x", "a positive multiple of 64 channels", hidden)
    return data, sf, hidden


def _check_tensor_sf(data: torch.Tensor, sf: torch.Tensor, tensor_sf: torch.Tensor | None) -> torch.Tensor | None:
    """tensor_sf with one dimension."""
    if not isinstance(sf, torch.Tensor) or sf.dtype is not torch.float8_e4m3fn:
        check.require(tensor_sf is None, "tensor_sf", "None unless x[1] is float8_e4m3fn", type(tensor_sf).__name__)
        return None
    check.require(data.dtype is torch.int8, "x[0]", "e2m1 beside an x[1] of float8_e4m3fn", data.dtype)
    check.require(tensor_sf is not None, "tensor_sf", "a float32 tensor beside an x[1] of float8_e4m3fn", None)
    check.require_type(isinstance(tensor_sf, torch.Tensor), "tensor_sf", "a torch.Tensor", type(tensor_sf).__name__)
    dtype, shape, device = tensor_sf.dtype, tensor_sf.shape, tensor_sf.device
    check.require_type(dtype is torch.float32, "tensor_sf", "dtype torch.float32", dtype)
    check.require(tensor_sf.numel() == 1, "tensor_sf", "one element", tuple(shape))
    check.require(device == data.device, "tensor_sf", f"device {data.device}", str(device))
    return tensor_sf if len(shape) == 1 else tensor_sf.view(1)


def dequantize(
    data: torch.Tensor,
    sf: torch.Tensor,
    hidden: int,
    fmt: str,
    x_block_size: tuple[int, int],
    tensor_sf: torch.Tensor | None,
) -> torch.Tensor:
    """The rest of the check, the allocation and the launch; blocks have positive sides."""
    num_tokens = data.shape[0]
    block_tokens, block_channels = x_block_size
    num_rows, num_cols = ceil_div(num_tokens, block_tokens), ceil_div(hidden, block_channels)
    check_scales("x[1]", sf, num_rows, num_cols, data.device, _BYTE_SF_DTYPES)
    tensor_sf = _check_tensor_sf(data, sf, tensor_sf)
    out = data.new_empty((num_tokens, hidden), dtype=_OUT_DTYPES[fmt])
    _cast_back_out(data, sf, tensor_sf, out, block_tokens, block_channels)
    return out


def _by_blocks(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    x_block_size: tuple[int, int],
    x_special_fmt: str | None,
    tensor_sf: torch.Tensor | None,
) -> torch.Tensor:
    data, sf, hidden = check_pair(x, fmt, x_special_fmt)
    check.require_type(isinstance(x_block_size, (tuple, list)), "x_block_size", "a tuple of two", x_block_size)
    check.require(len(x_block_size) == 2, "x_block_size", "two numbers", x_block_size)
    for size in x_block_size:
        check.integer("x_block_size", size)
    block_tokens, block_channels = x_block_size
    if block_tokens != 1 or block_channels < 1:
        check.require(
            block_tokens in _BLOCK_SIDES and block_channels in _BLOCK_SIDES,
            "x_block_size",
            "(1, channels), or two powers of two up to 128",
            x_block_size,
        )
    return dequantize(data, sf, hidden, fmt, (block_tokens, block_channels), tensor_sf)


@replayable
def cast_back(
    x: tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    x_block_size: tuple[int, int] = (32, 32),
    x_special_fmt: str | None = None,
    *,
    tensor_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize: data * sf of its block, rounded to float32, and that to bfloat16 where `fmt` is "bf16".

    Both roundings are to nearest, ties to even, subnormals included. Data or sf that is NaN, and infinity times 0, give
    NaN, always with the bits 0x7fffffff (bf16: 0x7fff). Names and formula are those of DeepSeek's TileKernels 1.0.0;
    NVFP4 and swizzled sf are not in it.

    Args:
        x: `(data, sf)`. data: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), the even channel in the low nibble, or e5m6 in uint8 (num_tokens, hidden * 3 / 2); hidden a
            multiple of 64, rows may be strided. sf: one for each block, (ceil(num_tokens / block tokens), ceil(hidden /
            block channels)), in any layout of tk_core.scales: float32 row major or TMA-aligned column major, packed
            UE8M0, swizzled; for NVFP4 float8_e4m3fn, row major or swizzled.
        fmt: Type of the output, "bf16" or "fp32".
        x_block_size: (tokens, channels) of a block: (1, any number), or two powers of two up to 128, such as (128, 1),
            (32, 32) and (128, 128).
        x_special_fmt: "e5m6" for e5m6 data, else None.
        tensor_sf: float32, one element, for an sf of float8_e4m3fn (NVFP4, e2m1 data) and only there: the value is
            (data * sf) * tensor_sf, where the first product is exact and the second is rounded to float32.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data, sf or tensor_sf has another dtype, or x_block_size is no pair of ints.
        ValueError: Any other argument is not as described, or is on another device.
    """
    return _by_blocks(x, fmt, x_block_size, x_special_fmt, tensor_sf)


@replayable
def cast_back_e5m6(x: tuple[torch.Tensor, torch.Tensor], fmt: str, x_block_size: tuple[int, int]) -> torch.Tensor:
    """`cast_back` of e5m6 data: data * sf of its block.

    Args:
        x: `(data, sf)`. data: uint8 (num_tokens, hidden * 3 / 2), eight codes in three little-endian words; hidden a
            multiple of 64, rows may be strided. sf: as for `cast_back`.
        fmt: Type of the output, "bf16" or "fp32".
        x_block_size: As for `cast_back`.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data or sf has another dtype, or x_block_size is no pair of ints.
        ValueError: Any other argument is not as described, or is on another device.
    """
    return _by_blocks(x, fmt, x_block_size, "e5m6", None)
