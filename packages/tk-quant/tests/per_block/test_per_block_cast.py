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
from tk_core.reference.scales import unpack_scales
from tk_core.testing import tiers
from tk_quant.lib.cast_config import TileConfig
from tk_quant.reference.lib.formats import dequantize
from tk_quant.testing.per_block.per_block_cast import SPEC, WITH_PRECOMPUTED_SF_SPEC, WITH_SF_ONLY_SPEC, compare, ties
from tk_quant.testing.per_token.per_token_cast import FLAGS, extremes

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)
test_with_sf_only_cpu = tiers.cpu_tests(WITH_SF_ONLY_SPEC)
test_with_sf_only_compile = tiers.compile_tests(WITH_SF_ONLY_SPEC)
test_with_sf_only_gpu = tiers.gpu_tests(WITH_SF_ONLY_SPEC)
test_with_sf_only_gpu_modes = tiers.gpu_mode_tests(WITH_SF_ONLY_SPEC)
test_with_precomputed_sf_cpu = tiers.cpu_tests(WITH_PRECOMPUTED_SF_SPEC)
test_with_precomputed_sf_compile = tiers.compile_tests(WITH_PRECOMPUTED_SF_SPEC)
test_with_precomputed_sf_gpu = tiers.gpu_tests(WITH_PRECOMPUTED_SF_SPEC)
test_with_precomputed_sf_gpu_modes = tiers.gpu_mode_tests(WITH_PRECOMPUTED_SF_SPEC)

