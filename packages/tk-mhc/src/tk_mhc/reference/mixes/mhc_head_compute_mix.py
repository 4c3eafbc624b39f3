"""Reference of mhc_head_compute_mix."""

import torch
from torch import Tensor


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """sigmoid(mix · scale + base) + pre_eps."""
    return torch.sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps
