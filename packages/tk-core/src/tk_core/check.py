"""Argument checks: a fast test for valid arguments, and an error that names the argument for the others."""

import operator
from collections.abc import Collection
from types import EllipsisType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tk_core import env
from tk_core.math import align

Layout = Literal["contiguous", "rows", "any"]
_LARGEST = torch.finfo(torch.float32).max
Shape = tuple[str | int | EllipsisType, ...]


def tensor(
    name: str,
    x: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: Shape,
    *,
    layout: Layout = "contiguous",
    device: torch.device | None = None,
) -> torch.Size:
    """Check a tensor argument and return its shape.

    `shape` has a name for each dimension of any size, an int for each of a fixed size: ("num_tokens", 128). If it
    begins with `...`, any number of leading dimensions may precede these. `layout` "rows" requires stride 1 in the last
    dimension only, "any" nothing. Raises TypeError for a wrong type or dtype, for sparse tensors, negative views and
    subclasses that hold other tensors, such as DTensor; ValueError otherwise.
    """
    if isinstance(x, Tensor) and x.dtype in dtypes and _is_plain(x):
        found = x.shape
        if _has_rank(x, shape) and (device is None or x.device == device):
            for size, want in zip(reversed(found), reversed(shape)):
                if want.__class__ is int and size != want:
                    break
            else:
                if layout == "contiguous":
                    if x.is_contiguous():
                        return found
                elif layout == "any" or x.stride(-1) == 1 or found[-1] <= 1 or not x.numel():
                    return found
    raise _tensor_error(name, x, dtypes, shape, layout, device)


def _is_plain(x: Tensor) -> bool:
    """Whether the elements of x are those at its address and strides: what a kernel reads."""
    if type(x) not in (Tensor, Parameter) and is_traceable_wrapper_subclass(x):
        return False
    # Dynamo cannot trace these: in a backward it bans the layout.
    return is_compiling() or (x.layout is torch.strided and not x.is_neg())


def plain(name: str, x: Any) -> None:
    """Raise TypeError unless x is a tensor whose elements are those at its address and strides."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if _is_plain(x):
        return
    if is_traceable_wrapper_subclass(x):
        instead = f"call it on {name}.to_local()" if hasattr(x, "to_local") else "call it on the tensors in it"
        raise TypeError(f"{name}: expected a plain torch.Tensor, got a {type(x).__name__}; {instead}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got layout {x.layout}; call it on {name}.to_dense()")
    raise TypeError(f"{name}: expected a plain torch.Tensor, got a negative view; call it on {name}.resolve_neg()")


def _known(x: Any) -> Any:
    """A size, or those in a tuple, as numbers for an error's text: torch.compile prints none that it leaves open."""
    if x.__class__ is tuple:
        return tuple(map(_known, x))
    return operator.index(x) if x.__class__ is int else x


def _has_rank(x: Tensor, shape: Shape) -> bool:
    return x.ndim >= len(shape) - 1 if shape and shape[0] is ... else x.ndim == len(shape)


def _tensor_error(
    name: str,
    x: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: Shape,
    layout: Layout,
    device: torch.device | None,
) -> Exception:
    plain(name, x)
    if x.dtype not in dtypes:
        return TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
    pairs = zip(reversed(x.shape), reversed(shape))
    if not _has_rank(x, shape) or any(isinstance(want, int) and size != want for size, want in pairs):
        wanted = ", ".join("..." if want is ... else str(_known(want)) for want in shape)
        return ValueError(f"{name}: expected shape ({wanted}), got {_known(tuple(x.shape))}")
    if device is not None and x.device != device:
        return ValueError(f"{name}: expected device {device}, got {x.device}")
    wanted = "contiguous" if layout == "contiguous" else "stride 1 in the last dimension"
    return ValueError(f"{name}: expected {wanted}, got strides {_known(x.stride())} for shape {_known(tuple(x.shape))}")


def require(condition: bool, name: str, expected: str, got: Any, *values: Any) -> None:
    """Raise ValueError "name: expected …, got …" unless the condition holds.

    `values` fill the {} of `expected`, as in `str.format`, once the check has failed: a caller that put a size into the
    text itself would make torch.compile specialize the size.
    """
    if not condition:
        text = expected.format(*map(_known, values)) if values else expected
        raise ValueError(f"{name}: expected {text}, got {_known(got)!r}")


def require_type(condition: bool, name: str, expected: str, got: Any) -> None:
    """Raise TypeError "name: expected …, got …" unless the condition holds."""
    if not condition:
        raise TypeError(f"{name}: expected {expected}, got {got!r}")


def pair(name: str, x: Any, expected: str = "a pair (data, sf)") -> tuple[Any, Any]:
    """Raise TypeError unless x is a tuple or list of two; return these."""
    require_type(isinstance(x, (tuple, list)) and len(x) == 2, name, expected, type(x).__name__)
    return x[0], x[1]


def integer(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is an int (not a bool), ValueError unless it fits 64 bits."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected an int of 64 bits, got one of {value.bit_length()}")


def flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a bool."""
    require_type(isinstance(value, bool), name, "a bool", value)


def multiple_of(name: str, value: int, divisor: int) -> None:
    """Raise ValueError unless `divisor` divides `value`."""
    if value % divisor:
        raise ValueError(f"{name}: expected a multiple of {divisor}, got {value}")


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    # A list, not a set: a value that cannot be hashed must get this error too.
    if value not in list(allowed):
        wanted = ", ".join(repr(_known(each)) for each in allowed)
        raise ValueError(f"{name}: expected one of {wanted}, got {_known(value)!r}")


def in_range(name: str, value: int, low: int, high: int) -> None:
    """Raise TypeError unless `value` is an int, ValueError unless low ≤ value ≤ high."""
    integer(name, value)
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")


def reads_data(x: Tensor) -> bool:
    """Whether to check the values in x: TK_DEBUG is on, and they can be read.

    That is not so under torch.compile, for meta and fake tensors, and while a CUDA graph is captured: reading
    synchronizes.
    """
    if is_compiling() or not env.debug() or x.is_meta or type(x) not in (Tensor, Parameter):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def below(name: str, indices: Tensor, bound: int, expected: str) -> None:
    """If `reads_data`, raise ValueError unless all indices are below `bound`, which fills the {} of `expected`."""
    if reads_data(indices) and indices.numel():
        highest = int(indices.max())
        require(highest < bound, name, expected, highest, bound)


def ends(name: str, x: Tensor, alignment: int) -> None:
    """If `reads_data`, raise ValueError unless no segment ends before it begins.

    x has the ends; each segment begins at the first multiple of `alignment` from the end of the one before.
    """
    if reads_data(x):
        first = 0
        for index, end in enumerate(x.tolist()):
            require(end >= first, f"{name}[{index}]", "at least {}, where the segment begins", end, first)
            first = align(end, alignment)


def row_alignment(x: Tensor) -> int:
    """Alignment in bytes, at most 16, of every row of x: the widest vectorized access that a kernel may use.

    x has at least one dimension, the last one contiguous. Kernels take the result as a compile-time argument.
    """
    size = x.element_size()
    bits = x.data_ptr() | 16
    for stride in x.stride()[:-1]:
        bits |= stride * size
    return bits & -bits


def number(name: str, value: Any, *, at_least: float | None = None) -> None:
    """Raise TypeError unless `value` is an int or a float, ValueError unless it is finite in float32 and in range."""
    is_number = isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    require_type(is_number, name, "a number", value)
    require(-_LARGEST <= value <= _LARGEST, name, "a finite number of float32", value)
    if at_least is not None:
        require(value >= at_least, name, "at least {}", value, at_least)
