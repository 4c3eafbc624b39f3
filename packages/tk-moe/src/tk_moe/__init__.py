"""Mixture-of-experts routing, token maps, expand and reduce as GPU kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_moe.aux_fi import aux_fi as aux_fi
    from tk_moe.aux_loss import aux_loss as aux_loss
    from tk_moe.aux_loss import aux_loss_bwd as aux_loss_bwd
    from tk_moe.expand_to_fused import expand_to_fused as expand_to_fused
    from tk_moe.expand_to_fused import expand_to_fused_with_sf as expand_to_fused_with_sf
    from tk_moe.expand_to_fused_bwd import expand_to_fused_bwd as expand_to_fused_bwd
    from tk_moe.gate_weights_bwd import gate_weights_bwd as gate_weights_bwd
    from tk_moe.get_fused_mapping import get_fused_mapping as get_fused_mapping
    from tk_moe.group_count import group_count as group_count
    from tk_moe.hash_gate import hash_gate as hash_gate
    from tk_moe.inplace_unique_group_indices import inplace_unique_group_indices as inplace_unique_group_indices
    from tk_moe.mask_indices_by_tp import mask_indices_by_tp as mask_indices_by_tp
    from tk_moe.max_expanded_tokens import max_expanded_tokens as max_expanded_tokens
    from tk_moe.normalize_weight import normalize_weight as normalize_weight
    from tk_moe.normalize_weight_bwd import normalize_weight_bwd as normalize_weight_bwd
    from tk_moe.reduce_fused import reduce_fused as reduce_fused
    from tk_moe.reduce_fused_bwd import reduce_fused_bwd as reduce_fused_bwd
    from tk_moe.scoring import ScoringFunc as ScoringFunc
    from tk_moe.top2_sum_gate import top2_sum_gate as top2_sum_gate
    from tk_moe.topk_gate import topk_gate as topk_gate
    from tk_moe.topk_gate_with_weights import topk_gate_with_weights as topk_gate_with_weights
    from tk_moe.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx as topk_sum_and_topk_group_idx

__version__: str

__all__ = [
    "ScoringFunc",
    "aux_fi",
    "aux_loss",
    "aux_loss_bwd",
    "expand_to_fused",
    "expand_to_fused_bwd",
    "expand_to_fused_with_sf",
    "gate_weights_bwd",
    "get_fused_mapping",
    "group_count",
    "hash_gate",
    "inplace_unique_group_indices",
    "mask_indices_by_tp",
    "max_expanded_tokens",
    "normalize_weight",
    "normalize_weight_bwd",
    "reduce_fused",
    "reduce_fused_bwd",
    "top2_sum_gate",
    "topk_gate",
    "topk_gate_with_weights",
    "topk_sum_and_topk_group_idx",
]

export(
    __name__,
    {
        "ScoringFunc": "scoring",
        "aux_fi": "aux_fi",
        "aux_loss": "aux_loss",
        "aux_loss_bwd": "aux_loss",
        "expand_to_fused": "expand_to_fused",
        "expand_to_fused_bwd": "expand_to_fused_bwd",
        "expand_to_fused_with_sf": "expand_to_fused",
        "gate_weights_bwd": "gate_weights_bwd",
        "get_fused_mapping": "get_fused_mapping",
        "group_count": "group_count",
        "hash_gate": "hash_gate",
        "inplace_unique_group_indices": "inplace_unique_group_indices",
        "mask_indices_by_tp": "mask_indices_by_tp",
        "max_expanded_tokens": "max_expanded_tokens",
        "normalize_weight": "normalize_weight",
        "normalize_weight_bwd": "normalize_weight_bwd",
        "reduce_fused": "reduce_fused",
        "reduce_fused_bwd": "reduce_fused_bwd",
        "top2_sum_gate": "top2_sum_gate",
        "topk_gate": "topk_gate",
        "topk_gate_with_weights": "topk_gate_with_weights",
        "topk_sum_and_topk_group_idx": "topk_sum_and_topk_group_idx",
    },
)
