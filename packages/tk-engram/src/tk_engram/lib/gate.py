"""Checks that the ops of the gate share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_engram.sizes import HIDDEN_MULTIPLE, MAX_HIDDEN, MAX_STREAMS


def check_streams(name: str, x: Any) -> tuple[int, int, int]:
    """Check a contiguous bfloat16 tensor (T, m, H); return T, m and H. Raises TypeError or ValueError that names it."""
    num_tokens, mhc_mult, hidden = check.tensor(name, x, (torch.bfloat16,), ("num_tokens", "hc_mult", "hidden"))
    check_sizes(name, mhc_mult, hidden)
    return num_tokens, mhc_mult, hidden


def check_sizes(name: str, mhc_mult: int, hidden: int) -> None:
    """Raise ValueError unless m is 1 to 8 and H a multiple of 64, 64 to 16384; `name`: a tensor of these sizes."""
    check.in_range(f"hc_mult (dimension -2 of {name})", mhc_mult, 1, MAX_STREAMS)
    check.in_range(f"hidden (last dimension of {name})", hidden, HIDDEN_MULTIPLE, MAX_HIDDEN)
    check.multiple_of(f"hidden (last dimension of {name})", hidden, HIDDEN_MULTIPLE)


def check_inputs(
    k: Any, v: Any, weight_fused: Any, image_token_mask: Any, shape: Sequence[int], device: torch.device
) -> None:
    """Check what both forward and backward take beside the streams, whose shape (T, m, H) is given."""
    num_tokens, mhc_mult, hidden = shape
    bfloat16 = (torch.bfloat16,)
    check.tensor("k", k, bfloat16, (num_tokens, mhc_mult, hidden), layout="rows", device=device)
    check.tensor("v", v, bfloat16, (num_tokens, hidden), layout="rows", device=device)
    check.tensor("weight_fused", weight_fused, (torch.float32,), (mhc_mult, hidden), device=device)
    if image_token_mask is not None:
        check.tensor("image_token_mask", image_token_mask, (torch.bool,), (num_tokens,), device=device)


def with_aligned_rows(x: Tensor) -> Tensor:
    """x itself if all its rows begin at multiples of 16 bytes, as those of slices of a projection do, else a copy."""
    return x if check.row_alignment(x) == 16 else x.clone(memory_format=torch.contiguous_format)
