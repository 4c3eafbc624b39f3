"""Arguments that the ops of RMSNorm share: checks, and which of them a kernel is compiled for."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import new
from tk_quant.cast.config import CastSf
from tk_quant.cast.format import PLAIN_DTYPES

MAX_HIDDEN = 16384


@dataclass(frozen=True)
class NormOptions:
    """What a kernel is compiled for beside hidden."""

    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    """None without weight."""
    has_rows_of_weight: bool
    """Whether each row of a batch has a weight of its own."""
    has_residual: bool
    """The forward's residual, or the backward's residual_out_grad."""
    round_before_weight: bool
    alignment: int
    """Alignment in bytes of every row, from `check.row_alignment`."""

    @property
    def has_weight(self) -> bool:
        return self.weight_dtype is not None

    @property
    def loaded_weight(self) -> torch.dtype:
        """Dtype of the kernel's argument, which is not read without weight."""
        return self.weight_dtype or self.dtype

    @staticmethod
    def of(
        x: Tensor, weight: Tensor | None, others: tuple[Tensor | None, ...], has_residual: bool, rounds: bool = False
    ) -> "NormOptions":
        """Describe x, weight and the other tensors with rows, which the op has checked; None for one that is absent."""
        return NormOptions(
            x.dtype,
            None if weight is None else weight.dtype,
            weight is not None and weight.ndim == 2,
            has_residual,
            rounds and x.dtype is not torch.float32,
            min(check.row_alignment(each) for each in (x, *others) if each is not None),
        )


@dataclass(frozen=True)
class RowCast:
    """The cast of normalized rows that a kernel is compiled for."""

    fmt: str
    num_per_channels: int
    sf: CastSf


class Rows(NamedTuple):
    """Shape of x, and its leading dimensions."""

    leading: tuple[int, ...]
    hidden: int


def check_rows(
    name: str,
    x: Tensor,
    shape: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...] = PLAIN_DTYPES,
    device: torch.device | None = None,
) -> torch.Size:
    """Check a tensor of rows, (..., T, H) with any strides but the last; all dimensions before T fold into one."""
    found = check.tensor(name, x, dtypes, shape, layout="rows", device=device)
    strides = x.stride()
    for dim in range(len(found) - 3):
        folds = found[dim] == 1 or found[dim + 1] == 1 or strides[dim] == strides[dim + 1] * found[dim + 1]
        check.require(folds, name, "dimensions before the last two that fold into one", strides)
    return found


def check_x(x: Tensor, multiple: int) -> Rows:
    """Check x, (..., T, H)."""
    *leading, hidden = check_rows("x", x, (..., "num_tokens", "hidden"))
    check_hidden("x", hidden, multiple)
    return Rows(tuple(leading), hidden)


def check_hidden(name: str, hidden: int, multiple: int) -> None:
    """Check the number of channels of a row."""
    check.require(0 < hidden <= MAX_HIDDEN, name, f"1 to {MAX_HIDDEN} channels", hidden)
    check.require(hidden % multiple == 0, name, f"a multiple of {multiple} channels", hidden)


def check_weight(weight: Tensor | None, x: Tensor, name: str = "weight") -> None:
    """Check weight: None, (H), or a row for each x[..., g, :], (G, H); in x's dtype or float32."""
    if weight is not None:
        check.require_type(isinstance(weight, Tensor), name, "a torch.Tensor or None", type(weight).__name__)
        shape = x.shape[-2:] if weight.ndim == 2 else x.shape[-1:]
        check.tensor(name, weight, (x.dtype, torch.float32), tuple(shape), device=x.device)


def check_residual(residual: Tensor | None, x: Tensor) -> None:
    """Check the residual: None, or like x."""
    if residual is not None:
        check_rows("residual", residual, tuple(x.shape), (x.dtype,), x.device)


def check_factors(out_scale: float, weight_offset: float, eps: float = 0.0) -> None:
    """Check the numbers of a call."""
    check.number("eps", eps, at_least=0)
    check.number("out_scale", out_scale)
    check.number("weight_offset", weight_offset)


def given_rows(name: str, given: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A result with the shape of `like`, and its dtype unless another is named: `given`, checked, or a new tensor."""
    dtype = dtype or like.dtype
    if given is None:
        return new(like.new_empty, like.shape, dtype=dtype)
    check_rows(name, given, tuple(like.shape), (dtype,), like.device)
    return given


def folded(x: Tensor | None) -> Tensor | None:
    """A view (B, T, H) of a tensor that `check_rows` has checked; None stays None."""
    if x is None or x.ndim == 3:
        return x
    return x.unsqueeze(0) if x.ndim == 2 else x.view(-1, *x.shape[-2:])


def rows_of_weight(weight: Tensor | None) -> Tensor | None:
    """A view (G, H), G = 1 where all rows of x have one weight; None stays None."""
    return weight if weight is None else weight.view(-1, weight.shape[-1])
