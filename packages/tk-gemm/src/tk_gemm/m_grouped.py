"""Products of rows grouped by expert, each row times its expert's weights, in FP8 and in BF16.

    contiguous    d[r] = a[r] · b[group of r]ᵀ,  d[r] = 0 in the padding of a group's last 128 rows
    masked        d[g, r] = a[g, r] · b[g]ᵀ  for r < masked_m[g]; other rows of d are not written

Numerics are those of `fp8_gemm_nt` and `bf16_gemm_nt`, to the bit. Padding rows of a may hold NaN: their results are
replaced by zeros. Masked products are for decoding under CUDA graphs: nothing is read back.

    rows    0           128         256       384     512
    groups  | 0 0 0 pad | 1 1 1 1 1 1 1 1 pad | 2 pad | unspecified

The SwiGLU product is an expert's first product, SwiGLU, and the cast to e4m3, in one pass:

    [l | r] = a[row] · b[group of row]ᵀ  in float32;  out = l / (1 + exp(-l)) * r * weight
    for each 128 channels of a row:  amax = max(max |out|, 1e-4);  sf = amax / 448;  data = e4m3(out * (448 / amax))
    with packed factors:             sf = the least power of two that is at least amax / 448;  data = e4m3(out / sf)

The same as `m_grouped_fp8_gemm_nt_contiguous` and `tk_quant.swiglu_forward_and_per_token_cast` but for the rounding of
the product to bfloat16 between them, which does not happen here.
"""

import torch
from torch import Tensor

from tk_core.op import launching, new, op
from tk_core.scales import ScaleLayout, empty_scales
from tk_gemm import check
from tk_gemm.check import BF16, BLOCK, Pair, Recipe, SideRecipe
from tk_gemm.launch import Groups, Routing, launch_bf16, launch_fp8, launch_fp8_swiglu
from tk_gemm.views import transposed, view_of


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor | None,
    grouped_layout: Tensor,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> Tensor:
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
        recipe_a, recipe_b: (1, 128) and (128, 128), instead of recipe.
        compiled_dims, disable_ue8m0_cast, expected_m_for_psum_layout: Of DeepGEMM; without effect.
        use_psum_layout: grouped_layout has the ends of groups, not an id for each row.
        ensure_zero_padding: Without effect: padding of a group's last 128 rows is always written zero.

    Returns:
        d. Where 128 rows, from a multiple of 128 on, are all padding, they are unspecified.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes), device or option is not as described, d overlaps an operand, or
            with TK_DEBUG=1 the values of grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    check.only_per_block(recipe, recipe_a, recipe_b)
    check.without_effect(compiled_dims, ensure_zero_padding, expected_m_for_psum_layout, disable_ue8m0_cast)
    x = check.fp8_operands(a, b, groups=("G",))
    kind = check.row_groups(grouped_layout, use_psum_layout, x.a, x.b)
    d = check.result(d, None, x.shape, x.a, BF16)
    if launching(d):
        launch_fp8("tk_gemm.m_grouped_fp8_gemm_nt_contiguous", x, Groups(kind, grouped_layout), None, d)
    return d


@view_of(m_grouped_fp8_gemm_nt_contiguous)
def m_grouped_fp8_gemm_nn_contiguous(a: Pair, b: Pair) -> tuple[Pair, Pair]:
    """`m_grouped_fp8_gemm_nt_contiguous` of b (G, K, N) with factors (G, K/128, ⌈N/128⌉), contiguous along K."""
    return a, transposed(b)


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor | None,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Multiply the first masked_m[g] rows of each a[g] with b[g], in FP8.

    A row's bits are those of `fp8_gemm_nt` with its group's weights. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: `(data, sf)`: float8_e4m3fn (G, M_max, K), K a multiple of 128; float32 sf (G, M_max, K/128), each group's
            row major, or column major with columns a multiple of 4 elements apart: strides (align(M_max, 4) · K/128, 1,
            align(M_max, 4)), or (M_max, 1, align(G · M_max, 4)), a view of one cast of all rows. On Blackwell int32
            (G, M_max, ⌈K/512⌉), column major, four biased exponents a word; a view of one cast only if M_max is a
            multiple of 4.
        b: `(data, sf)`: float8_e4m3fn (G, N, K), N a multiple of 16; sf (G, ⌈N/128⌉, K/128) of a's dtype.
        d: bfloat16 (G, M_max, N), rows from masked_m on left alone; None: new, with those uninitialized.
        masked_m: int32 (G), on a's device; more than M_max counts as M_max.
        expected_m: Rows of a group that the caller expects: chooses the tile, results do not depend on it.
        recipe: (1, 128, 128), the default.
        recipe_a, recipe_b: (1, 128) and (128, 128), instead of recipe.
        compiled_dims, disable_ue8m0_cast: Of DeepGEMM; without effect.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or expected_m is not an int.
        ValueError: A shape, stride, base (16 bytes), device or recipe is not as described, d overlaps an operand, or
            with TK_DEBUG=1 masked_m is negative.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    check.only_per_block(recipe, recipe_a, recipe_b)
    check.without_effect(compiled_dims, disable_ue8m0_cast=disable_ue8m0_cast)
    x = check.fp8_operands(a, b, ("G", "M_max"))
    check.row_counts(masked_m, expected_m, x.a)
    d = check.result(d, None, x.shape, x.a, BF16)
    if launching(d):
        launch_fp8("tk_gemm.m_grouped_fp8_gemm_nt_masked", x, Groups("masked", masked_m, expected_m), None, d)
    return d


