"""HyperConnection: mHC around a sublayer."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tk_core import check
from tk_modeling.float32_state import Float32State
from tk_modeling.gradients import as_float32, autocast_to_bf16
from tk_modeling.mhc.functional import (
    MixParameters,
    PreResult,
    PreSettings,
    check_hidden,
    check_mhc_mult,
    collapse_streams,
)
from tk_modeling.mhc.ops import mhc_post
from tk_modeling.options import check_flags, check_numbers, check_placement

_SCALE = 0.01
_FN_STD = 0.02
# Sinkhorn makes nearly the identity of logits with this diagonal.
_DIAGONAL_LOGIT = 8.0


class HyperConnection(Float32State):
    """A sublayer with manifold-constrained hyper-connections: mhc_pre, the sublayer, mhc_post.

    The residual is m streams of hidden states. Their weighted sum is the sublayer's input; its output is added to each
    stream, after the streams were mixed. All weights are computed from the residual. Source: arXiv 2512.24880.

    Args:
        sublayer: takes bfloat16 (..., hidden) and the further arguments of forward; returns y of that shape and dtype,
            or a tuple (y, *rest).
        hidden: a multiple of 64, 64 to 8192.
        mhc_mult: m, the number of streams: 2, 4 or 8.
        post_mult_value: factor of post, more than 1, as post is 1 initially.
        norm_eps: added to the mean of squares.
        pre_eps: added to pre, less than 1/m.
        sinkhorn_eps: added to the softmax and to each sum of a row or column.
        sinkhorn_repeat: iterations, 1 to 1000.
        norm_weight: whether the RMS norm of the m·hidden channels has a learned weight.
        shifted: collapse the streams by the mix that the layer before computed; see forward.
        comb: whether the streams are mixed. If not (HY-V4), fn has 2m rows, scale 2 numbers and base 2m.
        post_eps: added to post, less than 1.
        device: of the parameters, which are float32.

    Parameters: fn (m·(m+2), m·hidden), scale (3), base (m·(m+2)), other shapes without comb, and norm_weight (m·hidden)
    or None, all float32, also after the module was cast; `sublayer` is cast. torch's fully_shard takes one dtype a
    unit, so give it `sublayer` before the whole layer. reset_parameters leaves the sublayer alone.
    """

    def __init__(
        self,
        sublayer: nn.Module,
        hidden: int,
        *,
        mhc_mult: int = 4,
        post_mult_value: float = 2.0,
        norm_eps: float = 1e-6,
        pre_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        sinkhorn_repeat: int = 20,
        norm_weight: bool = False,
        shifted: bool = False,
        comb: bool = True,
        post_eps: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_mhc_mult(mhc_mult)
        check_hidden("hidden", hidden)
        check.number("post_mult_value", post_mult_value)
        check.require(post_mult_value > 1, "post_mult_value", "more than 1", post_mult_value)
        check_pre_eps(pre_eps, mhc_mult)
        check.require_type(callable(sublayer), "sublayer", "a torch.nn.Module", sublayer)
        check_numbers(norm_eps=norm_eps, sinkhorn_eps=sinkhorn_eps, post_eps=post_eps)
        check.require(post_eps < 1, "post_eps", "less than 1", post_eps)
        check.in_range("sinkhorn_repeat", sinkhorn_repeat, 1, 1000)
        check_flags(norm_weight=norm_weight, shifted=shifted, comb=comb)
        check_placement(device)
        self.sublayer = sublayer
        self.hidden = hidden
        self.mhc_mult = mhc_mult
        self.comb = comb
        self.settings = PreSettings(
            *(norm_eps, post_mult_value, pre_eps, sinkhorn_eps, sinkhorn_repeat),
            n_splits=None,
            shifted=shifted,
            post_eps=post_eps,
        )
        num_rows, width = mhc_mult * (mhc_mult + 2 if comb else 2), mhc_mult * hidden
        self.fn = float32_parameter(num_rows, width, device=device)
        self.scale = float32_parameter(3 if comb else 2, device=device)
        self.base = float32_parameter(num_rows, device=device)
        self.norm_weight = float32_parameter(width, device=device) if norm_weight else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin nearly where a residual connection is: pre is 1/m, post is 1, and a stream mixes with itself alone."""
        m = self.mhc_mult
        reset_projection(self.fn, self.scale, self.norm_weight)
        base = torch.zeros(self.base.shape, dtype=torch.float32, device=self.base.device)
        base[:m] = logit(1 / m - self.settings.pre_eps)
        base[m : 2 * m] = logit((1 - self.settings.post_eps) / self.settings.post_mult_value)
        if self.comb:
            base[2 * m :].view(m, m).fill_diagonal_(_DIAGONAL_LOGIT)
        _copy_whole(self.base, base)

    def extra_repr(self) -> str:
        numbers = ", ".join(f"{k}={v}" for k, v in self.settings._asdict().items() if k != "n_splits")
        found = f"{self.hidden}, mhc_mult={self.mhc_mult}, norm_weight={self.norm_weight is not None}, {numbers}"
        return f"{found}, comb={self.comb}"

    def collapse(self, residual: Tensor, pre_mix: Tensor | None = None) -> PreResult:
        """mhc_pre with the parameters of the layer."""
        return collapse_streams(residual, mix_parameters(self), self.mhc_mult, self.settings, pre_mix)

    def forward(self, residual: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
        """The streams after the sublayer: residual (..., m, hidden), then arguments of the sublayer.

        Returns the new residual alone, or (residual, *rest) where the sublayer returns (y, *rest). Shifted: the first
        of the arguments is pre_mix, float32 (..., m, 1), or None before the first layer; (residual, next_pre_mix,
        *rest) is returned.

        Raises:
            TypeError: residual or the sublayer's output is no bfloat16 tensor (or float32 one, under autocast to
                bfloat16), or pre_mix is missing or no float32 tensor.
            ValueError: a shape, stride or device does not fit.
        """
        pre_mix = None
        if self.settings.shifted:
            check.require_type(
                len(args) > 0, "pre_mix", "a tensor or None behind residual, as the layer is shifted", args
            )
            pre_mix, *args = args
        collapsed = self.collapse(residual, pre_mix)
        output = self.sublayer(collapsed.layer_input, *args, **kwargs)
        y, rest = split_output(output, collapsed.layer_input)
        new_residual = mhc_post(y, collapsed.residual, collapsed.post_mix, collapsed.comb_mix)
        if self.settings.shifted:
            return new_residual, collapsed.pre_mix, *rest
        return (new_residual, *rest) if rest else new_residual


def split_output(output: Tensor | tuple[Any, ...], layer_input: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Split what a sublayer returned into its output, as mhc_post takes it, and the rest."""
    y, *rest = output if isinstance(output, tuple) else (output,)
    (y,) = autocast_to_bf16(y)
    shape, device = tuple(layer_input.shape), layer_input.device
    check.tensor("output of sublayer", y, (torch.bfloat16,), shape, layout="any", device=device)
    return y.contiguous(), tuple(rest)


def _copy_whole(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy value, which is the same in all processes, to a parameter that they may have shards of."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def reset_projection(fn: Tensor, scale: Tensor, norm_weight: Tensor | None) -> None:
    """Initialize fn, scale and, if there is one, norm_weight."""
    nn.init.normal_(fn, std=_FN_STD)
    nn.init.constant_(scale, _SCALE)
    if norm_weight is not None:
        nn.init.ones_(norm_weight)


def check_pre_eps(pre_eps: float, mhc_mult: int) -> None:
    """Raise TypeError or ValueError unless a sigmoid plus pre_eps can be 1/m, as it is initially."""
    check.number("pre_eps", pre_eps)
    expected = f"more than 1/m - 1 and less than 1/m for m = {mhc_mult}"
    check.require(0 < 1 / mhc_mult - pre_eps < 1, "pre_eps", expected, pre_eps)


def logit(p: float) -> float:
    """The number whose sigmoid is p."""
    return math.log(p / (1 - p))


def mix_parameters(module: nn.Module) -> MixParameters:
    """The module's parameters, as float32 where something has narrowed them."""
    parameters = module.fn, module.scale, module.base, module.norm_weight
    return MixParameters(*(None if x is None else as_float32(x) for x in parameters))


def float32_parameter(*shape: int, device: torch.device | str | None) -> nn.Parameter:
    """A float32 parameter, not initialized."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
