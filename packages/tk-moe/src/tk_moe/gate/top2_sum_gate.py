"""top2_sum_gate: scores a token's logits, keeps the best groups of experts, and chooses and weighs the best in those.

    rank      = scoring_func(logits[t]) + bias                        softmax: logits[t] + bias
    groups    = the num_topk_groups with the largest sum of their num_topk_sum best ranks; the others' become -∞
    selection = argsort(rank, descending, stable)[:num_topk]          or given: unmapped_topk_idx[t]
    weights   = score / max(Σ score, 1e-20) · routed_scaling_factor   (scores of the selection, without bias; not
                                                                       divided unless renormalize)

Then num_shared_experts slots follow, and experts are mapped to physical copies and to a tensor-parallel rank's indices.

logits float32 (num_tokens, num_experts), bias float32 (num_experts), topk_idx int64 and topk_weights float32
(num_tokens, num_slots).

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

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_moe.gate.gate import MAX_EXPERTS, WARPS
from tk_moe.lib.check_routing import check_groups, check_values
from tk_moe.scoring import ScoringFunc, scoring_func_of

MAX_EXTRA_EXPERTS = 32767


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
    renormalize: bool
    num_topk_sum: int


# Written per thread: lanes rank keys by shuffles, for which tiles have no operation. No tile version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _top2_sum_gate_kernel(num_experts: int, routing: Routing, alignment: int, bias_alignment: int, arch: Arch) -> Any:
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
        key, position = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        most = T.alloc_var("int32")
        most = T.int32(selection.TOP_KEY)
        for j in T.unroll(per_lane):
            keys[j] = T.if_then_else(first + j < limit, key_of(x[j], shift[j]), T.int32(selection.NO_KEY))
        selection.best_three(keys, best)
        if num_groups > 1:
            selection.group_key(best, lanes, routing.num_topk_sum, key)
            selection.group_position(key, num_groups, lane, position)
            most = T.if_then_else(
                position[0] < routing.num_topk_groups, T.int32(selection.TOP_KEY), T.int32(selection.LEAST_KEY)
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
                index = T.alloc_var("int64")
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
                                index = unmapped_topk_idx[token, lane]
                                # Cut to 32 bits, a wide index would be another expert's.
                                chosen[0] = T.cast(T.max(T.min(index, T.int64(2**31 - 1)), T.int64(-1)), "int32")
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
                    if routing.renormalize:
                        total = value
                        for step in T.unroll((num_topk - 1).bit_length()):
                            total = total + T.shfl_xor(total, 1 << step)
                        value = value * fast_reciprocal(clamped(total)) * factor
                    else:
                        value = value * factor
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


def _check_shared(num_experts: int, num_topk: int, num_shared: int, num_extra: int) -> None:
    if num_shared:
        check.multiple_of("num_topk (by num_shared_experts)", num_topk, num_shared)
        check.multiple_of("num_experts (by num_topk / num_shared_experts)", num_experts, num_topk // num_shared)
        most = f"at most {num_extra}, the extra physical experts"
        check.require(num_shared <= num_extra, "num_shared_experts", most, num_shared)


@op(writes=("unmapped_topk_idx",), aligned=())
def top2_sum_gate(
    logits: Tensor,
    bias: Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: ScoringFunc | str,
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    *,
    renormalize: bool = True,
    num_topk_sum: int = 2,
) -> tuple[Tensor, Tensor]:
    """Route tokens: keep the best groups of experts, weigh the best experts in them, and map these to physical copies.

    Names and formulas are those of DeepSeek's TileKernels 1.0.0. For each token t:

    1. Experts rank by scoring_func(logits) + bias, with softmax by logits + bias.
    2. If num_groups differs from num_topk_groups, only the num_topk_groups groups with the largest sums of their two
       best ranks stay, or with num_topk_sum 1 those with the largest ranks; the others' ranks become -inf.
    3. The num_topk best are selected, best first. Of equals, here and in 2, the smaller index comes first; NaN ranks
       highest. A weight is the score without bias / max(sum of the selected scores, 1e-20) * routed_scaling_factor;
       without renormalize the score * that factor.
    4. Where fix_routing_mask[t], the selection is unmapped_topk_idx[t] instead; a negative index has expert 0's score.
    5. With use_shared_as_routed, num_shared_experts slots follow: experts num_experts, num_experts + 1, weights 1.
    6. With to_physical_map, expert e becomes to_physical_map[e, (ep_rank + t * 23333) mod logical_count[e]].
    7. There are (num_experts + X) // num_ep_ranks physical experts on each rank. Those of ranks r with
       r mod num_tp_ranks = tp_rank stay, numbered as by `mask_indices_by_tp`; others become -1 and keep their weights.
    8. Where mask[t] is False, indices are -1 and weights 0.

    The order is the reference's where ranks (or sums of two) differ by more than 2e-6; weights agree within rtol 1e-5,
    atol 1e-8.

    Args:
        logits: float32 (num_tokens, num_experts), contiguous, at most 1024 experts.
        bias: float32 (num_experts), contiguous.
        num_topk: Experts per token; with the shared ones at most 32.
        num_topk_groups, num_groups: Groups kept and groups in all; both 0 for no groups. Where they differ, at most 32
            groups, of num_topk_sum experts or more.
        use_shared_as_routed, num_shared_experts: If set, 1 or 2 shared experts (S) take slots; S divides num_topk,
            num_topk / S divides num_experts.
        routed_scaling_factor: Factor of the weights, except those of shared experts.
        ep_rank, num_ep_ranks, tp_rank, num_tp_ranks: Index and number of ranks in expert and tensor parallelism.
        scoring_func: SIGMOID, SQRTSOFTPLUS or SOFTMAX, or its name.
        mask: bool (num_tokens), False for padding.
        fix_routing_mask: bool (num_tokens), True where the routing is given.
        to_physical_map: int32 (num_experts + S, 1 + X), physical copies of each expert; X extra ones, S <= X < 32768.
            Without it X is 0.
        logical_count: int32 (num_experts + S), copies of each expert, clamped to 1 to 1 + X.
        unmapped_topk_idx: int64 (num_tokens, num_topk), rows may be strided. The selection of every token whose routing
            is not given is written to it, -1 where mask is False.
        renormalize: Whether to divide by the sum of the selected scores.
        num_topk_sum: 2, or 1 for the group's best rank alone (DeepSeek-V2).

    Returns:
        topk_idx: int64 (num_tokens, num_topk + S).
        topk_weights: float32 (num_tokens, num_topk + S).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride or device; a size or rank out of range; identity scoring; a map without counts
            or counts without a map; fix_routing_mask without unmapped_topk_idx. With `TK_DEBUG=1` also indices and
            counts out of range, which otherwise give the weight or copy of some other expert.
    """
    num_tokens, num_experts = check.tensor("logits", logits, (torch.float32,), ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of logits)", num_experts, 1, MAX_EXPERTS)
    device = logits.device
    check.tensor("bias", bias, (torch.float32,), (num_experts,), device=device)
    check.flag("use_shared_as_routed", use_shared_as_routed)
    check.in_range("num_shared_experts", num_shared_experts, *((1, 2) if use_shared_as_routed else (0, num_experts)))
    num_shared = num_shared_experts if use_shared_as_routed else 0
    check.number("routed_scaling_factor", routed_scaling_factor)
    num_extra = 0
    if to_physical_map is not None:
        shape = num_experts + num_shared, "1 + X"
        num_extra = check.tensor("to_physical_map", to_physical_map, (torch.int32,), shape, device=device)[1] - 1
        check.in_range("X (columns of to_physical_map - 1)", num_extra, 0, MAX_EXTRA_EXPERTS)
        check.require(logical_count is not None, "logical_count", "a tensor beside to_physical_map", logical_count)
    if logical_count is not None:
        check.require(to_physical_map is not None, "to_physical_map", "a tensor beside logical_count", to_physical_map)
        check.tensor("logical_count", logical_count, (torch.int32,), (num_experts + num_shared,), device=device)
    scoring_func = scoring_func_of(scoring_func)
    check_groups(num_experts, num_topk, num_shared, (num_topk_groups, num_groups), num_topk_sum, scoring_func)
    _check_shared(num_experts, num_topk, num_shared, num_extra)
    check.flag("renormalize", renormalize)
    check.in_range("num_ep_ranks", num_ep_ranks, 1, num_experts + num_extra)
    check.in_range("ep_rank", ep_rank, 0, num_ep_ranks - 1)
    check.in_range("num_tp_ranks", num_tp_ranks, 1, num_experts + num_extra)
    check.in_range("tp_rank", tp_rank, 0, num_tp_ranks - 1)
    for name, tokens in (("mask", mask), ("fix_routing_mask", fix_routing_mask)):
        if tokens is not None:
            check.tensor(name, tokens, (torch.bool,), (num_tokens,), device=device)
    if unmapped_topk_idx is not None:
        what = "unmapped_topk_idx", unmapped_topk_idx
        check.tensor(*what, (torch.int64,), (num_tokens, num_topk), layout="rows", device=device)
    is_given = fix_routing_mask is None or unmapped_topk_idx is not None
    check.require(is_given, "unmapped_topk_idx", "a tensor beside fix_routing_mask", unmapped_topk_idx)
    if check.reads_data(logits):
        check_values(num_experts, fix_routing_mask, unmapped_topk_idx, to_physical_map, logical_count)
        if to_physical_map is not None:
            check.below("to_physical_map", to_physical_map, num_experts + num_extra, "experts below {}")
    topk_idx = new(logits.new_empty, (num_tokens, num_topk + num_shared), dtype=torch.int64)
    topk_weights = new(logits.new_empty, (num_tokens, num_topk + num_shared))
    if launching(topk_idx, topk_weights, unmapped_topk_idx):
        groups = (num_topk_groups, num_groups) if num_groups != num_topk_groups else (1, 1)
        present = (x is not None for x in (mask, fix_routing_mask, unmapped_topk_idx))
        num_copies = 0 if to_physical_map is None else num_extra + 1
        per_rank = (num_experts + num_extra) // num_ep_ranks if num_tp_ranks > 1 else 0
        sizes = num_topk, *groups, num_shared
        physical = num_copies, per_rank, num_tp_ranks
        routing = Routing(*sizes, scoring_func, *present, *physical, renormalize, num_topk_sum)
        alignments = check.row_alignment(logits), check.row_alignment(bias)
        gate = _top2_sum_gate_kernel(num_experts, routing, *alignments, get_arch(device))
        gate(
            *(logits, bias, mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx),
            *(topk_idx, topk_weights, float(routed_scaling_factor), ep_rank, tp_rank),
        )
    return topk_idx, topk_weights
