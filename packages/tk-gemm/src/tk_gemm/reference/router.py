"""Reference of the router's product."""

from torch import Tensor

from tk_gemm.reference.products import bf16_product, finish


def router_gemm_nt(x: Tensor, weight: Tensor, d: Tensor | None = None) -> Tensor:
    """x (M, K) · weight (N, K)ᵀ, summed in float64, rounded once. See tk_gemm.router_gemm_nt."""
    return finish(bf16_product(x, weight), d, None, weight.dtype)
