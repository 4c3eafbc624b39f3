"""per_channel_cast and its relatives, for transposed data, for pairs and for gathered rows: quantize each channel.

The kernel, with a picture, is in by_channel.py. Gathered rows of pairs, if there are many, are cast by that of
gathered_recast.py.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_quant.cast.by_channel import PAIR_CHANNELS, launch_per_channel_cast, per_channel_cast_kernel
from tk_quant.cast.config import TILE_ROWS, CastInput
from tk_quant.cast.format import PLAIN_DTYPES, check_channel_blocks, least_amax_of, pair_of

Pair = tuple[Tensor, Tensor]


def _check_cast(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    sizes: tuple[int, ...],
    round_sf: bool,
    num_per_channels: int | None,
    sf_clamp_min: float | None,
) -> tuple[Tensor, Tensor | None, int, int]:
    """Check the arguments of a cast; return `(data of x, sf of x, num_tokens, hidden)`. num_tokens is not checked."""
    x_sf = None
    if isinstance(x, tuple | list):
        x, x_sf = pair_of("x", x)
        num_tokens, hidden = check.tensor("x[0]", x, (torch.float8_e4m3fn,), ("num_tokens", "hidden"), layout="rows")
        fits = hidden > 0 and hidden % PAIR_CHANNELS == 0
        check.require(fits, "x[0].shape[1]", f"a positive multiple of {PAIR_CHANNELS}", hidden)
        check.tensor("x[1]", x_sf, (torch.float32,), (num_tokens, hidden // PAIR_CHANNELS), device=x.device)
        check.one_of("num_per_channels", num_per_channels, (PAIR_CHANNELS,))
        check.integer("num_per_channels", num_per_channels)
        check_channel_blocks(fmt, num_per_tokens, sizes, round_sf, sf_clamp_min)
    else:
        num_tokens, hidden = check.tensor("x", x, PLAIN_DTYPES, ("num_tokens", "hidden"), layout="rows")
        check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
        check_channel_blocks(fmt, num_per_tokens, sizes, round_sf, sf_clamp_min)
        check.require(num_per_channels is None, "num_per_channels", "None, for x is no pair", num_per_channels)
    return x, x_sf, num_tokens, hidden


@op(aligned=())
def per_channel_cast(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of one channel and 32 or 128 tokens: a tensor, or the values of a pair (data, sf).

    For each block: amax = max(max |x|, 1e-4), sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf =
    the least power of two at least amax / 448, data = round(x * (1 / sf)). Name, arguments and formula are those of
    DeepSeek's TileKernels 1.0.0, and the last two positional arguments, pairs and blocks of 32 tokens those of 2.1.0.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64. Or a pair `(data, sf)`,
            float8_e4m3fn (num_tokens, hidden) and contiguous float32 (num_tokens, hidden / 128), hidden a multiple of
            128, whose value is data * sf, rounded to float32. Rows of x or of data may be strided.
        fmt: "e4m3".
        num_per_tokens: 32 or 128.
        round_sf: whether scale factors are powers of two.
        num_per_channels: 128 for a pair, channels of a block of it; None otherwise.
        use_packed_ue8m0: sf as biased exponents, those of four blocks of tokens in an int32; needs round_sf.
        sf_clamp_min: the least amax instead of 1e-4; at least 448 * 2**-126.

    Returns:
        data float8_e4m3fn (num_tokens, hidden) and sf float32 (R, hidden), R = num_tokens / num_per_tokens, both
        contiguous; or packed int32 (ceil(R / 4), hidden), byte k of [r, c] that of block row 4 * r + k, 0 past the
        last. A block with NaN or infinity in it has NaN or infinity for its sf (packed: 255).

    Raises:
        TypeError: x is neither a bfloat16 or float32 tensor nor a pair, or an argument has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; any
            other argument is not as described.
    """
    checked = _check_cast(x, fmt, num_per_tokens, (32, TILE_ROWS), round_sf, num_per_channels, sf_clamp_min)
    x, x_sf, num_tokens, hidden = checked
    check.flag("use_packed_ue8m0", use_packed_ue8m0)
    check.require(round_sf or not use_packed_ue8m0, "use_packed_ue8m0", "round_sf=True beside it", "round_sf=False")
    check.multiple_of("rows of x" if x_sf is not None else "x.shape[0]", num_tokens, TILE_ROWS)
    num_rows, dtype = num_tokens // num_per_tokens, torch.float32
    if use_packed_ue8m0:
        num_rows, dtype = ceil_div(num_rows, 4), torch.int32
    data = new(x.new_empty, (num_tokens, hidden), dtype=torch.float8_e4m3fn)
    sf = new(x.new_empty, (num_rows, hidden), dtype=dtype)
    if launching(data, sf):
        launch_per_channel_cast(x, x_sf, None, data, sf, round_sf, sf_clamp_min, num_per_tokens)
    return data, sf


