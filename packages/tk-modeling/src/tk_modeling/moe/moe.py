"""MoE: a mixture of experts in place of a feed-forward layer."""

import torch
from torch import Tensor, nn

import tk_moe
from tk_core import check
from tk_modeling.fp8.functional import grouped_fp8_linear
from tk_modeling.fp8.operands import check_features
from tk_modeling.gradients import autocast_to_bf16
from tk_modeling.moe.experts import grouped_linear
from tk_modeling.moe.functional import expand_to_fused, reduce_fused, swiglu
from tk_modeling.moe.router import Router
from tk_modeling.options import check_placement
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

    Parameters: gate_up (num_experts, 2 · intermediate, hidden), gate above; down (num_experts, hidden, intermediate);
    both bfloat16, or float32 under autocast to bfloat16; with `fp8` either, with or without autocast. hidden and
    intermediate are multiples of 64, with `fp8` of 128. torch's fully_shard takes one dtype a unit, so give it
    `router`, whose parameters are float32, before the whole layer.

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
        routed_scaling_factor: float = 1.0,
        scoring_func: ScoringFunc | str = "sigmoid",
        bias_update_rate: float = 1e-3,
        aux_loss_factor: float = 1e-4,
        fp8: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check.flag("fp8", fp8)
        check_placement(device, dtype)
        check_features(128 if fp8 else 64, hidden=hidden, intermediate=intermediate)
        self.hidden, self.intermediate, self.fp8 = hidden, intermediate, fp8
        self.router = Router(
            *(hidden, num_experts, num_topk),
            num_groups=num_groups,
            num_topk_groups=num_topk_groups,
            routed_scaling_factor=routed_scaling_factor,
            scoring_func=scoring_func,
            bias_update_rate=bias_update_rate,
            aux_loss_factor=aux_loss_factor,
            device=device,
        )
        self.gate_up = nn.Parameter(torch.empty((num_experts, 2 * intermediate, hidden), device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty((num_experts, hidden, intermediate), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs."""
        self.router.reset_parameters()
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y, auxiliary loss)."""
        (tokens,) = autocast_to_bf16(x)
        check.tensor("x", tokens, (torch.bfloat16,), (..., self.hidden), layout="any")
        tokens = tokens.reshape(-1, self.hidden).contiguous()
        topk_idx, topk_weights, aux = self.router(x)
        num_experts, num_topk = self.router.num_experts, self.router.num_topk
        topk_idx, topk_weights = topk_idx.reshape(-1, num_topk), topk_weights.reshape(-1, num_topk)
        alignment = FP8_ALIGNMENT if self.fp8 else ALIGNMENT
        num_rows = tk_moe.max_expanded_tokens(*topk_idx.shape, num_experts, alignment)
        mapping = tk_moe.get_fused_mapping(
            topk_idx, num_experts, num_rows, alignment, force_no_sync=True, with_psum=self.fp8
        )
        pos_to_expert, _, pos_to_token_topk, token_topk_to_pos, _, segment_ends, *_, row_ends = mapping
        linear, ends = (grouped_fp8_linear, row_ends) if self.fp8 else (grouped_linear, segment_ends)
        rows = expand_to_fused(tokens, token_topk_to_pos, pos_to_expert)
        rows = swiglu(
            linear(rows, self.gate_up, ends, name="gate_up"),
            pos_to_token_topk=pos_to_token_topk,
            topk_weights=topk_weights,
            token_topk_to_pos=token_topk_to_pos,
            pos_to_expert=pos_to_expert,
        )
        # Rows are weighted already, so that the backward of reduce_fused needs none of them, and none are kept for it.
        rows = linear(rows, self.down, ends, name="down")
        y = reduce_fused(rows, None, token_topk_to_pos, pos_to_expert=pos_to_expert)
        return y.view(x.shape), aux

    def extra_repr(self) -> str:
        return f"{self.hidden}, intermediate={self.intermediate}" + (", fp8=True" if self.fp8 else "")
