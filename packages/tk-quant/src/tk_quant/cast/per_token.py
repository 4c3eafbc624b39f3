"""per_token_cast and its relatives: quantize each token by groups of channels, so that `data * sf` is close to x.

One relative returns sf alone, another takes sf from the caller. The kernel, with a picture, is in by_block.py.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import ceil_div
from tk_core.op import launching, op
from tk_core.scales import ScaleLayout, check_scales, scale_layout
from tk_quant.cast.by_block import launch_cast
from tk_quant.cast.by_token_stochastic import launch_stochastic_cast
from tk_quant.cast.config import CastSf, layout_of
from tk_quant.cast.format import (
    E2M1_DTYPES,
    LIMITS,
    PLAIN_DTYPES,
    block_size_of,
    check_flags_of_given_sf,
    check_sf_clamp_min,
    data_output,
    pair_of,
    sf_output,
)
from tk_quant.cast.to_dtype import check_seed

Pair = tuple[Tensor, Tensor]

_GROUPS = (16, 32, 64, 128)
_PAIR_DTYPES = (torch.float8_e4m3fn, *E2M1_DTYPES)
_FORMATS_FROM_PAIRS = ("e4m3", "e2m1")


def _check_input(
    x: Tensor | Pair, fmt: str, formats: tuple[str, ...], num_per_channels: int, x_block_size: Any
) -> tuple[Tensor, Tensor | None, int, int, tuple[int, int]]:
    """Check the arguments that all functions share; return `(data of x, sf of x, num_tokens, hidden, x_block_size)`."""
    if isinstance(x, Tensor):
        num_tokens, hidden = check.tensor("x", x, PLAIN_DTYPES, ("num_tokens", "hidden"), layout="rows")
        check.require(x_block_size is None, "x_block_size", "None for a plain tensor x", x_block_size)
        x_sf, x_block_size = None, (0, 0)
    else:
        x, x_sf = pair_of("x", x, "a tensor or a pair (data, sf)")
        check.require(fmt != "e5m6", "x", "a plain tensor for fmt 'e5m6'", "a pair")
        num_tokens, width = check.tensor("x[0]", x, _PAIR_DTYPES, ("num_tokens", "hidden"), layout="rows")
        if x.dtype is not torch.float8_e4m3fn and x.dtype is not torch.int8:
            x = x.view(torch.int8)
        hidden = width if x.dtype is torch.float8_e4m3fn else 2 * width
        check.require(x_block_size is not None, "x_block_size", "the block size of the pair x", x_block_size)
        x_block_size = block_size_of("x_block_size", x_block_size)
        check.require(min(x_block_size) > 0, "x_block_size", "two positive numbers", x_block_size)
        rows, cols = ceil_div(num_tokens, x_block_size[0]), ceil_div(hidden, x_block_size[1])
        check_scales("x[1]", x_sf, rows, cols, x.device, (torch.float8_e8m0fnu, torch.float8_e4m3fn))
    check.require(hidden > 0 and hidden % 64 == 0, "x", "a positive multiple of 64 channels", hidden)
    check.one_of("fmt", fmt, formats)
    check.integer("num_per_channels", num_per_channels)
    if fmt == "e5m6":
        check.require(num_per_channels == hidden, "num_per_channels", "{} for fmt 'e5m6'", num_per_channels, hidden)
    elif num_per_channels not in _GROUPS:
        check.one_of("num_per_channels", num_per_channels, (*_GROUPS, hidden))
    return x, x_sf, num_tokens, hidden, x_block_size


def check_sf(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_swizzled_sf: bool,
    tensor_sf: Tensor | None,
    sf_clamp_min: float | None,
    use_e4m3_sf: bool = False,
) -> tuple[ScaleLayout, torch.dtype | None, Tensor | None]:
    """Check the options of sf; return `(layout of sf, dtype of sf, tensor_sf with one dimension)`."""
    layout = scale_layout(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    check.flag("use_e4m3_sf", use_e4m3_sf)
    check_sf_clamp_min(sf_clamp_min, fmt, use_e4m3_sf)
    if use_e4m3_sf:
        check.one_of("fmt", fmt, _FORMATS_FROM_PAIRS)
        check.one_of("num_per_channels", num_per_channels, _GROUPS)
        check.require(not round_sf, "round_sf", "False beside use_e4m3_sf", round_sf)
        check.require(tensor_sf is None, "tensor_sf", "None beside use_e4m3_sf", type(tensor_sf).__name__)
        return layout, torch.float8_e4m3fn, None
    if tensor_sf is None:
        if use_swizzled_sf and not round_sf:
            check.require(False, "use_swizzled_sf", "round_sf=True, use_e4m3_sf or a tensor_sf beside it", "neither")
        return layout, None, None
    ndim = tensor_sf.ndim if isinstance(tensor_sf, Tensor) else 0
    check.tensor("tensor_sf", tensor_sf, (torch.float32,), (1,) if ndim else (), device=x.device)
    check.require(fmt == "e2m1", "fmt", "'e2m1' with tensor_sf", fmt)
    check.require(num_per_channels == 16, "num_per_channels", "16 with tensor_sf", num_per_channels)
    check.require(not round_sf, "round_sf", "False with tensor_sf", round_sf)
    check.require(sf_clamp_min is None, "sf_clamp_min", "None with tensor_sf", sf_clamp_min)
    if use_tma_aligned_col_major_sf:
        check.require(False, "use_tma_aligned_col_major_sf", "False with tensor_sf", True)
    if check.reads_data(tensor_sf):
        value = float(tensor_sf)
        check.require(value > 0, "tensor_sf", "a number above 0", value)
    return layout, torch.float8_e4m3fn, tensor_sf if ndim else tensor_sf.view(1)


Function = TypeVar("Function", bound=Callable[..., Any])


def flags_may_begin_at(position: int) -> Callable[[Function], Function]:
    """Let flags begin at `position`, the place of x_block_size, as in TileKernels 2.1.0, or after it, as in 1.0.0."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position and isinstance(args[position], bool):
                args = (*args[:position], None, *args[position:])
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


