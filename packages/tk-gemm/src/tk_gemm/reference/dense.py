"""References of the dense products."""

import torch
from torch import Tensor

from tk_gemm.check import Pair, Recipe, SideRecipe
from tk_gemm.reference.products import bf16_product, finish, fp8_product


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


def bf16_gemm_nt(
    a: Tensor, b: Tensor, d: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "nk"
) -> Tensor:
    """D = A·Bᵀ + C of a (M, K) and b (N, K). See tk_gemm.bf16_gemm_nt."""
    return finish(bf16_product(a, b), d, c)
