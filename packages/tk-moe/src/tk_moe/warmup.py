"""The calls that a mixture-of-experts model makes to this package's ops; `tk warmup` compiles the kernels they need."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

import tk_moe as moe
from tk_core.cli.profile import Call, call, empty
from tk_core.math import align, ceil_div

IdxDtype = Literal["int64", "int32"]
FloatDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Profile:
    """Section [tk_moe] of a model's profile."""

    hidden: int
    num_experts: int
    """Routed experts, each counted once."""
    num_topk: int
    """Routed experts of a token."""
    num_groups: int = 0
    """Groups of experts, of which `num_topk_groups` are kept; 0 for none."""
    num_topk_groups: int = 0
    scoring_func: Literal["sigmoid", "sqrtsoftplus", "softmax"] = "sigmoid"
    num_shared_slots: int = 0
    """Shared experts that take slots of the routing beside the routed ones."""
    num_extra_experts: int = 0
    """Physical copies of experts beyond the first of each; 0 for no map to physical experts."""
    num_ep_ranks: int = 1
    num_tp_ranks: int = 1
    logits: tuple[FloatDtype, ...] = ("float32",)
    indices: tuple[IdxDtype, ...] = ("int64",)
    expert_bias: tuple[bool, ...] = (True,)
    """Whether `topk_gate_with_weights` is given a bias."""
    token_masks: tuple[bool, ...] = (False,)
    """Whether gates are given a mask, which is False for padding tokens."""
    fixed_routing: bool = False
    """Whether `top2_sum_gate` and `moe_topk_gate` are also called with unmapped_topk_idx, without and with
    fix_routing_mask."""
    renormalize: bool = True
    """Whether gates divide weights by their sum."""
    num_topk_sum: Literal[1, 2] = 2
    """By how many of its best experts a group is chosen."""
    saves_scores: tuple[bool, ...] = ()
    """Whether `moe_topk_gate` is given scores to write, which its backward takes; empty without calls of it."""
    token_ids: tuple[IdxDtype, ...] = ()
    """Dtypes of the ids by which `hash_gate` looks up experts; empty without such layers."""
    tables: tuple[IdxDtype, ...] = ("int32",)
    """Dtypes of its tables."""
    expert_psum: tuple[bool, ...] = (False,)
    """Whether `get_fused_mapping` also returns expert_psum, the ends of the experts' pairs."""
    alignments: tuple[int, ...] = (128,)
    """The number of rows of each expert is a multiple of one of these."""
    rows: tuple[Literal["bfloat16", "float32", "e4m3", "e2m1"], ...] = ("bfloat16",)
    """Formats of the rows that go to the experts; e4m3 and e2m1 rows have scale factors."""
    num_per_channels: tuple[Literal[32, 128], ...] = (128,)
    """Channels of one scale factor of such rows."""
    sf_layouts: tuple[Literal["row_major", "col_major", "packed_ue8m0"], ...] = ("row_major",)
    """Layouts in which such rows' scale factors leave `expand_to_fused_with_sf`."""
    combine: tuple[FloatDtype, ...] = ("bfloat16",)
    """Dtypes of the rows that `reduce_fused` adds up, weighted and unweighted."""
    training: bool = False
    """Whether backwards and the auxiliary loss are called too."""


def calls(profile: Profile, num_tokens: int) -> Iterator[Call]:
    """Ops with their arguments on the meta device, for a batch of `num_tokens` tokens."""
    yield from _gates(profile, num_tokens)
    yield from _indices(profile, num_tokens)
    yield from _rows(profile, num_tokens)
    if profile.training:
        yield from _training(profile, num_tokens)