@op(writes=("out",), aligned=("out",))
def per_token_cast(
    x: Tensor | Pair,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: Pair | None = None,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: Tensor | None = None,
    sf_clamp_min: float | None = None,
    seed: Tensor | int | None = None,
) -> Pair:
    """Quantize each token by groups of channels; a quantized input is dequantized on the way, in the same pass.

    For each token and group, every operation in float32 to nearest with ties to even, max and least amax being 448 and
    1e-4 for e4m3, 6 and 6 * 2**-126 for e2m1, 65024 and 1e-4 for e5m6:

        amax = max(max |x|, least amax);  sf = amax / max;  data = round(x * (max / amax))
        with round_sf: sf = least power of two >= amax / max;  data = round(x / sf)
        with use_e4m3_sf: sf = e4m3 nearest to amax / max, at least 2**-9, at most 448;  data = round(x * (1 / sf))
        with tensor_sf: sf = e4m3 nearest to max |x| / 6 / tensor_sf, at least 2**-9, at most 448;
            data = round(x * (1 / (sf * tensor_sf)))

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf; its
    data are unspecified for e2m1 and e5m6. The formulas and names are those of DeepSeek's TileKernels 1.0.0, and
    use_e4m3_sf, stochastic_cast and `out` those of 2.1.0; what is by keyword only is in neither.

    Args:
        x: (num_tokens, hidden) bfloat16 or float32, hidden a multiple of 64, rows may be strided; or a pair
            `(data, sf)`: float8_e4m3fn (num_tokens, hidden), or e2m1 in int8 or float4_e2m1fn_x2 (num_tokens,
            hidden / 2), with sf of blocks `x_block_size` in any layout of tk_core.scales, also float8_e4m3fn. The
            pair's value is data * sf, rounded to float32.
        fmt: "e4m3", "e2m1", or for a plain x and num_per_channels == hidden "e5m6".
        num_per_channels: Channels of a group: 16, 32, 64, 128 or hidden. The last group of a row may be shorter.
        x_block_size: (tokens, channels) of a block of the pair x; None for a plain x.
        use_tma_aligned_col_major_sf: sf with strides (1, num_tokens rounded up to 4), as TMA wants it.
        round_sf: Round sf up to a power of two.
        use_packed_ue8m0: sf as biased exponents, four in an int32; needs round_sf.
        use_e4m3_sf: sf as float8_e4m3fn, in groups of 16 to 128 channels, without round_sf; for e2m1 in groups of 16
            the same bits as with a tensor_sf of 1. Column major, each column is aligned to 16 rows.
        stochastic_cast: Round data stochastically, as `cast` does; fmt "e4m3" or "e2m1". A quad's index is that in its
            row, or with a seed that in the tensor. sf is as without.
        out: `(data, sf)` to write into, with the dtypes, shapes and strides that a new result would have. They overlap
            no other argument and not each other.
        use_swizzled_sf: sf as Blackwell's block-scaled matrix products read it; needs round_sf or tensor_sf.
        tensor_sf: NVFP4: the scale of the whole tensor, float32, one element, shape () or (1,); a value is
            data * sf * tensor_sf. For fmt "e2m1" in groups of 16, with neither round_sf nor column-major sf. Let it be
            the largest |x| of the tensor / (448 * 6), computed or calibrated; groups with |x| above 448 * 6 * tensor_sf
            saturate. Must be above 0 (`TK_DEBUG=1` raises ValueError if it is not).
        sf_clamp_min: The least amax instead of the format's; at least max * 2**-126, with use_e4m3_sf max * 2**-9. Not
            with tensor_sf, where there is none.
        seed: For stochastic_cast an int of 64 bits, or an int64 tensor of one element, as for `cast`.

    Returns:
        `(data, sf)`, the tensors of `out` if it is given: data float8_e4m3fn (num_tokens, hidden), or int8
        (num_tokens, hidden / 2) with the even channel in the low nibble, or uint8 (num_tokens, hidden * 3 / 2) with
        eight e5m6 codes in three little-endian words; sf float32 (num_tokens, C), C = ceil(hidden / num_per_channels),
        or packed int32 (num_tokens, ceil(C / 4)), or swizzled float8_e8m0fnu (ceil(num_tokens / 128), ceil(C / 4), 32,
        4, 4); with tensor_sf or use_e4m3_sf float8_e4m3fn in the first or the last shape.

    Raises:
        TypeError: x, its sf or tensor_sf is no tensor or has another dtype, or sf_clamp_min is no number.
        ValueError: Any other argument is not as described, or is on another device.
    """
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    x, x_sf, num_tokens, hidden, x_block_size = _check_input(x, fmt, tuple(LIMITS), num_per_channels, x_block_size)
    layout, sf_dtype, tensor_sf = check_sf(x, fmt, num_per_channels, *flags, tensor_sf, sf_clamp_min, use_e4m3_sf)
    check.flag("stochastic_cast", stochastic_cast)
    check.require(fmt != "e5m6" or not stochastic_cast, "stochastic_cast", "False for fmt 'e5m6'", stochastic_cast)
    check_seed(seed, stochastic_cast, "stochastic_cast", x.device)
    data, sf = (None, None) if out is None else pair_of("out", out)
    data = data_output("out[0]", data, x, num_tokens, hidden, fmt)
    num_groups = ceil_div(hidden, num_per_channels)
    sf = sf_output("out[1]", sf, x, num_tokens, num_groups, layout, sf_dtype)
    if launching(data, sf):
        if stochastic_cast:
            of_sf = CastSf(layout_of(sf), round_sf, tensor_sf is not None, is_e4m3=use_e4m3_sf)
            options = (fmt, num_per_channels, of_sf, tensor_sf, sf_clamp_min, seed)
            launch_stochastic_cast((x, x_sf), x_block_size, data, sf, *options)
            return data, sf
        pair = {"x_sf": x_sf, "x_block_size": x_block_size, "use_e4m3_sf": use_e4m3_sf}
        options = {"tensor_sf": tensor_sf, "round_sf": round_sf, "sf_clamp_min": sf_clamp_min}
        launch_cast(x, data, sf, fmt, (1, num_per_channels), **pair, **options)
    return data, sf


