"""per_token_cast_and_cast_back."""

from typing import Any

import pytest
import torch

import tk_quant
from tk_core.reference.quantize import decode_e2m1, encode_e2m1
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers

from .test_per_token_cast import NEIGHBOURS, MakeInput, extremes, normal, strided, tiny

BF16, FP32 = torch.bfloat16, torch.float32
_NAMES = {BF16: "bf16", FP32: "fp32"}
FLAGS = {"plain": {}, "round": {"round_sf": True}, "e4m3-sf": {"use_e4m3_sf": True}}


def make(x: MakeInput, fmt: str, group: int, flags: str = "plain", out: MakeInput | None = None) -> Make:
    """Arguments, with `out` made like x."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        given = None if out is None else out(device)
        return {"x": values, "fmt": fmt, "num_per_channels": group, **FLAGS[flags], "out": given}

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """x is read once and written once."""
    return 2 * kwargs["x"].nbytes


SPEC = OpSpec(
    op=tk_quant.per_token_cast_and_cast_back,
    mutates=("x", "out"),
    least_bytes=least_bytes,
    cases=(
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-h576-t5",
                make(normal(5, 576, dtype), fmt, group, flags),
                small=True,
                compile=flags != "plain",
                modes=(fmt, group, flags) in (("e4m3", 128, "plain"), ("e2m1", 16, "e4m3-sf")),
            )
            for dtype, fmt, group, flags in (
                (BF16, "e4m3", 128, "plain"),
                (BF16, "e4m3", 32, "round"),
                (BF16, "e4m3", 64, "e4m3-sf"),
                (BF16, "e2m1", 16, "e4m3-sf"),
                (BF16, "e2m1", 32, "plain"),
                (BF16, "e2m1", 128, "round"),
                (BF16, "e4m3", 576, "plain"),
                (FP32, "e4m3", 128, "plain"),
                (FP32, "e2m1", 576, "round"),
                (FP32, "e2m1", 16, "plain"),
                (FP32, "e4m3", 16, "e4m3-sf"),
            )
        ),
        *(
            Case(f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-{name}", make(x, fmt, group, flags, out), small=True)
            for dtype in (BF16, FP32)
            for fmt, group, flags, name, x, out in (
                ("e4m3", 32, "plain", "extremes", extremes(192, dtype), None),
                ("e4m3", 64, "round", "extremes", extremes(192, dtype), None),
                ("e4m3", 128, "e4m3-sf", "extremes", extremes(192, dtype), None),
                ("e2m1", 32, "plain", "extremes", extremes(192, dtype), None),
                ("e2m1", 64, "round", "extremes", extremes(192, dtype), None),
                ("e2m1", 16, "e4m3-sf", "extremes", extremes(192, dtype), None),
                ("e4m3", 128, "e4m3-sf", "tiny", tiny(5, 128, dtype), None),
                ("e4m3", 128, "plain", "no-tokens", normal(0, 128, dtype), None),
                ("e4m3", 128, "plain", "to-out", normal(7, 192, dtype), normal(7, 192, dtype)),
                ("e2m1", 32, "plain", "odd-rows", strided(7, 192, dtype, 5, 3), None),
                ("e4m3", 32, "round", "odd-rows-to-out", normal(7, 192, dtype), strided(7, 192, dtype, 5, 3)),
            )
        ),
        *(
            Case(
                f"bf16-{fmt}-{group}-{flags}-h{hidden}-t{num}",
                make(normal(num, hidden, BF16), fmt, group, flags),
            )
            for fmt, group, flags in (("e4m3", 128, "plain"), ("e2m1", 32, "round"), ("e2m1", 16, "e4m3-sf"))
            for hidden, num in ((576, 4001), (7168, 1), (7168, 8001))
        ),
        Case("fp32-e4m3-7168-plain-h7168-t4001", make(normal(4001, 7168, FP32), "e4m3", 7168)),
        bench_case("bf16-e4m3-128-h7168-t8192", make(normal(8192, 7168, BF16), "e4m3", 128), model_shape=True),
        *(
            bench_case(f"bf16-e4m3-128-h{hidden}-t{num_tokens}", make(normal(num_tokens, hidden, BF16), "e4m3", 128))
            for num_tokens, hidden in NEIGHBOURS
        ),
        bench_case("bf16-e2m1-16-e4m3-sf-h7168-t8192", make(normal(8192, 7168, BF16), "e2m1", 16, "e4m3-sf")),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("flags", ["plain", "round"])
@pytest.mark.parametrize(("fmt", "group"), [("e4m3", 128), ("e2m1", 32), ("e4m3", 192)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_is_the_two_ops(dtype: torch.dtype, fmt: str, group: int, flags: str, device: str) -> None:
    x = extremes(192, dtype)(device)
    pair = tk_quant.per_token_cast(x, fmt, group, **FLAGS[flags])
    expected = tk_quant.per_token_cast_back(pair, _NAMES[dtype], group)
    out = torch.empty_like(x)
    tk_quant.per_token_cast_and_cast_back(x, fmt, group, **FLAGS[flags], out=out)
    if fmt == "e2m1":  # the data of blocks with infinity are unspecified
        whole = x.float().unflatten(1, (-1, group)).isfinite().all(2)
        expected, out = (y.unflatten(1, (-1, group))[whole] for y in (expected, out))
    assert_equal(out, expected)


def test_e4m3_sf_by_hand() -> None:
    x = torch.zeros(3, 64)
    # 10 / 448 is nearest to 1.375 · 2⁻⁶, and 10 over that is 465.5, which saturates.
    x[0, :3] = torch.tensor([10.0, 1.0, -0.0])
    x[1, 0], x[2, 0] = 1e6, 1e-3
    tk_quant.per_token_cast_and_cast_back(x, "e4m3", 64, use_e4m3_sf=True)
    assert x[0, 0] == 448 * 1.375 * 2.0**-6
    assert x[0, 1] == 48 * 1.375 * 2.0**-6
    assert str(x[0, 2].item()) == "-0.0"
    assert x[1, 0] == 448 * 448
    # The least sf is 2⁻⁹; 0.512 is nearest to 0.5.
    assert x[2, 0] == 0.5 * 2.0**-9


def test_values_stay_that_e2m1_has() -> None:
    codes = torch.randint(-128, 128, (5, 32), dtype=torch.int8)
    x = decode_e2m1(codes) * 0.25
    x[:, ::16] = 1.5  # 6 is the largest
    kept = x.clone()
    tk_quant.per_token_cast_and_cast_back(x, "e2m1", 16, use_e4m3_sf=True)
    assert_equal(x, kept)
    assert torch.equal(encode_e2m1(x * 4), encode_e2m1(kept * 4))


X = torch.ones(4, 192)
test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "e4m3", "num_per_channels": 64},
    [
        ({"x": X[:, :100]}, ValueError, "x: expected a positive multiple of 64 channels, got 100"),
        ({"fmt": "e5m6"}, ValueError, "fmt: expected one of 'e4m3', 'e2m1', got 'e5m6'"),
        ({"num_per_channels": 48}, ValueError, "num_per_channels: expected one of 16, 32, 64, 128, 192, got 48"),
        ({"num_per_channels": 192, "use_e4m3_sf": True}, ValueError, "num_per_channels: expected one of 16"),
        ({"round_sf": True, "use_e4m3_sf": True}, ValueError, "round_sf: expected False beside use_e4m3_sf"),
        ({"out": X}, ValueError, "out: expected memory of its own, got some of x"),
        ({"out": X.bfloat16()}, TypeError, "out: expected dtype torch.float32"),
        ({"out": torch.ones(4, 128)}, ValueError, r"out: expected shape \(4, 192\)"),
        ({"x": torch.ones(1, 192).expand(4, 192)}, ValueError, "x: expected elements apart in memory"),
    ],
)
