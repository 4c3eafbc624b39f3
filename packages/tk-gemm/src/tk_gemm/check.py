"""Checks of the products' arguments: operands, their scale factors, groups, results, and what only DeepGEMM uses."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import ceil_div
from tk_core.op import new
from tk_gemm.tma import BYTES, bytes_off

Pair = tuple[Tensor, Tensor]
Recipe = tuple[int, int, int]
SideRecipe = tuple[int, int]
Dtypes = tuple[torch.dtype, ...]

BLOCK = 128
"""Channels, and rows of weights, that share a scale factor; groups begin at multiples of it, in rows or along K."""
E4M3 = (torch.float8_e4m3fn,)
BF16 = (torch.bfloat16,)
FLOAT32 = (torch.float32,)
INT32 = (torch.int32,)
FACTORS = (torch.float32, torch.int32)
"""Scale factors: float32 on Hopper, int32 with four biased exponents a word on Blackwell."""


class Fp8Operands(NamedTuple):
    """Data and factors that fit together."""

    a: Tensor
    a_sf: Tensor
    b: Tensor
    b_sf: Tensor
    shape: tuple[int, ...]
    """That of the product: a's without K, and N."""


class Bf16Operands(NamedTuple):
    """Operands that fit together, as they lie in memory: with K before the rows where they are transposed."""

    a: Tensor
    b: Tensor
    a_is_transposed: bool
    b_is_transposed: bool
    shape: tuple[int, ...]
    """That of the product: a's without K, and N."""


def fp8_operands(
    a: Pair, b: Pair, rows: check.Shape = ("M",), groups: check.Shape = (), b_is_per_row: bool = False
) -> Fp8Operands:
    """Check a (*rows, K) with factors for each row, and b (N, K) with factors for each 128 × 128 block or row.

    b has the groups before its rows that a has, or else `groups`; its factors have the dtype of a's.
    """
    a_data, a_sf = check.pair("a", a)
    *sizes, num_channels = matrix("a[0]", a_data, E4M3, (*rows, "K"))
    positive_multiple("a[0] (K)", num_channels, BLOCK)
    device, num_blocks = a_data.device, num_channels // BLOCK
    _per_row_factors("a[1]", a_sf, (*sizes, num_blocks), device, FACTORS)
    b_data, b_sf = check.pair("b", b)
    shape = (*(sizes[:-1] or groups), "N", num_channels)
    *num_groups, num_cols, _ = matrix("b[0]", b_data, E4M3, shape, device)
    check.require(0 not in num_groups, "b[0]", "at least one group", 0)
    positive_multiple("b[0] (N)", num_cols, 16)
    if b_is_per_row:
        _per_row_factors("b[1]", b_sf, (num_cols, num_blocks), device, (a_sf.dtype,))
    else:
        factors("b[1]", b_sf, (*num_groups, ceil_div(num_cols, BLOCK), num_blocks), device, (a_sf.dtype,))
    return Fp8Operands(a_data, a_sf, b_data, b_sf, (*sizes, num_cols))


def fp8_k_operands(a: Pair, b: Pair) -> tuple[Fp8Operands, int]:
    """Check operands whose groups are ranges of K, in one form or the other; return them and ΣK.

    Factors are returned as (rows, blocks) of both forms.
    """
    a_data, a_sf, num_rows, total = _fp8_k_operand("a", a, None, FACTORS)
    b_data, b_sf, num_cols, b_total = _fp8_k_operand("b", b, a_data.device, (a_sf.dtype,))
    check.require(b_data.ndim == a_data.ndim, "b[0]", "{} dimensions as a[0]", b_data.ndim, a_data.ndim)
    check.require(b_total == total, "b (K)", "{} as a's", b_total, total)
    return Fp8Operands(a_data, a_sf, b_data, b_sf, (num_rows, num_cols)), total


def bf16_operands(a: Tensor, b: Tensor, rows: check.Shape = ("M",), groups: check.Shape = ()) -> Bf16Operands:
    """Check a (*rows, K), K a multiple of 64, and b (N, K), N a multiple of 8, with groups as in `fp8_operands`.

    b, and a where there are no groups, may be contiguous along the rows instead of K.
    """
    is_dense = len(rows) == 1 and not groups
    a, a_is_transposed, (*sizes, num_channels) = _bf16_operand("a", a, (*rows, "K"), None, is_dense)
    shape = (*(sizes[:-1] or groups), "N", num_channels)
    b, b_is_transposed, (*num_groups, num_cols, _) = _bf16_operand("b", b, shape, a.device, True)
    check.require(0 not in num_groups, "b", "at least one group", 0)
    positive_multiple("b (N)", num_cols, 8)
    return Bf16Operands(a, b, a_is_transposed, b_is_transposed, (*sizes, num_cols))


