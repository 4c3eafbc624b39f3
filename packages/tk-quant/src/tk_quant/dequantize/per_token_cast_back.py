"""per_token_cast_back: dequantize the output of per_token_cast, out = data * sf of its token and group of channels.

The kernel is that of cast_back, with blocks of one token.
"""

from torch import Tensor

from tk_core import check
from tk_core.replay import replayable
from tk_quant.dequantize.cast_back import cast_back, check_pair

_GROUPS = (16, 32, 64, 128)


@replayable
def per_token_cast_back(
    x: tuple[Tensor, Tensor],
    fmt: str,
    num_per_channels: int,
    x_special_fmt: str | None = None,
    *,
    tensor_sf: Tensor | None = None,
) -> Tensor:
    """Dequantize by groups of channels: data * sf of its token and group, rounded as `cast_back` does.

    Args:
        x: `(data, sf)`. data: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), or e5m6 in uint8 (num_tokens, hidden * 3 / 2); hidden a multiple of 64, rows may be strided.
            sf: (num_tokens, ceil(hidden / num_per_channels)) blocks in any layout of tk_core.scales; for NVFP4
            float8_e4m3fn, row major or swizzled.
        fmt: Type of the output, "bf16" or "fp32".
        num_per_channels: Channels of a group: 16, 32, 64, 128 or hidden. The last group of a row may be shorter.
        x_special_fmt: "e5m6" for e5m6 data, else None.
        tensor_sf: float32, one element, for an sf of float8_e4m3fn (NVFP4) and only there; see `cast_back`.

    Returns:
        (num_tokens, hidden), bfloat16 or float32, contiguous.

    Raises:
        TypeError: x is no pair of tensors, data, sf or tensor_sf has another dtype, or num_per_channels is no int.
        ValueError: Any other argument is not as described, or is on another device.
    """
    check.integer("num_per_channels", num_per_channels)
    if num_per_channels not in _GROUPS:
        *_, hidden = check_pair(x, fmt, x_special_fmt)
        check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden))
    return cast_back(x, fmt, (1, num_per_channels), x_special_fmt, tensor_sf=tensor_sf)
