"""Reference of mhc_post_pre."""

from torch import Tensor

from tk_mhc import reference


def mhc_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor | None,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int | None = None,
    norm_weight: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    layer_norm_eps: float = 1e-6,
    shifted: bool = False,
    pre_mix: Tensor | None = None,
    mhc_post_eps: float = 0.0,
) -> tuple[Tensor | None, ...]:
    """mhc_post of a sublayer, then mhc_pre_big_fuse of the next one on the residual that mhc_post gives.

    Returns (new_residual, post, comb, layer_input), and with shifted next_pre_mix.
    """
    new_residual = reference.mhc_post(x, residual, post_layer_mix, comb_res_mix)
    results = reference.mhc_pre_big_fuse(
        new_residual,
        fn,
        mhc_scale,
        mhc_base,
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
        sinkhorn_repeat,
        n_splits,
        norm_weight,
        layer_norm_weight=layer_norm_weight,
        layer_norm_eps=layer_norm_eps,
        shifted=shifted,
        pre_mix=pre_mix,
        mhc_post_eps=mhc_post_eps,
    )
    return new_residual, *results
