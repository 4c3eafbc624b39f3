"""What the ops before a sublayer take beside their streams: tuples, made by their checks and passed on whole."""

from typing import NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.views import flat
from tk_mhc.lib.tokens import Streams, check_repeat


class PreArguments(NamedTuple):
    """How mixes become pre, post and comb."""

    mhc_scale: Tensor
    mhc_base: Tensor
    rms_eps: float
    mhc_pre_eps: float
    mhc_sinkhorn_eps: float
    mhc_post_mult_value: float
    sinkhorn_repeat: int


class PreOptions(NamedTuple):
    """The layer norm, and the shifted form of the collapse."""

    layer_norm_weight: Tensor | None = None
    layer_norm_eps: float = 0.0
    shifted: bool = False
    pre_mix: Tensor | None = None


def check_pre_arguments(
    streams: Streams,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> PreArguments:
    """Raise TypeError or ValueError that names the argument, unless all fit the streams."""
    check.tensor("mhc_scale", mhc_scale, (torch.float32,), (3,), device=streams.device)
    check.tensor("mhc_base", mhc_base, (torch.float32,), (streams.num_mixes,), device=streams.device)
    check.number("rms_eps", rms_eps, at_least=0)
    check.number("mhc_pre_eps", mhc_pre_eps, at_least=0)
    check.number("mhc_sinkhorn_eps", mhc_sinkhorn_eps, at_least=0)
    check.number("mhc_post_mult_value", mhc_post_mult_value)
    check_repeat("sinkhorn_repeat", sinkhorn_repeat)
    numbers = [float(x) for x in (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value)]
    return PreArguments(mhc_scale, mhc_base, *numbers, sinkhorn_repeat)


def check_pre_options(
    streams: Streams, layer_norm_weight: Tensor | None, layer_norm_eps: float, shifted: bool, pre_mix: Tensor | None
) -> PreOptions:
    """Raise TypeError or ValueError that names the argument, unless all fit the streams. Returns pre_mix (T, m, 1)."""
    leading, mhc_mult, hidden, device = streams
    if layer_norm_weight is not None:
        dtypes = (torch.bfloat16, torch.float32)
        check.tensor("layer_norm_weight", layer_norm_weight, dtypes, (hidden,), device=device)
    check.number("layer_norm_eps", layer_norm_eps, at_least=0)
    check.flag("shifted", shifted)
    if pre_mix is not None:
        check.require(shifted, "pre_mix", "None unless shifted is True", "a tensor")
        check.tensor("pre_mix", pre_mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
        pre_mix = flat(pre_mix, 2)
    return PreOptions(layer_norm_weight, float(layer_norm_eps), shifted, pre_mix)
