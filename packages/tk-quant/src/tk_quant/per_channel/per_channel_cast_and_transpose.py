"""per_channel_cast_and_transpose: quantize each channel by blocks of tokens, and transpose the data.

For each channel of each block of num_per_tokens tokens, in float32:

    amax = max(max |x|, 1e-4);   sf = amax / 448;   data = round(x * (448 / amax))
    with round_sf:               sf = least power of two >= that quotient;   data = round(x * (1 / sf))

x bfloat16 (num_tokens, hidden); data float8_e4m3fn (hidden, num_tokens); sf float32
(num_tokens / num_per_tokens, hidden), not transposed; num_per_tokens 32 or 128.

The kernel, with a picture, is that of per_channel_cast.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.lib.cast_formats import CastInput
from tk_quant.lib.least_amax import least_amax_of
from tk_quant.lib.quantize import TILE_ROWS
from tk_quant.per_channel.per_channel_cast import PerChannelCastConfig, check_blocks, per_channel_cast_kernel

_SIZES = (32, 128)


@op(
    "tk_quant::per_channel_cast_and_transpose_out",
    mutates=("out", "sf"),
    reference="per_channel_cast_and_transpose",
    translate=lambda call: {"fmt": "e4m3"},
)
def _per_channel_cast_and_transpose_out(
    x: Tensor, out: Tensor, sf: Tensor, num_per_tokens: int, round_sf: bool, sf_clamp_min: float | None
) -> None:
    if out.numel() == 0:
        return
    arch, hidden = get_arch(x.device), x.shape[1]
    config = PerChannelCastConfig.best(x.dtype.itemsize, hidden, True, False, arch)
    source = CastInput(x.dtype, check.row_alignment(x))
    cast = per_channel_cast_kernel(source, hidden, num_per_tokens, round_sf, True, False, config, arch)
    cast(x, None, None, out, sf, least_amax_of("e4m3", sf_clamp_min))


@replayable
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
    check_blocks(fmt, num_per_tokens, round_sf, sf_clamp_min, _SIZES)
    data = x.new_empty((hidden, num_tokens), dtype=torch.float8_e4m3fn)
    sf = x.new_empty((num_tokens // num_per_tokens, hidden), dtype=torch.float32)
    _per_channel_cast_and_transpose_out(x, data, sf, num_per_tokens, round_sf, sf_clamp_min)
    return data, sf