@op(aligned=())
def per_channel_cast_and_transpose(
    x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False, *, sf_clamp_min: float | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of one channel and 32 or 128 tokens, and transpose the data.

    For each block: amax = max(max |x|, 1e-4), sf = amax / 448, data = round(x * (448 / amax)); with `round_sf`: sf =
    the least power of two at least amax / 448, data = round(x * (1 / sf)). Name, arguments and formula are those of
    DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 (num_tokens, hidden); num_tokens a multiple of 128, hidden of 64; rows may be strided.
        fmt: "e4m3".
        num_per_tokens: 32 or 128, tokens of a block.
        round_sf: whether scale factors are powers of two.
        sf_clamp_min: the least amax instead of 1e-4; at least 448 * 2**-126.

    Returns:
        data float8_e4m3fn (hidden, num_tokens) and sf float32 (num_tokens / num_per_tokens, hidden), both contiguous. A
        block with NaN or infinity in it has NaN or infinity for its sf.

    Raises:
        TypeError: x is no bfloat16 tensor, or an argument has another type.
        ValueError: x has another rank or a size that is not such a multiple, or columns that are not contiguous; fmt or
            num_per_tokens is none of those above.
    """
    num_tokens, hidden = check.tensor("x", x, (torch.bfloat16,), ("num_tokens", "hidden"), layout="rows")
    check.multiple_of("x.shape[0]", num_tokens, TILE_ROWS)
    check.require(hidden > 0 and hidden % 64 == 0, "x.shape[1]", "a positive multiple of 64", hidden)
    check_channel_blocks(fmt, num_per_tokens, (32, 128), round_sf, sf_clamp_min)
    data = new(x.new_empty, (hidden, num_tokens), dtype=torch.float8_e4m3fn)
    sf = new(x.new_empty, (num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    if launching(data, sf):
        source = CastInput(x.dtype, check.row_alignment(x))
        cast = per_channel_cast_kernel(source, hidden, num_per_tokens, round_sf, True, False, False, get_arch(x.device))
        cast(x, None, None, data, sf, least_amax_of("e4m3", sf_clamp_min))
    return data, sf


@op(aligned=())
def per_channel_cast_fused(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of one channel: a tensor, the values of a pair (data, sf), or gathered rows of either.

    value[p] = x[p], or for a pair data[p] * sf[p] rounded to float32; with `pos_to_token`, that of row pos_to_token[p],
    0 where the index is negative. For each channel of each 128 rows: amax = max(max |value|, 1e-4), sf = amax / 448,
    data = round(value * (448 / amax)); with `round_sf`: sf = the least power of two at least amax / 448,
    data = round(value * (1 / sf)). Name, arguments and formula are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: bfloat16 or float32 (num_tokens, hidden), hidden a multiple of 64; or a pair `(data, sf)`, float8_e4m3fn
            (num_tokens, hidden) and contiguous float32 (num_tokens, hidden / 128), hidden a multiple of 128. Rows of x
            or of data may be strided.
        fmt: "e4m3".
        num_per_tokens: 128, rows of a block.
        round_sf: whether scale factors are powers of two.
        num_per_channels: 128 for a pair, channels of a block of it; None otherwise.
        pos_to_token: int32 (num_rows,), the source row in x of each row of the result; negative for none, and an index
            past the last row counts as none (`TK_DEBUG=1` raises ValueError). num_rows is a multiple of 16. Without
            pos_to_token, num_rows is num_tokens, a multiple of 128.
        sf_clamp_min: the least amax instead of 1e-4; at least 448 * 2**-126.

    Returns:
        data float8_e4m3fn (num_rows, hidden) and sf float32 (ceil(num_rows / 128), hidden), both contiguous. A block
        with NaN or infinity in it has NaN or infinity for its sf.

    Raises:
        TypeError: x is neither a tensor nor a pair, or an argument has another type or dtype.
        ValueError: a shape, stride or device is not as described; fmt, num_per_tokens or num_per_channels is none of
            those above.
    """
    checked = _check_cast(x, fmt, num_per_tokens, (TILE_ROWS,), round_sf, num_per_channels, sf_clamp_min)
    x, x_sf, num_tokens, hidden = checked
    num_rows = num_tokens
    if pos_to_token is None:
        check.multiple_of("rows of x", num_rows, TILE_ROWS)
    else:
        (num_rows,) = check.tensor("pos_to_token", pos_to_token, (torch.int32,), ("num_rows",), device=x.device)
        check.multiple_of("pos_to_token.shape[0]", num_rows, 16)
        check.below("pos_to_token", pos_to_token, num_tokens, "indices below {}")
    out = new(x.new_empty, (num_rows, hidden), dtype=torch.float8_e4m3fn)
    sf = new(x.new_empty, (ceil_div(num_rows, TILE_ROWS), hidden), dtype=torch.float32)
    if launching(out, sf):
        launch_per_channel_cast(x, x_sf, pos_to_token, out, sf, round_sf, sf_clamp_min)
    return out, sf
