"""Trainable functions and layers over the domain packages' kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_modeling.engram.engram import Engram as Engram
    from tk_modeling.engram.engram import EngramState as EngramState
    from tk_modeling.engram.engram_gate import EngramGate as EngramGate
    from tk_modeling.engram.functional import engram_gate as engram_gate
    from tk_modeling.engram.functional import engram_lookup as engram_lookup
    from tk_modeling.engram.functional import short_conv as short_conv
    from tk_modeling.mhc.checkpoint_streams import checkpoint_streams as checkpoint_streams
    from tk_modeling.mhc.functional import expand_from_embedding as expand_from_embedding
    from tk_modeling.mhc.functional import mhc_head as mhc_head
    from tk_modeling.mhc.functional import mhc_pre as mhc_pre
    from tk_modeling.mhc.hyper_connection import HyperConnection as HyperConnection
    from tk_modeling.mhc.hyper_head import HyperHead as HyperHead
    from tk_modeling.mhc.ops import expand_to_mhc as expand_to_mhc
    from tk_modeling.mhc.ops import mhc_head_compute_mix as mhc_head_compute_mix
    from tk_modeling.mhc.ops import mhc_multilayer_recompute as mhc_multilayer_recompute
    from tk_modeling.mhc.ops import mhc_post as mhc_post
    from tk_modeling.mhc.ops import mhc_post_bwd as mhc_post_bwd
    from tk_modeling.mhc.ops import mhc_post_fwd as mhc_post_fwd
    from tk_modeling.mhc.ops import mhc_pre_apply_mix as mhc_pre_apply_mix
    from tk_modeling.mhc.ops import mhc_pre_big_fuse as mhc_pre_big_fuse
    from tk_modeling.mhc.ops import mhc_pre_norm_fn as mhc_pre_norm_fn
    from tk_modeling.mhc.ops import mhc_pre_split_mixes as mhc_pre_split_mixes
    from tk_modeling.mhc.ops import sinkhorn_normalize as sinkhorn_normalize
    from tk_modeling.moe.functional import aux_loss as aux_loss
    from tk_modeling.moe.functional import expand_to_fused as expand_to_fused
    from tk_modeling.moe.functional import hash_gate as hash_gate
    from tk_modeling.moe.functional import normalize_weight as normalize_weight
    from tk_modeling.moe.functional import reduce_fused as reduce_fused
    from tk_modeling.moe.functional import swiglu as swiglu
    from tk_modeling.moe.functional import top2_sum_gate as top2_sum_gate
    from tk_modeling.moe.functional import topk_gate_with_weights as topk_gate_with_weights
    from tk_modeling.moe.moe import MoE as MoE
    from tk_modeling.moe.router import Router as Router

__version__: str

__all__ = [
    "Engram",
    "EngramGate",
    "EngramState",
    "HyperConnection",
    "HyperHead",
    "MoE",
    "Router",
    "aux_loss",
    "checkpoint_streams",
    "engram_gate",
    "engram_lookup",
    "expand_from_embedding",
    "expand_to_fused",
    "expand_to_mhc",
    "hash_gate",
    "mhc_head",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "normalize_weight",
    "reduce_fused",
    "short_conv",
    "sinkhorn_normalize",
    "swiglu",
    "top2_sum_gate",
    "topk_gate_with_weights",
]

export(
    __name__,
    {
        "Engram": "engram.engram",
        "EngramGate": "engram.engram_gate",
        "EngramState": "engram.engram",
        "HyperConnection": "mhc.hyper_connection",
        "HyperHead": "mhc.hyper_head",
        "MoE": "moe.moe",
        "Router": "moe.router",
        "aux_loss": "moe.functional",
        "checkpoint_streams": "mhc.checkpoint_streams",
        "engram_gate": "engram.functional",
        "engram_lookup": "engram.functional",
        "expand_from_embedding": "mhc.functional",
        "expand_to_fused": "moe.functional",
        "expand_to_mhc": "mhc.ops",
        "hash_gate": "moe.functional",
        "mhc_head": "mhc.functional",
        "mhc_head_compute_mix": "mhc.ops",
        "mhc_multilayer_recompute": "mhc.ops",
        "mhc_post": "mhc.ops",
        "mhc_post_bwd": "mhc.ops",
        "mhc_post_fwd": "mhc.ops",
        "mhc_pre": "mhc.functional",
        "mhc_pre_apply_mix": "mhc.ops",
        "mhc_pre_big_fuse": "mhc.ops",
        "mhc_pre_norm_fn": "mhc.ops",
        "mhc_pre_split_mixes": "mhc.ops",
        "normalize_weight": "moe.functional",
        "reduce_fused": "moe.functional",
        "short_conv": "engram.functional",
        "sinkhorn_normalize": "mhc.ops",
        "swiglu": "moe.functional",
        "top2_sum_gate": "moe.functional",
        "topk_gate_with_weights": "moe.functional",
    },
)
