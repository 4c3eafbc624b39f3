"""get_fused_mapping: the position of each (token, slot) pair when pairs are grouped by expert, and the maps back.

Pair i = t · num_topk + k of topk_idx int64 or int32 (num_tokens, num_topk) goes to the segment of its expert. Segments
are in the order of the experts. Each has its pairs in ascending order (a stable counting sort), then padding up to a
multiple of `alignment`:

    pos               0 …                                                                  … num_expanded_tokens
                      ├── expert 0 ──┬─ padding ─┼── expert 1 ──┬─ padding ─┼── …  ─┼── padding after the last ──┤
    pos_to_expert        0 0 0 0 …      -1 …          1 1 1 …       -1 …                    -1 …

get_fused_mapping_kernel.py describes the kernels.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tk_core import check
from tk_core.arch import get_arch
from tk_core.kernel import new_workspace
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.lib.get_fused_mapping_kernel import GetFusedMappingConfig, count_kernel, mapping_kernel

MAX_EXPERTS = 1024
MAX_TOPK = 32

MAX_POSITIONS = 2**30  # so that no intermediate index overflows an int32

_Mapping = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]


def _get_fused_mapping_reference(
    topk_idx: Tensor, pos_to_expert: Tensor, expert_start: Tensor, alignment: int
) -> tuple[Tensor, ...]:
    from tk_moe.reference.mapping.get_fused_mapping import get_fused_mapping

    num_experts = expert_start.shape[0]
    check.below("topk_idx", topk_idx, num_experts, "indices below num_experts = {}")
    *values, _, psum = get_fused_mapping(topk_idx, num_experts, pos_to_expert.shape[0], alignment, True, with_psum=True)
    return *values, psum


@op(
    "tk_moe::get_fused_mapping_out",
    mutates=(
        "pos_to_expert",
        "pos_to_token",
        "pos_to_token_topk",
        "token_topk_to_pos",
        "expert_start",
        "expert_end",
        "num_tokens_per_expert",
        "expert_psum",
    ),
    reference=_get_fused_mapping_reference,
)
def _get_fused_mapping_out(
    topk_idx: Tensor,
    pos_to_expert: Tensor,
    pos_to_token: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    expert_start: Tensor,
    expert_end: Tensor,
    num_tokens_per_expert: Tensor,
    expert_psum: Tensor | None,
    alignment: int,
) -> None:
    num_tokens, num_topk = topk_idx.shape
    num_experts = expert_start.shape[0]
    maps = (pos_to_expert, pos_to_token, pos_to_token_topk)
    per_expert = (expert_start, expert_end, num_tokens_per_expert)
    if num_tokens == 0:
        for out in maps:
            out.fill_(-1)
        for out in (*per_expert, expert_psum):
            if out is not None:
                out.zero_()
        return
    check.below("topk_idx", topk_idx, num_experts, "indices below num_experts = {}")
    arch = get_arch(topk_idx.device)
    num_pairs = num_tokens * num_topk
    power_of_two = 1 << (num_pairs - 1).bit_length()
    config = GetFusedMappingConfig.best(power_of_two, num_experts, get_num_sms(topk_idx.device), arch)
    block_counts = None
    if config.cluster_size == 0:
        block_counts = new_workspace(expert_start, (ceil_div(num_pairs, config.room), num_experts))
        count_kernel(num_experts, num_topk, topk_idx.dtype, config, arch)(topk_idx, block_counts)
    launch = mapping_kernel(num_experts, num_topk, topk_idx.dtype, expert_psum is not None, config, arch)
    launch(topk_idx, block_counts, *maps, token_topk_to_pos, *per_expert, expert_psum, alignment)


@replayable
def _map_all(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool, with_psum: bool
) -> tuple[Tensor | None, ...]:
    """`get_fused_mapping` without the synchronization: all its tensors, the pos_to_* in full length."""
    num_tokens, num_topk = check.tensor("topk_idx", topk_idx, (torch.int64, torch.int32), ("num_tokens", "num_topk"))
    check.in_range("num_topk (columns of topk_idx)", num_topk, 1, MAX_TOPK)
    check.in_range("num_experts", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_expanded_tokens", num_expanded_tokens, 0, MAX_POSITIONS)
    check.in_range("alignment", alignment, 1, MAX_POSITIONS)
    check.flag("force_no_sync", force_no_sync)
    check.flag("with_psum", with_psum)
    worst_case = (num_tokens * num_topk + (alignment - 1) * num_experts) // alignment * alignment
    is_small = worst_case <= MAX_POSITIONS
    check.require(is_small, "topk_idx", "at most {} positions in the worst case", worst_case, MAX_POSITIONS)
    num_pos = num_expanded_tokens or worst_case
    # In the operator's order: three maps from positions, the map to positions, then the tensors (num_experts,).
    shapes = [(num_pos,)] * 3 + [(num_tokens, num_topk)] + [(num_experts,)] * (4 if with_psum else 3)
    outs = [topk_idx.new_empty(shape, dtype=torch.int32) for shape in shapes]
    if not with_psum:
        outs.append(None)
    _get_fused_mapping_out(topk_idx, *outs, alignment)
    return tuple(outs)


@overload
def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: Literal[False] = False,
) -> _Mapping: ...


@overload
def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: Literal[True],
) -> tuple[*_Mapping, Tensor]: ...


def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    *,
    with_psum: bool = False,
) -> tuple[Any, ...]:
    """Group (token, slot) pairs by expert: each owns a segment of positions, padded to a multiple of `alignment`.

    Segments are in the order of the experts. Each has its pairs in ascending flat order t · num_topk + k, then padding;
    positions after the last segment are padding too. An index outside 0 … num_experts-1 means no expert; with
    TK_DEBUG=1, one of num_experts or more raises.

    With num_expanded_tokens = 0, the pos_to_* are allocated for the worst case, ⌊(num_tokens · num_topk +
    (alignment - 1) · num_experts) / alignment⌋ · alignment positions. Then, unless `force_no_sync`, the sizes of the
    segments are read back, which synchronizes with the device, and the pos_to_* are cut to the sum of the sizes. In all
    other cases there is no synchronization, and the call can be captured in a CUDA graph. On the meta device there are
    no sizes to read, and nothing is cut. Fake tensors, torch.compile and torch.export need a size or `force_no_sync`:
    `tk_moe.max_expanded_tokens` computes the most that any routing needs.

    Args:
        topk_idx: int64 or int32 (num_tokens, num_topk), contiguous; num_topk from 1 to 32.
        num_experts: From 1 to 1024.
        num_expanded_tokens: Length of the pos_to_*; 0 for the worst case. If it is too small, pairs that do not fit
            get -1 in token_topk_to_pos; the bounds of the segments are as if they did fit.
        alignment: The size of each segment is a multiple of this; at least 1.
        force_no_sync: Keep the length of the worst case instead of synchronizing.
        with_psum: Also return expert_psum.

    Returns:
        pos_to_expert, pos_to_token, pos_to_token_topk: int32 (num_expanded_tokens). Expert, token and flat index
            t · num_topk + k of each position; -1 for padding.
        token_topk_to_pos: int32 (num_tokens, num_topk). Position of each pair, -1 if it has none.
        expert_start, expert_end: int32 (num_experts). Bounds of the segments.
        num_tokens_per_expert: int32 (num_experts). Sizes of the segments, padding included.
        num_tokens_per_expert_list: The same as a list if it was read back, otherwise empty.
        expert_psum: With `with_psum` only: int32 (num_experts). The position where the pairs of each expert end and its
            padding begins: expert_start plus the number of its pairs. For grouped matrix products that skip padding.

    Raises:
        TypeError: topk_idx is not an int64 or int32 tensor, or another argument is not an int (a bool for a flag).
        ValueError: topk_idx has another shape or is not contiguous, a size is out of range, there would be more than
            2³⁰ positions, or sizes would have to be read back from fake tensors.
    """
    reads_sizes = num_expanded_tokens == 0 and not force_no_sync
    if reads_sizes and (torch.compiler.is_compiling() or isinstance(topk_idx, FakeTensor)):
        # A fake tensor has no data from which sizes could be read back.
        size = (
            "a size, as tk_moe.max_expanded_tokens computes it, or force_no_sync, under torch.compile and fake tensors"
        )
        check.require(False, "num_expanded_tokens", size, 0)
    *maps, num_tokens_per_expert, expert_psum = _map_all(
        topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync, with_psum
    )
    sizes: list[int] = []
    if reads_sizes and not topk_idx.is_meta:
        sizes = num_tokens_per_expert.tolist()
        used = sum(sizes)
        maps[:3] = (pos_to[:used] for pos_to in maps[:3])
    if with_psum:
        return *maps, num_tokens_per_expert, sizes, expert_psum
    return *maps, num_tokens_per_expert, sizes
