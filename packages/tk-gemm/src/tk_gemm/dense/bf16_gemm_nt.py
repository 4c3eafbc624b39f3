"""bf16_gemm_nt: D = A·Bᵀ + C of bfloat16 operands, summed in float32; nn, tn, tt are its views.

    d[m, n] = round(Σ_k a[m, k] · b[n, k] + c[m, n])

The tensor core adds 16 products at a time to a float32 accumulator, in the order of K. docs/tuning/gemm.md has the
kernels' plan.
"""

import torch

from tk_core.op import launching, op
from tk_gemm.lib.bf16_operands import bf16_weights, in_either_order
from tk_gemm.lib.launch_bf16_product import launch_bf16_product
from tk_gemm.lib.operands import OUT, compiler_hints, result


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """D = A·Bᵀ + C in bfloat16: products summed in float32, in the order of K, and rounded once.

    A row's bits depend on that row of a and on b alone, not on their strides. Name and arguments are DeepGEMM 2.6's;
    there d is required.

    Args:
        a: bfloat16 (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 64. Or a transposed view,
            contiguous along M, with columns strided by multiples of 16 bytes.
        b: bfloat16 (N, K), N a multiple of 8; or a transposed view, as a.
        d: bfloat16 or float32 (M, N), written; by default new, of c's dtype or, without c, bfloat16.
        c: (M, N) of d's dtype, added last; may be d.
        compiled_dims: For DeepGEMM's compiler; without effect here.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes) or device is not as described, or d overlaps an operand.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    compiler_hints(compiled_dims)
    a, a_is_transposed, (num_rows, num_channels) = in_either_order("a", a, ("M", "K"))
    b, b_is_transposed, num_cols = bf16_weights(b, num_channels, a.device)
    d = result(d, c, (num_rows, num_cols), a, OUT)
    if launching(d):
        launch_bf16_product(
            "tk_gemm.bf16_gemm_nt",
            "dense",
            a.unsqueeze(0),
            b.unsqueeze(0),
            None,
            None if c is None else c.unsqueeze(0),
            d.unsqueeze(0),
            a_is_transposed=a_is_transposed,
            b_is_transposed=b_is_transposed,
        )
    return d


def _transposed(name: str, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 2:
        raise ValueError(f"{name}: expected two dimensions, got shape {tuple(x.shape)}")
    return x.t()


def bf16_gemm_nn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """D = A·B + C: `bf16_gemm_nt` of a (M, K) and b (K, N), read as they lie. The same errors."""
    return bf16_gemm_nt(a, _transposed("b", b), d, c, compiled_dims)


def bf16_gemm_tn(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """D = Aᵀ·B + C: `bf16_gemm_nt` of a (K, M) and b (K, N), read as they lie. The same errors."""
    return bf16_gemm_nt(_transposed("a", a), _transposed("b", b), d, c, compiled_dims)


def bf16_gemm_tt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """D = Aᵀ·Bᵀ + C: `bf16_gemm_nt` of a (K, M) and b (N, K), read as they lie. The same errors."""
    return bf16_gemm_nt(_transposed("a", a), b, d, c, compiled_dims)
