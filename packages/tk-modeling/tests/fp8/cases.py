"""Cases of the linear layers in FP8."""

import torch
from torch import Tensor

from tk_core.math import align
from tk_modeling import FP8Linear, GroupedFP8Linear, reference

from ..checks import ModuleCase

_SIZES = (256, 128)
COUNTS = (0, 5, 128, 0, 129)
"""Rows of each expert."""
# e4m3 has three bits behind the leading one: each of a product's two operands is off by 2.6 % (rms).
_BOUNDS = {"weight": 0.045, "input.0": 0.045}


def _inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor]:
    return (torch.randn(*leading, _SIZES[0], device=device).bfloat16(),)


def _grouped_inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Rows of zeros in the padding, and ends; there are no leading dimensions."""
    pieces, ends, start = [], [], 0
    for count in COUNTS:
        pieces.append(torch.randn(count, _SIZES[0], device=device).bfloat16())
        pieces.append(torch.zeros(align(count, 128) - count, _SIZES[0], device=device).bfloat16())
        ends.append(start + count)
        start += align(count, 128)
    return torch.cat(pieces), torch.tensor(ends, dtype=torch.int32, device=device)


def main_grad_of_ones(weight: Tensor, layout: str) -> Tensor:
    """A main_grad, contiguous, transposed, or not on 16 bytes."""
    if layout == "transposed":
        return torch.ones_like(weight, dtype=torch.float32).mT.contiguous().mT
    offset = 1 if layout == "not-on-16-bytes" else 0
    return torch.ones(weight.numel() + offset, device=weight.device)[offset:].view(weight.shape)


LINEAR = ModuleCase(
    "fp8-linear",
    lambda device: FP8Linear(*_SIZES, device=device, dtype=torch.bfloat16),
    lambda device: reference.FP8Linear(*_SIZES, device=device, dtype=torch.bfloat16),
    _inputs,
    bounds=_BOUNDS,
)
GROUPED = ModuleCase(
    "grouped-fp8-linear",
    lambda device: GroupedFP8Linear(len(COUNTS), *_SIZES, device=device, dtype=torch.bfloat16),
    lambda device: reference.GroupedFP8Linear(len(COUNTS), *_SIZES, device=device, dtype=torch.bfloat16),
    _grouped_inputs,
    bounds=_BOUNDS,
    has_leading=False,
)
CASES = (LINEAR, GROUPED)
