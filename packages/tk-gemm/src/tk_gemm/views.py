"""Views of an op: the same product of operands that lie the other way round, with the op's other arguments."""

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

from tk_gemm.check import Pair

Arguments = ParamSpec("Arguments")
Operand = TypeVar("Operand", Tensor, Pair)


def view_of(op: Callable[Arguments, Tensor]) -> Callable[[Callable[..., Tensor]], Callable[Arguments, Tensor]]:
    """Give a view, which passes on what it need not know, the op's signature."""

    def with_signature(view: Callable[..., Tensor]) -> Callable[Arguments, Tensor]:
        view.__signature__ = inspect.signature(op)
        return view

    return with_signature


def transposed(x: Operand) -> Operand:
    """An operand, or data and factors, with the last two dimensions swapped; without two it is the op's to refuse."""
    if isinstance(x, (tuple, list)):
        return tuple(map(transposed, x))
    return x.mT if isinstance(x, Tensor) and x.ndim > 1 else x
