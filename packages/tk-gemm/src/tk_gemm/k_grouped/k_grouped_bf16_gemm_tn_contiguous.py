"""k_grouped_bf16_gemm_tn_contiguous: gradients of the experts' weights in bfloat16, groups being ranges of rows (K).

    d[g] = a[rows of g]ᵀ · b[rows of g] + c[g]

Numerics are those of `bf16_gemm_tn` of a group's rows, to the bit.

    rows    0           128         256       384     512
    groups  | 0 0 0 pad | 1 1 1 1 1 1 1 1 pad | 2 pad | …    (padding rows are zero in a and b)
"""

import torch

from tk_core import check
from tk_core.op import launching, op
from tk_gemm.lib.k_groups import check_ks, ends_of, finish_without_k
from tk_gemm.lib.launch_bf16_product import launch_bf16_product
from tk_gemm.lib.operands import BF16, BLOCK, compiler_hints, matrix, positive_multiple, result

_OUT = (torch.float32, torch.bfloat16)


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    ks: list[int] | torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
) -> torch.Tensor:
    """Multiply aᵀ and b over each group's rows, in bfloat16. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: bfloat16 (ΣK, M), M a multiple of 8, rows strided by multiples of 16 bytes; ΣK a multiple of 128.
        b: bfloat16 (ΣK, N), N a multiple of 8.
        d: float32 or bfloat16 (G, M, N), written; None: new, of c's dtype or float32.
        ks: Sizes of the groups, multiples of 128 that add up to ΣK; the first call with these sizes copies them to the
            device, which a CUDA graph cannot capture. Or int32 (G) on the device, where each group ends: the next one
            begins at the next multiple of 128, and rows in between must be zero in both operands. An end past ΣK
            counts as ΣK.
        grouped_layout: The sizes in ks on the device, int32 (G), only where ks is a list; without effect.
        c: (G, M, N) of d's dtype, added last; may be d. Groups without rows give c, or zeros without c.
        compiled_dims: For DeepGEMM's compiler; without effect here.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or ks is no list of int.
        ValueError: A shape, stride, base (16 bytes) or device is not as described, d overlaps an operand, or with
            TK_DEBUG=1 the values of ks or grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    compiler_hints(compiled_dims)
    total, num_rows = matrix("a", a, BF16, ("K", "M"))
    check.multiple_of("a (K)", total, BLOCK)
    positive_multiple("a (M)", num_rows, 8)
    _, num_cols = matrix("b", b, BF16, (total, "N"), a.device)
    positive_multiple("b (N)", num_cols, 8)
    num_groups = check_ks(ks, grouped_layout, total, a.device)
    d = result(d, c, (num_groups, num_rows, num_cols), a, _OUT)
    if not launching(d):
        return d
    if total:
        launch_bf16_product(
            "tk_gemm.k_grouped_bf16_gemm_tn_contiguous",
            "k",
            a.unsqueeze(0),
            b.unsqueeze(0),
            ends_of(ks, a.device),
            c,
            d,
            a_is_transposed=True,
            b_is_transposed=True,
        )
    else:
        finish_without_k(c, d)
    return d
