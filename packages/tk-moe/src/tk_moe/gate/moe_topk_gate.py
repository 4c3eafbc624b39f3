"""moe_topk_gate_forward: DeepSeek's TileKernels 2.1.0's gate, for any scoring function, with groups and any dtype.

    u       = scoring_func(logits[t])                                         float32
    rank    = u + bias                          softmax: logits[t] + bias; image_bias where image_token_mask[t]
    experts = argsort(rank, descending, stable)[:num_topk]    in the best groups; or given: unmapped_topk_idx[t]
    weights = u[experts] / (Σ u[experts] + 1e-20) · routed_scaling_factor

Then num_shared_experts slots follow, and experts are mapped to physical copies. Where force_random[t], experts and
weights are drawn instead (lib/random_experts.py).

logits bfloat16 or float32 (num_tokens, num_experts), topk_idx int64 or int32 and topk_weights float32 (num_tokens,
num_slots), scores float32 (num_tokens, num_experts) for `moe_topk_gate_backward`.

Each warp handles one token, as in gate.py where experts have no groups, and as in top2_sum_gate.py where they have.
Ranks and saved scores are approximations of sigmoid and sqrtsoftplus, off by at most 5e-7, and 4e-6 of their value; the
lane of a slot computes the score of its expert again, accurately.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_moe.gate.gate import IDX_DTYPES, LOGIT_DTYPES, MAX_EXPERTS, WARPS
from tk_moe.lib.check_routing import check_groups, check_values
from tk_moe.scoring import ScoringFunc, scoring_func_of

MAX_COPIES = 32768


@dataclass(frozen=True)
class TopkRouting:
    """Options that the kernel is compiled for."""

    num_topk: int
    num_shared: int
    num_topk_groups: int
    num_groups: int
    """1 where all groups are kept."""
    num_topk_sum: int
    scoring_func: ScoringFunc
    renormalize: bool
    num_copies: int
    """Columns of to_physical_map; 0 without a map."""
    given: tuple[str, ...]
    """Names of the optional tensors that are given; the others are passed as None."""
    idx_dtype: torch.dtype


# Written per thread: lanes rank keys by shuffles, for which tiles have no operation. No tile version has been timed.
# Every access has its own guard, so TileLang need not add any.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _moe_topk_gate_kernel(
    num_experts: int, dtype: torch.dtype, routing: TopkRouting, alignment: int, float32_alignment: int, arch: Arch
) -> Any:
    """Rows of logits are aligned to `alignment` bytes, biases and rows of scores to `float32_alignment` bytes."""
    import tilelang.language as T

    from tk_moe.device.gates import fast_sigmoid
    from tk_moe.device.scores import fast_sqrtsoftplus
    from tk_moe.lib import selection
    from tk_moe.lib.expert_rows import Run, add_row, expert, load_row, store_row
    from tk_moe.lib.packed_selection import choose_packed
    from tk_moe.lib.physical_experts import of_copy
    from tk_moe.lib.random_experts import choose_at_random, count_choices
    from tk_moe.lib.scores import score, softmax_score, softmax_sums

    num_topk, num_groups, num_copies = routing.num_topk, routing.num_groups, routing.num_copies
    num_slots, given = num_topk + routing.num_shared, routing.given
    is_softmax = routing.scoring_func is ScoringFunc.SOFTMAX
    fast_score = fast_sigmoid if routing.scoring_func is ScoringFunc.SIGMOID else fast_sqrtsoftplus
    is_packed = num_groups == 1 and num_experts <= 256 and num_topk <= 16 and not is_softmax
    lanes, group_size = selection.group_lanes(num_groups), num_experts // num_groups
    most = alignment // dtype.itemsize
    vector = selection.lane_vector(group_size, lanes, min(most, 4) if is_packed else most)
    per_lane = align(ceil_div(group_size, lanes), vector)
    # Length of a lane's runs of consecutive experts: one vector, the next one being 32 vectors on, or all its experts.
    run_length = vector if is_packed else per_lane
    float32_vector = min(vector, float32_alignment // 4)
    num_tokens, unmapped_stride = T.dynamic("num_tokens"), T.dynamic("unmapped_stride", "int64")
    num_mapped = num_experts + routing.num_shared

    @T.macro
    def select(ranks: T.Buffer, lane: T.int32, run: Run, chosen: T.Buffer) -> None:
        if is_packed:
            choose_packed(ranks, num_experts, vector, num_topk, lane, chosen)
        else:
            keys = T.alloc_local((per_lane,), "int32")
            for j in T.unroll(per_lane):
                is_expert = expert(run, j) < run.limit
                keys[j] = T.if_then_else(is_expert, selection.sort_key(ranks[j]), T.int32(selection.NO_KEY))
            kept = routing.num_topk_groups, num_groups, routing.num_topk_sum
            selection.choose_in_groups(keys, kept, num_topk, lane, run.first, chosen)

    @T.prim_func
    def moe_topk_gate(
        logits: T.Tensor((num_tokens, num_experts), dtype),
        mask: T.Tensor((num_tokens,), "bool"),
        bias: T.Tensor((num_experts,), "float32"),
        image_bias: T.Tensor((num_experts,), "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        fix_routing_mask: T.Tensor((num_tokens,), "bool"),
        to_physical_map: T.Tensor((num_mapped, max(num_copies, 1)), "int32"),
        logical_count: T.Tensor((num_mapped,), "int32"),
        unmapped_topk_idx: T.StridedTensor((num_tokens, num_topk), (unmapped_stride, 1), "int64"),
        force_random: T.Tensor((num_tokens,), "bool"),
        random_offset: T.Tensor((1,), "int64"),
        topk_idx: T.Tensor((num_tokens, num_slots), routing.idx_dtype),
        topk_weights: T.Tensor((num_tokens, num_slots), "float32"),
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        factor: T.float32,
        ep_rank: T.int32,
        fixed_offset: T.int64,
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * WARPS + thread // 32
            group = lane // lanes
            first = group * group_size + lane % lanes * run_length
            limit = T.if_then_else(group < num_groups, (group + 1) * group_size, 0)
            run = Run(first, limit, run_length)
            if token < num_tokens:  # uniform in a warp, as are the masks
                x, ranks = T.alloc_local((per_lane,), "float32"), T.alloc_local((per_lane,), "float32")
                chosen, value = T.alloc_local((1,), "int32"), T.alloc_local((1,), "float32")
                sums, num_choices = T.alloc_local((2,), "float32"), T.alloc_local((1,), "int32")
                is_routed, is_random, is_fixed = (T.alloc_var("bool") for _ in range(3))
                index, total, draws = T.alloc_var("int64"), T.alloc_var("float32"), T.alloc_var("int64")
                is_routed = True
                if "mask" in given:
                    is_routed = mask[token]
                is_random = False
                if "force_random" in given:
                    is_random = force_random[token]
                is_fixed = False
                if "fix_routing_mask" in given:
                    is_fixed = fix_routing_mask[token]
                chosen[0] = -1
                value[0] = T.float32(0)
                if is_routed and not is_random:
                    load_row(logits, token, run, vector, -math.inf, x)
                    for j in T.unroll(per_lane):
                        ranks[j] = x[j] if is_softmax else fast_score(x[j])
                    if "scores" in given and not is_softmax:
                        store_row(ranks, token, run, float32_vector, scores)
                    if is_fixed:
                        if "fix_routing_mask" in given and lane < num_topk:
                            index = unmapped_topk_idx[token, lane]
                            if index >= 0 and index < num_experts:
                                chosen[0] = T.cast(index, "int32")
                    else:
                        if "image_bias" in given:
                            if image_token_mask[token]:
                                add_row(image_bias, run, float32_vector, ranks)
                            elif "bias" in given:
                                add_row(bias, run, float32_vector, ranks)
                        elif "bias" in given:
                            add_row(bias, run, float32_vector, ranks)
                        select(ranks, lane, run, chosen)
                        if "unmapped_topk_idx" in given and lane < num_topk:
                            unmapped_topk_idx[token, lane] = T.cast(chosen[0], "int64")
                    if is_softmax:
                        softmax_sums(x, sums)
                        if "scores" in given:
                            for j in T.unroll(per_lane):
                                x[j] = x[j] / sums[1]
                            store_row(x, token, run, float32_vector, scores)
                    if lane < num_topk and chosen[0] >= 0:
                        logit = T.cast(logits[token, chosen[0]], "float32")
                        value[0] = softmax_score(logit, sums) if is_softmax else score(routing.scoring_func, logit)
                    if routing.renormalize:
                        total = T.warp_reduce_sum(value[0])
                        value[0] = value[0] / (total + T.float32(1e-20))
                    value[0] = value[0] * factor
                    if routing.num_shared and lane >= num_topk:
                        chosen[0] = num_experts - num_topk + lane
                        value[0] = T.float32(1)
                    if num_copies and lane < num_slots and chosen[0] >= 0:
                        of_copy(to_physical_map, logical_count, token, ep_rank, chosen)
                else:
                    if "unmapped_topk_idx" in given and lane < num_topk:
                        unmapped_topk_idx[token, lane] = T.int64(-1)
                    if "scores" in given:
                        for j in T.unroll(per_lane):
                            x[j] = T.float32(0)
                        store_row(x, token, run, float32_vector, scores)
                    if "force_random" in given and is_routed:
                        num_choices[0] = num_mapped
                        if num_copies:
                            count_choices(logical_count, num_copies, lane, num_choices)
                        draws = random_offset[0] if "random_offset" in given else fixed_offset
                        choose_at_random(draws, token, lane, ep_rank, num_choices[0], num_slots, chosen, value)
                if lane < num_slots:
                    topk_idx[token, lane] = T.cast(chosen[0], routing.idx_dtype)
                    topk_weights[token, lane] = value[0]

    return moe_topk_gate


def _check_options(logits: Tensor, **tensors: Tensor | None) -> None:
    """Check the optional tensors that have a value for each token or each expert, and which of them go together."""
    num_tokens, num_experts = logits.shape
    kinds = {"bias": (torch.float32, num_experts), "image_bias": (torch.float32, num_experts)}
    for name, x in tensors.items():
        if x is not None:
            dtype, size = kinds.get(name, (torch.bool, num_tokens))
            check.tensor(name, x, (dtype,), (size,), device=logits.device)
    for name, other in (("image_bias", "image_token_mask"), ("image_token_mask", "image_bias")):
        is_whole = tensors[name] is None or tensors[other] is not None
        check.require(is_whole, other, f"a tensor beside {name}", tensors[other])


def _check_map(to_physical_map: Tensor | None, logical_count: Tensor | None, num_mapped: int, logits: Tensor) -> int:
    """Check the map to physical experts, and return its number of columns; 0 without a map."""
    num_copies = 0
    if to_physical_map is not None:
        shape = num_mapped, "D"
        _, num_copies = check.tensor("to_physical_map", to_physical_map, (torch.int32,), shape, device=logits.device)
        check.in_range("D (columns of to_physical_map)", num_copies, 1, MAX_COPIES)
        check.require(logical_count is not None, "logical_count", "a tensor beside to_physical_map", logical_count)
    if logical_count is not None:
        check.require(to_physical_map is not None, "to_physical_map", "a tensor beside logical_count", to_physical_map)
        check.tensor("logical_count", logical_count, (torch.int32,), (num_mapped,), device=logits.device)
    return num_copies


def _check_offset(random_offset: int | Tensor, device: torch.device) -> None:
    if isinstance(random_offset, Tensor):
        check.tensor("random_offset", random_offset, (torch.int64,), (1,), device=device)
    else:
        check.in_range("random_offset", random_offset, 0, 2**63 - 1)


@op(writes=("unmapped_topk_idx", "out", "scores"), aligned=())
def moe_topk_gate_forward(
    logits: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: ScoringFunc | str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    scores: Tensor | None = None,
    *,
    num_groups: int = 0,
    num_topk_groups: int = 0,
    num_topk_sum: int = 2,
    renormalize: bool = True,
    random_offset: int | Tensor = 0,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Choose experts by scores with a bias, weigh them by their scores, and map them to physical copies.

    Names, positions and formulas are those of DeepSeek's TileKernels 2.1.0, which has sqrtsoftplus and float32 only;
    what follows `*` is ours, and so are the other scoring functions. For each token t, with u = scoring_func(logits):

    1. Where mask[t] is False: indices -1, weights 0, scores 0.
    2. Where force_random[t]: random distinct physical experts and weights in (0, 1], for the shared slots too, from
       ep_rank, random_offset, t and the slot alone, by Philox4x32-10; scores 0.
    3. Where fix_routing_mask[t]: the experts unmapped_topk_idx[t]. An index that is none gives -1 and weight 0.
    4. Else the num_topk experts of the largest u + bias, with softmax of logits + bias, best first; of equals the
       smaller index first, NaN above +inf. Where image_token_mask[t], image_bias takes the place of bias. With groups,
       of the num_topk_groups groups with the largest sum of their num_topk_sum best.
    5. weights = u / (sum of u over the chosen + 1e-20) * routed_scaling_factor; without renormalize u * that factor.
    6. With use_shared_as_routed, num_shared_experts slots follow: experts num_experts, num_experts + 1, weights 1.
    7. With to_physical_map, expert e becomes to_physical_map[e, (ep_rank + t * 23333) mod logical_count[e]].

    The choice is the reference's where ranks (or sums of two) differ by more than 2e-6; weights and scores agree within
    rtol 1e-5, atol 1e-8. `moe_topk_gate` is another name. `moe_topk_gate_backward` is the backward, from the scores;
    `gate_weights_bwd` one from the logits.

    Args:
        logits: float32 or bfloat16 (num_tokens, num_experts), contiguous, at most 1024 experts.
        num_topk: Experts per token; with the shared ones (S) at most 32.
        use_shared_as_routed, num_shared_experts: If set, 1 or 2 shared experts take slots; else S is 0.
        routed_scaling_factor: Factor of the weights of routed experts.
        ep_rank: Index of the rank in expert parallelism.
        scoring_func: SIGMOID, SQRTSOFTPLUS or SOFTMAX, or its name.
        mask: bool (num_tokens), False for padding.
        bias: float32 (num_experts), or None for zeros.
        image_bias, image_token_mask: float32 (num_experts) and bool (num_tokens), True for tokens of images.
        fix_routing_mask: bool (num_tokens), True where the routing is given.
        to_physical_map: int32 (num_experts + S, D), physical copies of each expert, at most 32768.
        logical_count: int32 (num_experts + S), copies of each expert, clamped to 1 to D.
        unmapped_topk_idx: int64 (num_tokens, num_topk), rows may be strided. The logical experts of every token whose
            routing is not given are written to it; -1 in 1 and 2.
        force_random: bool (num_tokens).
        out: Where to write the results.
        scores: float32 (num_tokens, num_experts), to which u is written.
        num_groups, num_topk_groups: Groups in all and groups kept; both 0 for no groups. Where they differ, at most 32
            groups, of num_topk_sum experts or more.
        num_topk_sum: 2, or 1 for the group's best alone (DeepSeek-V2).
        renormalize: Whether to divide by the sum of the chosen scores.
        random_offset: An int from 0 on, or an int64 tensor (1) that is read on the device. Other offsets give other
            random experts; 0 those of TileKernels.
        idx_dtype: torch.int64 or torch.int32.

    Returns:
        topk_idx: idx_dtype (num_tokens, num_topk + S).
        topk_weights: float32 (num_tokens, num_topk + S).

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride or device; a size out of range; identity scoring; one of image_bias and
            image_token_mask, or of to_physical_map and logical_count, alone; fix_routing_mask without
            unmapped_topk_idx. With `TK_DEBUG=1` also given indices and counts out of range.
    """
    num_tokens, num_experts = check.tensor("logits", logits, LOGIT_DTYPES, ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of logits)", num_experts, 1, MAX_EXPERTS)
    check.flag("use_shared_as_routed", use_shared_as_routed)
    check.in_range("num_shared_experts", num_shared_experts, *((1, 2) if use_shared_as_routed else (0, 2**31 - 1)))
    num_shared = num_shared_experts if use_shared_as_routed else 0
    scoring_func = scoring_func_of(scoring_func)
    check_groups(num_experts, num_topk, num_shared, (num_topk_groups, num_groups), num_topk_sum, scoring_func)
    check.number("routed_scaling_factor", routed_scaling_factor)
    check.in_range("ep_rank", ep_rank, 0, 2**31 - 1)
    check.flag("renormalize", renormalize)
    check.require_type(idx_dtype in IDX_DTYPES, "idx_dtype", "torch.int64 or torch.int32", idx_dtype)
    of_tokens = {"mask": mask, "image_token_mask": image_token_mask, "fix_routing_mask": fix_routing_mask}
    of_tokens["force_random"] = force_random
    _check_options(logits, bias=bias, image_bias=image_bias, **of_tokens)
    num_copies = _check_map(to_physical_map, logical_count, num_experts + num_shared, logits)
    device = logits.device
    if unmapped_topk_idx is not None:
        what = "unmapped_topk_idx", unmapped_topk_idx
        check.tensor(*what, (torch.int64,), (num_tokens, num_topk), layout="rows", device=device)
    is_given = fix_routing_mask is None or unmapped_topk_idx is not None
    check.require(is_given, "unmapped_topk_idx", "a tensor beside fix_routing_mask", unmapped_topk_idx)
    if scores is not None:
        check.tensor("scores", scores, (torch.float32,), (num_tokens, num_experts), device=device)
    _check_offset(random_offset, device)
    dtypes, shape = (idx_dtype, torch.float32), (num_tokens, num_topk + num_shared)
    if out is not None:
        for index, (x, dtype) in enumerate(zip(check.pair("out", out, "a pair (topk_idx, topk_weights)"), dtypes)):
            check.tensor(f"out[{index}]", x, (dtype,), shape, device=device)
    if check.reads_data(logits):
        check_values(num_experts, fix_routing_mask, unmapped_topk_idx, to_physical_map, logical_count)
    topk_idx, topk_weights = out or (new(logits.new_empty, shape, dtype=dtype) for dtype in dtypes)
    if launching(topk_idx, topk_weights, unmapped_topk_idx, scores):
        optional = {"bias": bias, "image_bias": image_bias, "scores": scores, "unmapped_topk_idx": unmapped_topk_idx}
        optional |= of_tokens
        offsets = random_offset if isinstance(random_offset, Tensor) else None
        optional["random_offset"] = offsets
        names = tuple(name for name, x in optional.items() if x is not None)
        groups = (num_topk_groups, num_groups) if num_groups != num_topk_groups else (1, 1)
        sizes = num_topk, num_shared, *groups, num_topk_sum
        routing = TopkRouting(*sizes, scoring_func, renormalize, num_copies, names, idx_dtype)
        float32_alignment = min([check.row_alignment(x) for x in (bias, image_bias, scores) if x is not None] or [16])
        alignments = check.row_alignment(logits), float32_alignment
        gate = _moe_topk_gate_kernel(num_experts, logits.dtype, routing, *alignments, get_arch(device))
        gate(
            *(logits, mask, bias, image_bias, image_token_mask, fix_routing_mask, to_physical_map, logical_count),
            *(unmapped_topk_idx, force_random, offsets, topk_idx, topk_weights, scores),
            *(float(routed_scaling_factor), ep_rank, 0 if offsets is not None else random_offset),
        )
    return topk_idx, topk_weights


moe_topk_gate = moe_topk_gate_forward
