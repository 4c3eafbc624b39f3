"""Views of an op: the same product of operands that lie the other way round, with the op's other arguments."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from tk_gemm.check import Pair

Operand = TypeVar("Operand", Tensor, Pair)
Rest = ParamSpec("Rest")
Op = Callable[Concatenate[Operand, Operand, Rest], Tensor]


def view_of(
    op: Op[Operand, Rest],
) -> Callable[[Callable[[Operand, Operand], tuple[Operand, Operand]]], Op[Operand, Rest]]:
    """Make a view of an op from a function that gives the op's operands for the view's."""

    def make(operands: Callable[[Operand, Operand], tuple[Operand, Operand]]) -> Op[Operand, Rest]:
        @wraps(operands)
        def view(a: Operand, b: Operand, *rest: Rest.args, **options: Rest.kwargs) -> Tensor:
            return op(*operands(a, b), *rest, **options)

        view.__signature__ = inspect.signature(op)
        return view

    return make


def transposed(x: Operand) -> Operand:
    """An operand, or data and factors, with the last two dimensions swapped; without two it is the op's to refuse."""
    if isinstance(x, (tuple, list)):
        return tuple(map(transposed, x))
    return x.mT if isinstance(x, Tensor) and x.ndim > 1 else x
