"""References of the dense BF16 products."""

import torch

from tk_gemm.reference.lib.products import bf16_product, finish


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """D = A·Bᵀ + C of a (M, K) and b (N, K). See tk_gemm.bf16_gemm_nt."""
    return finish(bf16_product(a, b), d, c)


def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """`bf16_gemm_nt` of a (M, K) and b (K, N)."""
    return bf16_gemm_nt(a, b.t(), d, c, compiled_dims)


def bf16_gemm_tn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """`bf16_gemm_nt` of a (K, M) and b (K, N)."""
    return bf16_gemm_nt(a.t(), b.t(), d, c, compiled_dims)


def bf16_gemm_tt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """`bf16_gemm_nt` of a (K, M) and b (N, K)."""
    return bf16_gemm_nt(a.t(), b, d, c, compiled_dims)
