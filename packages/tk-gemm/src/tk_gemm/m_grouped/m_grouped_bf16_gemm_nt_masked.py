"""m_grouped_bf16_gemm_nt_masked: a buffer of rows for each expert, of which the first masked_m are multiplied.

    d[g, r] = a[g, r] · b[g]ᵀ  for r < masked_m[g]; other rows of d are not written

For decoding under CUDA graphs: nothing is read back. Numerics are those of `bf16_gemm_nt`, to the bit.
"""

import torch

from tk_core.op import launching, op
from tk_gemm.lib.bf16_operands import bf16_weights
from tk_gemm.lib.groups import check_masked_m
from tk_gemm.lib.launch_bf16_product import launch_bf16_product
from tk_gemm.lib.operands import BF16, compiler_hints, matrix, positive_multiple, result


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    masked_m: torch.Tensor,
    expected_m: int,
    compiled_dims: str = "nk",
) -> torch.Tensor:
    """Multiply the first masked_m[g] rows of each a[g] with b[g], in bfloat16.

    A row's bits are those of `bf16_gemm_nt` with its group's weights. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: bfloat16 (G, M_max, K), K a multiple of 64.
        b: bfloat16 (G, N, K), N a multiple of 8; contiguous along K or, a transposed view, along N.
        d: bfloat16 (G, M_max, N), rows from masked_m on left alone; None: new, with those uninitialized.
        masked_m: int32 (G), on a's device; more than M_max counts as M_max.
        expected_m: Rows of a group that the caller expects: chooses the tile, results do not depend on it.
        compiled_dims: For DeepGEMM's compiler; without effect here.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or expected_m is not an int.
        ValueError: A shape, stride, base (16 bytes) or device is not as described, d overlaps an operand, or with
            TK_DEBUG=1 masked_m is negative.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    compiler_hints(compiled_dims)
    num_groups, max_m, num_channels = matrix("a", a, BF16, ("G", "M_max", "K"))
    positive_multiple("a (K)", num_channels, 64)
    b, b_is_transposed, num_cols = bf16_weights(b, num_channels, a.device, num_groups)
    check_masked_m(masked_m, expected_m, num_groups, a.device)
    d = result(d, None, (num_groups, max_m, num_cols), a, BF16)
    if launching(d):
        launch_bf16_product(
            "tk_gemm.m_grouped_bf16_gemm_nt_masked",
            "masked",
            a,
            b,
            masked_m,
            None,
            d,
            b_is_transposed=b_is_transposed,
            num_rows=expected_m,
        )
    return d
