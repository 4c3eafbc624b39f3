"""Quantization in plain PyTorch, for any device: scale factors from the amax of blocks, e4m3 and e2m1 codes."""

import torch

from tk_core.scales import LIMITS

_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
_E4M3_NAN = 0x7F
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def least_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is at least x, for positive normal float32 x; infinity and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits.clamp(max=_INFINITY_BITS) + _MANTISSA_BITS) & _INFINITY_BITS).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def quantization_factors(
    amax: torch.Tensor, fmt: str, round_sf: bool, least_amax: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(sf, s)` of blocks with this amax (float32): the scale factor, and the factor that x is multiplied by."""
    # On CUDA, torch replaces division by a Python number with multiplication by its reciprocal; hence a tensor.
    largest = torch.full_like(amax, LIMITS[fmt][0])
    amax = amax.clamp(min=least_amax)
    sf = amax / largest
    if not round_sf:
        return sf, largest / amax
    sf = least_power_of_two(sf)
    return sf, torch.ones_like(sf) / sf


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Float32 to float8_e4m3fn: to nearest, ties to even, saturating at ±448; any NaN becomes byte 0x7f."""
    # torch's own cast turns values that are too large into NaN, and keeps the sign of a NaN.
    codes = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).masked_fill_(x.isnan(), _E4M3_NAN)
    return codes


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
    values = _E2M1_VALUES + tuple(-value for value in _E2M1_VALUES)
    table = torch.tensor(values, dtype=torch.float32, device=x.device)
    return table[codes.to(torch.int32)]
