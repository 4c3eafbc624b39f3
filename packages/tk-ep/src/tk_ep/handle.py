"""The routing of one dispatch, which combine and further dispatches need."""

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

topk_idx_t = torch.int64
"""The dtype of expert indices that DeepEP's users ask for by this name; int32 is taken too."""


class Place(NamedTuple):
    """Where a rank stands."""

    group: Any
    """What identifies the group: the process group of a buffer, or any object that virtual ranks share."""
    rank: int
    num_ranks: int
    device: torch.device
    """Where tensors of the calls have to be."""


@dataclass(frozen=True, eq=False)
class EPHandle:
    """What a rank knows of the routing of one dispatch.

    R ranks have E experts, L = E / R each; this one has T tokens of K slots, at most num_max_tokens_per_rank. It
    received N tokens, ordered by (source rank, token), or with do_expand M rows: experts in order, the segment of each
    beginning at a multiple of expert_alignment, its rows ordered by (source rank, token, slot).
    """

    place: Place
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    """As given to dispatch; combine uses it where its own num_sms is 0."""
    topk_idx: Tensor
    """(T, K) global expert indices: a copy, unless dispatch had do_handle_copy=False"""
    num_recv_tokens: int
    """N; R · num_max_tokens_per_rank if dispatch did not wait for counts"""
    num_expanded_tokens: int
    """M, also without do_expand; if dispatch did not wait for counts, the most that it can be"""
    num_recv_tokens_per_expert_list: list[int]
    """For each local expert the pairs of a token and a slot, aligned; empty if dispatch did not wait for counts"""
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    """int32 (R,): tokens received from ranks up to this one, itself included"""
    psum_num_recv_tokens_per_expert: Tensor
    """int32 (L,): with do_expand the row at which an expert's tokens end, without padding; else the inclusive sum of
    the aligned counts"""
    num_unaligned_recv_tokens_per_expert: Tensor
    """int32 (L,): for each local expert the pairs of a token and a slot"""
    recv_src_metadata: Tensor
    """int32 (N, 2 + K), a row for each received token: source rank · num_max_tokens_per_rank + token; source rank · K +
    the last slot with an expert of this rank; then the row of each slot, -1 for slots with experts elsewhere and
    without do_expand. -1 past the received."""
    dst_buffer_slot_idx: Tensor
    """int32 (T, K): this rank · num_max_tokens_per_rank + the token's index among those sent to the rank of the slot's
    expert, at the last slot with an expert there, else -1"""
    pos_to_expert: Tensor | None
    """int32 (M,): the local expert of each row, -1 in padding; None without do_expand"""

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.place.num_ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError("EPHandle: cannot be pickled or copied, as it belongs to this process's group")