def _gates(profile: Profile, num_tokens: int) -> Iterator[Call]:
    num_experts, num_topk, scoring_func = profile.num_experts, profile.num_topk, profile.scoring_func
    scores, bias = empty(num_tokens, num_experts), empty(num_experts)
    yield call(moe.topk_gate, scores, num_topk)
    yield call(moe.normalize_weight, empty(num_tokens, num_topk))
    if profile.num_groups:
        groups = empty(num_tokens, profile.num_groups, num_experts // profile.num_groups)
        for num_topk_sum in (1, 2):
            yield call(moe.topk_sum_and_topk_group_idx, groups, num_topk_sum, profile.num_topk_groups)
    for masked in profile.token_masks:
        mask = empty(num_tokens, dtype=torch.bool) if masked else None
        for logits_dtype, idx_dtype in product(profile.logits, profile.indices):
            logits = empty(num_tokens, num_experts, dtype=logits_dtype)
            options = {"mask": mask, "idx_dtype": getattr(torch, idx_dtype)}
            for has_bias in profile.expert_bias:
                bias_given = bias if has_bias else None
                scored = logits, num_topk, scoring_func, bias_given, profile.renormalize
                yield call(moe.topk_gate_with_weights, *scored, **options)
                yield from _moe_topk_gates(profile, logits, bias_given, **options)
            for id_dtype, table_dtype in product(profile.token_ids, profile.tables):
                token_ids, table = empty(num_tokens, dtype=id_dtype), empty(1, num_topk, dtype=table_dtype)
                yield call(moe.hash_gate, token_ids, table, logits, scoring_func, profile.renormalize, **options)
        yield from _top2_sum_gates(profile, scores, bias, mask)


def _routings(profile: Profile, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Options of gates that map experts to physical ones, and may be given experts."""
    unmapped = {"unmapped_topk_idx": empty(num_tokens, profile.num_topk, dtype=torch.int64)}
    fixed = [unmapped, {**unmapped, "fix_routing_mask": empty(num_tokens, dtype=torch.bool)}]
    options: dict[str, Any] = {"renormalize": profile.renormalize, "num_topk_sum": profile.num_topk_sum}
    if profile.num_extra_experts:
        num_logical = profile.num_experts + profile.num_shared_slots
        copies = empty(num_logical, 1 + profile.num_extra_experts, dtype=torch.int32)
        options |= {"to_physical_map": copies, "logical_count": empty(num_logical, dtype=torch.int32)}
    for routing in [{}, *fixed] if profile.fixed_routing else [{}]:
        yield {**options, **routing}


def _top2_sum_gates(profile: Profile, logits: Tensor, bias: Tensor, mask: Tensor | None) -> Iterator[Call]:
    num_shared = profile.num_shared_slots
    sizes = profile.num_topk, profile.num_topk_groups, profile.num_groups, num_shared > 0, num_shared
    ranks = 0, profile.num_ep_ranks, 0, profile.num_tp_ranks
    for routing in _routings(profile, logits.shape[0]):
        yield call(moe.top2_sum_gate, logits, bias, *sizes, 1.0, *ranks, profile.scoring_func, mask, **routing)


def _moe_topk_gates(profile: Profile, logits: Tensor, bias: Tensor | None, **options: Any) -> Iterator[Call]:
    num_shared = profile.num_shared_slots
    sizes = profile.num_topk, num_shared > 0, num_shared
    groups = {"num_groups": profile.num_groups, "num_topk_groups": profile.num_topk_groups}
    for saves_scores, routing in product(profile.saves_scores, _routings(profile, logits.shape[0])):
        scores = empty(*logits.shape) if saves_scores else None
        arguments = logits, *sizes, 1.0, 0, profile.scoring_func
        yield call(moe.moe_topk_gate, *arguments, bias=bias, scores=scores, **groups, **routing, **options)


def _indices(profile: Profile, num_tokens: int) -> Iterator[Call]:
    num_experts = profile.num_experts
    for dtype in profile.indices:
        idx = empty(num_tokens, profile.num_topk, dtype=dtype)
        for with_psum in profile.expert_psum:
            yield call(moe.get_fused_mapping, idx, num_experts, 0, profile.alignments[0], with_psum=with_psum)
        for num_groups in sorted({num_experts, profile.num_groups, profile.num_ep_ranks} - {0, 1}):
            yield call(moe.group_count, idx, num_groups)
            if num_groups < num_experts:
                yield call(moe.inplace_unique_group_indices, idx, num_groups)
        if profile.num_tp_ranks > 1:
            yield call(moe.mask_indices_by_tp, idx, num_experts, profile.num_ep_ranks, 0, profile.num_tp_ranks)


def _maps(profile: Profile, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """token_topk_to_pos and pos_to_expert, with the fewest rows that there can be and with the most."""
    num_pairs = num_tokens * profile.num_topk
    token_topk_to_pos = empty(num_tokens, profile.num_topk, dtype=torch.int32)
    for alignment in profile.alignments:
        most = (num_pairs + (alignment - 1) * profile.num_experts) // alignment * alignment
        for num_rows in (align(num_pairs, alignment), most):
            yield token_topk_to_pos, empty(num_rows, dtype=torch.int32)


def _rows(profile: Profile, num_tokens: int) -> Iterator[Call]:
    weights = empty(num_tokens, profile.num_topk)
    for maps in _maps(profile, num_tokens):
        token_topk_to_pos, pos_to_expert = maps
        for row_format in profile.rows:
            if row_format in ("e4m3", "e2m1"):
                yield from _quantized_rows(profile, num_tokens, row_format, maps)
            else:
                yield call(moe.expand_to_fused, empty(num_tokens, profile.hidden, dtype=row_format), *maps)
        for dtype, topk_weights in product(profile.combine, (weights, None)):
            x = empty(pos_to_expert.shape[0], profile.hidden, dtype=dtype)
            yield call(moe.reduce_fused, x, topk_weights, token_topk_to_pos)


def _quantized_rows(profile: Profile, num_tokens: int, row_format: str, maps: tuple[Tensor, Tensor]) -> Iterator[Call]:
    cols, dtype = (profile.hidden, "float8_e4m3fn") if row_format == "e4m3" else (profile.hidden // 2, "int8")
    data = empty(num_tokens, cols, dtype=dtype)
    for num_per_channels, layout in product(profile.num_per_channels, profile.sf_layouts):
        num_sf = ceil_div(profile.hidden, num_per_channels)
        packed = empty(num_tokens, ceil_div(num_sf, 4), dtype=torch.int32)
        sf = packed if layout == "packed_ue8m0" else empty(num_tokens, num_sf)
        yield call(moe.expand_to_fused_with_sf, (data, sf), num_per_channels, *maps, layout != "row_major")


def _training(profile: Profile, num_tokens: int) -> Iterator[Call]:
    num_experts, num_topk = profile.num_experts, profile.num_topk
    weights, denominator = empty(num_tokens, num_topk), empty(num_tokens)
    for grad_denominator in (None, denominator):
        yield call(moe.normalize_weight_bwd, weights, grad_denominator, denominator, weights)
    scores, fi = empty(num_tokens, num_experts), empty(num_experts)
    yield call(moe.aux_loss, scores, fi)
    yield call(moe.aux_loss_bwd, empty(), scores, fi)
    for dtype in profile.indices:
        idx = empty(num_tokens, num_topk, dtype=dtype)
        yield call(moe.aux_fi, idx, num_experts, num_topk)
        for logits_dtype in profile.logits:
            logits = empty(num_tokens, num_experts, dtype=logits_dtype)
            yield call(moe.gate_weights_bwd, weights, logits, idx, profile.scoring_func, profile.renormalize)
        if True in profile.saves_scores:
            saved = scores, idx, weights, weights, 1.0, profile.scoring_func
            for masked, sums in product(profile.token_masks, (None, empty(1, num_experts))):
                mask = empty(num_tokens, dtype=torch.bool) if masked else None
                options = {"mask": mask, "grad_scores_sum": sums, "renormalize": profile.renormalize}
                yield call(moe.moe_topk_gate_backward, *saved, **options)
    for maps, dtype in product(_maps(profile, num_tokens), profile.combine):
        token_topk_to_pos, pos_to_expert = maps
        rows = empty(pos_to_expert.shape[0], profile.hidden, dtype=dtype)
        grad = empty(num_tokens, profile.hidden, dtype=dtype)
        yield call(moe.expand_to_fused_bwd, rows, token_topk_to_pos)
        yield call(moe.reduce_fused_bwd, grad, rows, weights, *maps)
        yield call(moe.reduce_fused_bwd, grad, None, None, *maps)
