"""k_grouped_fp8_gemm_nt_contiguous: gradients of the experts' weights, groups being ranges of K (tokens), in FP8.

    d[g] = Σ A·Bᵀ over the group's range of K, + c[g]

Numerics are those of `fp8_gemm_nt` with factors for each row on both sides. Two forms of the operands, by the rank of
data:

    2-D    a (M, ΣK) and b (N, ΣK), each contiguous along K;      sf (ΣK/128, M) and (ΣK/128, N)
    1-D    one contiguous (M, K_g) after another, (N, K_g) too;  sf (M, ΣK/128), strides (1, M), and (N, ΣK/128), (1, N)

Both have the same factors in memory; packed, four blocks of K are a word, counted from the beginning of ΣK.
TMA loads rows that are equally far apart, so a kernel first copies the second form's data into the first.
"""

from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch
from tk_core.math import ceil_div
from tk_core.op import launching, op
from tk_gemm.lib.archs import arch_of_factors
from tk_gemm.lib.gather_groups import gather_groups_kernel
from tk_gemm.lib.k_groups import check_ks, ends_of, finish_without_k
from tk_gemm.lib.launch_fp8_product import launch_fp8_k_product
from tk_gemm.lib.operands import (
    BLOCK,
    E4M3,
    FACTORS,
    aligned,
    compiler_hints,
    matrix,
    pair,
    positive_multiple,
    recipe_of,
    result,
)

Pair = tuple[torch.Tensor, torch.Tensor]

_NAME = "tk_gemm.k_grouped_fp8_gemm_nt_contiguous"
_OUT = (torch.float32, torch.bfloat16)


def _gathered(flat: torch.Tensor, num_rows: int, ends: torch.Tensor, arch: Arch) -> torch.Tensor:
    """The matrices of all groups side by side: a copy (rows, ΣK)."""
    out = flat.new_empty((num_rows, flat.numel() // num_rows))
    gather_groups_kernel(arch)(flat.view(torch.int32), ends, out.view(torch.int32))
    return out


def _operand(
    name: str, x: Any, device: torch.device | None, dtypes: tuple[torch.dtype, ...]
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Check one operand, with factors of one of these dtypes; return data, factors, rows, ΣK."""
    data, sf = pair(name, x)
    is_flat = isinstance(data, torch.Tensor) and data.ndim == 1
    if is_flat:
        check.tensor(f"{name}[0]", data, E4M3, ("rows * K",), device=device)
        aligned(f"{name}[0]", data)
        num_rows, _ = check.tensor(f"{name}[1]", sf, dtypes, ("rows", "K / 128"), layout="any")
    else:
        num_rows, _ = matrix(f"{name}[0]", data, E4M3, ("rows", "K"), device)
    positive_multiple(f"{name} (rows)", num_rows, 16)
    total = data.numel() // num_rows
    is_whole = data.numel() == num_rows * total and total % BLOCK == 0
    check.require(is_whole, f"{name}[0]", "{} rows of a multiple of {} elements", data.numel(), num_rows, BLOCK)
    is_packed = isinstance(sf, torch.Tensor) and sf.dtype is torch.int32
    num_factors = ceil_div(total, 4 * BLOCK) if is_packed else total // BLOCK
    factors = (f"{name}[1] transposed", sf.t()) if is_flat else (f"{name}[1]", sf)
    matrix(*factors, dtypes, (num_factors, num_rows), data.device)
    return data, sf, num_rows, total


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: torch.Tensor | None,
    ks: list[int] | torch.Tensor,
    grouped_layout: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
) -> torch.Tensor:
    """Multiply a and b over each group's range of K, in FP8.

    A group's bits are those of `fp8_gemm_nt` with recipe (1, 1, 128). Name and arguments are DeepGEMM 2.6's.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, ΣK), M a multiple of 16, with float32 sf (ΣK/128, M) contiguous in M; or
            (M · ΣK,), one contiguous (M, K_g) after the other, with float32 sf (M, ΣK/128) of strides (1, M). On a GPU
            that form is copied into the first one. On Blackwell int32 sf, ⌈ΣK/512⌉ in place of ΣK/128: the biased
            exponents of four blocks a word, counted from the beginning of ΣK, whatever the groups.
        b: The same with N, in the same form, with sf of a's dtype.
        d: float32 or bfloat16 (G, M, N), written; None: new, of c's dtype or float32.
        ks: Sizes of the groups, multiples of 128 that add up to ΣK; the first call with these sizes copies them to the
            device, which a CUDA graph cannot capture. Or int32 (G) on the device, where each group ends: the next one
            begins at the next multiple of 128, and channels in between must be zero in both operands. An end past ΣK
            counts as ΣK.
        grouped_layout: The sizes in ks on the device, int32 (G), only where ks is a list; without effect.
        c: (G, M, N) of d's dtype, added last; may be d. Groups without K give c, or zeros without c.
        recipe: (1, 1, 128).
        compiled_dims: For DeepGEMM's compiler; without effect here.

    Returns:
        d.

    Raises:
        TypeError: A tensor is of another type or dtype, or ks is no list of int.
        ValueError: A shape, stride, base (16 bytes), device or recipe is not as described, d overlaps an operand, or
            with TK_DEBUG=1 the values of ks or grouped_layout are not.
        UnsupportedArchError: On a GPU other than Hopper (sm_90a) with float32 factors and Blackwell (sm_100a, sm_103a)
            with packed ones, unless TK_BACKEND=reference.
    """
    recipe_of("recipe", recipe, ((1, 1, BLOCK),))
    compiler_hints(compiled_dims)
    a_data, a_sf, num_rows, total = _operand("a", a, None, FACTORS)
    device = a_data.device
    b_data, b_sf, num_cols, b_total = _operand("b", b, device, (a_sf.dtype,))
    check.require(b_data.ndim == a_data.ndim, "b[0]", "{} dimensions as a[0]", b_data.ndim, a_data.ndim)
    check.require(b_total == total, "b (K)", "{} as a's", b_total, total)
    num_groups = check_ks(ks, grouped_layout, total, device)
    d = result(d, c, (num_groups, num_rows, num_cols), a_data, _OUT)
    if not launching(d):
        return d
    if not total:
        finish_without_k(c, d)
        return d
    ends = ends_of(ks, device)
    if a_data.ndim == 1:
        arch = arch_of_factors(_NAME, a_sf)
        a_data, b_data = _gathered(a_data, num_rows, ends, arch), _gathered(b_data, num_cols, ends, arch)
        a_sf, b_sf = a_sf.t(), b_sf.t()
    launch_fp8_k_product(_NAME, a_data, a_sf, b_data, b_sf, ends, c, d)
    return d
