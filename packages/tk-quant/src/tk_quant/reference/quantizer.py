"""The quantizer in plain PyTorch, for all formats, blocks, roundings and scale layouts."""

import torch

from tk_core.math import ceil_div
from tk_core.reference.quantize import encode_e4m3, quantization_factors
from tk_core.reference.scales import pack_scales
from tk_core.scales import LIMITS, scale_layout
from tk_quant.cast.format import LEAST_E4M3, least_amax_of
from tk_quant.reference.formats import ENCODERS, dequantize, expand_blocks
from tk_quant.reference.stochastic import round_stochastically

Pair = tuple[torch.Tensor, torch.Tensor]


def block_amax(x: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """max |x| of each block of (rows, cols), float32 (⌈rows / block rows⌉, ⌈cols / block cols⌉); NaN propagates."""
    num_rows, num_cols = x.shape
    # Clamped, as a block may be far larger than the tensor.
    block_rows, block_cols = min(block_size[0], max(num_rows, 1)), min(block_size[1], max(num_cols, 1))
    count_rows, count_cols = ceil_div(num_rows, block_rows), ceil_div(num_cols, block_cols)
    missing = (0, count_cols * block_cols - num_cols, 0, count_rows * block_rows - num_rows)
    magnitude = x.abs()
    if any(missing):
        magnitude = torch.nn.functional.pad(magnitude, missing)
    return magnitude.view(count_rows, block_rows, count_cols, block_cols).amax(dim=(1, 3)).to(torch.float32)


def tensor_scaled_factors(amax: torch.Tensor, fmt: str, tensor_sf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(sf, s)` for sf in float8_e4m3fn with one float32 factor for the tensor (NVFP4); sf is returned as float32."""
    sf = amax / torch.full_like(amax, LIMITS[fmt][0]) / tensor_sf
    sf = encode_e4m3(sf.clamp(min=LEAST_E4M3)).to(torch.float32)
    sf = torch.where(amax.isfinite(), sf, torch.nan)
    return sf, torch.ones_like(sf) / (sf * tensor_sf)


def e4m3_factors(amax: torch.Tensor, fmt: str, least_amax: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`(sf, s)` for sf in float8_e4m3fn, returned as float32: at most 448, NaN where amax is not finite."""
    sf = encode_e4m3(amax.clamp(min=least_amax) / torch.full_like(amax, LIMITS[fmt][0])).to(torch.float32)
    sf = torch.where(amax.isfinite(), sf, torch.nan)
    return sf, torch.ones_like(sf) / sf


def written(out: Pair | torch.Tensor | None, result: Pair | torch.Tensor) -> Pair | torch.Tensor:
    """The result, copied to `out` if that is given."""
    if out is None:
        return result
    for given, new in zip(out, result, strict=True) if isinstance(result, tuple) else [(out, result)]:
        given.copy_(new)
    return out


def cast(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    block_size: tuple[int, int] = (32, 32),
    sf: torch.Tensor | None = None,
    x_block_size: tuple[int, int] | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
    stochastic_cast: bool = False,
    seed: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Quantize by blocks: `(data, sf)`, or data alone where `sf` (row-major float32 (R, C)) is given.

    x: bfloat16 or float32 (tokens, hidden), or a pair `(data, sf)` with blocks `x_block_size`, which is dequantized to
    float32 first. For each block of `block_size` = (num_per_tokens, num_per_channels), edge blocks being smaller:

        amax = max(max |x|, sf_clamp_min or least amax of fmt);  sf = amax / largest of fmt;  s = largest of fmt / amax
        with round_sf:   sf = least power of two ≥ that quotient;  s = 1 / sf
        with use_e4m3_sf: sf = e4m3 nearest to that quotient, at most 448 and at least 2**-9;  s = 1 / sf
        with sf given:   s = 1 / sf
        with tensor_sf:  sf = e4m3 nearest to max |x| / largest of fmt / tensor_sf, at least 2**-9, saturating at 448;
                         s = 1 / (sf * tensor_sf)
        data = round(x * s)

    each operation in float32 to nearest, ties to even; with `stochastic_cast` and blocks of one token, data is rounded
    stochastically, as tk_quant.per_token_cast does. sf comes in the layout that the flags ask for (tk_core.scales),
    float8_e4m3fn with `tensor_sf` or `use_e4m3_sf`.
    """
    if fmt not in LIMITS:
        raise ValueError(f"fmt: expected one of {', '.join(map(repr, LIMITS))}, got {fmt!r}")
    if not isinstance(x, torch.Tensor) and x_block_size is None:
        raise ValueError("x_block_size: expected the block size of the pair x, got None")
    values = x if isinstance(x, torch.Tensor) else dequantize(x, x_block_size)
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    if sf is not None:
        sf = sf.float()
        return _encode(values, torch.ones_like(sf) / sf, fmt, block_size)
    amax = block_amax(values, block_size)
    if use_e4m3_sf:
        sf, factor = e4m3_factors(amax, fmt, least_amax_of(fmt, sf_clamp_min, True))
    elif tensor_sf is None:
        sf, factor = quantization_factors(amax, fmt, round_sf, least_amax_of(fmt, sf_clamp_min))
    else:
        sf, factor = tensor_scaled_factors(amax, fmt, tensor_sf)
    sf = pack_scales(sf, layout, torch.float8_e4m3fn if use_e4m3_sf or tensor_sf is not None else None)
    scaled = expand_blocks(factor, block_size, *values.shape) * values
    if stochastic_cast:
        num_rows, num_quads = len(scaled), scaled.shape[1] // 4
        index = torch.arange(num_quads, device=scaled.device).expand(num_rows, -1)
        if seed is not None:
            index = index + num_quads * torch.arange(num_rows, device=scaled.device)[:, None]
        scaled = round_stochastically(scaled, fmt, index, seed)
    return ENCODERS[fmt](scaled), sf


def _encode(values: torch.Tensor, factor: torch.Tensor, fmt: str, block_size: tuple[int, int]) -> torch.Tensor:
    return ENCODERS[fmt](expand_blocks(factor, block_size, *values.shape) * values)