def bf16_k_operands(a: Tensor, b: Tensor) -> tuple[Bf16Operands, int]:
    """Check a (ΣK, M) and b (ΣK, N), whose groups are ranges of rows; return them and ΣK."""
    total, num_rows = matrix("a", a, BF16, ("K", "M"))
    check.multiple_of("a (K)", total, BLOCK)
    positive_multiple("a (M)", num_rows, 8)
    _, num_cols = matrix("b", b, BF16, (total, "N"), a.device)
    positive_multiple("b (N)", num_cols, 8)
    return Bf16Operands(a, b, True, True, (num_rows, num_cols)), total


def _bf16_operand(
    name: str, x: Tensor, shape: check.Shape, device: torch.device | None, either_order: bool
) -> tuple[Tensor, bool, torch.Size]:
    """Check x (..., rows, K); return it as it lies, whether it is contiguous along its rows, and x's shape."""
    is_tensor = isinstance(x, Tensor) and x.ndim == len(shape)
    is_transposed = either_order and is_tensor and x.stride(-1) != 1 and x.stride(-2) == 1
    if is_transposed:
        matrix(name, x.mT, BF16, (*shape[:-2], shape[-1], shape[-2]), device)
    else:
        matrix(name, x, BF16, shape, device)
    positive_multiple(f"{name} (K)", x.shape[-1], 64)
    return x.mT if is_transposed else x, is_transposed, x.shape


def _fp8_k_operand(name: str, x: Pair, device: torch.device | None, dtypes: Dtypes) -> tuple[Tensor, Tensor, int, int]:
    """Check one operand, with factors of one of these dtypes; return data, factors (rows, blocks), rows, ΣK."""
    data, sf = check.pair(name, x)
    is_flat = isinstance(data, Tensor) and data.ndim == 1
    if is_flat:
        check.tensor(f"{name}[0]", data, E4M3, ("rows * K",), device=device)
        _aligned(f"{name}[0]", data)
        num_rows, _ = check.tensor(f"{name}[1]", sf, dtypes, ("rows", "K / 128"), layout="any")
    else:
        num_rows, _ = matrix(f"{name}[0]", data, E4M3, ("rows", "K"), device)
    positive_multiple(f"{name} (rows)", num_rows, 16)
    total = data.numel() // num_rows
    is_whole = data.numel() == num_rows * total and total % BLOCK == 0
    check.require(is_whole, f"{name}[0]", "{} rows of a multiple of {} elements", data.numel(), num_rows, BLOCK)
    is_packed = isinstance(sf, Tensor) and sf.dtype is torch.int32
    num_factors = ceil_div(total, 4 * BLOCK) if is_packed else total // BLOCK
    rows = (f"{name}[1] transposed", sf.t()) if is_flat else (f"{name}[1]", sf)
    matrix(*rows, dtypes, (num_factors, num_rows), data.device)
    return data, sf if is_flat else sf.t(), num_rows, total


def matrix(name: str, x: Tensor, dtypes: Dtypes, shape: check.Shape, device: torch.device | None = None) -> torch.Size:
    """Check an operand or a result: unit stride in the last dimension, the rest on 16 bytes. Return its shape."""
    found = check.tensor(name, x, dtypes, shape, layout="rows", device=device)
    _aligned(name, x)
    return found


def _aligned(name: str, x: Tensor) -> None:
    """Raise ValueError unless the base and all strides but the last of x are on 16 bytes, as TMA requires.

    A tensor without elements is not checked, nor the base where `bytes_off` knows none.
    """
    if not x.numel():
        return
    size = x.element_size()
    for dim in range(x.ndim - 1):
        # The stride first: torch.compile would make a graph of its own for a size of 1 that is asked for.
        if x.stride(dim) * size % BYTES and x.shape[dim] > 1:
            got = f"stride {x.stride(dim)} in dimension {dim}"
            raise ValueError(f"{name}: expected strides that are multiples of {BYTES // size} elements, got {got}")
    if off := bytes_off(x):
        raise ValueError(f"{name}: expected a base on {BYTES} bytes, got one at {off} past that")


def positive_multiple(name: str, size: int, divisor: int) -> None:
    """Raise ValueError unless a size is a positive multiple of `divisor`."""
    check.require(size > 0 and size % divisor == 0, name, "a positive multiple of {}", size, divisor)


