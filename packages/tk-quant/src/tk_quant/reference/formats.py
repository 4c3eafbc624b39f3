"""Quantized formats in plain PyTorch: bit patterns, limits, and the values of a (data, sf) pair. For any device."""

from collections.abc import Callable

import torch

from tk_core.math import ceil_div
from tk_core.reference.quantize import decode_e2m1, encode_e2m1, encode_e4m3
from tk_core.reference.scales import unpack_scales
from tk_quant.cast.format import E2M1_DTYPES

_E5M6_LARGEST = 65024.0


def round_e5m6(x: torch.Tensor) -> torch.Tensor:
    """Float32 to the nearest E5M6 value, ties to even, saturating at ±65024, the sign of zero kept; NaN stays."""
    # frexp's mantissa is below 1, so the seven bits of a normal value end 7 below its exponent; subnormals at 2**-20.
    exponent = (x.frexp().exponent - 7).clamp(min=-20)
    step = ((exponent + 127) << 23).view(torch.float32)
    return ((x / step).round() * step).clamp(-_E5M6_LARGEST, _E5M6_LARGEST)


def encode_e5m6(x: torch.Tensor) -> torch.Tensor:
    """Float32 (..., n) to uint8 (..., n * 3 / 2), n % 8 == 0: to nearest, ties to even, saturating at ±65024.

    Eight codes make three little-endian 32-bit words: c0<<20 | c1<<8 | c2>>4, c2<<28 | c3<<16 | c4<<4 | c5>>8,
    c5<<24 | c6<<12 | c7, each cut to 32 bits.
    """
    # A float16 has four more bits of mantissa and the same exponent.
    codes = (round_e5m6(x).to(torch.float16).view(torch.int16).to(torch.int64) >> 4) & 0xFFF
    c = codes.unflatten(-1, (-1, 8)).unbind(-1)
    words = (
        c[0] << 20 | c[1] << 8 | c[2] >> 4,
        c[2] << 28 | c[3] << 16 | c[4] << 4 | c[5] >> 8,
        c[5] << 24 | c[6] << 12 | c[7],
    )
    shifts = torch.arange(0, 32, 8, device=x.device)
    return ((torch.stack(words, dim=-1).unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-3)


def decode_e5m6(x: torch.Tensor) -> torch.Tensor:
    """uint8 (..., n * 3 / 2) to float32 (..., n), exactly."""
    quads = x.unflatten(-1, (-1, 3, 4)).to(torch.int64)
    w0, w1, w2 = (quads << torch.arange(0, 32, 8, device=x.device)).sum(-1).unbind(-1)
    codes = (
        w0 >> 20,
        w0 >> 8,
        w0 << 4 | w1 >> 28,
        w1 >> 16,
        w1 >> 4,
        w1 << 8 | w2 >> 24,
        w2 >> 12,
        w2,
    )
    codes = torch.stack(codes, dim=-1).flatten(-2) & 0xFFF
    return (codes << 4).to(torch.int16).view(torch.float16).to(torch.float32)


ENCODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3": encode_e4m3,
    "e2m1": encode_e2m1,
    "e5m6": encode_e5m6,
}


def decode(data: torch.Tensor, special_fmt: str | None = None) -> torch.Tensor:
    """Quantized data to float32 by its dtype: float8_e4m3fn is e4m3; int8, uint8 and float4_e2m1fn_x2 are e2m1.

    uint8 is e5m6 where `special_fmt` says so.
    """
    if special_fmt == "e5m6":
        return decode_e5m6(data)
    if data.dtype is torch.float8_e4m3fn:
        return data.to(torch.float32)
    if data.dtype in (torch.uint8, *E2M1_DTYPES):
        return decode_e2m1(data)
    raise TypeError(f"data: expected dtype torch.float8_e4m3fn, torch.int8 or torch.uint8, got {data.dtype}")


def expand_blocks(values: torch.Tensor, block_size: tuple[int, int], num_rows: int, num_cols: int) -> torch.Tensor:
    """From one value per block, (R, C), to one per element: a new (num_rows, num_cols)."""
    # Clamped, as a block may be far larger than the tensor.
    block_rows, block_cols = min(block_size[0], max(num_rows, 1)), min(block_size[1], max(num_cols, 1))
    count_rows, count_cols = values.shape
    elements = values[:, None, :, None].expand(count_rows, block_rows, count_cols, block_cols)
    return elements.reshape(count_rows * block_rows, count_cols * block_cols)[:num_rows, :num_cols]


def dequantize(
    x: tuple[torch.Tensor, torch.Tensor],
    x_block_size: tuple[int, int],
    special_fmt: str | None = None,
    tensor_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of a pair `(data, sf)` with blocks `x_block_size`: data * sf, rounded once to float32.

    data: float8_e4m3fn (tokens, hidden), or e2m1 as int8, uint8 or float4_e2m1fn_x2 (tokens, hidden / 2), or with
        `special_fmt` "e5m6" uint8 (tokens, hidden * 3 / 2).
    sf: in any layout.
    tensor_sf: float32, one element: a factor for data * sf, which is exact for e2m1 with float8_e4m3fn.
    """
    data, sf = x
    values = decode(data, special_fmt)
    num_tokens, hidden = values.shape
    sf = unpack_scales(sf, ceil_div(num_tokens, x_block_size[0]), ceil_div(hidden, x_block_size[1]))
    values = values * expand_blocks(sf, x_block_size, num_tokens, hidden)
    return values if tensor_sf is None else values * tensor_sf.view(())
