"""per_token_cast_back."""

from typing import Any

import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers

from ..per_token.test_per_token_cast import BENCH, NEIGHBOURS
from .test_cast_back import MakePair, every_code, more, pair


def make(x: MakePair, fmt: str, num_per_channels: int, others: Any = None) -> Make:
    """Arguments of per_token_cast_back; `others(device)` gives more of them."""
    return lambda device: {
        "x": x(device),
        "fmt": fmt,
        "num_per_channels": num_per_channels,
        **(others(device) if others is not None else {}),
    }


def _case(
    fmt: str, group: int, layout: str, out: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    return Case(
        f"{fmt}-{group}-{layout}-{out}-h{hidden}-t{num_tokens}{suffix}",
        make(pair(num_tokens, hidden, fmt, (1, group), layout), out, group, more(fmt, layout)),
        **roles,
    )


SPEC = OpSpec(
    op=tk_quant.per_token_cast_back,
    cases=(
        *(
            _case(
                fmt,
                group,
                layout,
                out,
                5,
                576,
                small=True,
                modes=(fmt, group, layout, out) in (("e4m3", 128, "row", "bf16"), ("e2m1", 32, "packed", "fp32")),
            )
            for fmt in ("e4m3", "e2m1")
            for out in ("bf16", "fp32")
            for group, layout in (
                (16, "row"),
                (32, "packed"),
                (64, "col"),
                (128, "row"),
                (128, "packed"),
                (576, "row"),
                (576, "packed"),
            )
        ),
        *(
            _case(fmt, group, layout, out, 5, 576, small=True, modes=(layout, out) == ("nvswizzled", "fp32"))
            for fmt, group, layout, out in (
                ("e5m6", 576, "row", "fp32"),
                ("e5m6", 128, "packed", "bf16"),
                ("e2m1", 16, "nv", "bf16"),
                ("e2m1", 16, "nvswizzled", "fp32"),
                ("e2m1", 32, "swizzled", "bf16"),
            )
        ),
        _case("e4m3", 128, "row", "bf16", 7, 64, small=True),
        _case("e4m3", 128, "packed", "fp32", 0, 192, small=True),
        Case(
            "e4m3-32-row-bf16-h192-t9-apart3",
            make(pair(9, 192, "e4m3", (1, 32), "row", 3, 1), "bf16", 32),
            small=True,
        ),
        Case("e4m3-256-row-fp32-every-code", make(every_code("e4m3", "row"), "fp32", 256), small=True),
        Case("e2m1-512-packed-bf16-every-code", make(every_code("e2m1", "packed"), "bf16", 512)),
        # Of a real model; `cast_back`, which serves the call, has more sizes.
        _case("e4m3", 128, "packed", "bf16", 4001, 7168),
        *(
            _case(fmt, group, layout, out, 8192, 7168, "-bench", **BENCH, compile=out == "bf16", model_shape=True)
            for fmt, group, layout in (("e4m3", 128, "row"), ("e2m1", 32, "row"))
            for out in ("bf16", "fp32")
        ),
        *(
            _case(fmt, group, "packed", out, 8192, 7168, "-bench", **BENCH, compile=out == "bf16")
            for fmt, group in (("e4m3", 128), ("e2m1", 32))
            for out in ("bf16", "fp32")
        ),
        _case("e4m3", 7168, "row", "bf16", 8192, 7168, "-bench", **BENCH),
        *(_case("e2m1", 16, layout, "bf16", 8192, 7168, "-bench", **BENCH) for layout in ("nv", "nvswizzled")),
        _case("e5m6", 7168, "row", "fp32", 8192, 7168, "-bench", **BENCH),
        *(
            _case(fmt, group, "row", out, tokens, hidden, "-bench", **BENCH)
            for fmt, group, out in (("e4m3", 128, "bf16"), ("e4m3", 128, "fp32"), ("e2m1", 32, "bf16"))
            for tokens, hidden in NEIGHBOURS
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize(("fmt", "layout"), [("e4m3", "row"), ("e5m6", "packed"), ("e2m1", "nvswizzled")])
def test_is_cast_back_by_groups(fmt: str, layout: str) -> None:
    others = more(fmt, layout)("cpu")
    for group in (16, 320):
        x = pair(3, 320, fmt, (1, group), layout)("cpu")
        by_token = tk_quant.per_token_cast_back(x, "bf16", group, **others)
        assert_equal(by_token, tk_quant.cast_back(x, "bf16", (1, group), **others))


def test_by_hand() -> None:
    data = torch.full((2, 128), 2.0).to(torch.float8_e4m3fn)
    out = tk_quant.per_token_cast_back((data, torch.tensor([[1.0, 2.0], [3.0, 4.0]])), "bf16", 64)
    assert out.dtype is torch.bfloat16
    assert out[:, ::63].tolist() == [[2.0, 2.0, 4.0], [6.0, 6.0, 8.0]]


X = (torch.zeros(8, 192, dtype=torch.float8_e4m3fn), torch.ones(8, 6))
FP4 = torch.zeros(8, 96, dtype=torch.int8)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "bf16", "num_per_channels": 32},
    [
        ({"x": X[0]}, TypeError, "x: expected a pair"),
        ({"x": (X[0], X[1][:7])}, ValueError, r"x\[1\]: expected shape \(8, 6\)"),
        ({"x": (X[0][:, :96], X[1])}, ValueError, "x: expected a positive multiple of 64 channels, got 96"),
        ({"num_per_channels": 48}, ValueError, "num_per_channels: expected one of 16, 32, 64, 128, 192, got 48"),
        ({"x_special_fmt": "e5m6"}, TypeError, r"x\[0\]: expected dtype torch.uint8"),
        ({"tensor_sf": torch.ones(1)}, ValueError, "tensor_sf: expected None"),
        ({"x": (FP4, X[1].to(torch.float8_e4m3fn)), "tensor_sf": 3}, TypeError, "tensor_sf: expected a torch.Tensor"),
    ],
)
