"""m_grouped_fp8_gemm_nt_contiguous: rows grouped by expert, each times its expert's FP8 weights.

    d[r] = a[r] · b[group of r]ᵀ,  d[r] = 0 in the padding of a group's last 128 rows

Numerics are those of `fp8_gemm_nt`, to the bit. Padding rows of a may hold NaN: their results are replaced by zeros.

    rows    0           128         256       384     512
    groups  | 0 0 0 pad | 1 1 1 1 1 1 1 1 pad | 2 pad | unspecified
"""

import torch

from tk_core import check
from tk_core.op import launching, op
from tk_gemm.lib.groups import check_grouped_layout
from tk_gemm.lib.launch_fp8_product import launch_fp8_product
from tk_gemm.lib.operands import BF16, FACTORS, compiler_hints, fp8_a, fp8_weights, only_per_block, pair, result

Pair = tuple[torch.Tensor, torch.Tensor]


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """Multiply each row of a with the weights of its group, in FP8.

    A row's bits are those of `fp8_gemm_nt` with its group's weights. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 128.
            float32 sf (M, K/128), row major, or column major with columns a multiple of 4 elements apart. On Blackwell
            int32 (M, ⌈K/512⌉), column major, four biased exponents a word.
        b: `(data, sf)`: float8_e4m3fn (G, N, K), N a multiple of 16; sf (G, ⌈N/128⌉, K/128) of a's dtype.
        d: bfloat16 (M, N), written; None: new.
        grouped_layout: int32 (M): each row's group, -1 for padding; groups ascend, begin at multiples of
            128, and have -1 only after their rows: tk_moe's pos_to_expert, with an alignment of 128.
            With use_psum_layout int32 (G): where each group's rows end, the next one beginning at the next multiple of
            128; an end past M counts as M.
        recipe: (1, 128, 128), the default.
        recipe_a: (1, 128), instead of recipe.
        recipe_b: (128, 128), instead of recipe.
        compiled_dims: For DeepGEMM's compiler; without effect here.
        disable_ue8m0_cast: Of DeepGEMM; without effect.
        use_psum_layout: grouped_layout has the ends of groups, not an id for each row.
        ensure_zero_padding: Without effect: padding of a group's last 128 rows is always written zero.
        expected_m_for_psum_layout: Of DeepGEMM; without effect.

    Returns:
        d. Where 128 rows, from a multiple of 128 on, are all padding, they are unspecified.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes), device or option is not as described, d overlaps an operand, or
            with TK_DEBUG=1 the values of grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    only_per_block(recipe, recipe_a, recipe_b)
    compiler_hints(compiled_dims, disable_ue8m0_cast)
    check.flag("ensure_zero_padding", ensure_zero_padding)
    if expected_m_for_psum_layout is not None:
        check.in_range("expected_m_for_psum_layout", expected_m_for_psum_layout, 0, 2**31 - 1)
    a_data, a_sf, num_rows, num_channels = fp8_a(a, FACTORS)
    b_data, b_sf = fp8_weights(b, num_channels, a_data.device, "G", a_sf.dtype)
    num_groups, num_cols, _ = b_data.shape
    check_grouped_layout(grouped_layout, num_rows, num_groups, use_psum_layout, a_data.device)
    d = result(d, None, (num_rows, num_cols), a_data, BF16)
    if launching(d):
        kind, operands = "psum" if use_psum_layout else "ids", (a_data.unsqueeze(0), a_sf.unsqueeze(0), b_data, b_sf)
        name = "tk_gemm.m_grouped_fp8_gemm_nt_contiguous"
        launch_fp8_product(name, kind, *operands, grouped_layout, None, d.unsqueeze(0))
    return d


def m_grouped_fp8_gemm_nn_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None,
    grouped_layout: torch.Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> torch.Tensor:
    """`m_grouped_fp8_gemm_nt_contiguous` of b (G, K, N) with factors (G, K/128, ⌈N/128⌉), contiguous along K."""
    data, sf = pair("b", b)
    for index, part in enumerate((data, sf)):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"b[{index}]: expected a torch.Tensor, got {type(part).__name__}")
        if part.ndim != 3:
            raise ValueError(f"b[{index}]: expected three dimensions, got shape {tuple(part.shape)}")
    return m_grouped_fp8_gemm_nt_contiguous(
        a,
        (data.mT, sf.mT),
        d,
        grouped_layout,
        recipe,
        recipe_a,
        recipe_b,
        compiled_dims,
        disable_ue8m0_cast,
        use_psum_layout,
        ensure_zero_padding,
        expected_m_for_psum_layout,
    )
