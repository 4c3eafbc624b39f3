"""Mixture-of-experts routing, token maps, expand and reduce as GPU kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_moe.balance.aux_fi import aux_fi as aux_fi
    from tk_moe.balance.aux_loss import aux_loss as aux_loss
    from tk_moe.balance.aux_loss import aux_loss_bwd as aux_loss_bwd
    from tk_moe.balance.group_count import group_count as group_count
    from tk_moe.expand.expand_to_fused import expand_to_fused as expand_to_fused
    from tk_moe.expand.expand_to_fused import expand_to_fused_with_sf as expand_to_fused_with_sf
    from tk_moe.expand.expand_to_fused_bwd import expand_to_fused_bwd as expand_to_fused_bwd
    from tk_moe.gate.gate_weights_bwd import gate_weights_bwd as gate_weights_bwd
    from tk_moe.gate.hash_gate import hash_gate as hash_gate
    from tk_moe.gate.top2_sum_gate import top2_sum_gate as top2_sum_gate
    from tk_moe.gate.topk_gate import topk_gate as topk_gate
    from tk_moe.gate.topk_gate_with_weights import topk_gate_with_weights as topk_gate_with_weights
    from tk_moe.gate.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx as topk_sum_and_topk_group_idx
    from tk_moe.lib.scoring import ScoringFunc as ScoringFunc
    from tk_moe.mapping.get_fused_mapping import get_fused_mapping as get_fused_mapping
    from tk_moe.mapping.inplace_unique_group_indices import inplace_unique_group_indices as inplace_unique_group_indices
    from tk_moe.mapping.mask_indices_by_tp import mask_indices_by_tp as mask_indices_by_tp
    from tk_moe.mapping.max_expanded_tokens import max_expanded_tokens as max_expanded_tokens
    from tk_moe.reduce.reduce_fused import reduce_fused as reduce_fused
    from tk_moe.reduce.reduce_fused_bwd import reduce_fused_bwd as reduce_fused_bwd
    from tk_moe.weights.normalize_weight import normalize_weight as normalize_weight
    from tk_moe.weights.normalize_weight_bwd import normalize_weight_bwd as normalize_weight_bwd

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
        "ScoringFunc": "lib.scoring",
        "aux_fi": "balance.aux_fi",
        "aux_loss": "balance.aux_loss",
        "aux_loss_bwd": "balance.aux_loss",
        "expand_to_fused": "expand.expand_to_fused",
        "expand_to_fused_bwd": "expand.expand_to_fused_bwd",
        "expand_to_fused_with_sf": "expand.expand_to_fused",
        "gate_weights_bwd": "gate.gate_weights_bwd",
        "get_fused_mapping": "mapping.get_fused_mapping",
        "group_count": "balance.group_count",
        "hash_gate": "gate.hash_gate",
        "inplace_unique_group_indices": "mapping.inplace_unique_group_indices",
        "mask_indices_by_tp": "mapping.mask_indices_by_tp",
        "max_expanded_tokens": "mapping.max_expanded_tokens",
        "normalize_weight": "weights.normalize_weight",
        "normalize_weight_bwd": "weights.normalize_weight_bwd",
        "reduce_fused": "reduce.reduce_fused",
        "reduce_fused_bwd": "reduce.reduce_fused_bwd",
        "top2_sum_gate": "gate.top2_sum_gate",
        "topk_gate": "gate.topk_gate",
        "topk_gate_with_weights": "gate.topk_gate_with_weights",
        "topk_sum_and_topk_group_idx": "gate.topk_sum_and_topk_group_idx",
    },
)
