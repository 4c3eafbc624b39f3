"""Router: which experts each token goes to, with which weights; an even load by a bias and an auxiliary loss."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tk_gemm
import tk_moe
from tk_core import check
from tk_core.arch import get_arch
from tk_core.op import launching, new, op
from tk_ep import ElasticBuffer
from tk_modeling.float32_state import Float32State
from tk_modeling.function import Context, Function, Gradients
from tk_modeling.gradients import as_float32, without_autocast
from tk_modeling.linear import float32_product, linear
from tk_modeling.moe.functional import aux_loss, top2_sum_gate
from tk_modeling.options import check_ep, check_numbers, check_placement
from tk_moe import ScoringFunc


class Router(Float32State):
    """Choose `num_topk` of `num_experts` experts for each token by `tk_moe.top2_sum_gate`.

    logits = x · weightᵀ in float32, also under autocast: for bfloat16 on Hopper by `tk_gemm.router_gemm_nt` if
    hidden is a multiple of 64 and num_experts of 8, else by torch, as are the gradients. Experts are ranked by
    scoring_func(logits) + bias, for softmax by logits + bias, in the `num_topk_groups` best of `num_groups` groups
    if there are groups, which rank by the sum of their best `num_topk_sum`; their weights are the scores without bias,
    divided by their sum if `renormalize`, times `routed_scaling_factor`. The auxiliary loss is tk_moe.aux_loss of all
    scores of the call, with factor `aux_loss_factor`.

    A forward in training mode adds the number of tokens of each expert to `load`, unless activation checkpointing runs
    it again within a backward. `update_bias`, to be called after the optimizer's step, moves each expert's bias by
    `bias_update_rate` towards an even load (DeepSeek-V3, 2.1.2) and sets load to zero. Where several processes train
    one model, all-reduce load first; over the ranks of `ep`, a buffer, update_bias does, so all of them call it.

    Parameters and buffers: weight float32 (num_experts, hidden), bias float32 and load int64 (num_experts,). They keep
    these dtypes when the module is cast.

    Shapes:
        x: (..., hidden), bfloat16 or float32.
        returns: topk_idx int64 and topk_weights float32 (..., num_topk), aux float32 (); with `return_logits` also the
            logits float32 (..., num_experts), differentiable too.
    """

    def __init__(
        self,
        hidden: int,
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
        ep: ElasticBuffer | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_ep(ep)
        check.in_range("hidden", hidden, 1, 2**31 - 1)
        check.in_range("num_experts", num_experts, 1, 2**31 - 1)
        check_numbers(bias_update_rate=bias_update_rate, aux_loss_factor=aux_loss_factor)
        check_placement(device)
        self.hidden, self.num_experts, self.num_topk, self.ep = hidden, num_experts, num_topk, ep
        self.num_groups, self.num_topk_groups = num_groups, num_topk_groups
        self.num_topk_sum, self.renormalize = num_topk_sum, renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.scoring_func = scoring_func
        self.bias_update_rate, self.aux_loss_factor = bias_update_rate, aux_loss_factor
        self.weight = nn.Parameter(torch.empty((num_experts, hidden), dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.empty(num_experts, dtype=torch.float32, device=device))
        self.register_buffer("load", torch.empty(num_experts, dtype=torch.int64, device=device))
        self.reset_parameters()
        # The gate's checks refuse options that do not fit.
        logits = torch.empty((0, num_experts), dtype=torch.float32, device="meta")
        self._gate(logits, logits.new_empty(num_experts))
        if isinstance(scoring_func, str):
            self.scoring_func = ScoringFunc.from_str(scoring_func)

    def reset_parameters(self) -> None:
        """Weights that keep the variance of their inputs; no bias, no load."""
        nn.init.normal_(self.weight, std=self.hidden**-0.5)
        nn.init.zeros_(self.bias)
        self.load.zero_()

    def forward(self, x: Tensor, return_logits: bool = False) -> tuple[Tensor, ...]:
        """(topk_idx, topk_weights, aux), and with `return_logits` the logits."""
        check.flag("return_logits", return_logits)
        check.tensor("x", x, (torch.bfloat16, torch.float32), (..., self.hidden), layout="any")
        with without_autocast(x):
            rows, weight = x.reshape(-1, self.hidden), as_float32(self.weight)
            logits = linear(rows, weight) if x.dtype == torch.float32 else _Logits.call(rows, weight)
            topk_idx, topk_weights = self._gate(logits, self.bias.float())
            fi = tk_moe.aux_fi(topk_idx, self.num_experts, self.num_topk)
            aux = aux_loss(_scores(logits, self.scoring_func), fi, self.aux_loss_factor)
        if self.training:
            _add_load(self.load, topk_idx)
        shape = (*x.shape[:-1], self.num_topk)
        result = topk_idx.view(shape), topk_weights.view(shape), aux
        return (*result, logits.view(*x.shape[:-1], self.num_experts)) if return_logits else result

    def _gate(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return top2_sum_gate(
            *(logits, bias, self.num_topk, self.num_topk_groups, self.num_groups, False, 0),
            *(self.routed_scaling_factor, 0, 1, 0, 1, self.scoring_func),
            renormalize=self.renormalize,
            num_topk_sum=self.num_topk_sum,
        )

    @torch.no_grad()
    def update_bias(self) -> None:
        """bias += bias_update_rate · sign(mean(load) - load); load = 0. With `ep`, load is the sum of all ranks.

        Raises:
            TypeError: something that does not go through `to` has narrowed bias, which would lose such steps.
        """
        check.tensor("bias", self.bias, (torch.float32,), (self.num_experts,), layout="any")
        if self.ep is not None:
            dist.all_reduce(self.load, group=self.ep.group)
        load = self.load.to(torch.float64)
        self.bias.add_((load.mean() - load).sign().float(), alpha=self.bias_update_rate)
        self.load.zero_()

    def extra_repr(self) -> str:
        groups = f", {self.num_topk_groups} of {self.num_groups} groups" if self.num_groups else ""
        return f"{self.hidden}, {self.num_topk} of {self.num_experts} experts{groups}, {self.scoring_func}"


class _Logits(Function):
    """The float32 product of bfloat16 tokens and the router's weight; its gradients are torch's float32 products."""

    parameters = ("weight",)
    saves = ("x", "weight")

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return _logits(x, weight)

    @staticmethod
    def backward(ctx: Context, d_logits: Tensor) -> Gradients:
        x, weight = ctx.saved
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        d_x = float32_product(d_logits, weight).to(x.dtype) if needs_x else None
        return d_x, float32_product(d_logits.t(), x) if needs_weight else None


# An operator, so that compiled code, too, has tensors copied that do not begin on 16 bytes.
@op(reference=lambda x, weight: nn.functional.linear(x.float(), weight))
def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 (M, N) of x bfloat16 (M, K) and weight float32 (N, K)."""
    num_experts, hidden = weight.shape
    logits = new(x.new_empty, (x.shape[0], num_experts), dtype=torch.float32)
    if launching(logits):
        if get_arch(x.device).has_wgmma and hidden % 64 == 0 and num_experts % 8 == 0:
            x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 else x.contiguous()
            tk_gemm.router_gemm_nt(x, weight.contiguous(), logits)
        else:
            torch.mm(x.float(), weight.t(), out=logits)
    return logits


def _scores(logits: Tensor, scoring_func: ScoringFunc) -> Tensor:
    """Scores of all experts, differentiable."""
    if scoring_func is ScoringFunc.SIGMOID:
        return logits.sigmoid()
    if scoring_func is ScoringFunc.SOFTMAX:
        return logits.softmax(dim=-1)
    # The root's slope at 0 is infinite.
    return nn.functional.softplus(logits).clamp(min=torch.finfo(torch.float32).tiny).sqrt()


# An operator, so that compiled code, too, looks at run time whether it runs within a backward.
@torch.library.custom_op("tk_modeling::add_load", mutates_args=("load",))
def _add_load(load: Tensor, topk_idx: Tensor) -> None:
    # A forward within a backward is activation checkpointing: its tokens were counted before.
    if torch._C._current_graph_task_id() == -1:
        load.add_(tk_moe.group_count(topk_idx, load.shape[0]))