def per_token_cast_to_e5m6(
    x: Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    sf_clamp_min: float | None = None,
) -> Pair:
    """`per_token_cast(x, "e5m6", ...)` of a plain tensor x, num_per_channels being its hidden: see there."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return per_token_cast(x, "e5m6", num_per_channels, None, *flags, sf_clamp_min=sf_clamp_min)


@flags_may_begin_at(3)
@op(writes=("out_sf",), aligned=("out_sf",))
def per_token_cast_with_sf_only(
    x: Tensor | Pair,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
    *,
    use_swizzled_sf: bool = False,
    tensor_sf: Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> Tensor:
    """The sf that `per_token_cast` would return, without the data.

    Args, errors and layouts: see `per_token_cast`; fmt is "e4m3" or "e2m1". The flags may begin in fourth place, as in
    TileKernels 2.1.0, or after x_block_size, as in 1.0.0. `out_sf` is a tensor to write into, as `out` there.

    Returns:
        `out_sf`, or a new sf, float32 (num_tokens, ceil(hidden / num_per_channels)), or as the flags and tensor_sf say.
    """
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_swizzled_sf)
    checked = _check_input(x, fmt, _FORMATS_FROM_PAIRS, num_per_channels, x_block_size)
    x, x_sf, num_tokens, hidden, x_block_size = checked
    layout, sf_dtype, tensor_sf = check_sf(x, fmt, num_per_channels, *flags, tensor_sf, sf_clamp_min, use_e4m3_sf)
    num_groups = ceil_div(hidden, num_per_channels)
    sf = sf_output("out_sf", out_sf, x, num_tokens, num_groups, layout, sf_dtype)
    if launching(sf):
        pair = {"x_sf": x_sf, "x_block_size": x_block_size, "use_e4m3_sf": use_e4m3_sf}
        options = {"tensor_sf": tensor_sf, "round_sf": round_sf, "sf_clamp_min": sf_clamp_min}
        launch_cast(x, None, sf, fmt, (1, num_per_channels), **pair, **options)
    return sf


@flags_may_begin_at(4)
@op(writes=("out",), aligned=("out",))
def per_token_cast_with_precomputed_sf(
    x: Tensor | Pair,
    fmt: str,
    num_per_channels: int,
    sf: Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize with given scale factors: data = round(x * (1 / sf)), both operations in float32.

    The flags may begin in fifth place, as in TileKernels 2.1.0, or after x_block_size, as in 1.0.0.

    Args:
        x, fmt, num_per_channels, x_block_size: see `per_token_cast`; fmt is "e4m3" or "e2m1".
        sf: float32, or with use_e4m3_sf float8_e4m3fn, (num_tokens, ceil(hidden / num_per_channels)), contiguous;
            another layout is not supported.
        use_tma_aligned_col_major_sf, use_packed_ue8m0: must be False, as they would describe another layout of sf.
        round_sf: Has no effect: 1 / sf is exact anyway where sf is a power of two.
        use_e4m3_sf: Whether sf is float8_e4m3fn.
        out: data to write into, contiguous; it overlaps no other argument.

    Returns:
        `out`, or new data, float8_e4m3fn (num_tokens, hidden), or int8 (num_tokens, hidden / 2).

    Raises:
        TypeError: x or sf is no tensor, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    check_flags_of_given_sf(use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    check.flag("use_e4m3_sf", use_e4m3_sf)
    checked = _check_input(x, fmt, _FORMATS_FROM_PAIRS, num_per_channels, x_block_size)
    x, x_sf, num_tokens, hidden, x_block_size = checked
    num_groups = ceil_div(hidden, num_per_channels)
    dtype = torch.float8_e4m3fn if use_e4m3_sf else torch.float32
    check.tensor("sf", sf, (dtype,), (num_tokens, num_groups), device=x.device)
    data = data_output("out", out, x, num_tokens, hidden, fmt)
    if launching(data):
        pair = {"x_sf": x_sf, "x_block_size": x_block_size}
        launch_cast(x, data, sf, fmt, (1, num_per_channels), **pair, sf_is_given=True, use_e4m3_sf=use_e4m3_sf)
    return data
