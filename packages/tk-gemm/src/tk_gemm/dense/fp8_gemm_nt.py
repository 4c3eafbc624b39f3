"""fp8_gemm_nt: D = A·Bᵀ + C of e4m3 operands with a scale factor for each 128 channels; nn, tn, tt are its views.

    acc[m, n] = 0;  for each block k of 128 channels, in order:
        acc[m, n] = fma(a_sf[m, k] · b_sf[n, k], Σ_j a[m, 128 k + j] · b[n, 128 k + j], acc[m, n])
    d[m, n] = round(acc[m, n] + c[m, n])

in float32, with b_sf of the row's 128 × 128 block, or of the row itself. This is Hopper's order:
Blackwell's tensor cores scale and sum products of 32 channels. docs/tuning/gemm.md has the kernels' plan.
"""

import torch

from tk_core.math import ceil_div
from tk_core.op import launching, op
from tk_gemm.layout.get_mn_major_tma_aligned_tensor import get_mn_major_tma_aligned_tensor
from tk_gemm.lib.launch_fp8_product import launch_fp8_k_product, launch_fp8_product
from tk_gemm.lib.operands import (
    BLOCK,
    E4M3,
    FACTORS,
    OUT,
    compiler_hints,
    fp8_a,
    is_per_row,
    matrix,
    pair,
    per_block_factors,
    per_row_factors,
    positive_multiple,
    result,
)

Pair = tuple[torch.Tensor, torch.Tensor]
Recipe = tuple[int, int, int]
SideRecipe = tuple[int, int]


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """D = A·Bᵀ + C in FP8: products of blocks of 128 channels, scaled and summed in float32, in the order of K.

    A row's bits depend on that row of a and on b alone. Name and arguments are DeepGEMM 2.6's; there d is required.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 128.
            float32 sf (M, K/128), row major, or column major with columns a multiple of 4 elements apart. On Blackwell
            int32 (M, ⌈K/512⌉), column major: four biased exponents a word, as casts with use_packed_ue8m0 write them.
        b: `(data, sf)`: float8_e4m3fn (N, K), N a multiple of 16; sf of a's dtype, (⌈N/128⌉, K/128) of any strides, or
            with factors for each row (N, K/128) as a's.
        d: bfloat16 or float32 (M, N), written; by default new, of c's dtype or, without c, bfloat16. With factors for
            each row of b only float32.
        c: (M, N) of d's dtype, added last; may be d.
        recipe: (1, 128, 128), the default, or (1, 1, 128): factors for each row of b.
        recipe_a: (1, 128), instead of recipe.
        recipe_b: (128, 128) or (1, 128), instead of recipe.
        compiled_dims: For DeepGEMM's compiler; without effect here.
        disable_ue8m0_cast: Of DeepGEMM; without effect.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or a is no pair.
        ValueError: A shape, stride, base (16 bytes), device or recipe is not as described, or d overlaps an operand.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    b_is_per_row = is_per_row(recipe, recipe_a, recipe_b)
    compiler_hints(compiled_dims, disable_ue8m0_cast)
    a_data, a_sf, num_rows, num_channels = fp8_a(a, FACTORS)
    b_data, b_sf = pair("b", b)
    device = a_data.device
    num_cols, _ = matrix("b[0]", b_data, E4M3, ("N", num_channels), device)
    positive_multiple("b[0] (N)", num_cols, 16)
    num_blocks = num_channels // BLOCK
    if b_is_per_row:
        per_row_factors("b[1]", b_sf, (num_cols, num_blocks), device, (a_sf.dtype,))
    else:
        per_block_factors("b[1]", b_sf, (ceil_div(num_cols, BLOCK), num_blocks), device, (a_sf.dtype,))
    dtypes = (torch.float32,) if b_is_per_row else OUT
    d = result(d, c, (num_rows, num_cols), a_data, dtypes)
    if launching(d):
        name, addend, rows = "tk_gemm.fp8_gemm_nt", None if c is None else c.unsqueeze(0), d.unsqueeze(0)
        if b_is_per_row and a_sf.dtype is torch.float32:
            a_sf, b_sf = (get_mn_major_tma_aligned_tensor(sf).t() for sf in (a_sf, b_sf))
            ends = a_data.new_full((1,), num_channels, dtype=torch.int32)
            launch_fp8_k_product(name, a_data, a_sf, b_data, b_sf, ends, addend, rows)
        else:
            operands = [x.unsqueeze(0) for x in (a_data, a_sf, b_data, b_sf)]
            launch_fp8_product(name, "dense", *operands, None, addend, rows, b_is_per_row=b_is_per_row)
    return d


def _transposed(name: str, x: Pair) -> Pair:
    data, sf = pair(name, x)
    for index, part in enumerate((data, sf)):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{name}[{index}]: expected a torch.Tensor, got {type(part).__name__}")
        if part.ndim != 2:
            raise ValueError(f"{name}[{index}]: expected two dimensions, got shape {tuple(part.shape)}")
    return data.t(), sf.t()


def fp8_gemm_nn(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """D = A·B + C: `fp8_gemm_nt` of a (M, K) and b (K, N), whose memory is contiguous along K all the same.

    Hopper's FP8 products read both operands along K: a transposed operand is a view, such as `(w.t(), w_sf.t())`.
    Shapes, strides and factors are those of `fp8_gemm_nt` once it is transposed back; the same errors.
    """
    return fp8_gemm_nt(a, _transposed("b", b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tn(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """D = Aᵀ·B + C: `fp8_gemm_nt` of a (K, M) and b (K, N), whose memory is contiguous along K all the same.

    Hopper's FP8 products read both operands along K: a transposed operand is a view, such as `(w.t(), w_sf.t())`.
    Shapes, strides and factors are those of `fp8_gemm_nt` once it is transposed back; the same errors.
    """
    return fp8_gemm_nt(
        _transposed("a", a), _transposed("b", b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    )


def fp8_gemm_tt(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """D = Aᵀ·Bᵀ + C: `fp8_gemm_nt` of a (K, M) and b (N, K), whose memory is contiguous along K all the same.

    Hopper's FP8 products read both operands along K: a transposed operand is a view, such as `(w.t(), w_sf.t())`.
    Shapes, strides and factors are those of `fp8_gemm_nt` once it is transposed back; the same errors.
    """
    return fp8_gemm_nt(_transposed("a", a), b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)
