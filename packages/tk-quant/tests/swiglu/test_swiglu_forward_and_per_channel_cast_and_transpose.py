"""swiglu_forward_and_per_channel_cast_and_transpose."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, tiers

from ..per_channel.test_per_channel_cast import quantize
from ..per_token.test_per_token_cast import BENCH

MakeInput = Callable[[str], torch.Tensor]


def normal(num_tokens: int, hidden: int) -> MakeInput:
    """Normally distributed [l | r], each channel of r with a scale of its own."""

    def build(device: str) -> torch.Tensor:
        x = torch.randn(num_tokens, 2 * hidden, device=device) * 3
        x[:, hidden:] *= torch.exp2(torch.randint(-12, 12, (hidden,), device=device).to(torch.float32))
        return x.to(torch.bfloat16)

    return build


def tiny(num_tokens: int, hidden: int) -> MakeInput:
    """The same, with r around 1e-9 and a channel of zeros."""
    plain = normal(num_tokens, hidden)

    def build(device: str) -> torch.Tensor:
        x = plain(device)
        x[:, hidden:] *= 2.0**-30
        x[:, hidden] = 0
        return x

    return build


def strided(num_tokens: int, hidden: int, extra: int, first: int) -> MakeInput:
    """Rows with a gap of `extra` elements, which start at column `first` of a wider tensor."""

    def build(device: str) -> torch.Tensor:
        wide = torch.randn(num_tokens, 2 * hidden + extra, device=device).to(torch.bfloat16)
        return wide[:, first : first + 2 * hidden]

    return build


def every_gate(value: float) -> MakeInput:
    """All 2**16 bfloat16 for l, channel by channel, beside one r: (1024, 2 * 64)."""

    def build(device: str) -> torch.Tensor:
        bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
        gates = bits.view(torch.bfloat16).view(64, 1024).t()
        return torch.cat((gates, torch.full_like(gates, value)), dim=1)

    return build


def extremes(num_tokens: int, hidden: int) -> MakeInput:
    """Channels of zeros, infinities, NaN, subnormals, overflow, activations below the clamp, one outlier, equals."""

    def build(device: str) -> torch.Tensor:
        noise = torch.randn(num_tokens, 2 * hidden)
        x = noise.clone()
        left, right = x[:, :hidden], x[:, hidden:]
        # Blocks that a single token decides; first in l, then in r.
        left[0, 0], left[1, 1], left[2, 2], left[3, 3] = torch.inf, -torch.inf, torch.nan, -torch.nan
        right[4, 4], right[5, 5], right[6, 6] = torch.inf, -torch.inf, torch.nan
        left[7, 7], right[7, 7] = torch.inf, 0.0
        left[:, 8], right[:, 9] = 0.0, 0.0
        left[:, 10], right[:, 11] = -0.0, -0.0
        left[:, 12] = noise[:, 12] * 2.0**-130
        right[:, 13] = noise[:, 13] * 2.0**-130
        left[:, 14], right[:, 14] = 2.0**100, 2.0**40
        # exp(-l) close to overflow and beyond it, with large and small r.
        left[:, 15] = -87 + torch.arange(num_tokens) % 16 * -0.5
        left[:, 16], right[:, 16] = left[:, 15], 1e30
        left[:, 17], right[:, 17] = left[:, 15], 3e38
        left[:, 18], right[:, 18] = 80 + torch.arange(num_tokens) % 32, 1.5
        right[:, 19] = 1e-5
        left[:, 20], right[:, 20] = 1.0, 1.0
        right[num_tokens // 2, 21] = 2.0**60
        left[:, 22], right[:, 22] = 20.0, 448.0 / 20
        bits = torch.randint(-(2**15), 2**15, (num_tokens, 2), dtype=torch.int16)
        x = x.to(torch.bfloat16)
        x[:, 23], x[:, hidden + 23] = bits.view(torch.bfloat16).unbind(1)
        return x.to(device)

    return build


def make(x: MakeInput, num_per_tokens: int, **more: Any) -> Make:
    """Arguments of the op."""
    return lambda device: {"x": x(device), "fmt": "e4m3", "num_per_tokens": num_per_tokens, **more}


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "round": {"round_sf": True},
    "straight": {"without_transpose": True},
    "straight-round": {"without_transpose": True, "round_sf": True},
    "clamp": {"swiglu_clamp_value": 7.0},
    "straight-clamp": {"without_transpose": True, "swiglu_clamp_value": 10},
    # Not representable in bfloat16.
    "round-odd-clamp": {"round_sf": True, "swiglu_clamp_value": 1.2345678},
}
_PAIRS = tuple((num_per_tokens, flags) for num_per_tokens in (32, 128) for flags in FLAGS)


def _case(num_tokens: int, hidden: int, num_per_tokens: int, flags: str, suffix: str = "", **roles: Any) -> Case:
    name = f"{num_per_tokens}-{flags}-h{hidden}-t{num_tokens}{suffix}"
    return Case(name, make(normal(num_tokens, hidden), num_per_tokens, **FLAGS[flags]), **roles)


_BENCH_SHAPE = (16384, 2048)

SPEC = OpSpec(
    op=tk_quant.swiglu_forward_and_per_channel_cast_and_transpose,
    cases=(
        *(
            _case(
                *(128, 64, num_per_tokens, flags),
                small=True,
                compile=True,
                modes=(num_per_tokens, flags) in ((128, "plain"), (32, "clamp")),
            )
            for num_per_tokens, flags in _PAIRS
        ),
        _case(256, 192, 128, "plain", small=True),
        _case(384, 128, 32, "straight-clamp", small=True),
        *(
            _case(0, 64, num_per_tokens, flags, small=True)
            for num_per_tokens, flags in ((32, "plain"), (128, "straight"))
        ),
        *(
            Case(
                f"{num_per_tokens}-{flags}-extremes",
                make(extremes(128, 64), num_per_tokens, **FLAGS[flags]),
                small=True,
            )
            for num_per_tokens, flags in _PAIRS
        ),
        *(
            Case(
                f"{num_per_tokens}-{flags}-h64-tiny",
                make(tiny(128, 64), num_per_tokens, **FLAGS[flags], sf_clamp_min=448 * 2.0**-126),
                small=True,
            )
            for num_per_tokens, flags in ((128, "plain"), (32, "straight-round"))
        ),
        *(
            Case(
                f"{num_per_tokens}-{flags}-apart{extra}-from{first}",
                make(strided(128, 64, extra, first), num_per_tokens, **FLAGS[flags]),
                small=True,
                compile=True,
            )
            for num_per_tokens, flags, extra, first in (
                (128, "plain", 64, 64),
                (32, "round", 4, 4),
                (128, "straight", 6, 2),
                (32, "plain", 3, 1),
            )
        ),
        # Every gate through l / (1 + exp(-l)) and rounding to bfloat16; most blocks of 32 are finite.
        *(
            Case(f"32-{flags}-every-gate-{name}", make(every_gate(value), 32, **FLAGS[flags]))
            for flags in ("straight", "clamp", "round-odd-clamp")
            for name, value in (("one", 1.0), ("large", 3e38), ("third", 1 / 3))
        ),
        *(
            _case(tokens, hidden, *_PAIRS[(5 * row + 3 * column) % len(_PAIRS)])
            for row, tokens in enumerate((128, 4096, 8064))
            for column, hidden in enumerate((576, 1280, 1536, 2048, 3072, 4096, 7168))
        ),
        _case(4096, 3584, 128, "plain"),
        _case(65536, 64, 32, "plain"),
        *(
            _case(
                *(*_BENCH_SHAPE, num_per_tokens, flags, "-bench"),
                **BENCH,
                model_shape=(num_per_tokens, flags) == (128, "plain"),
            )
            for num_per_tokens, flags in (
                *((128, "plain"), (128, "round"), (128, "straight"), (128, "clamp"), (32, "plain"), (32, "round")),
            )
        ),
        *(
            _case(tokens, hidden, 128, "plain", "-bench", **BENCH)
            for tokens, hidden in (
                *((16384, hidden) for hidden in (576, 1280, 1536, 3072, 7168)),
                *((tokens, 2048) for tokens in (128, 4096, 8064)),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

INF, NAN = math.inf, math.nan
cast = tk_quant.swiglu_forward_and_per_channel_cast_and_transpose


def tokens(pairs: list[tuple[float, float]]) -> torch.Tensor:
    """(128, 2 * 64): in channel 0 these pairs (l, r), one a token, and zeros elsewhere."""
    x = torch.zeros(128, 128)
    for token, (gate, value) in enumerate(pairs):
        x[token, 0], x[token, 64] = gate, value
    return x.to(torch.bfloat16)


def test_by_hand() -> None:
    # 64 / (1 + exp(-64)) is 64, and 448 / 64 is 7: nothing is scaled. 0 / (1 + 1) * r is 0 with the sign of both.
    x = tokens([(64.0, 7.0), (32.0, -7.0), (64.0, 0.25), (0.0, 5.0), (-0.0, 5.0), (-0.0, -5.0), (64.0, -1.0)])
    data, sf = cast(x, "e4m3", 128)
    assert data.shape == (64, 128)
    assert sf.shape == (1, 64)
    assert data.view(torch.uint8)[0, :7].tolist() == [0x7E, 0xF6, 0x58, 0x00, 0x80, 0x00, 0xE8]
    assert sf[0, 0] == 1.0
    assert sf[0, 1] == np.float32(1e-4) / np.float32(448)
    straight, other_sf = cast(x, "e4m3", 128, without_transpose=True)
    assert torch.equal(straight.view(torch.uint8).t(), data.view(torch.uint8))
    assert torch.equal(sf, other_sf)


def test_the_activation_is_rounded_to_bfloat16() -> None:
    # 3 * (1 + 2**-7) times 86 lies between bfloat16 numbers.
    gate, value = 86.0, 3 * (1 + 2.0**-7)
    _, sf = cast(tokens([(gate, value)]), "e4m3", 32)
    product = np.float32(gate) * np.float32(ml_dtypes.bfloat16(value))
    rounded = np.float32(ml_dtypes.bfloat16(product))
    assert rounded != product
    assert sf[0, 0].item() == rounded / np.float32(448)


@pytest.mark.parametrize("num_per_tokens", [32, 128])
@pytest.mark.parametrize("flags", list(FLAGS))
def test_against_numpy(num_per_tokens: int, flags: str) -> None:
    x = normal(256, 64)("cpu")
    data, sf = cast(x, "e4m3", num_per_tokens, **FLAGS[flags])
    clamp = FLAGS[flags].get("swiglu_clamp_value")
    left, right = (half.float().numpy() for half in (x[:, :64], x[:, 64:]))
    if clamp is not None:
        left, right = np.minimum(left, np.float32(clamp)), np.clip(right, -np.float32(clamp), np.float32(clamp))
    # numpy's exp differs from torch's in the last place.
    exp = torch.exp(torch.from_numpy(-left)).numpy()
    activation = (left / (np.float32(1) + exp) * right).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected, expected_sf = quantize(activation, num_per_tokens, "round_sf" in FLAGS[flags])
    if not FLAGS[flags].get("without_transpose"):
        expected = expected.T
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), expected)
    np.testing.assert_array_equal(sf.numpy(), expected_sf)
    assert data.is_contiguous()
    assert sf.is_contiguous()


@pytest.mark.parametrize("round_sf", [False, True])
def test_not_finite(round_sf: bool) -> None:
    data, sf = cast(extremes(128, 64)("cpu"), "e4m3", 128, round_sf)
    for channel, expected in ((0, INF), (1, NAN), (2, NAN), (3, NAN), (4, INF), (5, INF), (6, NAN), (7, NAN)):
        assert str(sf[0, channel].item()) == str(expected)
        codes = data.view(torch.uint8)[channel]
        assert (codes & 0x7F == 0x7F).any()
        assert not (codes & 0x7F).bool().logical_and(codes & 0x7F != 0x7F).any()
    assert sf[:, 8:14].isfinite().all()


X = torch.zeros(128, 128, dtype=torch.bfloat16)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "e4m3", "num_per_tokens": 128},
    [
        ({"x": X[:127]}, ValueError, r"x.shape\[0\]: expected a multiple of 128, got 127"),
        ({"x": X[:, :64]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 128, got 64"),
        ({"x": X[:, :0]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 128, got 0"),
        ({"num_per_tokens": 64}, ValueError, "num_per_tokens: expected one of 32, 128, got 64"),
    ],
)
