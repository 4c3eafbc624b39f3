"""What the ops before a sublayer take beside their streams: tuples that are checked once and passed on whole."""

from typing import NamedTuple

import torch
from torch import Tensor

from tk_core import check
from tk_core.views import flat
from tk_mhc.lib.tokens import Streams, check_repeat, mix_counts


class PreArguments(NamedTuple):
    """How mixes become pre, post and comb."""

    mhc_scale: Tensor
    mhc_base: Tensor
    rms_eps: float
    mhc_pre_eps: float
    mhc_sinkhorn_eps: float
    mhc_post_mult_value: float
    sinkhorn_repeat: int | None
    """None without comb, once checked."""
    mhc_post_eps: float = 0.0

    def checked(self, streams: Streams, num_mixes: int) -> "PreArguments":
        """These for `num_mixes` mixes of a token, as `mix_counts` has them; the numbers as floats.

        Raises TypeError or ValueError that names the argument that does not fit.
        """
        scale, base, *numbers, sinkhorn_repeat, post_eps = self
        has_comb = num_mixes == mix_counts(streams.mhc_mult)[0]
        check.tensor("mhc_scale", scale, (torch.float32,), (3 if has_comb else 2,), device=streams.device)
        check.tensor("mhc_base", base, (torch.float32,), (num_mixes,), device=streams.device)
        check.number("rms_eps", self.rms_eps, at_least=0)
        check.number("mhc_pre_eps", self.mhc_pre_eps, at_least=0)
        check.number("mhc_sinkhorn_eps", self.mhc_sinkhorn_eps, at_least=0)
        check.number("mhc_post_mult_value", self.mhc_post_mult_value)
        check_repeat("sinkhorn_repeat", sinkhorn_repeat)
        check.number("mhc_post_eps", post_eps, at_least=0)
        repeat = sinkhorn_repeat if has_comb else None
        return PreArguments(scale, base, *[float(x) for x in numbers], repeat, float(post_eps))


class PreOptions(NamedTuple):
    """The layer norm, and the shifted form of the collapse."""

    layer_norm_weight: Tensor | None = None
    layer_norm_eps: float = 0.0
    shifted: bool = False
    pre_mix: Tensor | None = None

    def checked(self, streams: Streams) -> "PreOptions":
        """These, pre_mix as (T, m, 1). Raises TypeError or ValueError that names the argument that does not fit."""
        leading, mhc_mult, hidden, device = streams
        weight, eps, shifted, pre_mix = self
        if weight is not None:
            check.tensor("layer_norm_weight", weight, (torch.bfloat16, torch.float32), (hidden,), device=device)
        check.number("layer_norm_eps", eps, at_least=0)
        check.flag("shifted", shifted)
        if pre_mix is not None:
            check.require(shifted, "pre_mix", "None unless shifted is True", "a tensor")
            check.tensor("pre_mix", pre_mix, (torch.float32,), (*leading, mhc_mult, 1), device=device)
            pre_mix = flat(pre_mix, 2)
        return PreOptions(weight, float(eps), shifted, pre_mix)
