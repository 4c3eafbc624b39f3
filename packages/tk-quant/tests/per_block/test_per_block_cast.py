"""per_block_cast, per_block_cast_with_sf_only, per_block_cast_with_precomputed_sf."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.arch import arch_from_name
from tk_core.math import ceil_div
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, OpSpec, assert_equal, tiers
from tk_quant.cast.config import TileConfig
from tk_quant.reference.formats import expand_blocks

from ..per_token.test_per_token_cast import (
    ALL_FLAGS,
    BENCH,
    LEAST_AMAX,
    NEIGHBOURS,
    Make,
    MakeInput,
    extremes,
    nibbles,
    normal,
    repeated,
    strided,
    tiny,
)

Block = tuple[int, int]

_BF16, _FP32 = torch.bfloat16, torch.float32
_NAMES = {_BF16: "bf16", _FP32: "fp32"}
_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)
# Blocks held by several warps, by one, by some lanes; several blocks in a thread, along tokens and channels.
_BLOCKS = ((128, 128), (32, 32), (1, 128), (128, 1), (1, 1), (2, 128), (64, 2), (16, 4), (8, 8), (1, 16), (4, 64))
_EDGES = ((128, 16), (4, 128), (2, 2), (32, 1), (16, 64), (2, 1), (128, 8), (64, 64))


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except e2m1 data of blocks that contain infinity or NaN, which are unspecified."""
    if isinstance(expected, tuple) and expected[0].dtype is torch.int8:
        (data, sf), want = actual, expected[0]
        num_tokens, hidden = want.shape[0], 2 * want.shape[1]
        num_rows, num_cols = expected[1].shape
        per_word = 4 if expected[1].dtype is torch.int32 else 1
        # Any size that fits the shape of sf will do; packed factors must fill more than one word of a row.
        block_tokens = next(side for side in _SIDES if ceil_div(num_tokens, side) == num_rows)
        block_channels = next(side for side in _SIDES if ceil_div(ceil_div(hidden, side), per_word) == num_cols)
        factors = unpack_scales(expected[1], num_rows, ceil_div(hidden, block_channels))
        counts = expand_blocks(factors, (block_tokens, block_channels), num_tokens, hidden).isfinite()
        nibbles = counts[:, ::2] * torch.tensor(0x0F, dtype=torch.int8, device=want.device)
        nibbles |= counts[:, 1::2] * torch.tensor(-0x10, dtype=torch.int8, device=want.device)
        actual, expected = (data & nibbles, sf), (want & nibbles, expected[1])
    assert_equal(actual, expected)


def ties(block_size: Block, dtype: torch.dtype) -> MakeInput:
    """Every block has amax 6 * u, with 64 different integers u, and multiples of u / 4 up to that.

    Their exact quotients are e2m1 values and midpoints between two of them. As 6 / amax is rounded, the products hit
    them exactly or just miss them.
    """

    def build(device: str) -> torch.Tensor:
        quarters = torch.randint(-24, 25, (8 * block_size[0], 8 * block_size[1]), device=device)
        quarters[:: block_size[0], :: block_size[1]] = 24
        u = torch.arange(1, 65, device=device).view(8, 8)
        u = u.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
        return (quarters * u).to(torch.float32).mul(0.25).to(dtype)

    return build


def every_bfloat16(device: str) -> torch.Tensor:
    """All 2**16 values, (1024, 64)."""
    bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
    return bits.view(torch.bfloat16).view(1024, 64)


def make(x: MakeInput, fmt: str, block_size: Block, flags: str = "row", **more: Any) -> Make:
    """Arguments of per_block_cast or its form with sf only."""
    return lambda device: {"x": x(device), "fmt": fmt, "block_size": block_size, **ALL_FLAGS[flags], **more}


