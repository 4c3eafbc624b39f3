"""Mixture-of-experts routing, token maps, expand and reduce as GPU kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_moe.expand_to_fused import expand_to_fused as expand_to_fused
    from tk_moe.expand_to_fused import expand_to_fused_with_sf as expand_to_fused_with_sf
    from tk_moe.get_fused_mapping import get_fused_mapping as get_fused_mapping
    from tk_moe.normalize_weight import normalize_weight as normalize_weight
    from tk_moe.reduce_fused import reduce_fused as reduce_fused
    from tk_moe.topk_gate import topk_gate as topk_gate

__all__ = [
    "expand_to_fused",
    "expand_to_fused_with_sf",
    "get_fused_mapping",
    "normalize_weight",
    "reduce_fused",
    "topk_gate",
]

export(
    __name__,
    {
        "expand_to_fused": "expand_to_fused",
        "expand_to_fused_with_sf": "expand_to_fused",
        "get_fused_mapping": "get_fused_mapping",
        "normalize_weight": "normalize_weight",
        "reduce_fused": "reduce_fused",
        "topk_gate": "topk_gate",
    },
)
