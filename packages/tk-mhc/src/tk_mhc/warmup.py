"""The calls that a model with hyper-connections makes of this package's ops; `tk warmup` compiles their kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

import tk_mhc as mhc
from tk_core.cli.profile import Call, empty, signature

_EPS = 1e-6  # of every kind: kernels take it when launched


@dataclass(frozen=True)
class Profile:
    """Section [tk_mhc] of a model's profile."""

    hidden: int
    mhc_mult: int = 4
    """Residual streams."""
    comb: bool = True
    """Whether streams are mixed: without, `broadcast` and `partial_splits` can't be."""
    post_eps: bool = False
    """Whether there is a number that is added to post."""
    sinkhorn_repeat: int = 10
    n_splits: int = 0
    """Splits of the projection; 0 for the number that follows from mhc_mult · hidden."""
    norm_weights: tuple[bool, ...] = (False,)
    """Whether the norm before the projection has weights."""
    layer_norms: tuple[Literal["none", "bfloat16", "float32"], ...] = ("none",)
    """Dtypes of the weight of the fused layer norm, "none" for no norm."""
    shifted: tuple[bool, ...] = (False,)
    """Whether the streams are collapsed by the pre mix of the sublayer before."""
    head: bool = True
    """Whether the streams are collapsed after the last sublayer by weights of their own."""
    broadcast: bool = False
    """Whether the first sublayer takes `mhc_pre_broadcast` rather than expanded streams."""
    partial_splits: tuple[int, ...] = ()
    """Splits for which `mhc_prenorm_gemm` and `mhc_pre_big_fuse_from_partials` are called."""
    rms_groups: tuple[int, ...] = (1,)
    """Numbers of groups of channels that `mhc_prenorm_gemm` sums separately."""
    recompute: tuple[tuple[int, int], ...] = ()
    """Numbers of layers and of posts that `mhc_multilayer_recompute` takes at a time."""
    training: bool = False
    """Whether the single steps and their backwards are called too."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    shared = _arguments(profile, num_tokens)

    def call(op: Any, **others: Any) -> Call:
        """The op with those of `shared` and `others` that it has a parameter for."""
        return op, {name: value for name, value in (shared | others).items() if name in signature(op).parameters}

    norm_weights = [empty(shared["fn"].shape[1]) if has_weight else None for has_weight in profile.norm_weights]
    options = list(_options(profile, shared["pre"]))
    head_fn = empty(profile.mhc_mult, shared["fn"].shape[1])
    yield call(mhc.expand_to_mhc)
    yield call(mhc.mhc_post)
    for norm_weight, each in product(norm_weights, options):
        yield call(mhc.mhc_pre_big_fuse, norm_weight=norm_weight, **each)
        yield call(mhc.mhc_post_pre, norm_weight=norm_weight, **each)
    if profile.broadcast:
        for norm_weight in norm_weights:
            yield call(mhc.mhc_fold_fn, norm_weight=norm_weight)
        yield call(mhc.mhc_pre_broadcast)
    for n_splits in profile.partial_splits:
        for num_rms_groups in profile.rms_groups:
            yield call(mhc.mhc_prenorm_gemm, n_splits=n_splits, num_rms_groups=num_rms_groups)
        mul, sqrsum = empty(n_splits, *shared["input_mixes"].shape), empty(n_splits, num_tokens)
        for each in options:
            yield call(mhc.mhc_pre_big_fuse_from_partials, gemm_out_mul=mul, gemm_out_sqrsum=sqrsum, **each)
    yield call(mhc.mhc_pre_apply_mix, x=shared["residual"])
    if profile.head:
        for norm_weight in norm_weights:
            yield call(mhc.mhc_pre_norm_fn, mhc_fn=head_fn, mhc_norm_weight=norm_weight)
        yield call(mhc.mhc_head_compute_mix, **_head(profile))
    for num_layers, num_posts in profile.recompute:
        yield call(mhc.mhc_multilayer_recompute, **_lists(shared, num_layers, num_posts))
    if not profile.training:
        return
    yield call(mhc.expand_to_mhc_bwd, d_o=shared["residual"])
    for fn, norm_weight in product((shared["fn"], head_fn) if profile.head else (shared["fn"],), norm_weights):
        forward = {"mhc_fn": fn, "mhc_norm_weight": norm_weight}
        yield call(mhc.mhc_pre_norm_fn, **forward)
        mixes = empty(num_tokens, fn.shape[0])
        for d_residual in (None, shared["residual"]):
            yield call(mhc.mhc_pre_norm_fn_bwd, **forward, d_mixes=mixes, mixes=mixes, d_residual=d_residual)
    yield call(mhc.mhc_pre_split_mixes)
    yield call(mhc.mhc_pre_split_mixes_bwd)
    if profile.comb:
        yield call(mhc.sinkhorn_normalize, x=shared["d_comb"])
        yield call(mhc.sinkhorn_normalize_bwd, d_o=shared["d_comb"], x=shared["d_comb"])
    for d_x in (None, shared["residual"]):
        yield call(mhc.mhc_pre_apply_mix_bwd, d_o=shared["x"], x=shared["residual"], d_x=d_x)
    yield call(mhc.mhc_post_bwd, d_o=shared["residual"])
    if profile.head:
        yield call(mhc.mhc_head_compute_mix_bwd, d_o=shared["input_mix"], **_head(profile))


def _arguments(profile: Profile, num_tokens: int) -> dict[str, Any]:
    """Arguments by the names of the ops' parameters, where these mean the same in most of the ops."""
    mhc_mult, hidden = profile.mhc_mult, profile.hidden
    num_mixes = mhc_mult * (mhc_mult + 2 if profile.comb else 2)
    x, residual = empty(num_tokens, hidden, dtype="bfloat16"), empty(num_tokens, mhc_mult, hidden, dtype="bfloat16")
    mix, comb = empty(num_tokens, mhc_mult, 1), empty(num_tokens, mhc_mult, mhc_mult)
    mixes = {"input_mixes": empty(num_tokens, num_mixes), "input_mix": empty(num_tokens, mhc_mult)}
    mixes |= {"mhc_scale": empty(3 if profile.comb else 2), "mhc_base": empty(num_mixes), "mhc_mult": mhc_mult}
    weights = {"post_layer_mix": mix, "comb_res_mix": comb if profile.comb else None, "pre": mix, "mix": mix}
    gradients = {"d_pre": mix, "d_post": mix, "d_comb": weights["comb_res_mix"], "rstd": empty(num_tokens)}
    projections = {"fn": empty(num_mixes, mhc_mult * hidden), "fn_folded": empty(num_mixes, hidden)}
    numbers = dict.fromkeys(("rms_eps", "mhc_norm_eps", "mhc_pre_eps", "mhc_sinkhorn_eps", "eps"), _EPS)
    numbers |= {"mhc_post_mult_value": 1.0, "n_splits": profile.n_splits or None}
    numbers["mhc_post_eps"] = _EPS if profile.post_eps else 0.0
    numbers |= dict.fromkeys(("sinkhorn_repeat", "repeat"), profile.sinkhorn_repeat)
    return {"x": x, "hidden": x, "residual": residual, **mixes, **weights, **gradients, **projections, **numbers}


