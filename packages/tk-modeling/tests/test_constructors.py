"""Constructors refuse what cannot work when they are given it, by the argument's name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tk_modeling

from .engram.cases import LAYOUT

NAN = float("nan")
MAKERS: dict[str, Callable[..., nn.Module]] = {
    "Engram": lambda **options: tk_modeling.Engram(
        **{"hidden": 64, "layout": LAYOUT, "layer": 0} | options, head_dim=32
    ),
    "EngramGate": lambda **options: tk_modeling.EngramGate(64, **options),
    "FP8Linear": lambda **options: tk_modeling.FP8Linear(128, 128, **options),
    "GroupedFP8Linear": lambda **options: tk_modeling.GroupedFP8Linear(2, 128, 128, **options),
    "HyperConnection": lambda **options: tk_modeling.HyperConnection(
        hidden=64, **{"sublayer": nn.Identity()} | options
    ),
    "HyperHead": lambda **options: tk_modeling.HyperHead(64, **options),
    "MoE": lambda **options: tk_modeling.MoE(64, 64, 4, 2, **options),
    "Router": lambda **options: tk_modeling.Router(64, 4, 2, **options),
}
NUMBERS = {
    "Engram": ("eps", "clamp_value", "conv_eps"),
    "EngramGate": ("eps", "clamp_value"),
    "HyperConnection": ("norm_eps", "pre_eps", "sinkhorn_eps", "post_mult_value"),
    "HyperHead": ("norm_eps", "pre_eps"),
    "MoE": ("bias_update_rate", "aux_loss_factor", "routed_scaling_factor"),
    "Router": ("bias_update_rate", "aux_loss_factor", "routed_scaling_factor"),
}
FLAGS = {
    "Engram": ("short_conv", "sparse_grad"),
    "HyperConnection": ("norm_weight", "shifted"),
    "HyperHead": ("norm_weight",),
    "MoE": ("fp8",),
}
WITH_DTYPE = ("Engram", "EngramGate", "FP8Linear", "GroupedFP8Linear", "MoE")
SIGNED = ("pre_eps", "routed_scaling_factor")
EACH_NUMBER = [(module, name) for module, names in NUMBERS.items() for name in names]
WRONG = [
    *((module, name, NAN, ValueError) for module, name in EACH_NUMBER),
    *((module, name, "1", TypeError) for module, name in EACH_NUMBER),
    *((module, name, -1e-6, ValueError) for module, name in EACH_NUMBER if name not in SIGNED),
    *((module, name, value, TypeError) for module, names in FLAGS.items() for name in names for value in (1, None)),
    *((module, "device", "nonsense", ValueError) for module in MAKERS),
    *((module, "device", 1.5, TypeError) for module in MAKERS),
    *((module, "dtype", dtype, ValueError) for module in WITH_DTYPE for dtype in (torch.float16, torch.int32)),
    *((module, "dtype", "bfloat16", TypeError) for module in WITH_DTYPE),
    ("Engram", "conv_eps", 0.0, ValueError),
    ("Engram", "pad_id", 2**31, ValueError),
    ("Engram", "pad_id", None, TypeError),
    ("Engram", "block_id", -(2**31) - 1, ValueError),
    ("Engram", "block_id", 1.0, TypeError),
    ("Engram", "layout", None, TypeError),
    ("HyperConnection", "sublayer", None, TypeError),
    ("HyperConnection", "sinkhorn_repeat", 0, ValueError),
    ("HyperConnection", "sinkhorn_repeat", 2**31, ValueError),
    ("HyperConnection", "sinkhorn_repeat", 2.0, TypeError),
]


@pytest.mark.parametrize(("module", "name", "value", "error"), WRONG)
def test_what_cannot_work_is_named(module: str, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name}: expected .*, got "):
        MAKERS[module](**{name: value})


@pytest.mark.parametrize("module", MAKERS)
def test_devices_that_can_work(module: str) -> None:
    for device in ("cpu", torch.device("meta"), "meta"):
        made = MAKERS[module](device=device)
        assert all(x.device.type == torch.device(device).type for x in made.state_dict().values())


def test_all_modules_are_tried() -> None:
    public = [name for name in tk_modeling.__all__ if isinstance(getattr(tk_modeling, name), type)]
    assert {name for name in public if issubclass(getattr(tk_modeling, name), nn.Module)} == MAKERS.keys()


@pytest.mark.parametrize("name", [3, None])
def test_functions_refuse_a_name_that_is_no_text(name: Any) -> None:
    x, weight = torch.zeros(128, 128).bfloat16(), torch.zeros(1, 128, 128)
    with pytest.raises(TypeError, match=r"^name: expected a str, got "):
        tk_modeling.fp8_linear(x, weight[0], name=name)
    with pytest.raises(TypeError, match=r"^name: expected a str, got "):
        tk_modeling.grouped_fp8_linear(x, weight, torch.tensor([128], dtype=torch.int32), name=name)
