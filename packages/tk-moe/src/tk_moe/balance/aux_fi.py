"""aux_fi: each expert's share of the routed (token, slot) pairs, as the auxiliary loss for load balance takes it.

    fi[e] = float32(count[e] · num_experts) / float32(num_tokens · num_aux_topk)       (one IEEE division)

count[e] is how often e occurs in topk_idx, int64 or int32 (num_tokens, num_topk). fi, float32 (num_experts), is 1 for
every expert if the load is even. The kernel is `group_count`'s, whose counts are integers, so every bit is defined.
"""

import torch
from torch import Tensor

from tk_core import check
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.balance.group_count import MAX_GROUPS, MAX_TOPK, check_pairs, launch_group_count


@op("tk_moe::aux_fi_out", mutates=("fi",), reference="aux_fi", translate=lambda call: {"num_experts": call.fi.shape[0]})
def _aux_fi_out(topk_idx: Tensor, num_aux_topk: int, fi: Tensor) -> None:
    """Launch."""
    launch_group_count(topk_idx, num_aux_topk, fi)


@replayable
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Share of each expert in the choices of all tokens, times the number of experts.

    fi[e] = float32(count[e] · num_experts) / float32(num_tokens · num_aux_topk). Names and formula are those of
    DeepSeek's TileKernels 1.0.0. An index outside 0 … num_experts-1 counts for no expert; with TK_DEBUG=1,
    one of num_experts or more raises.

    Args:
        topk_idx: int64 or int32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        num_experts: From 1 to 1024.
        num_aux_topk: Choices of a token that the loss counts, from 1 to 32: usually num_topk.

    Returns:
        float32 (num_experts); zeros without tokens.

    Raises:
        TypeError: topk_idx is not an int64 or int32 tensor, or another argument is not an int.
        ValueError: topk_idx has another shape or is not contiguous, or a size is out of range.
    """
    check_pairs("topk_idx", topk_idx)
    check.in_range("num_experts", num_experts, 1, MAX_GROUPS)
    check.in_range("num_aux_topk", num_aux_topk, 1, MAX_TOPK)
    check.below("topk_idx", topk_idx, num_experts, "indices below num_experts = {}")
    fi = topk_idx.new_empty((num_experts,), dtype=torch.float32)
    _aux_fi_out(topk_idx, num_aux_topk, fi)
    return fi
