"""Stochastic rounding in plain PyTorch; tk_quant.cast.stochastic says in short what it is."""

import torch

_ALL = 0xFFFFFFFF
_QUADS = 1 << 20
"""Quads rounded at a time: a hundred bytes of integers and float64 for each element of a large tensor may not fit."""
# By format: the least normal exponent, bits of the mantissa, the largest finite value.
_GRIDS = {"bf16": (-126, 7, torch.finfo(torch.bfloat16).max), "e4m3": (-6, 3, 448.0), "e2m1": (0, 1, 6.0)}


def _product(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor of 32 bits without their carry; torch's int64 wraps around at 64 bits."""
    return x * factor & _ALL


def _mixed(h: int) -> int:
    """murmur3's 32-bit finalizer."""
    h = (h ^ h >> 16) * 0x85EBCA6B & _ALL
    h = (h ^ h >> 13) * 0xC2B2AE35 & _ALL
    return h ^ h >> 16


def random_words(x: torch.Tensor, index: torch.Tensor, seed: torch.Tensor | int | None) -> tuple[torch.Tensor, ...]:
    """Two words of random bits, int64 (…), of each quad of x, float32 (…, 4), with its index, int64 (…)."""
    low, high = (int(seed or 0) >> shift & _ALL for shift in (0, 32))
    h = index + _mixed((_mixed(low) + high) & _ALL)
    for k, factor in enumerate((0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)):
        h = h + _product(x[..., k].contiguous().view(torch.int32).long() & _ALL, factor) & _ALL
    h = _product(h ^ h >> 23, 0x7FEB352D)
    h = h ^ h >> 16
    words = (_product(h, factor) for factor in (0x846CA68B, 0xD35A2D97))
    return tuple(word ^ word >> 11 for word in words)


def random_fractions(words: tuple[torch.Tensor, ...], fmt: str) -> torch.Tensor:
    """16 random bits, int64 (…, 4), for each element of a quad."""
    if fmt == "bf16":
        return torch.stack([word >> shift & 0xFFFF for word in words for shift in (0, 16)], -1)
    word = words[0]
    halves = [word & 0xFFFF, word >> 16]
    if fmt == "e2m1":
        byte = [word >> shift & 0xFF for shift in (0, 8, 16, 24)]
        halves = [byte[0] | byte[2] << 8, byte[1] | byte[3] << 8]
    backwards = [sum((half >> bit & 1) << 15 - bit for bit in range(16)) for half in halves]
    return torch.stack([halves[0], backwards[0], halves[1], backwards[1]], -1)


def round_stochastically(
    x: torch.Tensor, fmt: str, index: torch.Tensor, seed: torch.Tensor | int | None
) -> torch.Tensor:
    """float32 x (…, 4 · n), whose quads have these indices, int64 (…, n), to values of fmt, in float32.

    Finite values saturate; zeros, infinity and NaN stay.
    """
    pieces = zip(x.reshape(-1, 4).split(_QUADS), index.flatten().split(_QUADS))
    return torch.cat([_round_quads(quads, fmt, of_quads, seed) for quads, of_quads in pieces]).view(x.shape)


def _round_quads(quads: torch.Tensor, fmt: str, index: torch.Tensor, seed: torch.Tensor | int | None) -> torch.Tensor:
    """`round_stochastically` of quads (n, 4) with these indices (n,)."""
    least_exponent, mantissa_bits, largest = _GRIDS[fmt]
    random = random_fractions(random_words(quads, index, seed), fmt)
    magnitude = quads.abs().double().clamp(max=largest)
    exponent = (magnitude.frexp().exponent - 1).clamp(min=least_exponent)
    step = torch.exp2((exponent - mantissa_bits).double())
    lower = (magnitude / step).floor()
    # All of this is exact: a place has at most 24 bits.
    place = magnitude / step - lower
    away = place * 2**16 + random >= 2**16
    rounded = ((lower + away) * step).clamp(max=largest).copysign(quads)
    return torch.where(quads.isfinite(), rounded, quads).float()