def _options(profile: Profile, pre: torch.Tensor) -> Iterator[dict[str, Any]]:
    """A fused norm, and the shifted form: without a pre_mix for the first sublayer, with one for the others."""
    for dtype, shifted in product(profile.layer_norms, profile.shifted):
        weight = None if dtype == "none" else empty(profile.hidden, dtype=dtype)
        for pre_mix in (None, pre) if shifted else (None,):
            yield {"layer_norm_weight": weight, "shifted": shifted, "pre_mix": pre_mix}


def _head(profile: Profile) -> dict[str, torch.Tensor]:
    return {"mhc_scale": empty(1), "mhc_base": empty(profile.mhc_mult)}


def _lists(shared: dict[str, Any], num_layers: int, num_posts: int) -> dict[str, Any]:
    """Arguments of mhc_multilayer_recompute, which always takes a comb; what it writes has memory of its own."""
    num_tokens, mhc_mult, _ = shared["residual"].shape
    return {
        "initial_residual": shared["residual"],
        "pre_mix_list": [shared["pre"]] * num_layers,
        "layer_output_list": [shared["x"]] * num_posts,
        "post_mix_list": [shared["post_layer_mix"]] * num_posts,
        "comb_mix_list": [empty(num_tokens, mhc_mult, mhc_mult)] * num_posts,
        "layer_input_list": [torch.empty_like(shared["x"]) for _ in range(num_layers)],
        "residual_list": [torch.empty_like(shared["residual"]) for _ in range(num_posts)],
    }
