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

    @property
    def num_mixes(self) -> int:
        """Mixes of a token: of pre, post and comb."""
        return self.mhc_mult * (self.mhc_mult + 2)


def check_streams(name: str, x: Any, layout: check.Layout = "contiguous") -> Streams:
    """Raise TypeError unless x is a bfloat16 tensor (..., m, H), ValueError unless its shape and layout fit.

    m is 2, 4 or 8 and H a multiple of 64, 64 to 8192.
    """
    *leading, mhc_mult, hidden = check.tensor(name, x, (torch.bfloat16,), (..., "mhc_mult", "hidden"), layout=layout)
    check.one_of(f"mhc_mult (dimension -2 of {name})", mhc_mult, MHC_MULTS)
    check_hidden(f"hidden (last dimension of {name})", hidden)
    return Streams(tuple(leading), mhc_mult, hidden, x.device)


class PostArguments(NamedTuple):
    """What mhc_post takes: x (T, H), residual (T, m, H), post_layer_mix (T, m, 1) and comb_res_mix (T, m, m)."""

    x: Tensor
    residual: Tensor
    post_layer_mix: Tensor
    comb_res_mix: Tensor


def check_post(x: Any, residual: Any, post_layer_mix: Any, comb_res_mix: Any) -> tuple[Streams, PostArguments]:
    """Check what mhc_post takes, any leading dimensions, and merge these; a residual that is not contiguous is copied.

    Raises TypeError for another type or dtype, ValueError for another shape, stride or device.
    """
    streams = check_streams("residual", residual, layout="any")
    leading, mhc_mult, hidden, device = streams
    check.tensor("x", x, (torch.bfloat16,), (*leading, hidden), device=device)
    check.tensor("post_layer_mix", post_layer_mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
    check.tensor("comb_res_mix", comb_res_mix, (torch.float32,), (*leading, mhc_mult, mhc_mult), device=device)
    residual = flat(residual.contiguous(), 2)
    return streams, PostArguments(flat(x, 1), residual, flat(post_layer_mix, 2), flat(comb_res_mix, 2))


def check_hidden(name: str, hidden: int) -> None:
    """Raise ValueError unless `hidden` is a multiple of 64, 64 to 8192."""
    check.in_range(name, hidden, HIDDEN_MULTIPLE, MAX_HIDDEN)
    check.multiple_of(name, hidden, HIDDEN_MULTIPLE)


def check_repeat(name: str, repeat: Any) -> None:
    """Raise TypeError unless the number of Sinkhorn's iterations is an int, ValueError unless it is 1 to 1000."""
    check.in_range(name, repeat, 1, MAX_REPEAT)


def check_fn(name: str, fn: Any, streams: Streams) -> int:
    """Check the projection's weight, float32 (m·(m+2), m·H) or (m, m·H), and return its number of rows.

    Raises TypeError for another type or dtype, ValueError for another shape, stride or device.
    """
    num_rows, _ = check.tensor(name, fn, (torch.float32,), ("rows", streams.width), device=streams.device)
    rows = (streams.num_mixes, streams.mhc_mult)
    check.require(num_rows in rows, f"rows of {name}", "{}, or {} for the head", num_rows, *rows)
    return num_rows


def check_norm_weight(name: str, weight: Any, streams: Streams) -> None:
    """Raise TypeError or ValueError unless the weight of the norm before the projection is None or float32 (m·H)."""
    if weight is not None:
        check.tensor(name, weight, (torch.float32,), (streams.width,), device=streams.device)
