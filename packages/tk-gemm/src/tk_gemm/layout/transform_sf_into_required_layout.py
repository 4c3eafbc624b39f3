"""transform_sf_into_required_layout: scale factors as the products of this package read them best."""

import torch

from tk_core import check
from tk_core.math import ceil_div
from tk_gemm.layout.get_mn_major_tma_aligned_tensor import get_mn_major_tma_aligned_tensor
from tk_gemm.lib.operands import BLOCK, FLOAT32, recipe_of


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, int] | tuple[int, int, int],
    num_groups: int | None = None,
    is_sfa: bool = False,
    disable_ue8m0_cast: bool = False,
) -> torch.Tensor:
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
    allowed = ((1, BLOCK), (BLOCK, BLOCK), (1, BLOCK, BLOCK), (1, 1, BLOCK))
    recipe_of("recipe", recipe, allowed)
    rows = recipe[0] if len(recipe) == 2 or is_sfa else recipe[1]
    shape: tuple[int, ...] = (ceil_div(mn, rows), ceil_div(k, BLOCK))
    if num_groups is not None:
        check.in_range("num_groups", num_groups, 1, 2**31 - 1)
        shape = (num_groups, *shape)
    check.tensor("sf", sf, FLOAT32, shape, layout="any")
    return get_mn_major_tma_aligned_tensor(sf) if rows == 1 else sf
