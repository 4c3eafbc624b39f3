"""The kernel of top2_sum_gate.

Each warp handles one token. With 8 groups of 32 experts, for instance, its lanes own

    group        0              1        …       7
    lanes    0  1  2  3     4  5  6  7      28 29 30 31
    experts  0  8 16 24    32 40 48 56     224 …          (the first of the 8 experts of each lane)

A group's lanes agree on its best two ranks by shuffles, and divide the comparisons with the other groups among
themselves. Lanes of groups that are ruled out lower their keys, and the warp chooses experts as selection.py says. From
then on lane k has slot k: it computes the score of its expert again, maps the expert and stores both.

Sigmoids use the approximate exponential and reciprocal: their absolute error is at most 2e-7, their relative error
4e-6, as the product with log2(e) is rounded. A score that underflows is 0.
"""

from dataclasses import dataclass
from typing import Any

from tk_core.arch import Arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_moe.lib.gate_kernel import WARPS
from tk_moe.scoring import ScoringFunc


@dataclass(frozen=True)
class Routing:
    """Options that the kernel is compiled for. The tensors of an option that is off are passed as None."""

    num_topk: int
    num_topk_groups: int
    num_groups: int
    """1 where all groups are kept."""
    num_shared: int
    scoring_func: ScoringFunc
    has_mask: bool
    has_fixed: bool
    has_unmapped: bool
    num_copies: int
    """Columns of to_physical_map; 0 without a map."""
    per_rank: int
    """Physical experts of an expert-parallel rank; 0 with one tensor-parallel rank."""
    num_tp_ranks: int


