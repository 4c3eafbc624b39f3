"""per_channel_cast and per_channel_cast_and_transpose."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.scales import ScaleLayout
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers

from ..per_token import test_per_token_cast as by_token
from ..per_token.test_per_token_cast import BENCH

MakeInput = Callable[[str], torch.Tensor]

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
HIDDENS = (576, 2048, 2560, 3072, 4096, 6144, 7168)


def normal(num_tokens: int, hidden: int, dtype: torch.dtype) -> MakeInput:
    """Normally distributed, each channel with a scale of its own, and each token with one of up to 16."""

    def build(device: str) -> torch.Tensor:
        x = torch.randn(num_tokens, hidden, device=device)
        x *= torch.exp2(torch.randint(-12, 12, (hidden,), device=device).to(torch.float32))
        x *= torch.exp2(torch.randint(-4, 1, (num_tokens, 1), device=device).to(torch.float32))
        return x.to(dtype)

    return build


def strided(num_tokens: int, hidden: int, dtype: torch.dtype, extra: int, first: int) -> MakeInput:
    """Rows with a gap of `extra` elements, which start at column `first` of a wider tensor."""
    wide = normal(num_tokens, hidden + extra, dtype)
    return lambda device: wide(device)[:, first : first + hidden]


def extremes(num_tokens: int, dtype: torch.dtype) -> MakeInput:
    """64 channels: zeros, infinity, NaN, subnormals, the largest values, ties, quotients at powers of two, random bits.

    24 of them are the tokens of `testing.per_token.per_token_cast.extremes`, as channels.
    """
    special = by_token.extremes(num_tokens, dtype)

    def build(device: str) -> torch.Tensor:
        x = torch.randn(num_tokens, 64)
        # Blocks whose amax is in one token: the first, the last, one in the middle of a thread's rows.
        x[0, 24], x[num_tokens - 1, 25], x[num_tokens // 2 + 3, 26] = 2.0**60, -(2.0**60), 2.0**60
        x[5, 27], x[num_tokens - 2, 28], x[num_tokens // 2 + 1, 29] = torch.nan, torch.inf, -torch.inf
        x[:, 30] = 3.0
        x[:, 31] = 0.5e-4
        x = x.to(dtype)
        x[:, :24] = special("cpu").t()
        return x.to(device)

    return build


def make(x: MakeInput, num_per_tokens: int = 128, round_sf: bool = False, **more: Any) -> Make:
    """Arguments of the op."""
    kwargs = {"fmt": "e4m3", "num_per_tokens": num_per_tokens, "round_sf": round_sf, **more}
    return lambda device: {"x": x(device), **kwargs}


PACKED = {"round_sf": True, "use_packed_ue8m0": True}
OF_PAIR = {"num_per_channels": 128}


def pair(num_tokens: int, hidden: int, special: bool = False) -> MakeInput:
    """A pair of e4m3 codes and a scale factor for 128 channels of a token."""
    return by_token.pair(num_tokens, hidden, "e4m3", (1, 128), ScaleLayout.ROW_MAJOR, special)


def tiny_case(dtype: torch.dtype, num_per_tokens: int, round_sf: bool) -> Case:
    """A case with values around 1e-9 and the least sf_clamp_min."""
    name = f"{NAMES[dtype]}-{num_per_tokens}{'-round' if round_sf else ''}-h192-tiny"
    x, least = by_token.tiny(128, 192, dtype), by_token.LEAST_AMAX["e4m3"]
    return Case(name, make(x, num_per_tokens, round_sf, sf_clamp_min=least), small=True)


def case(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    num_per_tokens: int,
    round_sf: bool,
    suffix: str = "",
    **roles: Any,
) -> Case:
    """A case with normally distributed input."""
    name = f"{NAMES[dtype]}-{num_per_tokens}{'-round' if round_sf else ''}-h{hidden}-t{num_tokens}{suffix}"
    return Case(name, make(normal(num_tokens, hidden, dtype), num_per_tokens, round_sf), **roles)


SPEC = OpSpec(
    op=tk_quant.per_channel_cast,
    cases=(
        *(
            case(tokens, hidden, dtype, 128, round_sf, small=True, modes=tokens == 128 and not round_sf)
            for dtype in (BF16, FP32)
            for round_sf in (False, True)
            for tokens, hidden in ((128, 64), (256, 192), (0, 64))
        ),
        *(
            Case(
                f"{NAMES[dtype]}{'-round' if round_sf else ''}-extremes-t{tokens}",
                make(extremes(tokens, dtype), round_sf=round_sf),
                small=True,
            )
            for dtype in (BF16, FP32)
            for round_sf in (False, True)
            for tokens in (128, 256)
        ),
        tiny_case(BF16, 128, False),
        tiny_case(FP32, 128, True),
        *(
            Case(
                f"{NAMES[dtype]}-apart{extra}-from{first}",
                make(strided(128, 192, dtype, extra, first)),
                small=True,
                compile=True,
            )
            for dtype, extra, first in (
                (BF16, 64, 64),
                (BF16, 4, 4),
                (BF16, 6, 2),
                (BF16, 3, 1),
                (FP32, 2, 2),
                (FP32, 1, 1),
            )
        ),
        *(
            case(tokens, hidden, dtype, 128, round_sf, compile=(dtype, hidden) == (FP32, 576))
            for tokens, dtype, round_sf in (
                (128, BF16, True),
                (3968, BF16, False),
                (8064, BF16, True),
                (4096, FP32, True),
            )
            for hidden in HIDDENS
        ),
        case(65536, 64, BF16, 128, False),
        # Blocks of 32 tokens, pairs, packed words of four and of fewer blocks.
        *(
            Case(
                f"{kind}-{size}-{flags}-h{hidden}-t{tokens}",
                make(x, size, **more),
                small=True,
                compile=True,
                modes=modes,
            )
            for kind, x, size, tokens, hidden, flags, more, modes in (
                ("bf16", normal(256, 192, BF16), 32, 256, 192, "plain", {}, False),
                ("fp32", normal(128, 64, FP32), 32, 128, 64, "round", {"round_sf": True}, False),
                ("bf16", normal(256, 192, BF16), 32, 256, 192, "packed", PACKED, True),
                ("bf16", normal(640, 192, BF16), 128, 640, 192, "packed", PACKED, False),
                ("fp32", normal(384, 64, FP32), 128, 384, 64, "packed", PACKED, False),
                ("pair", pair(256, 256), 32, 256, 256, "plain", OF_PAIR, True),
                ("pair", pair(256, 128), 128, 256, 128, "round", {**OF_PAIR, "round_sf": True}, False),
                ("pair", pair(384, 128), 128, 384, 128, "packed", {**OF_PAIR, **PACKED}, False),
                ("pair", pair(128, 128, special=True), 32, 128, 128, "special-packed", {**OF_PAIR, **PACKED}, False),
            )
        ),
        *(
            Case(f"{NAMES[dtype]}-{size}-packed-extremes", make(extremes(256, dtype), size, **PACKED), small=True)
            for dtype in (BF16, FP32)
            for size in (32, 128)
        ),
        Case("bf16-32-packed-no-tokens", make(normal(0, 64, BF16), 32, **PACKED), small=True),
        *(
            Case(f"bf16-{size}-packed-h{hidden}-t{tokens}", make(normal(tokens, hidden, BF16), size, **PACKED))
            for size in (32, 128)
            for tokens, hidden in ((4992, 7168), (8064, 576))
        ),
        Case("pair-32-h7168-t4992", make(pair(4992, 7168), 32, **OF_PAIR)),
        *(
            bench_case(f"bf16-{size}-packed-h7168-t8192", make(normal(8192, 7168, BF16), size, **PACKED))
            for size in (32, 128)
        ),
        bench_case("pair-32-h7168-t8192", make(pair(8192, 7168), 32, **OF_PAIR)),
        case(8192, 7168, FP32, 128, False, "-bench", **BENCH, model_shape=True, compile=True),
        *(
            case(*(8192, 7168, BF16, 128, round_sf, "-bench"), **BENCH, model_shape=True, compile=True)
            for round_sf in (False, True)
        ),
        *(
            case(tokens, hidden, BF16, 128, False, "-bench", **BENCH)
            for tokens, hidden in (
                *((8192, hidden) for hidden in HIDDENS[:-1]),
                *((tokens, 7168) for tokens in (128, 3968, 8064)),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


def quantize(x: np.ndarray, size: int, round_sf: bool = False, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(codes, sf) of float32 x by blocks of `size` along `axis`, the last one shorter, with ml_dtypes' rounding."""
    x = np.moveaxis(x, axis, -1)
    length = x.shape[-1]
    blocks = np.pad(x, ((0, 0), (0, -length % size))).reshape(len(x), -1, size)
    amax = np.maximum(np.abs(blocks).max(axis=-1), np.float32(1e-4))
    sf, factor = amax / np.float32(448), np.float32(448) / amax
    if round_sf:
        sf = np.exp2(np.ceil(np.log2(sf.astype(np.float64)))).astype(np.float32)
        factor = np.float32(1) / sf
    codes = (blocks * factor[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.moveaxis(codes.reshape(len(x), -1)[:, :length], -1, axis), np.moveaxis(sf, -1, axis)


# sf of a block whose amax is 1e-4 or less.
LEAST_SF = np.float32(1e-4) / np.float32(448)


def channel_with(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(128, 64): in channel 3 448, so that nothing is scaled, and the values; zeros elsewhere."""
    x = torch.zeros(128, 64)
    x[0, 3] = 448.0
    x[1 : 1 + len(values), 3] = torch.tensor(values)
    return x.to(dtype)


TABLE = [(value, code) for value, code in by_token.E4M3_TABLE if torch.tensor(value).bfloat16().item() == value]


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand(dtype: torch.dtype, round_sf: bool) -> None:
    x = channel_with([value for value, _ in TABLE], dtype)
    data, sf = tk_quant.per_channel_cast(x, "e4m3", 128, round_sf)
    assert data.shape == (128, 64)
    assert sf.shape == (1, 64)
    assert data.view(torch.uint8)[: 1 + len(TABLE), 3].tolist() == [0x7E, *(code for _, code in TABLE)]
    assert not data.view(torch.uint8)[1 + len(TABLE) :].any()
    assert sf[0, 3] == 1.0
    assert sf[0, 4] == (2.0**-22 if round_sf else LEAST_SF)


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize(("num_per_tokens", "transpose"), [(128, False), (32, False), (128, True), (32, True)])
def test_against_numpy(num_per_tokens: int, transpose: bool, round_sf: bool) -> None:
    x = normal(256, 192, torch.bfloat16)("cpu")
    cast = tk_quant.per_channel_cast_and_transpose if transpose else tk_quant.per_channel_cast
    data, sf = cast(x, "e4m3", num_per_tokens, round_sf)
    expected, expected_sf = quantize(x.float().numpy(), num_per_tokens, round_sf)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), expected.T if transpose else expected)
    np.testing.assert_array_equal(sf.numpy(), expected_sf)


@pytest.mark.parametrize("round_sf", [False, True])
def test_not_finite(round_sf: bool) -> None:
    x = torch.ones(256, 64)
    x[3, 0], x[200, 1], x[5, 2], x[6, 2] = math.nan, -math.inf, math.inf, math.nan
    data, sf = tk_quant.per_channel_cast(x, "e4m3", 128, round_sf)
    codes = data.view(torch.uint8)
    assert sf.isnan().nonzero().tolist() == [[0, 0], [0, 2]]
    assert sf.isinf().nonzero().tolist() == [[1, 1]]
    assert (codes[:128, 0] & 0x7F == 0x7F).all()
    assert codes[200, 1] & 0x7F == 0x7F
    assert not codes[128:200, 1].any()
    assert sf[:, 3:].isfinite().all()


def test_packed_by_hand(device: str) -> None:
    """Byte k of a word of row r is the exponent of block row 4r + k, and 0 past the last."""
    x = torch.zeros(640, 64, device=device)
    x[::128] = 448 * torch.exp2(torch.arange(5.0, device=device))[:, None]
    data, sf = tk_quant.per_channel_cast(x, "e4m3", 128, True, use_packed_ue8m0=True)
    assert sf.dtype is torch.int32
    assert sf.shape == (2, 64)
    assert sf.view(torch.uint8).view(2, 64, 4)[0, 0].tolist() == [127, 128, 129, 130]
    assert sf[1].tolist() == [131] * 64
    plain, factors = tk_quant.per_channel_cast(x, "e4m3", 128, True)
    assert torch.equal(plain.view(torch.uint8), data.view(torch.uint8))
    assert factors[:, 0].tolist() == [1, 2, 4, 8, 16]


def test_a_pair_is_dequantized_first(device: str) -> None:
    x = pair(256, 256)(device)
    whole = tk_quant.per_token_cast_back(x, "fp32", 128)
    for size in (32, 128):
        found = tk_quant.per_channel_cast(x, "e4m3", size, False, 128)
        assert_equal(found, tk_quant.per_channel_cast(whole, "e4m3", size))
    assert_equal(
        tk_quant.per_channel_cast_fused(x, "e4m3", 128, False, 128),
        tk_quant.per_channel_cast(x, "e4m3", 128, False, 128),
    )


X = torch.zeros(256, 128, dtype=torch.bfloat16)
PAIR = X.to(torch.float8_e4m3fn), torch.ones(256, 1)


GOOD = {"x": X, "fmt": "e4m3", "num_per_tokens": 128}
BAD = [
    ({"x": X[:127]}, ValueError, r"x.shape\[0\]: expected a multiple of 128, got 127"),
    ({"x": X[:, :96]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 64, got 96"),
    ({"x": X[:, :0]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 64, got 0"),
    ({"num_per_tokens": 64}, ValueError, "num_per_tokens: expected one of .*128, got 64"),
]
BAD_OF_PAIRS = [
    ({"x": PAIR}, ValueError, "num_per_channels: expected one of 128, got None"),
    ({"x": PAIR, "num_per_channels": 64}, ValueError, "num_per_channels: expected one of 128, got 64"),
    ({"num_per_channels": 128}, ValueError, "num_per_channels: expected None, for x is no pair, got 128"),
    ({"x": (PAIR[0], PAIR[1].t()), "num_per_channels": 128}, ValueError, r"x\[1\]: expected shape \(256, 1\)"),
    (
        {"x": (PAIR[0][:100], PAIR[1][:100]), "num_per_channels": 128},
        ValueError,
        "rows of x: expected a multiple of 128",
    ),
    ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected round_sf=True beside it"),
]
test_bad_input = tiers.bad_input(SPEC, GOOD, [*BAD, *BAD_OF_PAIRS])


def test_what_only_one_of_them_serves() -> None:
    with pytest.raises(ValueError, match="num_per_tokens: expected one of 128, got 32"):
        tk_quant.per_channel_cast_fused(X, "e4m3", 32)
    with pytest.raises(TypeError, match=r"x: expected dtype torch.bfloat16, got torch.float32"):
        tk_quant.per_channel_cast_and_transpose(X.float(), "e4m3", 32)
