"""Constructors refuse what cannot work when they are given it, by the argument's name."""

from typing import Any

import pytest
import torch
from torch import nn

import tk_modeling

from .engram.cases import LAYOUT
from .test_dtypes import default_dtype

NAN = float("nan")
# Arguments with which each module can be made.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Engram": {"hidden": 64, "layout": LAYOUT, "layer": 0, "head_dim": 32},
    "EngramGate": {"hidden": 64},
    "FP8Linear": {"in_features": 128, "out_features": 128},
    "GroupedFP8Linear": {"num_experts": 2, "in_features": 128, "out_features": 128},
    "HyperConnection": {"sublayer": nn.Identity(), "hidden": 64},
    "HyperHead": {"hidden": 64},
    "MoE": {"hidden": 64, "intermediate": 64, "num_experts": 4, "num_topk": 2},
    "RMSNorm": {"hidden": 64},
    "Router": {"hidden": 64, "num_experts": 4, "num_topk": 2},
}
NUMBERS = {
    "Engram": ("eps", "clamp_value", "conv_eps"),
    "EngramGate": ("eps", "clamp_value"),
    "HyperConnection": ("norm_eps", "pre_eps", "sinkhorn_eps", "post_mult_value", "post_eps"),
    "HyperHead": ("norm_eps", "pre_eps"),
    "MoE": ("bias_update_rate", "aux_loss_factor", "routed_scaling_factor"),
    "RMSNorm": ("eps", "weight_offset"),
    "Router": ("bias_update_rate", "aux_loss_factor", "routed_scaling_factor"),
}
FLAGS = {
    "Engram": ("short_conv", "sparse_grad"),
    "HyperConnection": ("norm_weight", "shifted", "comb"),
    "HyperHead": ("norm_weight",),
    "MoE": ("fp8", "gated", "interleaved", "clamp_after"),
    "RMSNorm": ("round_before_weight",),
}
WITH_DTYPE = ("Engram", "EngramGate", "FP8Linear", "GroupedFP8Linear", "MoE", "RMSNorm")
STREAMS = ("HyperConnection", "HyperHead")
SIGNED = ("pre_eps", "routed_scaling_factor", "weight_offset")
EACH_NUMBER = [(module, name) for module, names in NUMBERS.items() for name in names]
WRONG = [
    *((module, name, NAN, ValueError) for module, name in EACH_NUMBER),
    *((module, name, "1", TypeError) for module, name in EACH_NUMBER),
    *((module, name, -1e-6, ValueError) for module, name in EACH_NUMBER if name not in SIGNED),
    *((module, name, value, TypeError) for module, names in FLAGS.items() for name in names for value in (1, None)),
    *((module, "device", "nonsense", ValueError) for module in ARGUMENTS),
    *((module, "device", 1.5, TypeError) for module in ARGUMENTS),
    *((module, "ep", value, TypeError) for module in ("MoE", "Router") for value in (2, "group")),
    *((module, "dtype", dtype, ValueError) for module in WITH_DTYPE for dtype in (torch.float16, torch.int32)),
    *((module, "dtype", "bfloat16", TypeError) for module in WITH_DTYPE),
    ("Engram", "hidden", 96, ValueError),
    ("Engram", "hidden", 64.0, TypeError),
    ("Engram", "mhc_mult", 9, ValueError),
    ("Engram", "head_dim", 40, ValueError),
    ("Engram", "head_dim", 0, ValueError),
    ("Engram", "layer", 2, ValueError),
    ("Engram", "layer", -1, ValueError),
    ("Engram", "conv_eps", 0.0, ValueError),
    ("Engram", "pad_id", 2**31, ValueError),
    ("Engram", "pad_id", None, TypeError),
    ("Engram", "block_id", -(2**31) - 1, ValueError),
    ("Engram", "block_id", 1.0, TypeError),
    ("Engram", "layout", None, TypeError),
    ("EngramGate", "hidden", 96, ValueError),
    ("RMSNorm", "hidden", 60, ValueError),
    ("RMSNorm", "hidden", 64.0, TypeError),
    ("FP8Linear", "in_features", 0, ValueError),
    ("FP8Linear", "in_features", 128.0, TypeError),
    ("FP8Linear", "out_features", -128, ValueError),
    ("FP8Linear", "out_features", 192, ValueError),
    ("GroupedFP8Linear", "num_experts", 0, ValueError),
    ("GroupedFP8Linear", "num_experts", 2.0, TypeError),
    ("GroupedFP8Linear", "in_features", 0, ValueError),
    ("GroupedFP8Linear", "out_features", 128.0, TypeError),
    *((module, "mhc_mult", 3, ValueError) for module in STREAMS),
    *((module, "hidden", hidden, ValueError) for module in STREAMS for hidden in (96, 8256)),
    # Initially pre is 1/m of m = 4 streams, a sigmoid plus pre_eps.
    *((module, "pre_eps", value, ValueError) for module in STREAMS for value in (0.25, -0.75)),
    ("HyperConnection", "post_mult_value", 1.0, ValueError),
    ("HyperConnection", "post_eps", 1.0, ValueError),
    ("HyperConnection", "sublayer", None, TypeError),
    ("HyperConnection", "sinkhorn_repeat", 0, ValueError),
    ("HyperConnection", "sinkhorn_repeat", 2**31, ValueError),
    ("HyperConnection", "sinkhorn_repeat", 2.0, TypeError),
    ("MoE", "hidden", 96, ValueError),
    ("MoE", "hidden", 0, ValueError),
    ("MoE", "intermediate", 100, ValueError),
    ("MoE", "intermediate", 64.0, TypeError),
    ("MoE", "num_topk", 5, ValueError),
    ("MoE", "activation", "gelu", ValueError),
    ("MoE", "alpha", 0.0, ValueError),
    ("MoE", "alpha", "1", TypeError),
    ("MoE", "swiglu_clamp_value", 0.0, ValueError),
    ("Router", "hidden", -1, ValueError),
    ("Router", "hidden", 8.0, TypeError),
    ("Router", "num_experts", -1, ValueError),
    ("Router", "num_topk", 5, ValueError),
    ("Router", "scoring_func", "relu", ValueError),
    ("Router", "scoring_func", "identity", ValueError),
    ("Router", "routed_scaling_factor", "1", TypeError),
]


