"""per_block_cast and its relatives: quantize by blocks of tokens and channels, so that `data * sf` is close to x.

One relative returns sf alone, another takes sf from the caller. The kernel, with a picture, is in by_block.py.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import ceil_div
from tk_core.op import launching, op
from tk_core.scales import scale_layout
from tk_quant.cast.by_block import launch_cast
from tk_quant.cast.format import (
    BLOCK_SIDES,
    PLAIN_DTYPES,
    block_size_of,
    check_flags_of_given_sf,
    check_sf_clamp_min,
    data_output,
    pair_of,
    sf_output,
)

_FORMATS = ("e4m3", "e2m1")


def _check_input(x: Tensor, fmt: str, block_size: tuple[int, int]) -> tuple[tuple[int, int], int, int]:
    """Check the arguments that all functions share; return `(block_size, rows of sf, columns of sf)`."""
    num_tokens, hidden = check.tensor("x", x, PLAIN_DTYPES, ("num_tokens", "hidden"), layout="rows")
    check.require(hidden > 0 and hidden % 64 == 0, "x", "a positive multiple of 64 channels", hidden)
    check.one_of("fmt", fmt, _FORMATS)
    block_tokens, block_channels = block_size_of("block_size", block_size)
    fits = block_tokens in BLOCK_SIDES and block_channels in BLOCK_SIDES
    check.require(fits, "block_size", "two powers of two from 1 to 128", block_size)
    return (block_tokens, block_channels), ceil_div(num_tokens, block_tokens), ceil_div(hidden, block_channels)


@op(writes=("out",), aligned=("out",))
def per_block_cast(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize by blocks of tokens and channels.

    For each block, every operation in float32 to nearest with ties to even, max and least amax being 448 and 1e-4 for
    e4m3, 6 and 6 * 2**-126 for e2m1:

        amax = max(max |x|, least amax);  sf = amax / max;  data = round(x * (max / amax))
        with round_sf: sf = least power of two >= amax / max;  data = round(x / sf)

    data saturates and keeps the sign of zero. A block with NaN or infinity in it has NaN or infinity for its sf, and
    its data are unspecified for e2m1. The formulas and names are those of DeepSeek's TileKernels 1.0.0, and `out` is
    from 2.1.0.

    Args:
        x: (num_tokens, hidden) bfloat16 or float32, hidden a multiple of 64; rows may be strided.
        fmt: "e4m3" or "e2m1".
        block_size: (tokens, channels) of a block, powers of two from 1 to 128. The last blocks may be smaller.
        use_tma_aligned_col_major_sf: sf with strides (1, its rows rounded up to 4), as TMA wants it.
        round_sf: Round sf up to a power of two.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs round_sf.
        out: `(data, sf)` to write into, with the dtypes, shapes and strides that a new result would have. They overlap
            neither x nor each other.
        sf_clamp_min: The least amax instead of the format's; at least max * 2**-126.

    Returns:
        `(data, sf)`, the tensors of `out` if it is given: data float8_e4m3fn (num_tokens, hidden), or int8
        (num_tokens, hidden / 2) with the even channel in the low nibble; sf float32 (ceil(num_tokens / block tokens),
        ceil(hidden / block channels)), or packed int32 with a quarter of the columns.

    Raises:
        TypeError: x is no tensor or has another dtype, block_size is no pair of ints, or sf_clamp_min no number.
        ValueError: Any other argument is not as described.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    block_size, num_rows, num_cols = _check_input(x, fmt, block_size)
    check_sf_clamp_min(sf_clamp_min, fmt)
    data, sf = (None, None) if out is None else pair_of("out", out)
    data = data_output("out[0]", data, x, *x.shape, fmt)
    sf = sf_output("out[1]", sf, x, num_rows, num_cols, layout)
    if launching(data, sf):
        launch_cast(x, data, sf, fmt, block_size, round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    return data, sf


@op(writes=("out_sf",), aligned=("out_sf",))
def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: Tensor | None = None,
    *,
    sf_clamp_min: float | None = None,
) -> Tensor:
    """The sf that `per_block_cast` would return, without the data.

    Args, errors and layouts: see `per_block_cast`. `out_sf` is a tensor to write into, as `out` there.

    Returns:
        `out_sf`, or a new sf: float32 (ceil(num_tokens / block tokens), ceil(hidden / block channels)), or packed int32
        with a quarter of the columns.
    """
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    block_size, num_rows, num_cols = _check_input(x, fmt, block_size)
    check_sf_clamp_min(sf_clamp_min, fmt)
    sf = sf_output("out_sf", out_sf, x, num_rows, num_cols, layout)
    if launching(sf):
        launch_cast(x, None, sf, fmt, block_size, round_sf=round_sf, sf_clamp_min=sf_clamp_min)
    return sf


@op(writes=("out",), aligned=("out",))
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize with given scale factors: data = round(x * (1 / sf)), both operations in float32.

    Args:
        x, fmt, block_size: see `per_block_cast`.
        sf: float32 (ceil(num_tokens / block tokens), ceil(hidden / block channels)), contiguous.
        use_tma_aligned_col_major_sf, use_packed_ue8m0: must be False, as they would describe another layout of sf.
        round_sf: Has no effect: 1 / sf is exact anyway where sf is a power of two.
        out: data to write into, contiguous; it overlaps no other argument.

    Returns:
        `out`, or new data, float8_e4m3fn (num_tokens, hidden), or int8 (num_tokens, hidden / 2).

    Raises:
        TypeError: x or sf is no tensor or has another dtype, or block_size is no pair of ints.
        ValueError: Any other argument is not as described, or sf is on another device.
    """
    check_flags_of_given_sf(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    block_size, num_rows, num_cols = _check_input(x, fmt, block_size)
    check.tensor("sf", sf, (torch.float32,), (num_rows, num_cols), device=x.device)
    data = data_output("out", out, x, *x.shape, fmt)
    if launching(data):
        launch_cast(x, data, sf, fmt, block_size, sf_is_given=True)
    return data
