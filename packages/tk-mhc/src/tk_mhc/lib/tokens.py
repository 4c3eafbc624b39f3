"""Checks of streams (..., m, H), and the shapes that the kernels are built for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.views import flat

MHC_MULTS = (2, 4, 8)
"""Numbers of streams that the kernels are built for."""
HIDDEN_MULTIPLE = 64
"""Every hidden size is a multiple of it."""
MAX_HIDDEN = 8192
MAX_REPEAT = 1000
"""Sinkhorn's iterations, at most: the sums of so many fit into shared memory in the backward, on any GPU."""


def mix_counts(mhc_mult: int) -> tuple[int, int]:
    """How many mixes a token has: of pre, post and comb, or, without comb, of pre and post."""
    return mhc_mult * (mhc_mult + 2), 2 * mhc_mult


class Streams(NamedTuple):
    """Shape and device of streams (..., m, H)."""

    leading: tuple[int, ...]
    mhc_mult: int
    hidden: int
    device: torch.device

    @property
    def width(self) -> int:
        """All channels of a token."""
        return self.mhc_mult * self.hidden


def check_streams(name: str, x: Any, layout: check.Layout = "contiguous") -> Streams:
    """Raise TypeError unless x is a bfloat16 tensor (..., m, H), ValueError unless its shape and layout fit.

    m is 2, 4 or 8 and H a multiple of 64, 64 to 8192.
    """
    *leading, mhc_mult, hidden = check.tensor(name, x, (torch.bfloat16,), (..., "mhc_mult", "hidden"), layout=layout)
    check.one_of(f"mhc_mult (dimension -2 of {name})", mhc_mult, MHC_MULTS)
    check_hidden(f"hidden (last dimension of {name})", hidden)
    return Streams(tuple(leading), mhc_mult, hidden, x.device)


class PostArguments(NamedTuple):
    """What mhc_post takes: x (T, H), residual (T, m, H), post_layer_mix (T, m, 1), comb_res_mix (T, m, m) or None."""

    x: Tensor
    residual: Tensor
    post_layer_mix: Tensor
    comb_res_mix: Tensor | None


def check_post(x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any) -> tuple[Streams, PostArguments]:
    """Check what mhc_post takes, any leading dimensions, and merge these; a residual that is not contiguous is copied.

    Raises TypeError for another type or dtype, ValueError for another shape, stride or device.
    """
    streams = check_streams("residual", residual, layout="any")
    leading, mhc_mult, hidden, device = streams
    check.tensor("x", x, (torch.bfloat16,), (*leading, hidden), device=device)
    check.tensor("post_layer_mix", post_layer_mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
    if comb_res_mix is not None:
        check.tensor("comb_res_mix", comb_res_mix, (torch.float32,), (*leading, mhc_mult, mhc_mult), device=device)
        comb_res_mix = flat(comb_res_mix, 2)
    residual = flat(residual.contiguous(), 2)
    return streams, PostArguments(flat(x, 1), residual, flat(post_layer_mix, 2), comb_res_mix)


def check_mixes(input_mixes: Any, mhc_scale: Any, mhc_base: Any, mhc_mult: Any) -> tuple[tuple[int, ...], bool]:
    """Check raw mixes, float32 (..., m·(m+2)), or (..., 2m) without comb, with scale (3) or (2), and base.

    Returns the leading dimensions and whether there is comb. Raises TypeError for another type or dtype, ValueError for
    another shape, stride, device or number of streams.
    """
    check.integer("mhc_mult", mhc_mult)
    check.one_of("mhc_mult", mhc_mult, MHC_MULTS)
    *leading, num_columns = check.tensor("input_mixes", input_mixes, (torch.float32,), (..., "columns"))
    counts = mix_counts(mhc_mult)
    check.require(num_columns in counts, "columns of input_mixes", "{}, or {} without comb", num_columns, *counts)
    has_comb, device = num_columns == counts[0], input_mixes.device
    check.tensor("mhc_scale", mhc_scale, (torch.float32,), (3 if has_comb else 2,), device=device)
    check.tensor("mhc_base", mhc_base, (torch.float32,), (num_columns,), device=device)
    return tuple(leading), has_comb


def check_hidden(name: str, hidden: int) -> None:
    """Raise ValueError unless `hidden` is a multiple of 64, 64 to 8192."""
    check.in_range(name, hidden, HIDDEN_MULTIPLE, MAX_HIDDEN)
    check.multiple_of(name, hidden, HIDDEN_MULTIPLE)


def check_repeat(name: str, repeat: Any) -> None:
    """Raise TypeError unless the number of Sinkhorn's iterations is an int, ValueError unless it is 1 to 1000."""
    check.in_range(name, repeat, 1, MAX_REPEAT)


def check_fn(name: str, fn: Any, streams: Streams) -> int:
    """Check the projection's weight, float32 (rows, m·H) with m·(m+2), 2m or m rows, and return how many it has.

    Raises TypeError for another type or dtype, ValueError for another shape, stride or device.
    """
    num_rows, _ = check.tensor(name, fn, (torch.float32,), ("rows", streams.width), device=streams.device)
    rows = (*mix_counts(streams.mhc_mult), streams.mhc_mult)
    check.require(num_rows in rows, f"rows of {name}", "{}, {} without comb, or {} for the head", num_rows, *rows)
    return num_rows


def check_norm_weight(name: str, weight: Any, streams: Streams) -> None:
    """Raise TypeError or ValueError unless the weight of the norm before the projection is None or float32 (m·H)."""
    if weight is not None:
        check.tensor(name, weight, (torch.float32,), (streams.width,), device=streams.device)