# Written per thread: lanes rank keys by shuffles, for which tiles have no operation. No tile version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def top2_sum_gate_kernel(num_experts: int, routing: Routing, alignment: int, bias_alignment: int, arch: Arch) -> Any:
    """Rows of logits are aligned to `alignment` bytes, bias to `bias_alignment` bytes."""
    import tilelang.language as T

    from tk_moe.device.gates import fast_reciprocal, fast_sigmoid
    from tk_moe.lib import selection
    from tk_moe.lib.physical_experts import of_copy, of_tp_rank
    from tk_moe.lib.scores import clamped, score, softmax_score, softmax_sums

    num_topk, num_groups, num_copies = routing.num_topk, routing.num_groups, routing.num_copies
    per_rank, num_tp_ranks = routing.per_rank, routing.num_tp_ranks
    num_slots = num_topk + routing.num_shared
    scoring_func = routing.scoring_func
    is_softmax = scoring_func is ScoringFunc.SOFTMAX
    lanes = selection.group_lanes(num_groups)
    group_size = num_experts // num_groups
    vector = selection.lane_vector(group_size, lanes, alignment // 4)
    bias_vector = min(vector, bias_alignment // 4)
    per_lane = align(ceil_div(group_size, lanes), vector)
    num_tokens, unmapped_stride = T.dynamic("num_tokens"), T.dynamic("unmapped_stride", "int64")
    num_mapped = num_experts + routing.num_shared

    def score_of(x: Any) -> Any:
        if scoring_func is ScoringFunc.SIGMOID:
            return fast_sigmoid(x)
        return score(scoring_func, x)

    def key_of(x: Any, shift: Any) -> Any:
        # A score is never -0, so score + bias is not -0 either, as sort_key_of_sum requires.
        return selection.sort_key(x + shift) if is_softmax else selection.sort_key_of_sum(score_of(x), shift)

    @T.macro
    def load(
        logits: T.Buffer, bias: T.Buffer, token: T.int32, first: T.int32, limit: T.int32, x: T.Buffer, shift: T.Buffer
    ) -> None:
        for c in T.unroll(per_lane // vector):
            if first + c * vector < limit:
                for v in T.vectorized(vector):
                    x[c * vector + v] = logits[token, first + c * vector + v]
        for c in T.unroll(per_lane // bias_vector):
            if first + c * bias_vector < limit:
                for v in T.vectorized(bias_vector):
                    shift[c * bias_vector + v] = bias[first + c * bias_vector + v]

    @T.macro
    def select(x: T.Buffer, shift: T.Buffer, lane: T.int32, first: T.int32, limit: T.int32, chosen: T.Buffer) -> None:
        keys = T.alloc_local((per_lane,), "int32")
        best = T.alloc_local((3,), "int32")
        key, place = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        most = T.alloc_var("int32")
        most = T.int32(selection.TOP_KEY)
        for j in T.unroll(per_lane):
            keys[j] = T.if_then_else(first + j < limit, key_of(x[j], shift[j]), T.int32(selection.NO_KEY))
        selection.best_three(keys, best)
        if num_groups > 1:
            selection.group_key(best, lanes, 2, key)
            selection.group_place(key, num_groups, lane, place)
            most = T.if_then_else(
                place[0] < routing.num_topk_groups, T.int32(selection.TOP_KEY), T.int32(selection.LEAST_KEY)
            )
            for i in T.unroll(3):
                best[i] = T.min(best[i], most)
        selection.choose_from(keys, best, most, num_topk, lane, first, chosen)

    @T.prim_func
    def top2_sum_gate(
        logits: T.Tensor((num_tokens, num_experts), "float32"),
        bias: T.Tensor((num_experts,), "float32"),
        mask: T.Tensor((num_tokens,), "bool"),
        fix_routing_mask: T.Tensor((num_tokens,), "bool"),
        to_physical_map: T.Tensor((num_mapped, max(num_copies, 1)), "int32"),
        logical_count: T.Tensor((num_mapped,), "int32"),
        unmapped_topk_idx: T.StridedTensor((num_tokens, num_topk), (unmapped_stride, 1), "int64"),
        topk_idx: T.Tensor((num_tokens, num_slots), "int64"),
        topk_weights: T.Tensor((num_tokens, num_slots), "float32"),
        factor: T.float32,
        ep_rank: T.int32,
        tp_rank: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            group = lane // lanes
            first = group * group_size + lane % lanes * per_lane
            limit = T.if_then_else(group < num_groups, (group + 1) * group_size, 0)
            if token < num_tokens:  # uniform in a warp, as are the masks
                x, shift = T.alloc_local((per_lane,), "float32"), T.alloc_local((per_lane,), "float32")
                chosen = T.alloc_local((1,), "int32")
                sums = T.alloc_local((2,), "float32")
                is_routed, is_fixed = T.alloc_var("bool"), T.alloc_var("bool")
                given = T.alloc_var("int64")
                expert = T.alloc_var("int32")
                value, total = T.alloc_var("float32"), T.alloc_var("float32")
                load(logits, bias, token, first, limit, x, shift)
                is_routed = True
                if routing.has_mask:
                    is_routed = mask[token]
                is_fixed = False
                if routing.has_fixed:
                    is_fixed = fix_routing_mask[token]
                chosen[0] = -1
                value = T.float32(0)
                if is_routed:
                    if routing.has_fixed:
                        if is_fixed:
                            if lane < num_topk:
                                given = unmapped_topk_idx[token, lane]
                                # Cut to 32 bits, a wide index would be another expert's.
                                chosen[0] = T.cast(T.max(T.min(given, T.int64(2**31 - 1)), T.int64(-1)), "int32")
                        else:
                            select(x, shift, lane, first, limit, chosen)
                    else:
                        select(x, shift, lane, first, limit, chosen)
                    if routing.has_unmapped and lane < num_topk and not is_fixed:
                        unmapped_topk_idx[token, lane] = T.cast(chosen[0], "int64")
                    if is_softmax:
                        for j in T.unroll(per_lane):
                            x[j] = T.if_then_else(first + j < limit, x[j], -T.infinity("float32"))
                        softmax_sums(x, sums)
                    if lane < num_topk:
                        expert = T.min(T.max(chosen[0], 0), num_experts - 1)
                        value = logits[token, expert]
                        value = softmax_score(value, sums) if is_softmax else score_of(value)
                    total = value
                    for step in T.unroll((num_topk - 1).bit_length()):
                        total = total + T.shfl_xor(total, 1 << step)
                    value = value * fast_reciprocal(clamped(total)) * factor
                    if routing.num_shared and lane >= num_topk:
                        chosen[0] = num_experts - num_topk + lane
                        value = T.float32(1)
                    if lane < num_slots and chosen[0] >= 0:
                        if num_copies:
                            of_copy(to_physical_map, logical_count, token, ep_rank, chosen)
                        if num_tp_ranks > 1 and chosen[0] >= 0:
                            of_tp_rank(per_rank, num_tp_ranks, tp_rank, chosen)
                elif routing.has_unmapped and lane < num_topk:
                    unmapped_topk_idx[token, lane] = T.int64(-1)
                if lane < num_slots:
                    topk_idx[token, lane] = T.cast(chosen[0], "int64")
                    topk_weights[token, lane] = value

    return top2_sum_gate
