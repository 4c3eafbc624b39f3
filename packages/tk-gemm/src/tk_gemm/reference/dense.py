"""References of the dense products."""

import torch
from torch import Tensor

from tk_gemm.reference.products import Pair, Recipe, SideRecipe, bf16_product, finish, fp8_product


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """D = A·Bᵀ + C of pairs a (M, K) and b (N, K). See tk_gemm.fp8_gemm_nt."""
    b_is_per_row = tuple(recipe or ()) == (1, 1, 128) or tuple(recipe_b or ()) == (1, 128)
    return finish(fp8_product(*a, *b), d, c, torch.float32 if b_is_per_row else torch.bfloat16)


def fp8_gemm_nn(
    a: Pair,
    b: Pair,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """`fp8_gemm_nt` of a (M, K) and b (K, N)."""
    return fp8_gemm_nt(a, _transposed(b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tn(
    a: Pair,
    b: Pair,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """`fp8_gemm_nt` of a (K, M) and b (K, N)."""
    return fp8_gemm_nt(
        _transposed(a), _transposed(b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    )


def fp8_gemm_tt(
    a: Pair,
    b: Pair,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """`fp8_gemm_nt` of a (K, M) and b (N, K)."""
    return fp8_gemm_nt(_transposed(a), b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def _transposed(pair: Pair) -> Pair:
    data, sf = pair
    return data.t(), sf.t()


def bf16_gemm_nt(
    a: Tensor, b: Tensor, d: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "nk"
) -> Tensor:
    """D = A·Bᵀ + C of a (M, K) and b (N, K). See tk_gemm.bf16_gemm_nt."""
    return finish(bf16_product(a, b), d, c)


def bf16_gemm_nn(
    a: Tensor, b: Tensor, d: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "nk"
) -> Tensor:
    """`bf16_gemm_nt` of a (M, K) and b (K, N)."""
    return bf16_gemm_nt(a, b.t(), d, c, compiled_dims)


def bf16_gemm_tn(
    a: Tensor, b: Tensor, d: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "nk"
) -> Tensor:
    """`bf16_gemm_nt` of a (K, M) and b (K, N)."""
    return bf16_gemm_nt(a.t(), b.t(), d, c, compiled_dims)


def bf16_gemm_tt(
    a: Tensor, b: Tensor, d: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "nk"
) -> Tensor:
    """`bf16_gemm_nt` of a (K, M) and b (N, K)."""
    return bf16_gemm_nt(a.t(), b, d, c, compiled_dims)
