"""Reference of mhc_multilayer_recompute."""

from collections.abc import Sequence

from torch import Tensor

from tk_mhc.reference.collapse.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_mhc.reference.post.mhc_post import mhc_post


def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """For each layer in turn, mhc_pre_apply_mix and then mhc_post, which may be missing after the last."""
    residual = initial_residual
    for i, (pre_mix, layer_input) in enumerate(zip(pre_mix_list, layer_input_list, strict=True)):
        mhc_pre_apply_mix(residual, pre_mix, out=layer_input)
        if i < len(residual_list):
            mhc_post(layer_output_list[i], residual, post_mix_list[i], comb_mix_list[i], out=residual_list[i])
            residual = residual_list[i]
