"""Reference of mhc_pre_split_mixes."""

import torch
from torch import Tensor


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    *,
    mhc_post_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """z = mixes · scale of the group + base; sigmoid(z) + pre_eps, sigmoid(z) · post_mult_value + post_eps, z as m × m.

    Of 2m mixes there are only the first two groups, and None instead of the last result.
    """
    groups = (mhc_mult, mhc_mult, mhc_mult * mhc_mult)[: len(mhc_scale)]
    pairs = zip(input_mixes.split(groups, -1), mhc_scale, mhc_base.split(groups), strict=True)
    pre, post, *comb = (mixes * scale + base for mixes, scale, base in pairs)
    return (
        (torch.sigmoid(pre) + mhc_pre_eps).unsqueeze(-1),
        (torch.sigmoid(post) * mhc_post_mult_value + mhc_post_eps).unsqueeze(-1),
        comb[0].unflatten(-1, (mhc_mult, mhc_mult)) if comb else None,
    )
