"""Cases of RMSNorm."""

from typing import Any

import torch
from torch import Tensor, nn

from tk_modeling import RMSNorm, reference

from ..checks import ModuleCase

_HIDDEN = 72


def _case(name: str, with_residual: bool, **options: Any) -> ModuleCase:
    def make(device: str) -> nn.Module:
        module = RMSNorm(_HIDDEN, 1e-5, **options, device=device, dtype=torch.bfloat16)
        nn.init.normal_(module.weight, 1 - module.weight_offset, 0.5)
        return module

    def make_inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
        return tuple(torch.randn(*leading, _HIDDEN, device=device).bfloat16() for _ in range(1 + with_residual))

    make_reference = lambda device: reference.RMSNorm(_HIDDEN, 1e-5, **options, device=device, dtype=torch.bfloat16)  # noqa: E731
    return ModuleCase(name, make, make_reference, make_inputs)


CASES = (
    _case("rms-norm", False),
    _case("rms-norm-residual", True, weight_offset=1.0, round_before_weight=True),
)
