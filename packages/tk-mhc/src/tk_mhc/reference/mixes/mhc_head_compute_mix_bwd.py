"""Reference of mhc_head_compute_mix_bwd."""

import torch
from torch import Tensor


def mhc_head_compute_mix_bwd(
    d_o: Tensor, input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """d_z = d_o · s(1 - s) with s = sigmoid(mix · scale + base); d_mix = d_z · scale.

    d_scale = Σ d_z · mix over tokens and streams, d_base = Σ d_z over tokens, in float64.
    """
    s = torch.sigmoid(input_mix * mhc_scale + mhc_base)
    d_z = d_o * (s * (1 - s))
    tokens = d_z.double().view(-1, d_z.shape[-1])
    d_scale = (tokens * input_mix.reshape(tokens.shape)).sum().view(1)
    return d_z * mhc_scale, d_scale.to(d_z.dtype), tokens.sum(0).to(d_z.dtype)