INF, NAN = math.inf, math.nan
SIDES = (1, 2, 4, 8, 16, 32, 64, 128)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Codes of packed e2m1 data, one an element."""
    codes = data.view(torch.uint8)
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


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


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("num_per_channels", [16, 32, 64, 128])
@pytest.mark.parametrize("flags", list(FLAGS))
def test_blocks_of_one_token_are_groups(fmt: str, num_per_channels: int, flags: str) -> None:
    x = extremes(192, torch.bfloat16)("cpu")
    data, sf = tk_quant.per_block_cast(x, fmt, (1, num_per_channels), **FLAGS[flags])
    expected_data, expected_sf = tk_quant.per_token_cast(x, fmt, num_per_channels, **FLAGS[flags])
    assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
    assert torch.equal(sf.view(torch.int32), expected_sf.view(torch.int32))


@pytest.mark.parametrize(("block_tokens", "block_channels"), list(product(SIDES, SIDES)))
def test_blocks_do_not_mix(block_tokens: int, block_channels: int) -> None:
    x = torch.ones(133, 192)
    x[100, 130] = 448.0
    data, sf = tk_quant.per_block_cast(x, "e4m3", (block_tokens, block_channels), round_sf=True)
    expected = torch.full((-(-133 // block_tokens), -(-192 // block_channels)), 2.0**-8)
    expected[100 // block_tokens, 130 // block_channels] = 1.0
    assert torch.equal(sf, expected)
    assert torch.equal(dequantize((data, sf), (block_tokens, block_channels)), x)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_layouts_hold_the_same(fmt: str) -> None:
    x = torch.randn(70, 192)
    data, sf = tk_quant.per_block_cast(x, fmt, (16, 32), round_sf=True)
    assert sf.is_contiguous()
    for name in ("col-round", "packed"):
        other_data, other_sf = tk_quant.per_block_cast(x, fmt, (16, 32), **FLAGS[name])
        assert torch.equal(other_data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, 5, 6), sf)
        assert other_sf.stride() == (1, 8)
    assert other_sf.shape == (5, 2)


def test_not_finite() -> None:
    x = torch.ones(6, 128)
    x[1, 3], x[3, 40], x[5, 100], x[4, 101] = INF, NAN, -INF, NAN
    for flags in ("row", "row-round", "col"):
        data, sf = tk_quant.per_block_cast(x, "e4m3", (2, 32), **FLAGS[flags])
        assert sf[0, 0] == INF
        assert sf[1, 1].isnan()
        assert sf[2, 3].isnan()
        assert int(sf.isfinite().sum()) == 9
        codes = data.view(torch.uint8)
        assert codes[1, 2:5].tolist() == [0x00, 0x7F, 0x00]
        assert (codes[2:4, 32:64] == 0x7F).all()
    for fmt in ("e4m3", "e2m1"):
        sf = tk_quant.per_block_cast_with_sf_only(x, fmt, (2, 32), **FLAGS["packed"])
        assert [[(word >> shift) & 0xFF == 255 for shift in (0, 8, 16, 24)] for word in sf[:, 0].tolist()] == [
            [True, False, False, False],
            [False, True, False, False],
            [False, False, False, True],
        ]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", ["row", "row-round"])
def test_relatives_agree(fmt: str, flags: str) -> None:
    x = extremes(192, torch.bfloat16)("cpu")
    data, sf = tk_quant.per_block_cast(x, fmt, (2, 64), **FLAGS[flags])
    only = tk_quant.per_block_cast_with_sf_only(x, fmt, (2, 64), **FLAGS[flags])
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
        data, sf = tk_quant.per_block_cast(x, "e2m1", (4, 32), **FLAGS[flags])
        elsewhere = data.clone()
        elsewhere[3, 15] ^= 1
        compare((elsewhere, sf), (data, sf))
        for row, byte in ((4, 15), (3, 16)):
            wrong = data.clone()
            wrong[row, byte] ^= 1
            with pytest.raises(AssertionError):
                compare((wrong, sf), (data, sf))


def least_of_three(a: np.ndarray, dtype: Any, base: float) -> np.ndarray:
    """As the kernels do: the least of three sums that are rounded to integers."""
    halves, ones, twos = (
        (a.astype(np.float64) * factor + (base + offset)).astype(dtype).astype(np.float64)
        for factor, offset in ((2.0, 0.0), (1.0, 2.0), (0.5, 4.0))
    )
    return np.minimum(np.minimum(halves, ones), twos) - base


def test_arithmetic_of_e2m1_codes() -> None:
    # Every bfloat16 from 0 to 6, and each boundary's neighbours in float32.
    a = np.arange(0, 0x40C1, dtype=np.uint16).view(ml_dtypes.bfloat16)
    expected = a.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(least_of_three(a, ml_dtypes.bfloat16, 128.0), expected)
    middle = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    a = np.concatenate((middle, np.nextafter(middle, np.float32(9)), np.nextafter(middle, np.float32(0))))
    expected = a.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(least_of_three(a, np.float32, 2.0**23), expected)


def test_ties_are_made() -> None:
    x = ties((32, 32), torch.bfloat16)("cpu")
    _, sf = tk_quant.per_block_cast(x, "e2m1", (32, 32))
    assert torch.equal(sf.flatten(), torch.arange(1.0, 65.0).mul(6).to(torch.bfloat16).float() / torch.tensor(6.0))


@pytest.mark.parametrize("hidden", [64, 192, 576, 7168])
def test_tiles_are_whole_blocks(hidden: int) -> None:
    for side, other, itemsize, fmt, packed in product(SIDES, SIDES, (2, 4), ("e4m3", "e2m1"), (False, True)):
        config = TileConfig.best(hidden, (side, other), 8 * itemsize, fmt, "data", packed, arch_from_name("sm_90a"))
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


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a torch.Tensor"),
        ({"x": (X, X)}, TypeError, "x: expected a torch.Tensor"),
        ({"x": X.half()}, TypeError, "x: expected dtype"),
        ({"x": X[0]}, ValueError, "x: expected shape"),
        ({"x": X[:, :100]}, ValueError, "x: expected a positive multiple of 64 channels, got 100"),
        ({"x": X[:, :0]}, ValueError, "x: expected a positive multiple of 64 channels"),
        ({"x": torch.zeros(192, 8).t()}, ValueError, "x: expected stride 1"),
        ({"fmt": "e5m6"}, ValueError, "fmt: expected one of 'e4m3', 'e2m1'"),
        ({"block_size": 32}, TypeError, "block_size: expected a tuple of two"),
        ({"block_size": (32,)}, ValueError, "block_size: expected two numbers"),
        ({"block_size": (32, 32.0)}, TypeError, "block_size: expected an int"),
        ({"block_size": (True, 32)}, TypeError, "block_size: expected an int"),
        ({"block_size": (0, 32)}, ValueError, "block_size: expected two powers of two from 1 to 128"),
        ({"block_size": (32, 48)}, ValueError, "block_size: expected two powers of two from 1 to 128"),
        ({"block_size": (256, 32)}, ValueError, "block_size: expected two powers of two from 1 to 128"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0"),
        ({"use_packed_ue8m0": True, "round_sf": True}, ValueError, "use_packed_ue8m0"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    kwargs = {"x": X, "fmt": "e4m3", "block_size": (4, 32), **change}
    for function in (tk_quant.per_block_cast, tk_quant.per_block_cast_with_sf_only):
        with pytest.raises(error, match=match):
            function(**kwargs)
    with pytest.raises(error, match=match):
        tk_quant.per_block_cast_with_precomputed_sf(**kwargs, sf=torch.ones(2, 6))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"sf": None}, TypeError, "sf: expected a torch.Tensor"),
        ({"sf": torch.ones(2, 6, dtype=torch.int32)}, TypeError, "sf: expected dtype"),
        ({"sf": torch.ones(8, 6)}, ValueError, r"sf: expected shape \(2, 6\)"),
        ({"sf": torch.ones(6, 2).t()}, ValueError, "sf: expected contiguous"),
        ({"sf": torch.ones(2, 6, device="meta")}, ValueError, "sf: expected device"),
        ({"use_tma_aligned_col_major_sf": True}, ValueError, "use_tma_aligned_col_major_sf: expected False"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected False"),
    ],
)
def test_bad_precomputed_sf(change: dict[str, Any], error: type[Exception], match: str) -> None:
    kwargs = {"x": X, "fmt": "e4m3", "block_size": (4, 32), "sf": torch.ones(2, 6), **change}
    with pytest.raises(error, match=match):
        tk_quant.per_block_cast_with_precomputed_sf(**kwargs)
