"""Cases of Engram's modules."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tk_modeling
from tk_engram.layout import engram_layout
from tk_modeling.reference import engram as reference

from ..checks import ModuleCase

VOCAB_SIZE = 50
LAYOUT = engram_layout(VOCAB_SIZE, layer_ids=(1, 4), max_ngram=3, num_heads=2, table_sizes=(17, 23))


# Mean and standard deviation. The slope of the gate's root is unbounded at d = 0, where no arithmetic is exact enough.
# So streams and the rows looked up for them have means other than 0, and |d| is about half of √H.
_PARAMETERS = {
    "table": (1, 1),
    "kv_weight": (0.01, 0.05),
    "weight_hidden": (1, 0.2),
    "weight_embed": (1, 0.2),
    "norm_weight": (1, 0.2),
    "conv_weight": (0, 0.5),
}


def randomized(module: nn.Module) -> nn.Module:
    """The module with all parameters drawn at random."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(*_PARAMETERS[name])
    return module


def streams(leading: tuple[int, ...], mhc_mult: int, hidden: int, device: str) -> Tensor:
    """Random residual streams, bfloat16: those of a token have a mean of 1 or -1."""
    sign = 2 * torch.randint(2, (*leading, 1, 1), device=device) - 1
    return (sign * (1 + torch.randn(*leading, mhc_mult, hidden, device=device))).bfloat16()


def parameter(*shape: int, mean: float = 1.0, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """A random leaf that takes a gradient."""
    return (mean + 0.2 * torch.randn(shape, device=device)).to(dtype).requires_grad_()


def in_float64(tensors: list[Tensor]) -> list[Tensor]:
    """Leaves of the same values."""
    return [x.detach().double().requires_grad_() for x in tensors]


def relative_error(found: Tensor, want: Tensor) -> float:
    """Norm of the difference relative to the norm of `want`."""
    found, want = found.detach().double(), want.detach().double()
    return float((found - want).norm() / want.norm())


def check_gradients(found: list[Tensor], exact: list[Tensor]) -> None:
    """Leaves have gradients of their dtype, close to those of the float64 leaves."""
    for x, want in zip(found, exact, strict=True):
        assert x.grad is not None
        assert x.grad.dtype == x.dtype
        assert relative_error(x.grad, want.grad) < (3e-6 if x.dtype == torch.float32 else 2**-8)


def _gate_inputs(mhc_mult: int, hidden: int, leading: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, k = (streams(leading, mhc_mult, hidden, device) for _ in range(2))
    return x, k, torch.randn(*leading, hidden, device=device).bfloat16()


def _engram_inputs(mhc_mult: int, hidden: int, leading: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    token_ids = torch.randint(VOCAB_SIZE, leading, device=device, dtype=torch.int32)
    return streams(leading, mhc_mult, hidden, device), token_ids


def _gate_case(name: str, hidden: int, mhc_mult: int) -> ModuleCase:
    options: dict[str, Any] = {"mhc_mult": mhc_mult, "dtype": torch.bfloat16}
    return ModuleCase(
        name=name,
        make=lambda device: randomized(tk_modeling.EngramGate(hidden, device=device, **options)),
        make_reference=lambda device: reference.EngramGate(hidden, device=device, **options),
        make_inputs=partial(_gate_inputs, mhc_mult, hidden),
    )


def _engram_case(name: str, hidden: int, mhc_mult: int, **options: Any) -> ModuleCase:
    options |= {"head_dim": 32, "mhc_mult": mhc_mult, "dtype": torch.bfloat16}
    return ModuleCase(
        name=name,
        make=lambda device: randomized(tk_modeling.Engram(hidden, LAYOUT, 1, device=device, **options)),
        make_reference=lambda device: reference.Engram(hidden, LAYOUT, 1, device=device, **options),
        make_inputs=partial(_engram_inputs, mhc_mult, hidden),
    )


CASES = (
    _gate_case("engram-gate", 128, 4),
    _engram_case("engram", 64, 4),
    _engram_case("engram-without-conv", 64, 2, short_conv=False),
    _engram_case("engram-one-stream", 64, 1, pad_id=3, block_id=7),
)
