"""Casts of activations, gradients and weights to e4m3 for the products of a linear layer, forward and backward."""

from torch import Tensor

import tk_quant
from tk_core import check

Pair = tuple[Tensor, Tensor]
"""float8_e4m3fn data and float32 scale factors."""

BLOCK = 128
# A mean over many tokens has gradients far below e4m3's own least amax of 1e-4, and dividing them by the number of
# processes must not change their codes: so the least that leaves sf and its reciprocal normal.
GRADIENT_CLAMP = 448 * 2.0**-126
"""The least amax, `sf_clamp_min`, of casts of gradients."""


def check_features(divisor: int, **features: int) -> None:
    """Raise TypeError or ValueError unless all are positive multiples of `divisor`."""
    for name, size in features.items():
        check.in_range(name, size, divisor, 2**31 - 1)
        check.multiple_of(name, size, divisor)


def cast_rows(x: Tensor, sf_clamp_min: float | None = None) -> Pair:
    """Cast x (rows, channels) with a factor for each row and 128 channels. `sf_clamp_min`: another least amax."""
    return tk_quant.per_token_cast(x, "e4m3", BLOCK, use_tma_aligned_col_major_sf=True, sf_clamp_min=sf_clamp_min)


def cast_rows_and_columns(x: Tensor, sf_clamp_min: float | None = None) -> tuple[Pair, Pair]:
    """`cast_rows`, and x transposed with a factor for each channel and 128 rows; x is read once.

    There are a multiple of 128 rows. The second pair is data (channels, rows) and factors (rows / 128, channels).
    """
    flags = {"transpose_channel_data": True, "use_tma_aligned_col_major_sf": True}
    return tk_quant.per_token_and_channel_cast(x, "e4m3", BLOCK, BLOCK, **flags, sf_clamp_min=sf_clamp_min)


def cast_weight(weight: Tensor) -> Pair:
    """Cast weights (…, out_features, in_features), both multiples of 128, with a factor for each 128 × 128."""
    data, sf = tk_quant.per_block_cast(weight.reshape(-1, weight.shape[-1]), "e4m3", (BLOCK, BLOCK))
    leading = weight.shape[:-2]
    return data.view(weight.shape), sf.view(*leading, weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK)


def transposed(weight: Pair) -> Pair:
    """Transpose the result of `cast_weight` to (…, in_features, out_features): the same values."""
    data, sf = weight
    transpose = tk_quant.transpose if data.dim() == 2 else tk_quant.batched_transpose
    # A product copies factors that are not contiguous, and a call that copies is not repeated.
    return transpose(data), sf.mT.contiguous()
