"""Router and MoE in plain PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Router(nn.Module):
    """The same as tk_modeling.Router without `ep`, of any floating-point dtype."""

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
        scoring_func: str = "sigmoid",
        bias_update_rate: float = 1e-3,
        aux_loss_factor: float = 1e-4,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_topk, self.num_groups, self.num_topk_groups = num_topk, num_groups, num_topk_groups
        self.num_topk_sum, self.renormalize = num_topk_sum, renormalize
        self.routed_scaling_factor, self.scoring_func = routed_scaling_factor, str(scoring_func)
        self.bias_update_rate, self.aux_loss_factor = bias_update_rate, aux_loss_factor
        self.weight = nn.Parameter(torch.empty((num_experts, hidden), dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.empty(num_experts, dtype=torch.float32, device=device))
        self.register_buffer("load", torch.empty(num_experts, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        nn.init.zeros_(self.bias)
        self.load.zero_()

    def forward(self, x: Tensor, return_logits: bool = False) -> tuple[Tensor, ...]:
        num_experts, hidden = self.weight.shape
        with torch.autocast(x.device.type, enabled=False):
            logits = functional.linear(x.reshape(-1, hidden).to(self.weight.dtype), self.weight)
        scores = _scores(logits, self.scoring_func)
        ranks = (logits if self.scoring_func == "softmax" else scores).detach() + self.bias
        topk_idx = self._without_other_groups(ranks).topk(self.num_topk, dim=-1).indices
        topk_weights = scores.gather(1, topk_idx)
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True).clamp(min=1e-20)
        topk_weights = topk_weights * self.routed_scaling_factor

        pairs = topk_idx.flatten()
        counts = torch.zeros_like(self.load).scatter_add_(0, pairs, torch.ones_like(pairs))
        frequency = counts.to(scores.dtype) * num_experts / max(pairs.shape[0], 1)
        share = (scores / (scores.sum(-1, keepdim=True) + 1e-20)).sum(0) / max(scores.shape[0], 1)
        aux = self.aux_loss_factor * (frequency * share).sum()
        if self.training:
            self.load += counts
        shape = (*x.shape[:-1], self.num_topk)
        result = topk_idx.view(shape), topk_weights.view(shape), aux
        return (*result, logits.view(*x.shape[:-1], num_experts)) if return_logits else result

    def _without_other_groups(self, ranks: Tensor) -> Tensor:
        if self.num_groups == self.num_topk_groups:
            return ranks
        by_group = ranks.unflatten(1, (self.num_groups, -1))
        best = by_group.topk(self.num_topk_sum, dim=-1).values.sum(-1).topk(self.num_topk_groups, dim=-1).indices
        is_out = torch.ones_like(by_group[:, :, 0], dtype=torch.bool).scatter(1, best, False)
        return by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)

    @torch.no_grad()
    def update_bias(self) -> None:
        load = self.load.to(torch.float64)
        self.bias.add_((load.mean() - load).sign().to(self.bias.dtype), alpha=self.bias_update_rate)
        self.load.zero_()


def _scores(logits: Tensor, scoring_func: str) -> Tensor:
    if scoring_func == "sigmoid":
        return logits.sigmoid()
    if scoring_func == "softmax":
        return logits.softmax(dim=-1)
    return functional.softplus(logits).clamp(min=torch.finfo(torch.float32).tiny).sqrt()


class MoE(nn.Module):
    """The same as tk_modeling.MoE without `fp8` and `ep`, of any floating-point dtype; `options` are Router's."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        num_topk: int,
        *,
        activation: str = "silu",
        alpha: float | None = None,
        swiglu_clamp_value: float | None = None,
        clamp_after: bool = False,
        interleaved: bool = False,
        gated: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: float | str,
    ) -> None:
        super().__init__()
        self.activation, self.alpha, self.interleaved, self.gated = activation, alpha, interleaved, gated
        self.clamp = torch.inf if swiglu_clamp_value is None else swiglu_clamp_value
        self.clamp_after = clamp_after
        self.router = Router(hidden, num_experts, num_topk, device=device, **options)
        rows = (2 if gated else 1) * intermediate
        self.gate_up = nn.Parameter(torch.empty((num_experts, rows, hidden), device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty((num_experts, hidden, intermediate), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        topk_idx, topk_weights, aux = self.router(x)
        tokens = x.reshape(-1, x.shape[-1])
        if torch.is_autocast_enabled(x.device.type):
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        # (token, slot) pairs in the order of their experts.
        order = topk_idx.flatten().argsort(stable=True)
        token_of_row = order // topk_idx.shape[-1]
        experts = torch.arange(1, self.gate_up.shape[0] + 1, device=x.device)
        ends = torch.searchsorted(topk_idx.flatten()[order], experts).int()

        rows = self.activated(_grouped_linear(tokens.index_select(0, token_of_row), self.gate_up, ends))
        rows = _grouped_linear(rows, self.down, ends)
        rows = rows * topk_weights.flatten().index_select(0, order).unsqueeze(1)
        y = rows.new_zeros(tokens.shape).index_add(0, token_of_row, rows)
        return y.to(tokens.dtype).view(x.shape), aux

    def activated(self, rows: Tensor) -> Tensor:
        """What the products with gate_up, (rows, channels), become before that with down."""
        gate, up = rows, None
        if self.gated:
            gate, up = (rows[:, 0::2], rows[:, 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
            up = up.clamp(-self.clamp, self.clamp)
        gate = gate if self.clamp_after else gate.clamp(max=self.clamp)
        if self.activation == "gelu_tanh":
            out = functional.gelu(gate, approximate="tanh")
        elif self.activation == "relu2":
            out = functional.relu(gate).square()
        elif self.activation == "swiglu_oai":
            out, up = gate * torch.sigmoid((self.alpha or 1.702) * gate), up + 1
        else:
            out = functional.silu(gate) if self.alpha is None else gate * torch.sigmoid(self.alpha * gate)
        out = out.clamp(max=self.clamp) if self.clamp_after else out
        return out if up is None else out * up


def _grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """rows[ends[i - 1]:ends[i]] · weight[i]ᵀ for each expert i."""
    weight = weight.to(rows.dtype).transpose(1, 2)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return functional.grouped_mm(rows, weight, offs=ends)
    segments = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([segment @ expert for segment, expert in zip(segments, weight, strict=True)])