def factors(name: str, sf: Tensor, shape: tuple[int, ...], device: torch.device, dtypes: Dtypes) -> bool:
    """Check factors (..., blocks) of any strides; return whether they are packed, four blocks a word."""
    is_packed = torch.int32 in dtypes and isinstance(sf, Tensor) and sf.dtype is torch.int32
    num_blocks = ceil_div(shape[-1], 4) if is_packed else shape[-1]
    check.tensor(name, sf, dtypes, (*shape[:-1], num_blocks), layout="any", device=device)
    return is_packed


def _per_row_factors(name: str, sf: Tensor, shape: tuple[int, ...], device: torch.device, dtypes: Dtypes) -> None:
    """Check factors (..., rows, blocks) of 1 × 128 blocks: float32 row major, or float32 or packed column major.

    Column major is unit stride along rows, a base on 16 bytes, and columns that are a multiple of 4 elements apart and
    do not overlap: the layout that casts write with use_tma_aligned_col_major_sf=True, whole or rows of it. Groups are
    a multiple of 4 elements apart; those of float32 may also follow each other along the rows of one cast.
    """
    is_packed = factors(name, sf, shape, device, dtypes)
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
    _aligned(name, (sf[0] if is_one_cast and not is_packed else sf).mT)


def recipe_of(name: str, blocks: tuple[int, ...], choices: tuple[tuple[int, ...], ...]) -> None:
    """Raise TypeError unless a recipe is a tuple of int, ValueError unless it is one of these."""
    is_recipe = isinstance(blocks, (tuple, list)) and all(type(size) is int for size in blocks)
    check.require_type(is_recipe, name, "a tuple of int", blocks)
    check.one_of(name, tuple(blocks), choices)


def is_per_row(recipe: Recipe | None, recipe_a: SideRecipe | None, recipe_b: SideRecipe | None) -> bool:
    """Whether b has factors for each row, not for 128 × 128 blocks. TypeError or ValueError for other recipes."""
    for name, blocks, choices in (
        ("recipe", recipe, ((1, BLOCK, BLOCK), (1, 1, BLOCK))),
        ("recipe_a", recipe_a, ((1, BLOCK),)),
        ("recipe_b", recipe_b, ((1, BLOCK), (BLOCK, BLOCK))),
    ):
        if blocks is not None:
            recipe_of(name, blocks, choices)
    if recipe is not None:
        check.require(recipe_a is None, "recipe_a", "None beside recipe", recipe_a)
        check.require(recipe_b is None, "recipe_b", "None beside recipe", recipe_b)
        return recipe[1] == 1
    return recipe_b is not None and recipe_b[0] == 1


def only_per_block(recipe: Recipe | None, recipe_a: SideRecipe | None, recipe_b: SideRecipe | None) -> None:
    """Raise ValueError unless b's factors are of 128 × 128 blocks: products of rows grouped by expert take no other."""
    if is_per_row(recipe, recipe_a, recipe_b):
        name, got = ("recipe", recipe) if recipe is not None else ("recipe_b", recipe_b)
        check.require(False, name, "factors of 128 x 128 blocks for b", got)


def without_effect(
    compiled_dims: str,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    disable_ue8m0_cast: bool = False,
) -> None:
    """Check arguments of DeepGEMM that have no effect in this package: compiled_dims is made of the letters m, n, k."""
    check.require_type(isinstance(compiled_dims, str), "compiled_dims", "a str", compiled_dims)
    check.require(set(compiled_dims) <= set("mnk"), "compiled_dims", "letters of 'mnk'", compiled_dims)
    check.flag("disable_ue8m0_cast", disable_ue8m0_cast)
    check.flag("ensure_zero_padding", ensure_zero_padding)
    if expected_m_for_psum_layout is not None:
        check.in_range("expected_m_for_psum_layout", expected_m_for_psum_layout, 0, 2**31 - 1)


def result(d: Tensor | None, c: Tensor | None, shape: tuple[int, ...], like: Tensor, dtypes: Dtypes) -> Tensor:
    """Check d and c, or allocate d: of c's dtype, or the first of `dtypes`."""
    if c is not None:
        matrix("c", c, dtypes, shape, like.device)
    if d is None:
        return new(like.new_empty, shape, dtype=dtypes[0] if c is None else c.dtype)
    matrix("d", d, dtypes, shape, like.device)
    check.require_type(c is None or c.dtype is d.dtype, "c", f"d's dtype {d.dtype}", getattr(c, "dtype", None))
    return d


