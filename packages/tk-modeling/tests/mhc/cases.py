"""Cases of HyperConnection and HyperHead."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tk_core.testing.trees import map_tensors, tensors
from tk_modeling import HyperConnection, HyperHead, reference
from tk_modeling.linear import linear

from ..checks import ModuleCase

HIDDEN = 64
FLOAT32 = ("fn", "scale", "base", "norm_weight")
# The kernels take a float32 weight as two bfloat16 parts; these are the bounds of mhc_pre_norm_fn.
HEAD_BOUNDS = {"fn": 1e-3, "norm_weight": 1e-3, "scale": 5e-4, "base": 5e-4}


class Mlp(nn.Module):
    """A small sublayer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 96, bias=False, device=device, dtype=torch.bfloat16)
        self.down = nn.Linear(96, HIDDEN, bias=False, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return linear(nn.functional.silu(linear(x, self.up.weight)), self.down.weight)


@torch.no_grad()
def randomize(module: nn.Module) -> nn.Module:
    """Randomize mHC's parameters, as some gradients are close to zero at the initial values."""
    module.fn.normal_(std=0.1)
    module.scale.uniform_(0.5, 1.5)
    module.base.normal_()
    if module.norm_weight is not None:
        module.norm_weight.uniform_(0.5, 1.5)
    return module


def draw_residual(leading: tuple[int, ...], device: str, mhc_mult: int = 4, hidden: int = HIDDEN) -> Tensor:
    """Streams like those that a layer returns: bfloat16, contiguous, of similar magnitude."""
    return torch.randn(*leading, mhc_mult, hidden, device=device).bfloat16()


def leaves(args: Any, dtype: torch.dtype | None = None) -> Any:
    """The same tree with leaves that take gradients, of another dtype if one is given."""
    return map_tensors(lambda x: x.detach().to(dtype or x.dtype, copy=True).requires_grad_(), args)


def backward(outputs: Any) -> None:
    """Backward of all outputs, with gradients that are not contiguous and the same in every dtype."""
    torch.manual_seed(1)
    outputs = [y for y in tensors(outputs) if y.requires_grad]
    weights = [torch.randn(y.shape[::-1]).bfloat16().permute(*range(y.ndim)[::-1]) for y in outputs]
    torch.autograd.backward(outputs, [weight.to(y.dtype) for weight, y in zip(weights, outputs)])


def _hyper_connection(name: str, **options: Any) -> ModuleCase:
    mhc_mult = options.get("mhc_mult", 4)

    def make_inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
        residual = draw_residual(leading, device, mhc_mult)
        return (residual, torch.rand(*leading, mhc_mult, 1, device=device)) if options.get("shifted") else (residual,)

    def maker(kind: Callable[..., nn.Module]) -> Callable[[str], nn.Module]:
        return lambda device: randomize(kind(Mlp(device), HIDDEN, device=device, **options))

    makers = maker(HyperConnection), maker(reference.HyperConnection)
    return ModuleCase(f"hyper-connection{name}", *makers, make_inputs, FLOAT32)


def _hyper_head(name: str, **options: Any) -> ModuleCase:
    def maker(kind: Callable[..., nn.Module]) -> Callable[[str], nn.Module]:
        return lambda device: randomize(kind(HIDDEN, device=device, **options))

    makers = maker(HyperHead), maker(reference.HyperHead)
    return ModuleCase(
        f"hyper-head{name}", *makers, lambda leading, device: (draw_residual(leading, device),), FLOAT32, HEAD_BOUNDS
    )


CASES = (
    _hyper_connection(""),
    _hyper_connection("-2-streams-norm-weight", mhc_mult=2, norm_weight=True, sinkhorn_repeat=3),
    _hyper_connection("-shifted", shifted=True, sinkhorn_repeat=3),
    _hyper_connection("-no-comb", comb=False, post_eps=0.25),
    _hyper_connection("-2-streams-no-comb-shifted", mhc_mult=2, comb=False, shifted=True),
    _hyper_head("", norm_weight=True),
)
