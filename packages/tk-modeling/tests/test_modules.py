"""Every module against its reference, in all the ways that a module is used."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from .checks import ModuleCase, check_zero_tokens, checks
from .engram import cases as engram
from .fp8 import cases as fp8
from .mhc import cases as mhc
from .moe import cases as moe

# GroupedFP8Linear takes rows in segments, and no leading dimensions: tests/fp8 has its tests.
CASES = (*mhc.CASES, *engram.CASES, *moe.CASES, fp8.LINEAR)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=name, marks=[pytest.mark.gpu] if needs_gpu else [])
        for case in CASES
        for name, check, needs_gpu in checks(case)
    ],
)
def test_module(check: Callable[[], None]) -> None:
    check()


def test_zero_tokens_must_give_every_gradient() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.numel() else x.clone()

    def make(device: str) -> nn.Module:
        return Detached(8, 8, device=device)

    def make_inputs(leading: tuple[int, ...], device: str) -> tuple[Tensor]:
        return (torch.randn(*leading, 8, device=device),)

    with pytest.raises(AssertionError):
        check_zero_tokens(ModuleCase("detached", make, make, make_inputs), "cpu")
