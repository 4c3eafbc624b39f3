"""MoE: a mixture of experts in place of a feed-forward layer."""

import torch
from torch import Tensor, nn

import tk_moe
from tk_core import check
from tk_ep import ElasticBuffer
from tk_modeling.fp8.functional import grouped_fp8_linear
from tk_modeling.fp8.operands import check_features
from tk_modeling.gradients import autocast_to_bf16
from tk_modeling.moe.expert_parallel import ep_combine, ep_dispatch
from tk_modeling.moe.experts import grouped_linear
from tk_modeling.moe.functional import expand_to_fused, reduce_fused, swiglu
from tk_modeling.moe.router import Router
from tk_modeling.options import check_ep, check_placement
from tk_moe import ScoringFunc

ALIGNMENT = 16
"""The rows of each expert are a multiple of this, for torch's grouped products."""
FP8_ALIGNMENT = 128
"""The same for FP8 products."""


class MoE(nn.Module):
    """y = Σ over a token's experts e of weight_e · down[e] · (silu(gate) · up), with gate and up from gate_up[e] · x.

    `router`, a Router with the options of the same names, chooses the experts; no token is dropped. Each expert has a
    segment of rows, to which its tokens are copied. The products are torch's grouped ones in bfloat16 (see
    `grouped_linear`), with `fp8` those of `grouped_fp8_linear`, forward and backward. Nothing waits for the GPU, save
    torch's products on others than sm_90 and sm_100.

    activation, alpha, swiglu_clamp_value, clamp_after and interleaved go to `swiglu`, for others than silu(gate)
    · up: gpt-oss has "swiglu_oai" with a clamp of 7, and interleaved rows in gate_up[e], a gate's before its value's.
    Without `gated` gate_up[e] has gates alone, and down[e] multiplies their activations.

    With `ep` the experts are shared out among the ranks of that buffer, and each rank has its own tokens. num_experts
    counts the experts of all R ranks; rank r has L = num_experts / R of them, from r · L on, in its parameters and its
    state_dict. Forward, backward and `router.update_bias` are then calls of all ranks, and the host waits for the
    number of rows. The output is that of one process with all experts, up to the rounding of sums on each rank, and to
    the bit if the buffer has allow_multiple_reduction=False. The auxiliary loss is that of this rank's tokens.

    An expert's gradient is then that of the sum of all ranks' losses. What every rank has, the router and the rest of
    the model, must begin equal, and gets the gradient of the rank's own loss: to add these up is left to the caller.
    DDP and FSDP average them, so divide the experts' gradients by R beside them; or divide each loss by R and add up.

    Parameters: gate_up (num_experts or L, 2 · intermediate, hidden), gate above, or without `gated` (num_experts or L,
    intermediate, hidden); down (num_experts or L, hidden, intermediate); both bfloat16, or float32 under autocast to
    bfloat16; with `fp8` either, with or without autocast. hidden and intermediate are multiples of 64, with `fp8` of
    128. torch's fully_shard takes one dtype a unit, so give it `router`, whose parameters are float32, before the whole
    layer.

    Shapes:
        x: (..., hidden) bfloat16, or float32 under autocast to bfloat16.
        returns: y (..., hidden) bfloat16, the auxiliary loss float32 ().
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        num_topk: int,
        *,
        num_groups: int = 0,
        num_topk_groups: int = 0,
        num_topk_sum: int = 2,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        scoring_func: ScoringFunc | str = "sigmoid",
        bias_update_rate: float = 1e-3,
        aux_loss_factor: float = 1e-4,
        activation: str = "silu",
        alpha: float | None = None,
        swiglu_clamp_value: float | None = None,
        clamp_after: bool = False,
        interleaved: bool = False,
        gated: bool = True,
        fp8: bool = False,
        ep: ElasticBuffer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check.flag("fp8", fp8)
        check.flag("gated", gated)
        check_ep(ep)
        check_placement(device, dtype)
        check_features(128 if fp8 else 64, hidden=hidden, intermediate=intermediate)
        self.hidden, self.intermediate, self.fp8, self.ep = hidden, intermediate, fp8, ep
        self.swiglu_options = {
            "swiglu_clamp_value": swiglu_clamp_value,
            "activation": activation,
            "alpha": alpha,
            "interleaved": interleaved,
            "gated": gated,
            "clamp_after": clamp_after,
        }
        rows = (2 if gated else 1) * intermediate
        # SwiGLU's checks refuse options that do not fit.
        swiglu(torch.empty((0, rows), dtype=torch.bfloat16, device="meta"), **self.swiglu_options)
        self.router = Router(
            *(hidden, num_experts, num_topk),
            num_groups=num_groups,
            num_topk_groups=num_topk_groups,
            num_topk_sum=num_topk_sum,
            renormalize=renormalize,
            routed_scaling_factor=routed_scaling_factor,
            scoring_func=scoring_func,
            bias_update_rate=bias_update_rate,
            aux_loss_factor=aux_loss_factor,
            ep=ep,
            device=device,
        )
        if ep is not None:
            check.multiple_of("num_experts", num_experts, ep.num_ranks)
            num_experts //= ep.num_ranks
        self.gate_up = nn.Parameter(torch.empty((num_experts, rows, hidden), device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty((num_experts, hidden, intermediate), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs.

        With `ep` each rank draws those of all, and keeps its own. So ranks that have the same seed have different
        experts, and are in step afterwards.
        """
        self.router.reset_parameters()
        for weight in (self.gate_up, self.down):
            for rank in range(1 if self.ep is None else self.ep.num_ranks):
                is_own = self.ep is None or rank == self.ep.rank_idx
                nn.init.normal_(weight if is_own else torch.empty_like(weight), std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y, auxiliary loss)."""
        (tokens,) = autocast_to_bf16(x)
        check.tensor("x", tokens, (torch.bfloat16,), (..., self.hidden), layout="any")
        tokens = tokens.reshape(-1, self.hidden).contiguous()
        topk_idx, topk_weights, aux = self.router(x)
        topk_idx, topk_weights = (each.reshape(-1, self.router.num_topk) for each in (topk_idx, topk_weights))
        y = (self._here if self.ep is None else self._on_all_ranks)(tokens, topk_idx, topk_weights)
        return y.view(x.shape), aux

    def _here(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        num_experts, alignment = self.router.num_experts, self._alignment
        num_rows = tk_moe.max_expanded_tokens(*topk_idx.shape, num_experts, alignment)
        mapping = tk_moe.get_fused_mapping(
            topk_idx, num_experts, num_rows, alignment, force_no_sync=True, with_psum=self.fp8
        )
        pos_to_expert, _, pos_to_token_topk, token_topk_to_pos, _, segment_ends, *_, row_ends = mapping
        rows = expand_to_fused(tokens, token_topk_to_pos, pos_to_expert)
        ends = row_ends if self.fp8 else segment_ends
        rows = self._experts(rows, ends, topk_weights, pos_to_token_topk, token_topk_to_pos, pos_to_expert)
        return reduce_fused(rows, None, token_topk_to_pos, pos_to_expert=pos_to_expert)

    def _on_all_ranks(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        num_experts, alignment = self.router.num_experts, self._alignment
        rows, row_weights, handle = ep_dispatch(
            self.ep, tokens, topk_idx, topk_weights, num_experts, expert_alignment=alignment
        )
        ends, pos_to_expert = handle.psum_num_recv_tokens_per_expert, handle.pos_to_expert
        if not self.fp8:
            ends = (ends + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        # For SwiGLU each row is a token with one expert.
        each_row = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        rows = self._experts(rows, ends, row_weights.unsqueeze(1), each_row, each_row.unsqueeze(1), pos_to_expert)
        return ep_combine(self.ep, rows, handle)

    @property
    def _alignment(self) -> int:
        return FP8_ALIGNMENT if self.fp8 else ALIGNMENT

    def _experts(
        self,
        rows: Tensor,
        ends: Tensor,
        topk_weights: Tensor,
        pos_to_token_topk: Tensor,
        token_topk_to_pos: Tensor,
        pos_to_expert: Tensor,
    ) -> Tensor:
        linear = grouped_fp8_linear if self.fp8 else grouped_linear
        rows = swiglu(
            linear(rows, self.gate_up, ends, name="gate_up"),
            pos_to_token_topk=pos_to_token_topk,
            topk_weights=topk_weights,
            token_topk_to_pos=token_topk_to_pos,
            pos_to_expert=pos_to_expert,
            **self.swiglu_options,
        )
        # Rows are weighted already: the backward of their sums needs none of them, and none are kept for it.
        return linear(rows, self.down, ends, name="down")

    def extra_repr(self) -> str:
        ep = "" if self.ep is None else f", ep=rank {self.ep.rank_idx} of {self.ep.num_ranks}"
        activation = self.swiglu_options["activation"]
        options = ("" if activation == "silu" else f", {activation}") + (", fp8=True" if self.fp8 else "")
        return f"{self.hidden}, intermediate={self.intermediate}{options}{ep}"
