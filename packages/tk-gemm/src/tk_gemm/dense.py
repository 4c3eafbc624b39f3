"""Dense products D = A·Bᵀ + C, in FP8 and in BF16; nn, tn, tt are views of nt.

FP8 operands are e4m3 with a scale factor for each 128 channels:

    acc[m, n] = 0;  for each block k of 128 channels, in order:
        acc[m, n] = fma(a_sf[m, k] · b_sf[n, k], Σ_j a[m, 128 k + j] · b[n, 128 k + j], acc[m, n])
    d[m, n] = round(acc[m, n] + c[m, n])

in float32, with b_sf of the row's 128 × 128 block, or of the row itself. This is Hopper's order: Blackwell's tensor
cores scale and sum products of 32 channels. In BF16

    d[m, n] = round(Σ_k a[m, k] · b[n, k] + c[m, n])

where the tensor core adds 16 products at a time to a float32 accumulator, in the order of K. docs/tuning/gemm.md has
the kernels' plan.
"""

import torch
from torch import Tensor

from tk_core.op import launching, op
from tk_gemm import check
from tk_gemm.check import BF16, FLOAT32, Pair, Recipe, SideRecipe
from tk_gemm.launch import Groups, launch_bf16, launch_fp8
from tk_gemm.layout import get_mn_major_tma_aligned_tensor
from tk_gemm.views import transposed, view_of


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe | None = None,
    recipe_a: SideRecipe | None = None,
    recipe_b: SideRecipe | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """D = A·Bᵀ + C in FP8: products of blocks of 128 channels, scaled and summed in float32, in the order of K.

    A row's bits depend on that row of a and on b alone. Name and arguments are DeepGEMM 2.6's; there d is required.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 128.
            float32 sf (M, K/128), row major, or column major with columns a multiple of 4 elements apart. On Blackwell
            int32 (M, ⌈K/512⌉), column major: four biased exponents a word, as casts with use_packed_ue8m0 write them.
        b: `(data, sf)`: float8_e4m3fn (N, K), N a multiple of 16; sf of a's dtype, (⌈N/128⌉, K/128) of any strides, or
            with factors for each row (N, K/128) as a's.
        d: bfloat16 or float32 (M, N), written; by default new, of c's dtype or, without c, bfloat16. With factors for
            each row of b only float32.
        c: (M, N) of d's dtype, added last; may be d. If it is, in float32, subnormal c and results count as 0.
        recipe: (1, 128, 128), the default, or (1, 1, 128): factors for each row of b.
        recipe_a: (1, 128), instead of recipe.
        recipe_b: (128, 128) or (1, 128), instead of recipe.
        compiled_dims, disable_ue8m0_cast: Of DeepGEMM; without effect.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or a is no pair.
        ValueError: A shape, stride, base (16 bytes), device or recipe is not as described, or d overlaps an operand.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    b_is_per_row = check.is_per_row(recipe, recipe_a, recipe_b)
    check.without_effect(compiled_dims, disable_ue8m0_cast=disable_ue8m0_cast)
    x = check.fp8_operands(a, b, b_is_per_row=b_is_per_row)
    d = check.result(d, c, x.shape, x.a, FLOAT32 if b_is_per_row else BF16 + FLOAT32)
    if launching(d):
        groups = Groups()
        if b_is_per_row and x.a_sf.dtype is torch.float32:
            a_sf, b_sf = (get_mn_major_tma_aligned_tensor(sf) for sf in (x.a_sf, x.b_sf))
            x = x._replace(a_sf=a_sf, b_sf=b_sf)
            groups = Groups("k", x.a.new_full((1,), x.a.shape[1], dtype=torch.int32))
        launch_fp8("tk_gemm.fp8_gemm_nt", x, groups, c, d)
    return d


@view_of(fp8_gemm_nt)
def fp8_gemm_nn(a: Pair, b: Pair) -> tuple[Pair, Pair]:
    """D = A·B + C: `fp8_gemm_nt` of a (M, K) and b (K, N), whose memory is contiguous along K all the same.

    Hopper's FP8 products read both operands along K: a transposed operand is a view, such as `(w.t(), w_sf.t())`.
    Shapes, strides and factors are those of `fp8_gemm_nt` once it is transposed back; the same errors.
    """
    return a, transposed(b)


@view_of(fp8_gemm_nt)
def fp8_gemm_tn(a: Pair, b: Pair) -> tuple[Pair, Pair]:
    """D = Aᵀ·B + C: `fp8_gemm_nt` of a (K, M) and b (K, N), contiguous along K, as in `fp8_gemm_nn`."""
    return transposed(a), transposed(b)


@view_of(fp8_gemm_nt)
def fp8_gemm_tt(a: Pair, b: Pair) -> tuple[Pair, Pair]:
    """D = Aᵀ·Bᵀ + C: `fp8_gemm_nt` of a (K, M) and b (N, K), contiguous along K, as in `fp8_gemm_nn`."""
    return transposed(a), b


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def bf16_gemm_nt(
    a: Tensor, b: Tensor, d: Tensor | None = None, c: Tensor | None = None, compiled_dims: str = "nk"
) -> Tensor:
    """D = A·Bᵀ + C in bfloat16: products summed in float32, in the order of K, and rounded once.

    A row's bits depend on that row of a and on b alone, not on their strides. Name and arguments are DeepGEMM 2.6's;
    there d is required.

    Args:
        a: bfloat16 (M, K), rows strided by multiples of 16 bytes; M from 0, K a multiple of 64. Or a transposed view,
            contiguous along M, with columns strided by multiples of 16 bytes.
        b: bfloat16 (N, K), N a multiple of 8; or a transposed view, as a.
        d: bfloat16 or float32 (M, N), written; by default new, of c's dtype or, without c, bfloat16.
        c: (M, N) of d's dtype, added last; may be d. If it is, in float32, subnormal c and results count as 0.
        compiled_dims: For DeepGEMM's compiler; without effect here.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype.
        ValueError: A shape, stride, base (16 bytes) or device is not as described, or d overlaps an operand.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) and Blackwell (sm_100a, sm_103a), unless
            TK_BACKEND=reference.
    """
    check.without_effect(compiled_dims)
    x = check.bf16_operands(a, b)
    d = check.result(d, c, x.shape, x.a, BF16 + FLOAT32)
    if launching(d):
        launch_bf16("tk_gemm.bf16_gemm_nt", x, Groups(), c, d)
    return d


@view_of(bf16_gemm_nt)
def bf16_gemm_nn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """D = A·B + C: `bf16_gemm_nt` of a (M, K) and b (K, N), read as they lie. The same errors."""
    return a, transposed(b)


@view_of(bf16_gemm_nt)
def bf16_gemm_tn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """D = Aᵀ·B + C: `bf16_gemm_nt` of a (K, M) and b (K, N), read as they lie. The same errors."""
    return transposed(a), transposed(b)


@view_of(bf16_gemm_nt)
def bf16_gemm_tt(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """D = Aᵀ·Bᵀ + C: `bf16_gemm_nt` of a (K, M) and b (N, K), read as they lie. The same errors."""
    return transposed(a), b
