"""Reference of mhc_pre_split_mixes_bwd."""

import torch
from torch import Tensor


def mhc_pre_split_mixes_bwd(
    d_pre: Tensor,
    d_post: Tensor,
    d_comb: Tensor | None,
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_z = d_pre · s(1 - s), d_post · post_mult_value · s(1 - s), d_comb; s = sigmoid(z), z = mixes · scale + base.

    d_mixes = d_z · scale; d_scale = Σ d_z · mixes over tokens and the group, d_base = Σ d_z over tokens, in float64.
    Of 2m mixes there are only the first two groups, and d_comb is None.
    """
    groups = (mhc_mult, mhc_mult, mhc_mult * mhc_mult)[: len(mhc_scale)]
    columns = zip(input_mixes.split(groups, -1), mhc_scale, mhc_base.split(groups), strict=True)
    slopes = []
    for mixes, scale, base in columns:
        s = torch.sigmoid(mixes * scale + base)
        slopes.append(s * (1 - s))
    d_z_pre, d_z_post = d_pre.squeeze(-1) * slopes[0], d_post.squeeze(-1) * mhc_post_mult_value * slopes[1]
    d_z = torch.cat((d_z_pre, d_z_post, *([] if d_comb is None else [d_comb.flatten(-2)])), -1)
    scales = torch.cat([scale.expand(size) for scale, size in zip(mhc_scale, groups, strict=True)])
    tokens = d_z.double().view(-1, d_z.shape[-1])
    products = tokens * input_mixes.reshape(tokens.shape)
    d_scale = torch.stack([group.sum() for group in products.split(groups, -1)])
    return d_z * scales, d_scale.to(d_z.dtype), tokens.sum(0).to(d_z.dtype)
