"""per_channel_cast_fused: quantize each channel by blocks of 128 rows, of x, of a pair, or of gathered rows of either.

For each channel of each block of 128 rows (the last block of gathered rows may be shorter), in float32:

    value[p] = x[p], or data[p] * sf[p] of a pair;   with pos_to_token, row pos_to_token[p] of these, 0 if there is none
    amax = max(max |value|, 1e-4);   sf = amax / 448;   data = round(value * (448 / amax))
    with round_sf:    sf = least power of two >= that quotient;   data = round(value * (1 / sf))

x (num_tokens, hidden), bfloat16, float32, or float8_e4m3fn beside float32 (num_tokens, hidden / 128);
data float8_e4m3fn (num_rows, hidden), sf float32 (ceil(num_rows / 128), hidden).

The kernel, with a picture, is that of per_channel_cast. Gathered rows of pairs, if there are many, are cast by the
kernel in lib/gathered_recast.py.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import ceil_div
from tk_core.replay import replayable
from tk_quant.lib.check_pairs import pair_of
from tk_quant.lib.quantize import TILE_ROWS
from tk_quant.per_channel.per_channel_cast import PAIR_CHANNELS, check_blocks, check_plain_cast, per_channel_cast_out


@replayable
def per_channel_cast_fused(
    x: Tensor | tuple[Tensor, Tensor],
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
    x_sf = None
    if isinstance(x, tuple | list):
        x, x_sf = pair_of("x", x)
        num_tokens, hidden = check.tensor("x[0]", x, (torch.float8_e4m3fn,), ("num_tokens", "hidden"), layout="rows")
        fits = hidden > 0 and hidden % PAIR_CHANNELS == 0
        check.require(fits, "x[0].shape[1]", f"a positive multiple of {PAIR_CHANNELS}", hidden)
        check.tensor("x[1]", x_sf, (torch.float32,), (num_tokens, hidden // PAIR_CHANNELS), device=x.device)
        check.one_of("num_per_channels", num_per_channels, (PAIR_CHANNELS,))
        check_blocks(fmt, num_per_tokens, round_sf, sf_clamp_min)
    else:
        num_tokens, hidden = check_plain_cast(x, fmt, num_per_tokens, round_sf, sf_clamp_min)
        check.require(num_per_channels is None, "num_per_channels", "None, for x is no pair", num_per_channels)
    num_rows = num_tokens
    if pos_to_token is None:
        check.multiple_of("rows of x", num_rows, TILE_ROWS)
    else:
        (num_rows,) = check.tensor("pos_to_token", pos_to_token, (torch.int32,), ("num_rows",), device=x.device)
        check.multiple_of("pos_to_token.shape[0]", num_rows, 16)
        check.below("pos_to_token", pos_to_token, num_tokens, "indices below {}")
    out = x.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((ceil_div(num_rows, TILE_ROWS), hidden), dtype=torch.float32)
    per_channel_cast_out(x, x_sf, pos_to_token, out, sf, round_sf, sf_clamp_min)
    return out, sf