@op(aligned=(), min_sm=90)
def m_grouped_fp8_gemm_swiglu_nt_contiguous(
    a: Pair,
    b: Pair,
    grouped_layout: Tensor,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    use_psum_layout: bool = False,
) -> Pair:
    """Multiply each row with the weights of its group, apply SwiGLU and quantize by groups of 128 channels.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, K) and float32 (M, K/128), on Blackwell int32 (M, ⌈K/512⌉), as
            `m_grouped_fp8_gemm_nt_contiguous` takes them.
        b: `(data, sf)`: float8_e4m3fn (G, 2 · I, K), I a multiple of 128, rows in the order of
            `interleave_gate_and_up`; sf (G, 2 · I / 128, K/128) of a's dtype.
        grouped_layout: int32 (M), or with use_psum_layout (G), as `m_grouped_fp8_gemm_nt_contiguous` takes it.
        pos_to_token_topk: int32 (M), index of each row's weight in topk_weights, flat; a row where it is negative or
            past the end is padding.
        topk_weights: float32 (num_tokens, num_topk), contiguous; with pos_to_token_topk only, and the other way round.
        swiglu_clamp_value: c, positive: l is clamped to at most c first, r to [-c, c].
        use_psum_layout: grouped_layout has the ends of groups, not an id for each row.

    Returns:
        `(data, sf)`: float8_e4m3fn (M, I), and float32 (M, I/128), or int32 (M, ⌈I/512⌉) where a's factors are packed,
        with strides (1, align(M, 4)), as the next product takes them. Both are 0 in padding rows, but unspecified where
        128 rows, from a multiple of 128 on, have no group; so are bytes of sf past I/128.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes), device or option is not as described, or with TK_DEBUG=1 the
            values of grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    x = check.fp8_operands(a, b, groups=("G",))
    num_rows, num_cols = x.shape
    check.positive_multiple("b[0] (2 * I)", num_cols, 2 * BLOCK)
    kind = check.row_groups(grouped_layout, use_psum_layout, x.a, x.b)
    clamp = check.swiglu_options(pos_to_token_topk, topk_weights, swiglu_clamp_value, x.a)
    inner = num_cols // 2
    data = new(x.a.new_empty, (num_rows, inner))
    sf_layout = ScaleLayout.COL_MAJOR if x.a_sf.dtype is torch.float32 else ScaleLayout.PACKED_UE8M0
    sf = new(empty_scales, x.a, num_rows, inner // BLOCK, sf_layout)
    if not launching(data, sf):
        return data, sf
    if topk_weights is not None and not topk_weights.numel():  # No row has a weight.
        data.zero_()
        sf.zero_()
        return data, sf
    name, groups = "tk_gemm.m_grouped_fp8_gemm_swiglu_nt_contiguous", Groups(kind, grouped_layout)
    routing = Routing(pos_to_token_topk, None if topk_weights is None else topk_weights.view(-1))
    launch_fp8_swiglu(name, x, groups, routing, clamp, data, sf)
    return data, sf


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> Tensor:
    """Multiply each row of a with the weights of its group, in bfloat16.

    A row's bits are those of `bf16_gemm_nt` with its group's weights. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: bfloat16 (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 64.
        b: bfloat16 (G, N, K), N a multiple of 8; contiguous along K or, a transposed view, along N.
        d: bfloat16 (M, N), written; None: new.
        grouped_layout: int32 (M), or with use_psum_layout (G), as `m_grouped_fp8_gemm_nt_contiguous` takes it.
        compiled_dims, expected_m_for_psum_layout: Of DeepGEMM; without effect.
        use_psum_layout: grouped_layout has the ends of groups, not an id for each row.
        ensure_zero_padding: Without effect: padding of a group's last 128 rows is always written zero.

    Returns:
        d. Where 128 rows, from a multiple of 128 on, are all padding, they are unspecified.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes), device or option is not as described, d overlaps an operand, or
            with TK_DEBUG=1 the values of grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    check.without_effect(compiled_dims, ensure_zero_padding, expected_m_for_psum_layout)
    x = check.bf16_operands(a, b, groups=("G",))
    kind = check.row_groups(grouped_layout, use_psum_layout, x.a, x.b)
    d = check.result(d, None, x.shape, x.a, BF16)
    if launching(d):
        launch_bf16("tk_gemm.m_grouped_bf16_gemm_nt_contiguous", x, Groups(kind, grouped_layout), None, d)
    return d


@view_of(m_grouped_bf16_gemm_nt_contiguous)
def m_grouped_bf16_gemm_nn_contiguous(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`m_grouped_bf16_gemm_nt_contiguous` of b (G, K, N), read as it lies. The same errors."""
    return a, transposed(b)


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor | None, masked_m: Tensor, expected_m: int, compiled_dims: str = "nk"
) -> Tensor:
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
    check.without_effect(compiled_dims)
    x = check.bf16_operands(a, b, ("G", "M_max"))
    check.row_counts(masked_m, expected_m, x.a)
    d = check.result(d, None, x.shape, x.a, BF16)
    if launching(d):
        launch_bf16("tk_gemm.m_grouped_bf16_gemm_nt_masked", x, Groups("masked", masked_m, expected_m), None, d)
    return d
