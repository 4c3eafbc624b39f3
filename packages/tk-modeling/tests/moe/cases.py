"""Cases of the mixture-of-experts modules."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tk_modeling import MoE, Router, reference

from ..checks import ModuleCase

_GROUPS = {"num_groups": 4, "num_topk_groups": 2, "routed_scaling_factor": 2.5, "scoring_func": "sqrtsoftplus"}
_BF16: dict[str, Any] = {"dtype": torch.bfloat16}
# Three casts, each off by 2.6 % (rms), lie between x and y.
_FP8_BOUNDS = {"gate_up": 0.08, "down": 0.08, "router.weight": 0.08, "input.0": 0.08}


def _made(kind: type[nn.Module], sizes: tuple[int, ...], options: dict[str, Any], device: str) -> nn.Module:
    made = kind(*sizes, **options, device=device)
    getattr(made, "router", made).bias.normal_(std=0.1)  # as after some training
    return made


def _inputs(hidden: int, leading: tuple[int, ...], device: str) -> tuple[Tensor]:
    return (torch.randn(*leading, hidden, device=device).bfloat16(),)


def _case(name: str, kind: type[nn.Module], sizes: tuple[int, ...], **options: Any) -> ModuleCase:
    plain = {key: value for key, value in options.items() if key != "fp8"}
    return ModuleCase(
        name,
        partial(_made, kind, sizes, options),
        partial(_made, getattr(reference, kind.__name__), sizes, plain),
        partial(_inputs, sizes[0]),
        float32=("weight", "bias") if kind is Router else ("router.weight", "router.bias"),
        bounds=_FP8_BOUNDS if "fp8" in options else {},
    )


# A large aux_loss_factor, or the loss would vanish in the rounding of the rest.
CASES = (
    _case("router", Router, (64, 16, 4), aux_loss_factor=0.5),
    _case("moe", MoE, (64, 64, 8, 2), aux_loss_factor=0.5, **_BF16),
    _case("moe-groups", MoE, (64, 128, 16, 3), **_GROUPS, **_BF16),
    _case("moe-plain", MoE, (64, 64, 16, 3), **(_GROUPS | {"num_topk_sum": 1, "renormalize": False}), **_BF16),
    _case(
        *("moe-oai", MoE, (64, 64, 8, 2)), activation="swiglu_oai", interleaved=True, swiglu_clamp_value=7.0, **_BF16
    ),
    _case("moe-relu2", MoE, (64, 64, 8, 2), activation="relu2", gated=False, **_BF16),
    _case("moe-fp8", MoE, (128, 128, 4, 2), fp8=True, **_BF16),
)
