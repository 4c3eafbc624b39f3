"""Checks of operands, scale factors and results that every product shares."""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import ceil_div
from tk_core.op import new
from tk_gemm.lib.tma import bytes_off

BLOCK = 128
E4M3 = (torch.float8_e4m3fn,)
BF16 = (torch.bfloat16,)
FLOAT32 = (torch.float32,)
FACTORS = (torch.float32, torch.int32)
"""Scale factors: float32 on Hopper, int32 with four biased exponents a word on Blackwell."""
OUT = (torch.bfloat16, torch.float32)

_PER_ROW_RECIPE = (1, 1, BLOCK)
_RECIPES = ((1, BLOCK, BLOCK), _PER_ROW_RECIPE)
_WIDE = 16  # bytes, to which TMA needs bases and strides aligned


def pair(name: str, x: Any) -> tuple[Any, Any]:
    """Raise TypeError unless x is a pair; return it."""
    check.require_type(isinstance(x, (tuple, list)) and len(x) == 2, name, "a pair (data, sf)", type(x).__name__)
    return x[0], x[1]


def aligned(name: str, x: Tensor) -> None:
    """Raise ValueError unless the base and all strides but the last of x are on 16 bytes, as TMA requires.

    A tensor without elements is not checked, nor the base where `bytes_off` knows none.
    """
    if not x.numel():
        return
    size = x.element_size()
    for dim in range(x.ndim - 1):
        # The stride first: torch.compile would make a graph of its own for a size of 1 that is asked for.
        if x.stride(dim) * size % _WIDE and x.shape[dim] > 1:
            got = f"stride {x.stride(dim)} in dimension {dim}"
            raise ValueError(f"{name}: expected strides that are multiples of {_WIDE // size} elements, got {got}")
    if off := bytes_off(x):
        raise ValueError(f"{name}: expected a base on {_WIDE} bytes, got one at {off} past that")


def matrix(
    name: str,
    x: Any,
    dtypes: tuple[torch.dtype, ...],
    shape: check.Shape,
    device: torch.device | None = None,
) -> torch.Size:
    """Check an operand or a result: unit stride in the last dimension, the rest on 16 bytes. Return its shape."""
    found = check.tensor(name, x, dtypes, shape, layout="rows", device=device)
    aligned(name, x)
    return found


def positive_multiple(name: str, size: int, divisor: int) -> None:
    """Raise ValueError unless a size is a positive multiple of `divisor`."""
    check.require(size > 0 and size % divisor == 0, name, "a positive multiple of {}", size, divisor)


