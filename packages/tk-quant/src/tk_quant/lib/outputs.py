"""Output tensors of a cast, new or given as `out` or `out_sf`, and a check of the flags beside a precomputed sf."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.scales import ScaleLayout, check_scales, empty_scales
from tk_quant.lib.cast_formats import FORMATS
from tk_quant.lib.check_pairs import pair_of
from tk_quant.lib.quantize import BITS

_DTYPES = {fmt: dtype for dtype, fmt in FORMATS.items()}


def output_pair(out: Any) -> tuple[Tensor | None, Tensor | None]:
    """Split the argument `out` of a cast into (data, sf); (None, None) if it is None."""
    if out is None:
        return None, None
    return pair_of("out", out)


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
    shape, dtype = (num_tokens, hidden * BITS[fmt] // 8), _DTYPES[fmt]
    if given is None:
        return like.new_empty(shape, dtype=dtype)
    check.tensor(name, given, (dtype,), shape, device=like.device)
    return given


def scales_output(
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
        return empty_scales(like, num_rows, num_cols, layout, dtype)
    expected = empty_scales(torch.empty((), dtype=torch.float32, device="meta"), num_rows, num_cols, layout, dtype)
    check_scales(name, given, num_rows, num_cols, like.device, (torch.float8_e8m0fnu, torch.float8_e4m3fn))
    check.require_type(given.dtype == expected.dtype, name, f"dtype {expected.dtype}", given.dtype)
    strides = zip(given.shape, given.stride(), expected.stride(), strict=True)
    fits = given.numel() == 0 or all(size == 1 or got == want for size, got, want in strides)
    check.require(fits, name, "strides {}", given.stride(), expected.stride())
    return given


def for_vectors(x: Tensor | None) -> Tensor | None:
    """x if its address is a multiple of 16 bytes, as vector stores need, else a new tensor, to be copied back to x."""
    if x is None or x.data_ptr() % 16 == 0:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
