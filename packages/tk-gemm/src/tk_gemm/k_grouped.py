"""Gradients of the experts' weights, groups being ranges of K (tokens), in FP8 and in BF16.

    FP8     d[g] = Σ A·Bᵀ over the group's range of K, + c[g]       as fp8_gemm_nt with factors for each row of both
    BF16    d[g] = a[rows of g]ᵀ · b[rows of g] + c[g]              as bf16_gemm_tn

    K       0           128         256       384     512
    groups  | 0 0 0 pad | 1 1 1 1 1 1 1 1 pad | 2 pad | …    (padding is zero in a and b)

FP8 operands have one of two forms, by the rank of data:

    2-D    a (M, ΣK) and b (N, ΣK), each contiguous along K;      sf (ΣK/128, M) and (ΣK/128, N)
    1-D    one contiguous (M, K_g) after another, (N, K_g) too;  sf (M, ΣK/128), strides (1, M), and (N, ΣK/128), (1, N)

Both have the same factors in memory; packed, four blocks of K are a word, counted from the beginning of ΣK.
TMA loads rows that are equally far apart: each group of the second form has tensor maps of its own, in device memory.
"""

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from tk_core.op import launching, op
from tk_gemm import check
from tk_gemm.check import BF16, BLOCK, FLOAT32, Pair, Recipe
from tk_gemm.launch import Groups, launch_bf16, launch_fp8

_OUT = FLOAT32 + BF16

# Sums that CUDA graphs read: they must outlive the cache, as a graph keeps only their addresses.
_in_graphs: dict[int, Tensor] = {}


def _ends_of(ks: list[int] | Tensor, device: torch.device) -> Tensor:
    """Where each group ends, on the device: ks, or if that has the sizes, their running sums, copied there once."""
    if isinstance(ks, Tensor):
        return ks
    sums = _sums(tuple(ks), device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs[sums.data_ptr()] = sums
    return sums


@lru_cache(maxsize=1024)
def _sums(ks: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(ks)), dtype=torch.int32, device=device)


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor | None,
    ks: list[int] | Tensor,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
) -> Tensor:
    """Multiply a and b over each group's range of K, in FP8.

    A group's bits are those of `fp8_gemm_nt` with recipe (1, 1, 128). Name and arguments are DeepGEMM 2.6's.

    Args:
        a: `(data, sf)`: float8_e4m3fn (M, ΣK), M a multiple of 16, with float32 sf (ΣK/128, M) contiguous in M; or
            (M · ΣK,), one contiguous (M, K_g) after the other, with float32 sf (M, ΣK/128) of strides (1, M). On
            Blackwell int32 sf, ⌈ΣK/512⌉ in place of ΣK/128: the biased exponents of four blocks a word, counted from
            the beginning of ΣK, whatever the groups.
        b: The same with N, in the same form, with sf of a's dtype.
        d: float32 or bfloat16 (G, M, N), written; None: new, of c's dtype or float32.
        ks: Sizes of the groups, multiples of 128 that add up to ΣK; the first call with these sizes copies them to the
            device, which a CUDA graph cannot capture. Or int32 (G) on the device, where each group ends: the next one
            begins at the next multiple of 128, and channels in between must be zero in both operands. An end past ΣK
            counts as ΣK.
        grouped_layout: The sizes in ks on the device, int32 (G), only where ks is a list; without effect.
        c: (G, M, N) of d's dtype, added last; may be d. If it is, in float32, subnormal c and results count as 0.
            Groups without K give c, or zeros without c.
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
    check.recipe_of("recipe", recipe, ((1, 1, BLOCK),))
    check.without_effect(compiled_dims)
    x, total = check.fp8_k_operands(a, b)
    num_groups = check.k_groups(ks, grouped_layout, total, x.a.device)
    d = check.result(d, c, (num_groups, *x.shape), x.a, _OUT)
    if not launching(d):
        return d
    if not total:  # All groups are empty, and TMA takes no operand without elements.
        return d.zero_() if c is None else d.copy_(c)
    launch_fp8("tk_gemm.k_grouped_fp8_gemm_nt_contiguous", x, Groups("k", _ends_of(ks, x.a.device)), c, d)
    return d


@op(writes=("d",), aligned=(), in_place={"d": ("c",)}, min_sm=90)
def k_grouped_bf16_gemm_tn_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    ks: list[int] | Tensor,
    grouped_layout: Tensor | None = None,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
) -> Tensor:
    """Multiply aᵀ and b over each group's rows, in bfloat16. Name and arguments are DeepGEMM 2.6's.

    Args:
        a: bfloat16 (ΣK, M), M a multiple of 8, rows strided by multiples of 16 bytes; ΣK a multiple of 128.
        b: bfloat16 (ΣK, N), N a multiple of 8.
        d: float32 or bfloat16 (G, M, N), written; None: new, of c's dtype or float32.
        ks: The groups' sizes or ends, as `k_grouped_fp8_gemm_nt_contiguous` takes them.
        grouped_layout: The sizes in ks on the device, int32 (G), only where ks is a list; without effect.
        c: (G, M, N) of d's dtype, added last; may be d. If it is, in float32, subnormal c and results count as 0.
            Groups without rows give c, or zeros without c.
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
    check.without_effect(compiled_dims)
    x, total = check.bf16_k_operands(a, b)
    num_groups = check.k_groups(ks, grouped_layout, total, a.device)
    d = check.result(d, c, (num_groups, *x.shape), a, _OUT)
    if not launching(d):
        return d
    if not total:  # All groups are empty, and TMA takes no operand without elements.
        return d.zero_() if c is None else d.copy_(c)
    launch_bf16("tk_gemm.k_grouped_bf16_gemm_tn_contiguous", x, Groups("k", _ends_of(ks, a.device)), c, d)
    return d