def row_groups(layout: Tensor, use_psum_layout: bool, a: Tensor, b: Tensor) -> Literal["ids", "psum"]:
    """Check the groups of a's rows: int32 (M), the row's group of b; or int32 (G), where each group ends. Return which.

    With TK_DEBUG=1 also the values: ids ascend and are below G, groups begin at multiples of 128 and have -1 only after
    their rows; no group ends before it begins.
    """
    check.flag("use_psum_layout", use_psum_layout)
    size = (b if use_psum_layout else a).shape[0]
    check.tensor("grouped_layout", layout, INT32, (size,), device=a.device)
    if use_psum_layout:
        check.ends("grouped_layout", layout, BLOCK)
        return "psum"
    if size and check.reads_data(layout):
        _check_ids(layout.cpu().long(), b.shape[0])
    return "ids"


def _check_ids(ids: Tensor, num_groups: int) -> None:
    check.require(int(ids.max()) < num_groups, "grouped_layout", "groups below {}", int(ids.max()), num_groups)
    rows = (ids >= 0).nonzero().flatten()
    groups = ids[rows]
    for index in (groups[1:] < groups[:-1]).nonzero().flatten().tolist():
        got = f"group {groups[index + 1]} in row {rows[index + 1]}, after group {groups[index]}"
        raise ValueError(f"grouped_layout: expected groups in ascending order, got {got}")
    is_first = torch.cat([groups.new_ones(1, dtype=torch.bool), groups[1:] != groups[:-1]])[: len(groups)]
    for row in rows[is_first & (rows % BLOCK != 0)].tolist():
        raise ValueError(
            f"grouped_layout: expected groups that begin at multiples of {BLOCK}, got one that begins at row {row}"
        )
    for row in rows[:-1][(rows[1:] - rows[:-1] != 1) & ~is_first[1:]].tolist():
        raise ValueError(
            f"grouped_layout: expected -1 only after a group's last row, got -1 in row {row + 1}, within a group"
        )


def row_counts(masked_m: Tensor, expected_m: int, a: Tensor) -> None:
    """Check the number of rows of each group of a, int32 (G), and the number that the caller expects."""
    check.tensor("masked_m", masked_m, INT32, (a.shape[0],), device=a.device)
    check.in_range("expected_m", expected_m, 0, 2**31 - 1)
    if check.reads_data(masked_m):
        least = int(masked_m.min())
        check.require(least >= 0, "masked_m", "counts from 0", least)


def swiglu_options(pos: Tensor | None, weights: Tensor | None, clamp: float | None, a: Tensor) -> float | None:
    """Check rows' weights, int32 (M) indices of float32 (num_tokens, num_topk) or neither, and the clamp; return it."""
    if (pos is None) is not (weights is None):
        missing = "topk_weights" if weights is None else "pos_to_token_topk"
        raise ValueError(f"{missing}: expected a tensor beside the other of the two, got None")
    if pos is not None:
        check.tensor("pos_to_token_topk", pos, INT32, (a.shape[0],), device=a.device)
        check.tensor("topk_weights", weights, FLOAT32, ("num_tokens", "num_topk"), device=a.device)
    if clamp is not None:
        check.number("swiglu_clamp_value", clamp, at_least=2.0**-126)
    return None if clamp is None else float(clamp)


def k_groups(ks: list[int] | Tensor, grouped_layout: Tensor | None, total: int, device: torch.device) -> int:
    """Check the groups along K, sizes in a list or ends in an int32 (G) tensor; return their number.

    With TK_DEBUG=1 also the values of tensors: no group ends before it begins, and grouped_layout has the list's sizes.
    """
    if isinstance(ks, Tensor):
        (num_groups,) = check.tensor("ks", ks, INT32, ("G",), device=device)
        check.require(num_groups > 0, "ks", "at least one group", num_groups)
        check.require(grouped_layout is None, "grouped_layout", "None where ks is a tensor", "a tensor")
        check.ends("ks", ks, BLOCK)
        return num_groups
    check.require_type(isinstance(ks, (list, tuple)), "ks", "a list of int or a tensor", type(ks).__name__)
    check.require(len(ks) > 0, "ks", "at least one group", ks)
    for group, size in enumerate(ks):
        check.in_range(f"ks[{group}]", size, 0, 2**31 - 1)
        check.multiple_of(f"ks[{group}]", size, BLOCK)
    check.require(sum(ks) == total, "ks", "sizes that add up to {}, the operands' K", sum(ks), total)
    if grouped_layout is not None:
        check.tensor("grouped_layout", grouped_layout, INT32, (len(ks),), device=device)
        if check.reads_data(grouped_layout):
            found = grouped_layout.tolist()
            check.require(found == list(ks), "grouped_layout", "the sizes of ks, {}", found, list(ks))
    return len(ks)
