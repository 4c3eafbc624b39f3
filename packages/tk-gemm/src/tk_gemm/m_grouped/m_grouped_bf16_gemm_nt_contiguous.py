"""m_grouped_bf16_gemm_nt_contiguous: rows grouped by expert, each times its expert's bfloat16 weights.

    d[r] = a[r] · b[group of r]ᵀ,  d[r] = 0 in the padding of a group's last 128 rows

Numerics are those of `bf16_gemm_nt`, to the bit; groups lie as in `m_grouped_fp8_gemm_nt_contiguous`. Padding rows of a
may hold NaN: their results are replaced by zeros.
"""

import torch

from tk_core import check
from tk_core.op import launching, op
from tk_gemm.lib.bf16_operands import bf16_weights
from tk_gemm.lib.groups import check_grouped_layout
from tk_gemm.lib.launch_bf16_product import launch_bf16_product
from tk_gemm.lib.operands import BF16, compiler_hints, matrix, positive_multiple, result


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """Multiply each row of a with the weights of its group, in bfloat16.

    A row's bits are those of `bf16_gemm_nt` with its group's weights. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: bfloat16 (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 64.
        b: bfloat16 (G, N, K), N a multiple of 8; contiguous along K or, a transposed view, along N.
        d: bfloat16 (M, N), written; None: new.
        grouped_layout: int32 (M): each row's group, -1 for padding; groups ascend, begin at multiples of
            128, and have -1 only after their rows: tk_moe's pos_to_expert, with an alignment of 128.
            With use_psum_layout int32 (G): where each group's rows end, the next one beginning at the next multiple of
            128; an end past M counts as M.
        compiled_dims: For DeepGEMM's compiler; without effect here.
        use_psum_layout: grouped_layout has the ends of groups, not an id for each row.
        ensure_zero_padding: Without effect: padding of a group's last 128 rows is always written zero.
        expected_m_for_psum_layout: Of DeepGEMM; without effect.

    Returns:
        d. Where 128 rows, from a multiple of 128 on, are all padding, they are unspecified.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes), device or option is not as described, d overlaps an operand, or
            with TK_DEBUG=1 the values of grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    compiler_hints(compiled_dims)
    check.flag("ensure_zero_padding", ensure_zero_padding)
    if expected_m_for_psum_layout is not None:
        check.in_range("expected_m_for_psum_layout", expected_m_for_psum_layout, 0, 2**31 - 1)
    num_rows, num_channels = matrix("a", a, BF16, ("M", "K"))
    positive_multiple("a (K)", num_channels, 64)
    b, b_is_transposed, num_cols = bf16_weights(b, num_channels, a.device, "G")
    check_grouped_layout(grouped_layout, num_rows, b.shape[0], use_psum_layout, a.device)
    d = result(d, None, (num_rows, num_cols), a, BF16)
    if launching(d):
        launch_bf16_product(
            "tk_gemm.m_grouped_bf16_gemm_nt_contiguous",
            "psum" if use_psum_layout else "ids",
            a.unsqueeze(0),
            b,
            grouped_layout,
            None,
            d.unsqueeze(0),
            b_is_transposed=b_is_transposed,
        )
    return d


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """`m_grouped_bf16_gemm_nt_contiguous` of b (G, K, N), read as it lies. The same errors."""
    if not isinstance(b, torch.Tensor):
        raise TypeError(f"b: expected a torch.Tensor, got {type(b).__name__}")
    if b.ndim != 3:
        raise ValueError(f"b: expected three dimensions, got shape {tuple(b.shape)}")
    return m_grouped_bf16_gemm_nt_contiguous(
        a,
        b.mT,
        d,
        grouped_layout,
        compiled_dims,
        use_psum_layout,
        ensure_zero_padding,
        expected_m_for_psum_layout,
    )
