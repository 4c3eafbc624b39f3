"""Differentiable gates, expand, reduce and SwiGLU: the ops of tk_moe and tk_quant with their gradients.

Names, arguments and results are those of the ops, unless a docstring says otherwise. Where nothing requires gradients
the op alone runs.
"""

from typing import Any

import torch
from torch import Tensor

import tk_moe
import tk_quant
from tk_core import check
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import needs_gradients
from tk_moe import ScoringFunc


def topk_gate_with_weights(
    logits: Tensor,
    num_topk: int,
    scoring_func: ScoringFunc | str,
    bias: Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """`tk_moe.topk_gate_with_weights`; topk_weights is differentiable by logits, topk_idx and bias are not."""
    topk_idx, topk_weights = tk_moe.topk_gate_with_weights(
        *(_detached(logits), num_topk, scoring_func, bias, renormalize, routed_scaling_factor, mask, idx_dtype)
    )
    return topk_idx, _GateWeights.call(logits, topk_idx, topk_weights, scoring_func, renormalize, routed_scaling_factor)


def hash_gate(
    token_ids: Tensor,
    table: Tensor,
    logits: Tensor,
    scoring_func: ScoringFunc | str,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    idx_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """`tk_moe.hash_gate`; topk_weights is differentiable by logits."""
    topk_idx, topk_weights = tk_moe.hash_gate(
        *(token_ids, table, _detached(logits), scoring_func, renormalize, routed_scaling_factor, mask, idx_dtype)
    )
    return topk_idx, _GateWeights.call(logits, topk_idx, topk_weights, scoring_func, renormalize, routed_scaling_factor)


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
    """`tk_moe.top2_sum_gate`; topk_weights is differentiable by logits, topk_idx and bias are not."""
    is_mapped = to_physical_map is not None or num_tp_ranks != 1
    if is_mapped and unmapped_topk_idx is None and needs_gradients(logits):
        num_tokens, num_experts = check.tensor("logits", logits, (torch.float32,), ("num_tokens", "num_experts"))
        check.in_range("num_topk", num_topk, 1, num_experts)
        unmapped_topk_idx = logits.new_empty((num_tokens, num_topk), dtype=torch.int64)
    topk_idx, topk_weights = tk_moe.top2_sum_gate(
        *(_detached(logits), bias, num_topk, num_topk_groups, num_groups, use_shared_as_routed, num_shared_experts),
        *(routed_scaling_factor, ep_rank, num_ep_ranks, tp_rank, num_tp_ranks, scoring_func, mask),
        *(fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx),
        renormalize=renormalize,
        num_topk_sum=num_topk_sum,
    )
    if not needs_gradients(logits):
        return topk_idx, topk_weights
    experts = topk_idx
    if unmapped_topk_idx is not None:
        # A caller's own tensor may change before the backward runs.
        experts = unmapped_topk_idx.clone(memory_format=torch.contiguous_format)
        if fix_routing_mask is not None:
            experts = torch.where(fix_routing_mask.unsqueeze(1), experts.clamp(min=0), experts)
        if mask is not None:
            experts = torch.where(mask.unsqueeze(1), experts, -1)
    return topk_idx, _GateWeights.call(logits, experts, topk_weights, scoring_func, renormalize, routed_scaling_factor)


def _detached(logits: Tensor) -> Tensor:
    check.require_type(isinstance(logits, Tensor), "logits", "a torch.Tensor", logits)
    return logits.detach()


class _GateWeights(Function):
    """A gate's weights as a differentiable function of its logits."""

    saves = ("logits", "experts", "scoring_func", "renormalize", "routed_scaling_factor")

    @staticmethod
    def forward(
        logits: Tensor,
        experts: Tensor,
        topk_weights: Tensor,
        scoring_func: ScoringFunc | str,
        renormalize: bool,
        routed_scaling_factor: float,
    ) -> Tensor:
        return topk_weights.view_as(topk_weights)

    @staticmethod
    def backward(ctx: Context, d_weights: Tensor) -> Tensor:
        _, experts, *_ = ctx.saved
        # Weights of shared experts, which come after the others, are constants.
        return tk_moe.gate_weights_bwd(d_weights[:, : experts.shape[1]].contiguous(), *ctx.saved)


def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """`tk_moe.normalize_weight`, both results differentiable."""
    return _NormalizeWeight.call(topk_weights)


class _NormalizeWeight(Function):
    outputs = ("denominator", "normalized")
    saves = ("denominator", "normalized")

    @staticmethod
    def forward(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        return tk_moe.normalize_weight(topk_weights)

    @staticmethod
    def backward(ctx: Context, d_denominator: Tensor | None, d_normalized: Tensor | None) -> Tensor:
        _, normalized = ctx.saved
        d_normalized = torch.zeros_like(normalized) if d_normalized is None else d_normalized
        return tk_moe.normalize_weight_bwd(d_normalized, d_denominator, *ctx.saved)


def aux_loss(scores: Tensor, fi: Tensor, alpha: float = 1.0) -> Tensor:
    """`tk_moe.aux_loss`, differentiable by scores."""
    return _AuxLoss.call(scores, fi, alpha)


class _AuxLoss(Function):
    saves = ("scores", "fi", "alpha")

    @staticmethod
    def forward(scores: Tensor, fi: Tensor, alpha: float) -> Tensor:
        return tk_moe.aux_loss(scores, fi, alpha)

    @staticmethod
    def backward(ctx: Context, d_loss: Tensor) -> Tensor:
        return tk_moe.aux_loss_bwd(d_loss, *ctx.saved)


def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """`tk_moe.expand_to_fused`, differentiable by x if it is bfloat16 or float32 and hidden is a multiple of 64."""
    if needs_gradients(x):
        _, hidden = check.tensor("x", x, (torch.bfloat16, torch.float32), ("num_tokens", "hidden"))
        check.multiple_of("hidden (columns of x)", hidden, 64)
    return _ExpandToFused.call(x, token_topk_to_pos, pos_to_expert)


class _ExpandToFused(Function):
    saves = ("token_topk_to_pos",)

    @staticmethod
    def forward(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
        return tk_moe.expand_to_fused(x, token_topk_to_pos, pos_to_expert)

    @staticmethod
    def backward(ctx: Context, d_rows: Tensor) -> Tensor:
        return tk_moe.expand_to_fused_bwd(d_rows, *ctx.saved)


def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = "",
    sf: Tensor | None = None,
    out: Tensor | None = None,
    *,
    pos_to_expert: Tensor | None = None,
) -> Tensor:
    """`tk_moe.reduce_fused`, differentiable by x and topk_weights where x is one tensor and it returns x's dtype.

    The gradient of rows that no position names is zero. `pos_to_expert` is for the backward, which finds those rows in
    token_topk_to_pos if it is None.

    Raises:
        ValueError: besides what the op raises: gradients are needed of FP8, of a pair, or of what is written to `out`.
    """
    values = x[0] if isinstance(x, tuple | list) and x else x
    check.require_type(isinstance(values, Tensor), "x", "a torch.Tensor or a pair (x, row_sf)", type(x))
    if pos_to_expert is not None:
        num_rows = tuple(values.shape[:1])
        check.tensor("pos_to_expert", pos_to_expert, (torch.int32,), num_rows, device=values.device)
    if not needs_gradients(values, topk_weights):
        return tk_moe.reduce_fused(x, topk_weights, token_topk_to_pos, fp8_format, sf, out)
    check.require(isinstance(x, Tensor), "x", "one tensor where gradients are needed", type(x))
    check.require(fp8_format == "", "fp8_format", "'' where gradients are needed", fp8_format)
    check.require(out is None, "out", "None where gradients are needed", type(out))
    check.require(sf is None, "sf", "None without fp8_format", type(sf))
    if topk_weights is None:
        return _ReduceUnweighted.call(x, token_topk_to_pos, pos_to_expert, x.shape[0])
    return _ReduceFused.call(x, topk_weights, token_topk_to_pos, pos_to_expert)


class _ReduceFused(Function):
    saves = ("x", "topk_weights", "token_topk_to_pos", "pos_to_expert")

    @staticmethod
    def forward(x: Tensor, topk_weights: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor | None) -> Tensor:
        return tk_moe.reduce_fused(x, topk_weights, token_topk_to_pos)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Gradients:
        x, topk_weights, token_topk_to_pos, pos_to_expert = ctx.saved
        if pos_to_expert is None:
            pos_to_expert = _named_rows(token_topk_to_pos, x.shape[0])
        # One kernel computes both gradients.
        return tk_moe.reduce_fused_bwd(d_y, x, topk_weights, token_topk_to_pos, pos_to_expert)


class _ReduceUnweighted(Function):
    """Without weights, only whose gradient needs x: it is not saved."""

    saves = ("token_topk_to_pos", "pos_to_expert", "num_rows")

    @staticmethod
    def forward(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor | None, num_rows: int) -> Tensor:
        return tk_moe.reduce_fused(x, None, token_topk_to_pos)

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Tensor:
        token_topk_to_pos, pos_to_expert, num_rows = ctx.saved
        if pos_to_expert is None:
            pos_to_expert = _named_rows(token_topk_to_pos, num_rows)
        return tk_moe.reduce_fused_bwd(d_y, None, None, token_topk_to_pos, pos_to_expert)[0]


def _named_rows(token_topk_to_pos: Tensor, num_rows: int) -> Tensor:
    """int32 (num_rows,): 0 for rows that some position names, -1 for all others."""
    pos = token_topk_to_pos.flatten().long()
    spare = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=pos.device)
    return spare.scatter(0, torch.where((pos >= 0) & (pos < num_rows), pos, num_rows), 0)[:num_rows].contiguous()


def swiglu(
    x: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str | None = None,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> Tensor:
    """`tk_quant.swiglu_forward`, differentiable by x and, with token_topk_to_pos, by topk_weights.

    fmt, "bf16" or "fp32", is the result's type; None stands for that of x. There is no clamped_count.

    Raises:
        ValueError: besides what the op raises: topk_weights requires gradients and token_topk_to_pos is None.
    """
    check.require_type(isinstance(x, Tensor), "x", "a torch.Tensor", x)
    fmt = fmt or _format_of(x)
    if needs_gradients(topk_weights):
        check.require(token_topk_to_pos is not None, "token_topk_to_pos", "a tensor for topk_weights' gradient", None)
    options = {
        "swiglu_clamp_value": swiglu_clamp_value,
        "activation": activation,
        "alpha": alpha,
        "interleaved": interleaved,
        "gated": gated,
        "clamp_after": clamp_after,
    }
    return _Swiglu.call(x, topk_weights, options, fmt, pos_to_token_topk, token_topk_to_pos, pos_to_expert)


def _format_of(x: Tensor) -> str:
    return "bf16" if x.dtype == torch.bfloat16 else "fp32"


class _Swiglu(Function):
    saves = ("x", "topk_weights", "options", "pos_to_token_topk", "token_topk_to_pos", "pos_to_expert")

    @staticmethod
    def forward(
        x: Tensor,
        topk_weights: Tensor | None,
        options: dict[str, Any],
        fmt: str,
        pos_to_token_topk: Tensor | None,
        token_topk_to_pos: Tensor | None,
        pos_to_expert: Tensor | None,
    ) -> Tensor:
        return tk_quant.swiglu_forward(
            x,
            fmt=fmt,
            pos_to_token_topk=pos_to_token_topk,
            topk_weights=topk_weights,
            pos_to_expert=pos_to_expert,
            **options,
        )

    @staticmethod
    def backward(ctx: Context, d_out: Tensor) -> Gradients:
        x, topk_weights, options, pos_to_token_topk, token_topk_to_pos, pos_to_expert = ctx.saved
        return tk_quant.swiglu_backward(
            *(x, d_out),
            fmt=_format_of(x),
            pos_to_token_topk=pos_to_token_topk,
            topk_weights=topk_weights,
            token_topk_to_pos=token_topk_to_pos if ctx.needs_input_grad[1] else None,
            pos_to_expert=pos_to_expert,
            **options,
        )[1:]
