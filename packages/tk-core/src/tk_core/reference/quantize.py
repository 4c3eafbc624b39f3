"""Quantization in plain PyTorch, for any device: scale factors from the amax of blocks, and e4m3 codes."""

import torch

from tk_core.scales import LIMITS

_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
_E4M3_NAN = 0x7F


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
