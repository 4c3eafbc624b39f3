"""The calls that a model with hyper-connections makes of this package's ops; `tk warmup` compiles their kernels."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

import tk_mhc as mhc
from tk_core.cli.profile import Call, empty

_EPS = 1e-6  # of every kind: kernels take it when launched


@dataclass(frozen=True)
class Profile:
    """Section [tk_mhc] of a model's profile."""

    hidden: int
    mhc_mult: int = 4
    """Residual streams."""
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
    yield from _layers(profile, num_tokens)
    yield from _partials(profile, num_tokens)
    yield from _collapse(profile, num_tokens)
    yield from _recompute(profile, num_tokens)
    if profile.training:
        yield from _training(profile, num_tokens)


def _residual(profile: Profile, num_tokens: int) -> torch.Tensor:
    return empty(num_tokens, profile.mhc_mult, profile.hidden, dtype=torch.bfloat16)


def _hidden(profile: Profile, num_tokens: int) -> torch.Tensor:
    return empty(num_tokens, profile.hidden, dtype=torch.bfloat16)


def _mixes(profile: Profile, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre, post and comb."""
    mhc_mult = profile.mhc_mult
    pre, post = (empty(num_tokens, mhc_mult, 1) for _ in range(2))
    return pre, post, empty(num_tokens, mhc_mult, mhc_mult)


def _num_rows(profile: Profile) -> int:
    return profile.mhc_mult * (profile.mhc_mult + 2)


def _norm_weights(profile: Profile) -> Iterator[torch.Tensor | None]:
    for has_weight in profile.norm_weights:
        yield empty(profile.mhc_mult * profile.hidden) if has_weight else None


def _fused_arguments(profile: Profile) -> dict[str, Any]:
    """Parameters and numbers that all fused ops take."""
    return {
        "mhc_scale": empty(3),
        "mhc_base": empty(_num_rows(profile)),
        "rms_eps": _EPS,
        "mhc_pre_eps": _EPS,
        "mhc_sinkhorn_eps": _EPS,
        "mhc_post_mult_value": 1.0,
        "sinkhorn_repeat": profile.sinkhorn_repeat,
    }


def _fused_options(profile: Profile, num_tokens: int) -> Iterator[dict[str, Any]]:
    """A fused norm, and the shifted form: without a pre_mix for the first sublayer, with one for the others."""
    for dtype, shifted in product(profile.layer_norms, profile.shifted):
        weight = None if dtype == "none" else empty(profile.hidden, dtype=dtype)
        for pre_mix in (None, empty(num_tokens, profile.mhc_mult, 1)) if shifted else (None,):
            yield {"layer_norm_weight": weight, "shifted": shifted, "pre_mix": pre_mix}


def _layers(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult, hidden, n_splits = profile.mhc_mult, profile.hidden, profile.n_splits or None
    x, residual = _hidden(profile, num_tokens), _residual(profile, num_tokens)
    _, post, comb = _mixes(profile, num_tokens)
    fn, fused = empty(_num_rows(profile), mhc_mult * hidden), _fused_arguments(profile)
    before = {"x": x, "residual": residual, "post_layer_mix": post, "comb_res_mix": comb}
    yield mhc.expand_to_mhc, {"hidden": x, "mhc_mult": mhc_mult}
    yield mhc.mhc_post, before
    for norm_weight, options in product(_norm_weights(profile), _fused_options(profile, num_tokens)):
        arguments = {"fn": fn, **fused, "n_splits": n_splits, "norm_weight": norm_weight, **options}
        yield mhc.mhc_pre_big_fuse, {"residual": residual, **arguments}
        yield mhc.mhc_post_pre, {**before, **arguments}
    if profile.broadcast:
        for norm_weight in _norm_weights(profile):
            yield mhc.mhc_fold_fn, {"fn": fn, "mhc_mult": mhc_mult, "norm_weight": norm_weight}
        folded = empty(_num_rows(profile), hidden)
        yield mhc.mhc_pre_broadcast, {"hidden": x, "fn_folded": folded, **fused, "n_splits": n_splits}


def _partials(profile: Profile, num_tokens: int) -> Iterator[Call]:
    residual, num_rows = _residual(profile, num_tokens), _num_rows(profile)
    fn = empty(num_rows, profile.mhc_mult * profile.hidden)
    for n_splits in profile.partial_splits:
        for num_rms_groups in profile.rms_groups:
            sizes = {"n_splits": n_splits, "num_rms_groups": num_rms_groups}
            yield mhc.mhc_prenorm_gemm, {"residual": residual, "fn": fn, **sizes}
        partials = {
            "gemm_out_mul": empty(n_splits, num_tokens, num_rows),
            "gemm_out_sqrsum": empty(n_splits, num_tokens),
        }
        for options in _fused_options(profile, num_tokens):
            arguments = {**partials, "residual": residual, **_fused_arguments(profile), **options}
            yield mhc.mhc_pre_big_fuse_from_partials, arguments


def _collapse(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult, residual = profile.mhc_mult, _residual(profile, num_tokens)
    yield mhc.mhc_pre_apply_mix, {"x": residual, "mix": _mixes(profile, num_tokens)[0]}
    if profile.head:
        fn = empty(mhc_mult, mhc_mult * profile.hidden)
        for norm_weight in _norm_weights(profile):
            options = {"mhc_norm_weight": norm_weight, "mhc_norm_eps": _EPS, "n_splits": profile.n_splits or None}
            yield mhc.mhc_pre_norm_fn, {"residual": residual, "mhc_fn": fn, **options}
        mix = {"input_mix": empty(num_tokens, mhc_mult), "mhc_scale": empty(1), "mhc_base": empty(mhc_mult)}
        yield mhc.mhc_head_compute_mix, {**mix, "mhc_pre_eps": _EPS}


def _recompute(profile: Profile, num_tokens: int) -> Iterator[Call]:
    x, residual = _hidden(profile, num_tokens), _residual(profile, num_tokens)
    pre, post, comb = _mixes(profile, num_tokens)
    for num_layers, num_posts in profile.recompute:
        yield (
            mhc.mhc_multilayer_recompute,
            {
                "initial_residual": residual,
                "pre_mix_list": [pre] * num_layers,
                "layer_output_list": [x] * num_posts,
                "post_mix_list": [post] * num_posts,
                "comb_mix_list": [comb] * num_posts,
                "layer_input_list": [_hidden(profile, num_tokens) for _ in range(num_layers)],
                "residual_list": [_residual(profile, num_tokens) for _ in range(num_posts)],
            },
        )


def _training(profile: Profile, num_tokens: int) -> Iterator[Call]:
    mhc_mult = profile.mhc_mult
    x, residual = _hidden(profile, num_tokens), _residual(profile, num_tokens)
    pre, post, comb = _mixes(profile, num_tokens)
    scale, base = empty(3), empty(_num_rows(profile))
    yield mhc.expand_to_mhc_bwd, {"d_o": residual}
    for num_rows, norm_weight in product((_num_rows(profile), mhc_mult), _norm_weights(profile)):
        if num_rows == mhc_mult and not profile.head:
            continue
        fn = {"residual": residual, "mhc_fn": empty(num_rows, mhc_mult * profile.hidden)}
        mixes, rstd = empty(num_tokens, num_rows), empty(num_tokens)
        options = {"mhc_norm_weight": norm_weight, "mhc_norm_eps": _EPS, "n_splits": profile.n_splits or None}
        yield mhc.mhc_pre_norm_fn, {**fn, **options}
        for d_residual in (None, residual):
            saved = {"mhc_norm_weight": norm_weight, "mixes": mixes, "rstd": rstd}
            yield mhc.mhc_pre_norm_fn_bwd, {"d_mixes": mixes, **fn, **saved, "d_residual": d_residual}
    split = {"input_mixes": empty(num_tokens, _num_rows(profile)), "mhc_scale": scale, "mhc_base": base}
    split |= {"mhc_mult": mhc_mult, "mhc_post_mult_value": 1.0}
    yield mhc.mhc_pre_split_mixes, {**split, "mhc_pre_eps": _EPS}
    yield mhc.mhc_pre_split_mixes_bwd, {"d_pre": pre, "d_post": post, "d_comb": comb, **split}
    sinkhorn = {"x": comb, "repeat": profile.sinkhorn_repeat, "eps": _EPS}
    yield mhc.sinkhorn_normalize, sinkhorn
    yield mhc.sinkhorn_normalize_bwd, {"d_o": comb, **sinkhorn}
    for d_x in (None, residual):
        yield mhc.mhc_pre_apply_mix_bwd, {"d_o": x, "x": residual, "mix": pre, "d_x": d_x}
    mixed = {"x": x, "residual": residual, "post_layer_mix": post, "comb_res_mix": comb, "d_o": residual}
    yield mhc.mhc_post_bwd, mixed
    if profile.head:
        mix = empty(num_tokens, mhc_mult)
        head = {"input_mix": mix, "mhc_scale": empty(1), "mhc_base": empty(mhc_mult)}
        yield mhc.mhc_head_compute_mix_bwd, {"d_o": mix, **head}