def made(module: str, **options: Any) -> nn.Module:
    return getattr(tk_modeling, module)(**ARGUMENTS[module] | options)


@pytest.mark.parametrize(("module", "name", "value", "error"), WRONG)
def test_what_cannot_work_is_named(module: str, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name}: expected .*, got "):
        made(module, **{name: value})


@pytest.mark.parametrize("wrong", [{"hidden": 64}, {"intermediate": 64}])
def test_fp8_experts_need_multiples_of_128(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected "):
        made("MoE", **{"hidden": 128, "intermediate": 128} | wrong, fp8=True)


def test_parameters_without_a_dtype_have_torchs_default() -> None:
    with default_dtype(torch.bfloat16):
        found = {module: {name: x.dtype for name, x in made(module).named_parameters()} for module in ARGUMENTS}
    assert all(
        x == torch.bfloat16 for module in WITH_DTYPE for name, x in found[module].items() if "router" not in name
    )
    assert found["MoE"]["router.weight"] == torch.float32
    assert all(x == torch.float32 for module in ("Router", *STREAMS) for x in found[module].values())


@pytest.mark.parametrize(
    ("module", "options", "text"),
    [
        (
            "Engram",
            {"pad_id": 3},
            "64, num_rows=88, num_heads=4, head_dim=32, max_ngram=3, mhc_mult=4, short_conv=True",
        ),
        ("EngramGate", {"eps": 0.5}, "EngramGate(64, mhc_mult=4, eps=0.5, clamp_value=1e-06)"),
        ("FP8Linear", {}, "FP8Linear(128, 128)"),
        ("GroupedFP8Linear", {}, "GroupedFP8Linear(2, 128, 128)"),
        ("HyperConnection", {"mhc_mult": 2}, "64, mhc_mult=2, norm_weight=False, norm_eps=1e-06, post_mult_value=2.0"),
        ("HyperHead", {"norm_weight": True}, "HyperHead(64, mhc_mult=4, norm_weight=True, norm_eps=1e-06"),
        ("MoE", {"hidden": 128, "intermediate": 128, "fp8": True}, "128, intermediate=128, fp8=True"),
        ("Router", {"num_groups": 2, "num_topk_groups": 1}, "Router(64, 2 of 4 experts, 1 of 2 groups, sigmoid)"),
    ],
)
def test_repr_shows_the_options(module: str, options: dict[str, Any], text: str) -> None:
    assert text in repr(made(module, **options))


@pytest.mark.parametrize("module", ARGUMENTS)
def test_devices_that_can_work(module: str) -> None:
    for device in ("cpu", torch.device("meta"), "meta"):
        state = made(module, device=device).state_dict()
        assert all(x.device.type == torch.device(device).type for x in state.values())


def test_all_modules_are_tried() -> None:
    public = [name for name in tk_modeling.__all__ if isinstance(getattr(tk_modeling, name), type)]
    assert {name for name in public if issubclass(getattr(tk_modeling, name), nn.Module)} == ARGUMENTS.keys()


@pytest.mark.parametrize("name", [3, None])
def test_functions_refuse_a_name_that_is_no_text(name: Any) -> None:
    x, weight = torch.zeros(128, 128).bfloat16(), torch.zeros(1, 128, 128)
    with pytest.raises(TypeError, match=r"^name: expected a str, got "):
        tk_modeling.fp8_linear(x, weight[0], name=name)
    with pytest.raises(TypeError, match=r"^name: expected a str, got "):
        tk_modeling.grouped_fp8_linear(x, weight, torch.tensor([128], dtype=torch.int32), name=name)
