"""Cases of the mixture-of-experts modules."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tk_modeling.moe.moe import MoE
from tk_modeling.moe.router import Router
from tk_modeling.reference import moe as reference

from ..checks import ModuleCase

_HIDDEN = 64
_GROUPS = {"num_groups": 4, "num_topk_groups": 2, "routed_scaling_factor": 2.5, "scoring_func": "sqrtsoftplus"}


def _make(module: type[nn.Module], sizes: tuple[int, ...], options: dict[str, Any], device: str) -> nn.Module:
    made = module(_HIDDEN, *sizes, **options, device=device)
    # As after some training.
    (made if isinstance(made, Router | reference.Router) else made.router).bias.normal_(std=0.1)
    return made


def _inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor]:
    return (torch.randn(*leading, _HIDDEN, device=device).bfloat16(),)


def _case(name: str, family: str, sizes: tuple[int, ...], **options: Any) -> ModuleCase:
    ours, theirs = {"router": (Router, reference.Router), "moe": (MoE, reference.MoE)}[family]
    prefix = "router." if family == "moe" else ""
    if family == "moe":
        options["dtype"] = torch.bfloat16
    return ModuleCase(
        name,
        partial(_make, ours, sizes, options),
        partial(_make, theirs, sizes, options),
        _inputs,
        float32=(f"{prefix}weight", f"{prefix}bias"),
    )


# A large aux_loss_factor, or the loss would vanish in the rounding of the rest.
CASES = (
    _case("router", "router", (16, 4), aux_loss_factor=0.5),
    _case("moe", "moe", (64, 8, 2), aux_loss_factor=0.5),
    _case("moe-groups", "moe", (128, 16, 3), **_GROUPS),
)
