"""Layouts that the products take: of scale factors, of interleaved weights, of groups; and the limit on SMs."""

import torch
from torch import Tensor

from tk_core import check
from tk_core.math import align, ceil_div
from tk_core.num_sms import get_num_sms as get_num_sms
from tk_core.num_sms import set_num_sms as set_num_sms
from tk_gemm.check import BLOCK, FACTORS, FLOAT32, Pair, Recipe, SideRecipe, factors, positive_multiple, recipe_of
from tk_gemm.tma import bytes_off


def get_mn_major_tma_aligned_tensor(x: Tensor) -> Tensor:
    """Give float32 factors (R, C) or (G, R, C) the strides (1, align(R, 4)), groups one after the other.

    Returns x itself if it has those strides already and its base is on 16 bytes, else a copy; on any device, in plain
    PyTorch. The name is DeepGEMM 2.6's. Raises TypeError for another dtype, ValueError for another rank.
    """
    check.tensor("x", x, FLOAT32, (..., "R", "C"), layout="any")
    check.require(x.ndim in (2, 3), "x", "2 or 3 dimensions", x.ndim)
    num_rows, num_cols = x.shape[-2:]
    column = align(num_rows, 4)
    strides = (column * num_cols, 1, column)[-x.ndim :]
    if x.stride() == strides and not bytes_off(x):
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def transform_sf_into_required_layout(
    sf: Tensor,
    mn: int,
    k: int,
    recipe: SideRecipe | Recipe,
    num_groups: int | None = None,
    is_sfa: bool = False,
    disable_ue8m0_cast: bool = False,
) -> Tensor:
    """Factors of an operand (mn, k), or (num_groups, mn, k), as Hopper's kernels read them best.

    Factors for each row become column major with columns on 16 bytes; those of 128 × 128 blocks stay as they are. The
    name and arguments are DeepGEMM 2.6's.

    Args:
        sf: float32 (mn, ⌈k/128⌉) or (⌈mn/128⌉, ⌈k/128⌉), before them num_groups if that is given; of any strides.
        mn: Rows of the operand, M or N.
        k: Channels.
        recipe: (1, 128) or (128, 128), the operand's block; or a product's (1, 128, 128) or (1, 1, 128), of which
            is_sfa chooses the side.
        num_groups: None without groups.
        is_sfa: sf is A's; used only with a recipe of three numbers.
        disable_ue8m0_cast: Of DeepGEMM; without effect on float32 factors.

    Raises:
        TypeError: sf is no float32 tensor, or a number is no int.
        ValueError: sf has another shape, or recipe has other blocks.
    """
    check.in_range("mn", mn, 0, 2**31 - 1)
    check.in_range("k", k, 0, 2**31 - 1)
    check.flag("is_sfa", is_sfa)
    check.flag("disable_ue8m0_cast", disable_ue8m0_cast)
    recipe_of("recipe", recipe, ((1, BLOCK), (BLOCK, BLOCK), (1, BLOCK, BLOCK), (1, 1, BLOCK)))
    rows = recipe[0] if len(recipe) == 2 or is_sfa else recipe[1]
    shape: tuple[int, ...] = (ceil_div(mn, rows), ceil_div(k, BLOCK))
    if num_groups is not None:
        check.in_range("num_groups", num_groups, 1, 2**31 - 1)
        shape = (num_groups, *shape)
    check.tensor("sf", sf, FLOAT32, shape, layout="any")
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf


def interleave_gate_and_up(b: Pair) -> Pair:
    """Put rows [gate | up] of each group in runs of 128: gate, up, gate, up, … once, when weights are loaded.

    A thread block of `m_grouped_fp8_gemm_swiglu_nt_contiguous` then has the gate and up columns of its outputs. Plain
    PyTorch on any device.

    Args:
        b: `(data, sf)`: float8_e4m3fn (G, 2 · I, K), the gate's rows first, I and K multiples of 128, contiguous;
            float32 sf (G, 2 · I / 128, K / 128), or int32 (G, 2 · I / 128, ⌈K / 512⌉) as Blackwell takes it.

    Returns:
        `(data, sf)`, new tensors of the same shapes.

    Raises:
        TypeError: b is no pair, or a tensor has another dtype.
        ValueError: A shape, stride or device is not as described.
    """
    data, sf = check.pair("b", b)
    num_groups, num_rows, num_channels = check.tensor("b[0]", data, (torch.float8_e4m3fn,), ("G", "2 * I", "K"))
    positive_multiple("b[0] (2 * I)", num_rows, 2 * BLOCK)
    positive_multiple("b[0] (K)", num_channels, BLOCK)
    shape = (num_groups, num_rows // BLOCK, num_channels // BLOCK)
    factors("b[1]", sf, shape, data.device, FACTORS)
    sides = (x.unflatten(1, (2, num_rows // (2 * BLOCK), -1)).transpose(1, 2) for x in (data.view(torch.uint8), sf))
    runs, sf_runs = (x.clone(memory_format=torch.contiguous_format) for x in sides)
    return runs.view(data.shape).view(data.dtype), sf_runs.view(sf.shape)


def get_mk_alignment_for_contiguous_layout() -> int:
    """128: each group begins at a multiple of this, in rows (M) or, in the K-grouped products, along K."""
    return BLOCK


def set_mk_alignment_for_contiguous_layout(new_alignment: int) -> None:
    """Accept 128, for DeepGEMM's callers. Raises TypeError for anything but an int, ValueError for other alignments."""
    check.integer("new_alignment", new_alignment)
    check.require(new_alignment == BLOCK, "new_alignment", f"{BLOCK}, the only one", new_alignment)
