from . import reference as reference
from .balance.aux_loss import aux_loss as aux_loss
from .balance.aux_loss import aux_loss_bwd as aux_loss_bwd
from .balance.group_count import aux_fi as aux_fi
from .balance.group_count import group_count as group_count
from .expand.expand_to_fused import expand_to_fused as expand_to_fused
from .expand.expand_to_fused import expand_to_fused_with_sf as expand_to_fused_with_sf
from .gate.gate import hash_gate as hash_gate
from .gate.gate import topk_gate as topk_gate
from .gate.gate import topk_gate_with_weights as topk_gate_with_weights
from .gate.gate_weights_bwd import gate_weights_bwd as gate_weights_bwd
from .gate.moe_topk_gate import moe_topk_gate as moe_topk_gate
from .gate.moe_topk_gate import moe_topk_gate_forward as moe_topk_gate_forward
from .gate.moe_topk_gate_backward import moe_topk_gate_backward as moe_topk_gate_backward
from .gate.top2_sum_gate import top2_sum_gate as top2_sum_gate
from .gate.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx as topk_sum_and_topk_group_idx
from .mapping.get_fused_mapping import get_fused_mapping as get_fused_mapping
from .mapping.inplace_unique_group_indices import inplace_unique_group_indices as inplace_unique_group_indices
from .mapping.mask_indices_by_tp import mask_indices_by_tp as mask_indices_by_tp
from .mapping.max_expanded_tokens import max_expanded_tokens as max_expanded_tokens
from .reduce.reduce_fused import expand_to_fused_bwd as expand_to_fused_bwd
from .reduce.reduce_fused import reduce_fused as reduce_fused
from .reduce.reduce_fused_bwd import reduce_fused_bwd as reduce_fused_bwd
from .scoring import ScoringFunc as ScoringFunc
from .weights.normalize_weight import normalize_weight as normalize_weight
from .weights.normalize_weight import normalize_weight_bwd as normalize_weight_bwd

__version__: str