def make_precomputed(x: MakeInput, fmt: str, block_size: Block, special: bool = False) -> Make:
    """Arguments of the form with precomputed sf: random, so that some data saturate."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        shape = tuple(map(ceil_div, values.shape, block_size))
        sf = torch.exp2(4 * torch.randn(shape, device=device))
        if special:
            sf[0, 0], sf[1, 0], sf[2, 0], sf[3, 0] = 0.0, torch.inf, torch.nan, -1.0
        return {"x": values, "fmt": fmt, "block_size": block_size, "sf": sf}

    return build


def _name(dtype: torch.dtype, fmt: str, block: Block, flags: str, num_tokens: int, hidden: int) -> str:
    layout = f"-{flags}" if flags else ""
    return f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}{layout}-h{hidden}-t{num_tokens}"


def _plain(
    dtype: torch.dtype, fmt: str, block: Block, flags: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    """A case with normally distributed input, each token with a scale of its own."""
    name = _name(dtype, fmt, block, flags, num_tokens, hidden) + suffix
    return Case(name, make(normal(num_tokens, hidden, dtype), fmt, block, flags), **roles)


def _precomputed(
    dtype: torch.dtype, fmt: str, block: Block, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    name = _name(dtype, fmt, block, "", num_tokens, hidden) + suffix
    return Case(name, make_precomputed(normal(num_tokens, hidden, dtype), fmt, block), **roles)


def _bench(dtype: torch.dtype, fmt: str, block: Block, flags: str, num_tokens: int, hidden: int, **roles: Any) -> Case:
    return _plain(dtype, fmt, block, flags, num_tokens, hidden, "-bench", **BENCH, **roles)


SPEC = OpSpec(
    op=tk_quant.per_block_cast,
    compare=compare,
    cases=(
        *(_plain(_BF16, "e4m3", block, "packed-row", 133, 192, small=True) for block in ((128, 128), (32, 32), (1, 1))),
        # Blocks of every kind, partial ones at both edges; 128 does not divide 576 channels, 192 leave a partial word.
        *(
            _plain(_BF16, fmt, block, flags, 133, 192, small=True, modes=(fmt, block) == ("e4m3", (128, 128)))
            for block in _BLOCKS
            for fmt, flags in (("e4m3", "packed"), ("e2m1", "row"))
        ),
        *(
            _plain(dtype, fmt, block, flags, 37, 576, small=True)
            for dtype, fmt, block, flags in zip(
                (_BF16, _FP32) * 4, ("e4m3", "e2m1", "e2m1", "e4m3") * 2, _EDGES, ("col", "packed", "row-round") * 3
            )
        ),
        *(
            _plain(_FP32, fmt, block, flags, 133, 192, small=True)
            for fmt, block, flags in (
                ("e4m3", (128, 128), "row"),
                ("e2m1", (32, 32), "packed"),
                ("e4m3", (128, 1), "col-round"),
                ("e2m1", (1, 1), "row"),
                ("e4m3", (1, 128), "packed"),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-e4m3-{side}x{side}-{flags}-h192-tiny",
                make(tiny(133, 192, dtype), "e4m3", (side, side), flags, sf_clamp_min=LEAST_AMAX["e4m3"]),
                small=True,
            )
            for dtype, side, flags in ((_BF16, 128, "row"), (_FP32, 2, "packed"))
        ),
        _plain(_BF16, "e2m1", (32, 32), "packed", 133, 576, small=True, modes=True),
        _plain(_BF16, "e2m1", (8, 8), "col-round", 133, 64, small=True),
        _plain(_BF16, "e2m1", (32, 4), "row-round", 37, 192, small=True),
        *(
            _plain(_BF16, "e4m3", block, "packed", tokens, 576, small=True)
            for block, tokens in (((128, 128), 0), ((128, 128), 1), ((32, 32), 1), ((1, 1), 1))
        ),
        _plain(_BF16, "e2m1", (32, 32), "row", 0, 576, small=True),
        # Strided rows, down to rows that start at odd elements.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}-h192-t40-apart{extra}-from{first}",
                make(strided(40, 192, dtype, extra, first), fmt, block),
                small=True,
                compile=(dtype, extra) == (_BF16, 3),
            )
            for dtype, fmt, block, extra, first in (
                (_BF16, "e4m3", (128, 128), 64, 64),
                (_BF16, "e2m1", (32, 32), 8, 4),
                (_BF16, "e4m3", (32, 32), 2, 0),
                (_BF16, "e4m3", (128, 1), 3, 1),
                (_FP32, "e2m1", (32, 32), 2, 2),
                (_FP32, "e4m3", (128, 128), 1, 1),
            )
        ),
        Case("bf16-e4m3-128x128-h2048-t4001-half", make(strided(4001, 2048, _BF16, 2048, 2048), "e4m3", (128, 128))),
        Case("bf16-e4m3-32x32-h576-t33-repeated", make(repeated(33, 576, _BF16), "e4m3", (32, 32)), small=True),
        # Zeros, infinity, NaN, subnormals, ties, an outlier; each token a row of blocks, or several tokens.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}-{flags}-h192-extremes",
                make(extremes(192, dtype), fmt, block, flags),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for block, flags in (((1, 32), "packed"), ((1, 64), "row"), ((2, 1), "row"), ((1, 16), "row-round"))
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-e2m1-{block[0]}x{block[1]}-{flags}-ties",
                make(ties(block, dtype), "e2m1", block, flags),
                small=True,
            )
            for dtype, block, flags in (
                (_BF16, (32, 32), "row"),
                (_BF16, (8, 8), "row"),
                (_BF16, (8, 16), "row-round"),
                (_FP32, (4, 32), "row"),
            )
        ),
        Case("bf16-e4m3-1x1-packed-every", make(every_bfloat16, "e4m3", (1, 1), "packed"), small=True),
        Case("bf16-e4m3-1x1-packed-h192-extremes", make(extremes(192, _BF16), "e4m3", (1, 1), "packed"), small=True),
        Case("bf16-e4m3-128x128-row-h192-extremes", make(extremes(192, _BF16), "e4m3", (128, 128)), small=True),
        # Sizes of real models.
        *(
            _plain(dtype, fmt, block, flags, tokens, hidden)
            for dtype, fmt, block, flags, tokens, hidden in (
                (_BF16, "e4m3", (128, 128), "row", 4001, 576),
                (_BF16, "e4m3", (128, 128), "packed", 8001, 2048),
                (_FP32, "e4m3", (128, 128), "col", 4001, 2560),
                (_BF16, "e2m1", (32, 32), "packed", 4001, 3072),
                (_BF16, "e2m1", (32, 32), "row", 8001, 7168),
                (_FP32, "e2m1", (32, 32), "row", 4001, 4096),
                (_BF16, "e4m3", (32, 32), "packed", 17, 6144),
                (_BF16, "e4m3", (128, 128), "row", 8001, 7168),
                (_BF16, "e4m3", (1, 128), "row", 4001, 7168),
                (_BF16, "e4m3", (128, 1), "row", 4001, 7168),
            )
        ),
        *(
            _bench(_BF16, fmt, block, flags, 8192, 7168, model_shape=True, compile=True)
            for fmt, block, flags in (
                ("e4m3", (128, 128), "row"),
                ("e4m3", (128, 128), "packed"),
                ("e2m1", (32, 32), "row"),
                ("e2m1", (32, 32), "packed"),
            )
        ),
        *(
            _bench(dtype, fmt, block, flags, 8192, 7168, compile=True)
            for dtype, fmt, block, flags in (
                (_BF16, "e4m3", (32, 32), "row"),
                (_BF16, "e4m3", (1, 128), "row"),
                (_BF16, "e4m3", (128, 1), "row"),
                (_BF16, "e2m1", (128, 128), "row"),
                (_BF16, "e4m3", (1, 1), "packed"),
                (_BF16, "e4m3", (8, 8), "row"),
                (_BF16, "e2m1", (4, 4), "col"),
                (_FP32, "e4m3", (128, 128), "row"),
                (_FP32, "e2m1", (32, 32), "packed"),
            )
        ),
        *(_bench(_BF16, "e4m3", (128, 128), "row", tokens, hidden) for tokens, hidden in NEIGHBOURS),
        *(_bench(_BF16, "e2m1", (32, 32), "row", tokens, hidden) for tokens, hidden in NEIGHBOURS),
    ),
)

WITH_SF_ONLY_SPEC = OpSpec(
    op=tk_quant.per_block_cast_with_sf_only,
    cases=(
        *(
            _plain(_BF16, fmt, block, flags, 133, 192, small=True, modes=(fmt, block) == ("e4m3", (128, 128)))
            for fmt, block, flags in (
                ("e4m3", (128, 128), "packed"),
                ("e2m1", (32, 32), "row"),
                ("e4m3", (32, 32), "col"),
                ("e2m1", (128, 1), "row"),
                ("e4m3", (1, 1), "packed"),
                ("e2m1", (1, 128), "packed"),
                ("e4m3", (16, 4), "row-round"),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}-packed-h192-extremes",
                make(extremes(192, dtype), fmt, block, "packed"),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for block in ((1, 32), (1, 1))
        ),
        _plain(_FP32, "e4m3", (128, 128), "row", 133, 192, small=True),
        _plain(_BF16, "e4m3", (128, 128), "row", 0, 192, small=True),
        Case("bf16-e4m3-32x32-h192-t40-apart3", make(strided(40, 192, _BF16, 3, 1), "e4m3", (32, 32)), small=True),
        *(
            _plain(dtype, "e4m3", block, "row", tokens, hidden)
            for dtype, block, tokens, hidden in (
                (_BF16, (128, 128), 8001, 7168),
                (_BF16, (32, 32), 4001, 2560),
                (_FP32, (32, 32), 4001, 576),
                (_BF16, (128, 128), 17, 6144),
            )
        ),
        *(
            _bench(dtype, fmt, block, flags, 8192, 7168, compile=True)
            for dtype, fmt, block, flags in (
                (_BF16, "e4m3", (128, 128), "row"),
                (_BF16, "e2m1", (32, 32), "packed"),
                (_FP32, "e4m3", (128, 128), "row"),
            )
        ),
    ),
)

WITH_PRECOMPUTED_SF_SPEC = OpSpec(
    op=tk_quant.per_block_cast_with_precomputed_sf,
    cases=(
        *(
            _precomputed(
                dtype, fmt, block, 133, 192, small=True, modes=(dtype, fmt, block) == (_BF16, "e4m3", (32, 32))
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for block in ((128, 128), (32, 32), (128, 1), (1, 4))
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-1x32-h192-extremes",
                make_precomputed(extremes(192, dtype), fmt, (1, 32), special=True),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
        ),
        _precomputed(_BF16, "e2m1", (32, 32), 0, 192, small=True),
        _precomputed(_BF16, "e4m3", (128, 128), 1, 576, small=True),
        Case("bf16-e4m3-32x32-h192-t40-apart3", make_precomputed(strided(40, 192, _BF16, 3, 1), "e4m3", (32, 32))),
        *(
            _precomputed(dtype, fmt, block, tokens, hidden)
            for dtype, fmt, block, tokens, hidden in (
                (_BF16, "e4m3", (128, 128), 8001, 7168),
                (_BF16, "e2m1", (32, 32), 4001, 2048),
                (_FP32, "e4m3", (128, 128), 4001, 3072),
            )
        ),
        *(
            _precomputed(_BF16, fmt, block, 8192, 7168, "-bench", **BENCH, compile=True)
            for fmt, block in (("e4m3", (128, 128)), ("e2m1", (32, 32)))
        ),
    ),
)


test_tiers = tiers.tests(SPEC)
test_with_sf_only_tiers = tiers.tests(WITH_SF_ONLY_SPEC)
test_with_precomputed_sf_tiers = tiers.tests(WITH_PRECOMPUTED_SF_SPEC)

INF, NAN = math.inf, math.nan
SIDES = (1, 2, 4, 8, 16, 32, 64, 128)


def test_by_hand() -> None:
    # Two blocks down, two across; the lower ones are one token high.
    x = torch.zeros(3, 64)
    x[0, 0], x[1, 31], x[0, 5] = 12.0, -3.0, 1.0
    x[0, 32], x[1, 33] = 448.0, -448.0
    x[2, 0], x[2, 1] = 7.0, -1.75
    data, sf = tk_quant.per_block_cast(x, "e2m1", (2, 32))
    # 448 / 6, 7 / 6 as float32.
    assert sf.tolist() == [[2.0, 74.66666412353516], [1.1666666269302368, 2.0**-126]]
    codes = nibbles(data)
    # 12 / 2 = 6, -3 / 2 = -1.5, 1 / 2; 7 * (6 / 7) = 6, -1.75 * (6 / 7) = -1.5.
    assert (codes[0, 0], codes[1, 31], codes[0, 5]) == (0x7, 0xB, 0x1)
    assert (codes[0, 32], codes[1, 33]) == (0x7, 0xF)
    assert codes[2, :2].tolist() == [0x7, 0xB]
    assert int((codes != 0).sum()) == 7
    data, sf = tk_quant.per_block_cast(x, "e4m3", (2, 32), round_sf=True)
    # 12 / 448 and 7 / 448 = 2**-6; the lower right block has nothing above 1e-4.
    assert sf.tolist() == [[2.0**-5, 1.0], [2.0**-6, 2.0**-22]]
    values = data.float()
    assert (values[0, 0], values[1, 31], values[0, 5]) == (384.0, -96.0, 32.0)
    assert (values[0, 32], values[1, 33], values[2, 0], values[2, 1]) == (448.0, -448.0, 448.0, -112.0)


@pytest.mark.parametrize(("fmt", "largest"), [("e4m3", 448.0), ("e2m1", 6.0)])
@pytest.mark.parametrize("block_size", [(128, 128), (32, 32), (1, 16), (16, 1), (2, 64), (64, 4), (1, 1)])
def test_against_ml_dtypes(fmt: str, largest: float, block_size: tuple[int, int]) -> None:
    oracle = ml_dtypes.float8_e4m3fn if fmt == "e4m3" else ml_dtypes.float4_e2m1fn
    x = (torch.randn(70, 192) * torch.exp2(torch.randint(-8, 8, (70, 1)).float())).to(torch.bfloat16)
    x[0, 0] = 0.0
    values = x.float().numpy()
    data, sf = tk_quant.per_block_cast(x, fmt, block_size)
    codes = data.view(torch.uint8) if fmt == "e4m3" else nibbles(data)
    for row, col in product(range(0, 70, block_size[0]), range(0, 192, block_size[1])):
        block = np.s_[row : row + block_size[0], col : col + block_size[1]]
        least = np.float32(1e-4 if fmt == "e4m3" else 6 * 2.0**-126)
        amax = np.maximum(np.abs(values[block]).max(), least)
        assert sf[row // block_size[0], col // block_size[1]].item() == amax / np.float32(largest)
        expected = (values[block] * (np.float32(largest) / amax)).astype(oracle).view(np.uint8)
        np.testing.assert_array_equal(codes[block].numpy(), expected & (0xFF if fmt == "e4m3" else 0xF))


def test_not_finite() -> None:
    x = torch.ones(6, 128)
    x[1, 3], x[3, 40], x[5, 100], x[4, 101] = INF, NAN, -INF, NAN
    for flags in ("row", "row-round", "col"):
        data, sf = tk_quant.per_block_cast(x, "e4m3", (2, 32), **ALL_FLAGS[flags])
        assert sf[0, 0] == INF
        assert sf[1, 1].isnan()
        assert sf[2, 3].isnan()
        assert int(sf.isfinite().sum()) == 9
        codes = data.view(torch.uint8)
        assert codes[1, 2:5].tolist() == [0x00, 0x7F, 0x00]
        assert (codes[2:4, 32:64] == 0x7F).all()
    for fmt in ("e4m3", "e2m1"):
        sf = tk_quant.per_block_cast_with_sf_only(x, fmt, (2, 32), **ALL_FLAGS["packed"])
        assert [[(word >> shift) & 0xFF == 255 for shift in (0, 8, 16, 24)] for word in sf[:, 0].tolist()] == [
            [True, False, False, False],
            [False, True, False, False],
            [False, False, False, True],
        ]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", ["row", "row-round"])
def test_relatives_agree(fmt: str, flags: str) -> None:
    x = extremes(192, torch.bfloat16)("cpu")
    data, sf = tk_quant.per_block_cast(x, fmt, (2, 64), **ALL_FLAGS[flags])
    only = tk_quant.per_block_cast_with_sf_only(x, fmt, (2, 64), **ALL_FLAGS[flags])
    assert torch.equal(only.view(torch.int32), sf.view(torch.int32))
    if flags == "row-round":
        again = tk_quant.per_block_cast_with_precomputed_sf(x, fmt, (2, 64), sf, round_sf=True)
        assert torch.equal(again.view(torch.uint8), data.view(torch.uint8))


def test_precomputed_sf_by_hand() -> None:
    x = torch.zeros(2, 64)
    x[0, :4] = torch.tensor([3.0, 7.5, 1000.0, -0.0])
    x[1, 32] = 7.5
    sf = torch.tensor([[3.0, 0.5]])
    codes = nibbles(tk_quant.per_block_cast_with_precomputed_sf(x, "e2m1", (2, 32), sf))
    # 1 / 3 is rounded before it multiplies: 3 * (1 / 3) = 1, 7.5 * (1 / 3) = 2.5 is a tie; 1000 / 3 and 15 saturate.
    assert codes[0, :4].tolist() == [0x2, 0x4, 0x7, 0x8]
    assert codes[1, 32] == 0x7


def test_compare_forgives_only_what_is_unspecified() -> None:
    x = torch.ones(8, 192)
    x[0, 0] = NAN
    for flags in ("row", "packed"):
        data, sf = tk_quant.per_block_cast(x, "e2m1", (4, 32), **ALL_FLAGS[flags])
        elsewhere = data.clone()
        elsewhere[3, 15] ^= 1
        compare((elsewhere, sf), (data, sf))
        for row, byte in ((4, 15), (3, 16)):
            wrong = data.clone()
            wrong[row, byte] ^= 1
            with pytest.raises(AssertionError):
                compare((wrong, sf), (data, sf))


@pytest.mark.parametrize("hidden", [64, 192, 576, 7168])
def test_tiles_are_whole_blocks(hidden: int) -> None:
    for side, other, itemsize, fmt, packed in product(SIDES, SIDES, (2, 4), ("e4m3", "e2m1"), (False, True)):
        config = TileConfig.best(hidden, (side, other), 8 * itemsize, fmt, True, packed, arch_from_name("sm_90a"))
        assert config.tokens % side == 0
        assert config.channels % other == 0
        assert config.channels % 8 == 0
        assert config.threads % 32 == 0
        assert config.threads <= 1024
        assert config.tokens * config.channels % (config.threads * config.vec) == 0
        if config.splits((side, other)):
            assert (config.tokens, config.channels) == (side, other)
        elif side == 1 and packed:
            assert config.channels >= hidden or config.blocks_across % 4 == 0


X = torch.zeros(8, 192)


GOOD = {"x": X, "fmt": "e4m3", "block_size": (4, 32)}
BAD = [
    ({"x": X[:, :100]}, ValueError, "x: expected a positive multiple of 64 channels, got 100"),
    ({"x": X[:, :0]}, ValueError, "x: expected a positive multiple of 64 channels"),
    ({"block_size": (32,)}, ValueError, "block_size: expected two numbers"),
    ({"block_size": (0, 32)}, ValueError, "block_size: expected two powers of two from 1 to 128"),
    ({"block_size": (32, 48)}, ValueError, "block_size: expected two powers of two from 1 to 128"),
    ({"block_size": (256, 32)}, ValueError, "block_size: expected two powers of two from 1 to 128"),
    ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0"),
]
test_bad_input = tiers.bad_input(SPEC, GOOD, BAD)
test_with_sf_only_bad_input = tiers.bad_input(WITH_SF_ONLY_SPEC, GOOD, BAD)


test_with_precomputed_sf_bad_input = tiers.bad_input(
    WITH_PRECOMPUTED_SF_SPEC,
    {**GOOD, "sf": torch.ones(2, 6)},
    [
        *BAD,
        ({"sf": torch.ones(8, 6)}, ValueError, r"sf: expected shape \(2, 6\)"),
        ({"use_tma_aligned_col_major_sf": True}, ValueError, "use_tma_aligned_col_major_sf: expected False"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected False"),
    ],
)
