"""m_grouped_fp8_gemm_nt_masked: a buffer of rows for each expert, of which the first masked_m are multiplied, in FP8.

    d[g, r] = a[g, r] · b[g]ᵀ  for r < masked_m[g]; other rows of d are not written

For decoding under CUDA graphs: nothing is read back. Numerics are those of `fp8_gemm_nt`, to the bit.
"""

import torch

from tk_core.op import launching, op
from tk_gemm.lib.groups import check_masked_m
from tk_gemm.lib.launch_fp8_product import launch_fp8_product
from tk_gemm.lib.operands import (
    BF16,
    BLOCK,
    E4M3,
    FACTORS,
    compiler_hints,
    fp8_weights,
    matrix,
    only_per_block,
    pair,
    per_row_factors,
    positive_multiple,
    result,
)

Pair = tuple[torch.Tensor, torch.Tensor]


@op(writes=("d",), aligned=(), min_sm=90)
def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
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
        recipe_a: (1, 128), instead of recipe.
        recipe_b: (128, 128), instead of recipe.
        compiled_dims: For DeepGEMM's compiler; without effect here.
        disable_ue8m0_cast: Of DeepGEMM; without effect.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or expected_m is not an int.
        ValueError: A shape, stride, base (16 bytes), device or recipe is not as described, d overlaps an operand, or
            with TK_DEBUG=1 masked_m is negative.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    only_per_block(recipe, recipe_a, recipe_b)
    compiler_hints(compiled_dims, disable_ue8m0_cast)
    a_data, a_sf = pair("a", a)
    num_groups, max_m, num_channels = matrix("a[0]", a_data, E4M3, ("G", "M_max", "K"))
    positive_multiple("a[0] (K)", num_channels, BLOCK)
    device = a_data.device
    per_row_factors("a[1]", a_sf, (num_groups, max_m, num_channels // BLOCK), device, FACTORS)
    b_data, b_sf = fp8_weights(b, num_channels, device, num_groups, a_sf.dtype)
    check_masked_m(masked_m, expected_m, num_groups, device)
    d = result(d, None, (num_groups, max_m, b_data.shape[1]), a_data, BF16)
    if launching(d):
        operands = a_data, a_sf, b_data, b_sf
        launch_fp8_product("tk_gemm.m_grouped_fp8_gemm_nt_masked", "masked", *operands, masked_m, None, d, expected_m)
    return d
