"""Manifold-constrained hyper-connections (mHC) as GPU kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_mhc.collapse.mhc_pre_apply_mix import mhc_pre_apply_mix as mhc_pre_apply_mix
    from tk_mhc.collapse.mhc_pre_apply_mix_bwd import mhc_pre_apply_mix_bwd as mhc_pre_apply_mix_bwd
    from tk_mhc.expand.expand_to_mhc import expand_to_mhc as expand_to_mhc
    from tk_mhc.expand.expand_to_mhc_bwd import expand_to_mhc_bwd as expand_to_mhc_bwd
    from tk_mhc.fused.mhc_post_pre import mhc_post_pre as mhc_post_pre
    from tk_mhc.fused.mhc_pre_big_fuse import mhc_pre_big_fuse as mhc_pre_big_fuse
    from tk_mhc.fused.mhc_pre_big_fuse_from_partials import (
        mhc_pre_big_fuse_from_partials as mhc_pre_big_fuse_from_partials,
    )
    from tk_mhc.fused.mhc_pre_broadcast import mhc_pre_broadcast as mhc_pre_broadcast
    from tk_mhc.mixes.mhc_head_compute_mix import mhc_head_compute_mix as mhc_head_compute_mix
    from tk_mhc.mixes.mhc_head_compute_mix_bwd import mhc_head_compute_mix_bwd as mhc_head_compute_mix_bwd
    from tk_mhc.mixes.mhc_pre_split_mixes import mhc_pre_split_mixes as mhc_pre_split_mixes
    from tk_mhc.mixes.mhc_pre_split_mixes_bwd import mhc_pre_split_mixes_bwd as mhc_pre_split_mixes_bwd
    from tk_mhc.mixes.sinkhorn_normalize import sinkhorn_normalize as sinkhorn_normalize
    from tk_mhc.mixes.sinkhorn_normalize_bwd import sinkhorn_normalize_bwd as sinkhorn_normalize_bwd
    from tk_mhc.post.mhc_multilayer_recompute import mhc_multilayer_recompute as mhc_multilayer_recompute
    from tk_mhc.post.mhc_post import mhc_post as mhc_post
    from tk_mhc.post.mhc_post_bwd import mhc_post_bwd as mhc_post_bwd
    from tk_mhc.projection.mhc_fold_fn import mhc_fold_fn as mhc_fold_fn
    from tk_mhc.projection.mhc_pre_norm_fn import mhc_pre_norm_fn as mhc_pre_norm_fn
    from tk_mhc.projection.mhc_pre_norm_fn_bwd import mhc_pre_norm_fn_bwd as mhc_pre_norm_fn_bwd
    from tk_mhc.projection.mhc_prenorm_gemm import mhc_prenorm_gemm as mhc_prenorm_gemm

__version__: str

__all__ = [
    "expand_to_mhc",
    "expand_to_mhc_bwd",
    "mhc_fold_fn",
    "mhc_head_compute_mix",
    "mhc_head_compute_mix_bwd",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_pre",
    "mhc_pre_apply_mix",
    "mhc_pre_apply_mix_bwd",
    "mhc_pre_big_fuse",
    "mhc_pre_big_fuse_from_partials",
    "mhc_pre_broadcast",
    "mhc_pre_norm_fn",
    "mhc_pre_norm_fn_bwd",
    "mhc_pre_split_mixes",
    "mhc_pre_split_mixes_bwd",
    "mhc_prenorm_gemm",
    "sinkhorn_normalize",
    "sinkhorn_normalize_bwd",
]

export(
    __name__,
    {
        "expand_to_mhc": "expand.expand_to_mhc",
        "expand_to_mhc_bwd": "expand.expand_to_mhc_bwd",
        "mhc_fold_fn": "projection.mhc_fold_fn",
        "mhc_head_compute_mix": "mixes.mhc_head_compute_mix",
        "mhc_head_compute_mix_bwd": "mixes.mhc_head_compute_mix_bwd",
        "mhc_multilayer_recompute": "post.mhc_multilayer_recompute",
        "mhc_post": "post.mhc_post",
        "mhc_post_bwd": "post.mhc_post_bwd",
        "mhc_post_pre": "fused.mhc_post_pre",
        "mhc_pre_apply_mix": "collapse.mhc_pre_apply_mix",
        "mhc_pre_apply_mix_bwd": "collapse.mhc_pre_apply_mix_bwd",
        "mhc_pre_big_fuse": "fused.mhc_pre_big_fuse",
        "mhc_pre_big_fuse_from_partials": "fused.mhc_pre_big_fuse_from_partials",
        "mhc_pre_broadcast": "fused.mhc_pre_broadcast",
        "mhc_pre_norm_fn": "projection.mhc_pre_norm_fn",
        "mhc_pre_norm_fn_bwd": "projection.mhc_pre_norm_fn_bwd",
        "mhc_pre_split_mixes": "mixes.mhc_pre_split_mixes",
        "mhc_pre_split_mixes_bwd": "mixes.mhc_pre_split_mixes_bwd",
        "mhc_prenorm_gemm": "projection.mhc_prenorm_gemm",
        "sinkhorn_normalize": "mixes.sinkhorn_normalize",
        "sinkhorn_normalize_bwd": "mixes.sinkhorn_normalize_bwd",
    },
)
