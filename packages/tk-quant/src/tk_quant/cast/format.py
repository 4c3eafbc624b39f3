"""Formats of quantized data: their limits and dtypes, and checks of pairs (data, sf), given or to be written."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import given_or_new, new
from tk_core.scales import LIMITS, ScaleLayout, check_scales, empty_scales

BITS = {"e4m3": 8, "e2m1": 4, "e5m6": 12}
"""By format: bits of a code."""
DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.int8, "e5m6": torch.uint8}
"""By format: dtype of data."""
FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}
FLOAT4_DTYPE: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
E2M1_DTYPES = (torch.int8,) + ((FLOAT4_DTYPE,) if FLOAT4_DTYPE is not None else ())
"""Dtypes of tensors with two e2m1 codes a byte."""
PLAIN_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of tensors that a cast reads, beside pairs."""
OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Dtypes of results that are not quantized, by their public names."""
BLOCK_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_NORMAL = 2.0**-126
"""The least normal float32."""
LEAST_E4M3 = 2.0**-9
"""The least positive e4m3 value."""


def pair_of(name: str, x: Any, expected: str = "a pair (data, sf)") -> tuple[Any, Any]:
    """The two items of a tuple or list; TypeError or ValueError for anything else."""
    if not isinstance(x, tuple | list) or len(x) != 2:
        check.require_type(isinstance(x, tuple | list), name, expected, type(x).__name__)
        check.require(False, name, "a pair (data, sf)", f"{len(x)} items")
    return x[0], x[1]


def block_size_of(name: str, block_size: Any) -> tuple[int, int]:
    """(tokens, channels) of a block; TypeError or ValueError unless these are two ints."""
    check.require_type(isinstance(block_size, tuple | list), name, "a tuple of two", block_size)
    check.require(len(block_size) == 2, name, "two numbers", block_size)
    for side in block_size:
        check.integer(name, side)
    return block_size[0], block_size[1]


def check_sf_clamp_min(value: Any, fmt: str, use_e4m3_sf: bool = False) -> None:
    """Raise unless `value` is None, or a number with which sf and its reciprocal stay normal, or an e4m3 sf above 0."""
    if value is not None:
        check.number("sf_clamp_min", value, at_least=LIMITS[fmt][0] * (LEAST_E4M3 if use_e4m3_sf else LEAST_NORMAL))


def check_channel_blocks(
    fmt: Any, num_per_tokens: Any, sizes: tuple[int, ...], round_sf: Any, sf_clamp_min: Any
) -> None:
    """Raise unless the casts by channel, to e4m3, support these arguments; num_per_tokens is one of `sizes`."""
    check.one_of("fmt", fmt, ("e4m3",))
    check.integer("num_per_tokens", num_per_tokens)
    check.one_of("num_per_tokens", num_per_tokens, sizes)
    check.flag("round_sf", round_sf)
    check_sf_clamp_min(sf_clamp_min, fmt)


def least_amax_of(fmt: str, sf_clamp_min: float | None, use_e4m3_sf: bool = False) -> float:
    """The least amax that a kernel gets as a run-time argument, which rounds it to float32."""
    if sf_clamp_min is not None:
        return float(sf_clamp_min)
    return LIMITS[fmt][0] * LEAST_E4M3 if use_e4m3_sf else LIMITS[fmt][1]


def check_flags_of_given_sf(use_tma_aligned_col_major_sf: Any, round_sf: Any, use_packed_ue8m0: Any) -> None:
    """Raise unless these flags describe a precomputed sf, which is row-major float32."""
    check.flag("round_sf", round_sf)
    flags = {"use_tma_aligned_col_major_sf": use_tma_aligned_col_major_sf, "use_packed_ue8m0": use_packed_ue8m0}
    for name, value in flags.items():
        check.flag(name, value)
        check.require(not value, name, "False, for a precomputed sf is row-major float32", value)


def data_output(name: str, given: Any, like: Tensor, num_tokens: int, hidden: int, fmt: str) -> Tensor:
    """The tensor to write the codes of (num_tokens, hidden) values to: `given`, or a new one if that is None.

    Raises TypeError or ValueError if `given` has another dtype, shape, device or strides.
    """
    return given_or_new(name, given, like, (num_tokens, hidden * BITS[fmt] // 8), DTYPES[fmt])


def sf_output(
    name: str,
    given: Any,
    like: Tensor,
    num_rows: int,
    num_cols: int,
    layout: ScaleLayout,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The tensor to write the sf of (num_rows, num_cols) blocks to, in `layout`: `given`, or a new one if that is None.

    Raises TypeError or ValueError if `given` has another dtype, shape, device or strides.
    """
    if given is None:
        return new(empty_scales, like, num_rows, num_cols, layout, dtype)
    expected = empty_scales(torch.empty((), dtype=torch.float32, device="meta"), num_rows, num_cols, layout, dtype)
    check_scales(name, given, num_rows, num_cols, like.device, (torch.float8_e8m0fnu, torch.float8_e4m3fn))
    check.require_type(given.dtype == expected.dtype, name, f"dtype {expected.dtype}", given.dtype)
    strides = zip(given.shape, given.stride(), expected.stride(), strict=True)
    fits = given.numel() == 0 or all(size == 1 or got == want for size, got, want in strides)
    check.require(fits, name, "strides {}", given.stride(), expected.stride())
    return given
