"""The quantizer in plain PyTorch, for all formats, blocks, roundings and scale layouts."""

import torch

from tk_core.math import ceil_div
from tk_core.reference.scales import pack_scales
from tk_core.scales import scale_layout
from tk_quant.reference.lib.formats import FORMATS, Format, decode_e4m3, dequantize, encode_e4m3, expand_blocks

Pair = tuple[torch.Tensor, torch.Tensor]

_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
_LEAST_E4M3 = 2.0**-9


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


def least_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is at least x, for positive normal float32 x; infinity and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits.clamp(max=_INFINITY_BITS) + _MANTISSA_BITS) & _INFINITY_BITS).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def quantization_factors(
    amax: torch.Tensor, fmt: Format, round_sf: bool, sf_clamp_min: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(sf, s)` of blocks with this amax (float32): the scale factor, and the factor that x is multiplied by."""
    # On CUDA, torch replaces division by a Python number with multiplication by its reciprocal; hence a tensor.
    largest = torch.full_like(amax, fmt.largest)
    amax = amax.clamp(min=fmt.least_amax if sf_clamp_min is None else sf_clamp_min)
    sf = amax / largest
    if not round_sf:
        return sf, largest / amax
    sf = least_power_of_two(sf)
    return sf, torch.ones_like(sf) / sf


def tensor_scaled_factors(
    amax: torch.Tensor, fmt: Format, tensor_sf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(sf, s)` for sf in float8_e4m3fn with one float32 factor for the tensor (NVFP4); sf is returned as float32."""
    sf = amax / torch.full_like(amax, fmt.largest) / tensor_sf
    sf = decode_e4m3(encode_e4m3(sf.clamp(min=_LEAST_E4M3)))
    sf = torch.where(amax.isfinite(), sf, torch.nan)
    return sf, torch.ones_like(sf) / (sf * tensor_sf)


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
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Quantize by blocks: `(data, sf)`, or data alone where `sf` (row-major float32 (R, C)) is given.

    x: bfloat16 or float32 (tokens, hidden), or a pair `(data, sf)` with blocks `x_block_size`, which is dequantized to
    float32 first. For each block of `block_size` = (num_per_tokens, num_per_channels), edge blocks being smaller:

        amax = max(max |x|, sf_clamp_min or least amax of fmt);  sf = amax / largest of fmt;  s = largest of fmt / amax
        with round_sf:   sf = least power of two ≥ that quotient;  s = 1 / sf
        with sf given:   s = 1 / sf
        with tensor_sf:  sf = e4m3 nearest to max |x| / largest of fmt / tensor_sf, at least 2**-9, saturating at 448;
                         s = 1 / (sf * tensor_sf)
        data = round(x * s)

    each operation in float32 to nearest, ties to even. sf comes in the layout that the flags ask for (tk_core.scales),
    float8_e4m3fn with `tensor_sf`.
    """
    if fmt not in FORMATS:
        raise ValueError(f"fmt: expected one of {', '.join(map(repr, FORMATS))}, got {fmt!r}")
    values = _values(x, x_block_size)
    if sf is not None:
        scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
        return _encode(values, torch.ones_like(sf) / sf, fmt, block_size)
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0, use_swizzled_sf)
    packed_sf, factor = _factors(values, fmt, block_size, *flags, tensor_sf, sf_clamp_min)
    return _encode(values, factor, fmt, block_size), packed_sf


def cast_sf_only(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    fmt: str,
    block_size: tuple[int, int],
    x_block_size: tuple[int, int] | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> torch.Tensor:
    """The sf that `cast` would return, without the data."""
    flags = (round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0, use_swizzled_sf)
    return _factors(_values(x, x_block_size), fmt, block_size, *flags, tensor_sf, sf_clamp_min)[0]


def _factors(
    values: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    round_sf: bool,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
    use_swizzled_sf: bool,
    tensor_sf: torch.Tensor | None,
    sf_clamp_min: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(sf in its layout, s)`, with s as in `quantization_factors`."""
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    amax = block_amax(values, block_size)
    if tensor_sf is not None:
        sf, factor = tensor_scaled_factors(amax, FORMATS[fmt], tensor_sf)
        return pack_scales(sf, layout, torch.float8_e4m3fn), factor
    sf, factor = quantization_factors(amax, FORMATS[fmt], round_sf, sf_clamp_min)
    return pack_scales(sf, layout), factor


def _values(x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], x_block_size: tuple[int, int] | None) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if x_block_size is None:
        raise ValueError("x_block_size: expected the block size of the pair x, got None")
    return dequantize(x, x_block_size)


def _encode(values: torch.Tensor, factor: torch.Tensor, fmt: str, block_size: tuple[int, int]) -> torch.Tensor:
    scaled = expand_blocks(factor, block_size, *values.shape) * values
    return FORMATS[fmt].encode(scaled)