def _checked_factors(
    name: str, sf: Any, shape: tuple[int, ...], device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> bool:
    """Check dtype, shape and device of factors (..., blocks); return whether they are packed, four blocks a word."""
    is_packed = torch.int32 in dtypes and isinstance(sf, Tensor) and sf.dtype is torch.int32
    num_blocks = ceil_div(shape[-1], 4) if is_packed else shape[-1]
    check.tensor(name, sf, dtypes, (*shape[:-1], num_blocks), layout="any", device=device)
    return is_packed


def per_row_factors(
    name: str, sf: Any, shape: tuple[int, ...], device: torch.device, dtypes: tuple[torch.dtype, ...] = FLOAT32
) -> None:
    """Check factors (..., rows, blocks) of 1 × 128 blocks: float32 row major, or float32 or packed column major.

    Column major is unit stride along rows, a base on 16 bytes, and columns that are a multiple of 4 elements apart and
    do not overlap: the layout that casts write with use_tma_aligned_col_major_sf=True, whole or rows of it. Groups are
    a multiple of 4 elements apart; those of float32 may also follow each other along the rows of one cast.
    """
    is_packed = _checked_factors(name, sf, shape, device, dtypes)
    num_rows, num_cols = sf.shape[-2:]
    if not sf.numel():
        return
    row_stride, col_stride = sf.stride()[-2:]
    is_row_major = (num_cols == 1 or col_stride == 1) and (num_rows == 1 or row_stride >= num_cols)
    if is_row_major and not is_packed:
        return
    is_col_major = (num_rows == 1 or row_stride == 1) and (
        num_cols == 1 or (col_stride % 4 == 0 and col_stride >= num_rows)
    )
    if not is_col_major:
        others = "" if is_packed else ", or contiguous rows"
        raise ValueError(
            f"{name}: expected rows of stride 1 element apart and columns a multiple of 4 from {num_rows} on{others}, "
            f"got strides {sf.stride()} for shape {tuple(sf.shape)}"
        )
    is_one_cast = sf.ndim == 3 and sf.stride(0) == num_rows and (num_cols == 1 or col_stride >= shape[0] * num_rows)
    aligned(name, (sf[0] if is_one_cast and not is_packed else sf).mT)


def per_block_factors(
    name: str, sf: Any, shape: tuple[int, ...], device: torch.device, dtypes: tuple[torch.dtype, ...] = FLOAT32
) -> None:
    """Check factors (..., ⌈N/128⌉, K/128) of 128 × 128 blocks, of any strides: they are few."""
    _checked_factors(name, sf, shape, device, dtypes)


def recipe_of(name: str, blocks: Any, choices: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Raise TypeError unless a recipe is a tuple of int, ValueError unless it is one of these; return it as a tuple."""
    is_recipe = isinstance(blocks, (tuple, list)) and all(type(size) is int for size in blocks)
    check.require_type(is_recipe, name, "a tuple of int", blocks)
    check.one_of(name, tuple(blocks), choices)
    return tuple(blocks)


def is_per_row(
    recipe: tuple[int, int, int] | None, recipe_a: tuple[int, int] | None, recipe_b: tuple[int, int] | None
) -> bool:
    """Whether B has factors for each row, not for 128 × 128 blocks. TypeError or ValueError for other recipes."""
    allowed = (
        ("recipe", recipe, _RECIPES),
        ("recipe_a", recipe_a, ((1, BLOCK),)),
        ("recipe_b", recipe_b, ((1, BLOCK), (BLOCK, BLOCK))),
    )
    for name, blocks, choices in allowed:
        if blocks is not None:
            recipe_of(name, blocks, choices)
    if recipe is not None:
        check.require(recipe_a is None, "recipe_a", "None beside recipe", recipe_a)
        check.require(recipe_b is None, "recipe_b", "None beside recipe", recipe_b)
        return tuple(recipe) == _PER_ROW_RECIPE
    return recipe_b is not None and recipe_b[0] == 1


def only_per_block(
    recipe: tuple[int, int, int] | None, recipe_a: tuple[int, int] | None, recipe_b: tuple[int, int] | None
) -> None:
    """Raise ValueError unless B's factors are of 128 × 128 blocks: products of rows grouped by expert take no other."""
    if is_per_row(recipe, recipe_a, recipe_b):
        name, got = ("recipe", recipe) if recipe is not None else ("recipe_b", recipe_b)
        check.require(False, name, "factors of 128 x 128 blocks for b", got)


def compiler_hints(compiled_dims: str, disable_ue8m0_cast: bool = False) -> None:
    """Check arguments of DeepGEMM that have no effect in this package: compiled_dims is made of the letters m, n, k."""
    check.require_type(isinstance(compiled_dims, str), "compiled_dims", "a str", compiled_dims)
    check.require(set(compiled_dims) <= set("mnk"), "compiled_dims", "letters of 'mnk'", compiled_dims)
    check.flag("disable_ue8m0_cast", disable_ue8m0_cast)


def fp8_a(a: Any, dtypes: tuple[torch.dtype, ...] = FLOAT32) -> tuple[Tensor, Tensor, int, int]:
    """Check activations (M, K) and their factors of one of these dtypes; return data, factors, M, K."""
    data, sf = pair("a", a)
    num_rows, num_channels = matrix("a[0]", data, E4M3, ("M", "K"))
    positive_multiple("a[0] (K)", num_channels, BLOCK)
    per_row_factors("a[1]", sf, (num_rows, num_channels // BLOCK), data.device, dtypes)
    return data, sf, num_rows, num_channels


def fp8_weights(
    b: Any, num_channels: int, device: torch.device, num_groups: int | str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Check weights (G, N, K) and factors (G, ⌈N/128⌉, K/128) of the dtype that a's have; return both."""
    data, sf = pair("b", b)
    groups, num_cols, _ = matrix("b[0]", data, E4M3, (num_groups, "N", num_channels), device)
    check.require(groups > 0, "b[0]", "at least one group", groups)
    positive_multiple("b[0] (N)", num_cols, 16)
    per_block_factors("b[1]", sf, (groups, ceil_div(num_cols, BLOCK), num_channels // BLOCK), device, (dtype,))
    return data, sf


def result(
    d: Tensor | None,
    c: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor:
    """Check d and c, or allocate d: of c's dtype, or the first of `dtypes`."""
    if c is not None:
        matrix("c", c, dtypes, shape, like.device)
    if d is None:
        return new(like.new_empty, shape, dtype=dtypes[0] if c is None else c.dtype)
    matrix("d", d, dtypes, shape, like.device)
    check.require_type(c is None or c.dtype is d.dtype, "c", f"d's dtype {d.dtype}", getattr(c, "dtype", None))
    return d
