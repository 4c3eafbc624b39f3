"""Activations for the cases of the SwiGLU ops, and their formulas in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "oai": {"activation": "swiglu_oai", "interleaved": True, "swiglu_clamp_value": 7.0},
    "oai-halves": {"activation": "swiglu_oai", "alpha": 65.0},
    "gelu": {"activation": "gelu_tanh", "interleaved": True},
    "gelu-ungated": {"activation": "gelu_tanh", "gated": False},
    "relu2": {"activation": "relu2", "gated": False},
    "relu2-gated": {"activation": "relu2", "swiglu_clamp_value": 1.5},
    "alpha": {"alpha": 1.702},
    "after": {"clamp_after": True, "swiglu_clamp_value": 0.7},
    "after-ungated": {"alpha": 0.5, "clamp_after": True, "gated": False, "swiglu_clamp_value": 1.25},
}
"""Each activation, with and without values, in halves and interleaved, with an alpha for which divisions take no short
cut; named as in case names."""
IN_HALVES: dict[str, dict[str, Any]] = {
    "alpha": {"alpha": 1.702},
    "gelu": {"activation": "gelu_tanh"},
    "relu2": {"activation": "relu2"},
}
"""For every gate there is."""
COUNTED: dict[str, dict[str, Any]] = {
    "oai": {"activation": "swiglu_oai", "interleaved": True, "swiglu_clamp_value": 0.7, "counted": 4},
    "after-interleaved": {"clamp_after": True, "interleaved": True, "swiglu_clamp_value": 0.5, "counted": 3},
    "relu2-ungated": {"activation": "relu2", "gated": False, "swiglu_clamp_value": 1.0, "counted": 4},
}


def width(hidden: int, options: dict[str, Any]) -> int:
    """Columns of x."""
    return 2 * hidden if options.get("gated", True) else hidden


def plain(
    x: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> Tensor:
    """The op by torch's own functions, in the dtype of x."""
    clamp = torch.inf if swiglu_clamp_value is None else swiglu_clamp_value
    gate, value = x, None
    if gated:
        gate, value = (x[:, 0::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=1)
        value = value.clamp(-clamp, clamp)
    if not clamp_after:
        gate = gate.clamp(max=clamp)
    if activation == "gelu_tanh":
        out = functional.gelu(gate, approximate="tanh")
    elif activation == "relu2":
        out = functional.relu(gate).square()
    else:
        out = gate * torch.sigmoid((alpha or (1.702 if activation == "swiglu_oai" else 1)) * gate)
    if clamp_after:
        out = out.clamp(max=clamp)
    if value is None:
        return out
    return out * (value + 1 if activation == "swiglu_oai" else value)
