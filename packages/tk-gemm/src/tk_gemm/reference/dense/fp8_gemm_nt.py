"""References of the dense FP8 products."""

import torch

from tk_gemm.reference.lib.products import finish, fp8_product, weight_factors


def _transposed(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    data, sf = pair
    return data.t(), sf.t()


def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """D = A·Bᵀ + C of pairs a (M, K) and b (N, K). See tk_gemm.fp8_gemm_nt."""
    b_is_per_row = tuple(recipe or ()) == (1, 1, 128) or tuple(recipe_b or ()) == (1, 128)
    b_sf = b[1] if b_is_per_row else weight_factors(b[1], b[0].shape[0])
    dtype = torch.float32 if b_is_per_row else torch.bfloat16
    return finish(fp8_product(*a, b[0], b_sf), d, c, dtype)


def fp8_gemm_nn(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """`fp8_gemm_nt` of a (M, K) and b (K, N)."""
    return fp8_gemm_nt(a, _transposed(b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)


def fp8_gemm_tn(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """`fp8_gemm_nt` of a (K, M) and b (K, N)."""
    return fp8_gemm_nt(
        _transposed(a), _transposed(b), d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast
    )


def fp8_gemm_tt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
    """`fp8_gemm_nt` of a (K, M) and b (N, K)."""
    return fp8_gemm_nt(_transposed(a), b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)
