"""Quantized formats in plain PyTorch: bit patterns, limits, and what a (data, sf) pair is worth. On any device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tk_core.math import ceil_div
from tk_core.scales import unpack_scales

_E4M3_NAN = 0x7F
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT4_DTYPE: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Float32 to float8_e4m3fn: to nearest, ties to even, saturating at ±448; any NaN becomes byte 0x7f."""
    # torch's own cast turns what is too large into NaN, and keeps the sign of a NaN.
    codes = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).masked_fill_(x.isnan(), _E4M3_NAN)
    return codes


def decode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn to float32, exactly."""
    return x.to(torch.float32)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Float32 (..., n) to int8 (..., n / 2): even elements in the low nibbles, odd ones in the high.

    To nearest, ties to even, saturating at ±6, the sign of zero kept; NaN becomes +6.
    """
    magnitude = x.abs()
    # The code is the number of boundaries passed; a tie goes to the even code, so every second boundary counts itself.
    codes = (magnitude > 0.25).to(torch.int8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    codes += x.signbit().to(torch.int8) << 3
    codes.masked_fill_(x.isnan(), 7)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """int8, uint8 or float4_e2m1fn_x2 (..., n / 2) to float32 (..., n), exactly."""
    codes = x.view(torch.uint8)
    codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    table = torch.tensor(_E2M1_VALUES + tuple(-value for value in _E2M1_VALUES), device=x.device)
    return table[codes.to(torch.int32)]


@dataclass(frozen=True)
class Format:
    """A quantized format and the numbers that its quantizer needs."""

    name: str
    largest: float
    """Largest finite value."""
    least_amax: float
    """A block's amax counts as at least this."""
    encode: Callable[[torch.Tensor], torch.Tensor]


FORMATS = {
    "e4m3": Format("e4m3", 448.0, 1e-4, encode_e4m3),
    "e2m1": Format("e2m1", 6.0, 6 * 2.0**-126, encode_e2m1),
}


def decode(data: torch.Tensor) -> torch.Tensor:
    """Quantized data to float32 by its dtype: float8_e4m3fn is e4m3; int8, uint8 and float4_e2m1fn_x2 are e2m1."""
    if data.dtype is torch.float8_e4m3fn:
        return decode_e4m3(data)
    if data.dtype in (torch.int8, torch.uint8) or (FLOAT4_DTYPE is not None and data.dtype is FLOAT4_DTYPE):
        return decode_e2m1(data)
    raise TypeError(f"data: expected dtype torch.float8_e4m3fn, torch.int8 or torch.uint8, got {data.dtype}")


def expand_blocks(values: torch.Tensor, block_size: tuple[int, int], num_rows: int, num_cols: int) -> torch.Tensor:
    """One value a block, (R, C), to one an element: a new (num_rows, num_cols)."""
    block_rows, block_cols = block_size
    count_rows, count_cols = values.shape
    elements = values[:, None, :, None].expand(count_rows, block_rows, count_cols, block_cols)
    return elements.reshape(count_rows * block_rows, count_cols * block_cols)[:num_rows, :num_cols]


def dequantize(x: tuple[torch.Tensor, torch.Tensor], x_block_size: tuple[int, int]) -> torch.Tensor:
    """What a pair `(data, sf)` with blocks `x_block_size` is worth: data * sf, rounded to float32 once.

    data: float8_e4m3fn (tokens, hidden), or e2m1 as int8, uint8 or float4_e2m1fn_x2 (tokens, hidden / 2).
    sf: in any layout.
    """
    data, sf = x
    values = decode(data)
    num_tokens, hidden = values.shape
    sf = unpack_scales(sf, ceil_div(num_tokens, x_block_size[0]), ceil_div(hidden, x_block_size[1]))
    return values * expand_blocks(sf, x_block_size, num_tokens, hidden)
