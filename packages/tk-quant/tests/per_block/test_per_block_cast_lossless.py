"""per_block_cast_lossless."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.math import ceil_div
from tk_core.reference.scales import decode_ue8m0, pack_scales, unpack_scales
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers

from ..dequantize.test_cast_back import LAYOUTS, Pair, random_codes
from ..per_token.test_per_token_cast import BENCH, NEIGHBOURS

Block = tuple[int, int]

# (first exponent, exponent after the last).
EXPONENTS = {"near": (100, 115), "apart": (90, 118), "tiny": (0, 15), "huge": (232, 255), "any": (0, 256)}
"""Ranges of biased exponents: exact for all ratios, rounding for some, at both ends of the range, and with NaN."""
FLAGS = {
    "row": {},
    "col": {"use_tma_aligned_col_major_sf": True},
    "round": {"round_sf": True},
    "packed": {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
    "packed-row": {"round_sf": True, "use_packed_ue8m0": True},
}
"""Layouts of the output's sf, by their names in case names."""


def pair(
    num_tokens: int, hidden: int, block_size: Block, layout: str, exponents: str = "near", extra: int = 0
) -> Callable[[str], Pair]:
    """Random codes, a third of the runs of 16 zero; float32 sf with any mantissa. Rows have gaps of `extra` bytes."""

    def build(device: str) -> Pair:
        rows, cols = ceil_div(num_tokens, block_size[0]), ceil_div(hidden, block_size[1])
        data = random_codes(num_tokens, hidden // 2 + extra, "e2m1", device)[:, extra:]
        zero = torch.randint(0, 3, (num_tokens, hidden // 16), device=device).repeat_interleave(8, dim=1) == 0
        # Keeps the signs: -0 has a code of its own.
        data.copy_(torch.where(zero, data & -0x78, data))
        codes = torch.randint(*EXPONENTS[exponents], (rows, cols), device=device)
        sf = decode_ue8m0(codes)
        if layout in ("row", "col"):
            mantissa = torch.randint(0, 1 << 23, (rows, cols), device=device, dtype=torch.int32)
            sf = ((codes.to(torch.int32) << 23) | mantissa).view(torch.float32)
        return data, pack_scales(sf, LAYOUTS[layout])

    return build


def make(x: Callable[[str], Pair], x_block_size: Block, out_block_size: Block, flags: str) -> Make:
    """Arguments of per_block_cast_lossless."""
    blocks = {"x_block_size": x_block_size, "out_block_size": out_block_size}
    return lambda device: {"x": x(device), "fmt": "e4m3", **blocks, **FLAGS[flags]}


def _case(
    x_block_size: Block,
    out_block_size: Block,
    layout: str,
    flags: str,
    num_tokens: int,
    hidden: int,
    exponents: str = "near",
    extra: int = 0,
    suffix: str = "",
    **roles: Any,
) -> Case:
    (a, b), (c, d) = x_block_size, out_block_size
    name = f"{a}x{b}-{layout}-{c}x{d}-{flags}-h{hidden}-t{num_tokens}-{exponents}"
    name += f"-apart{extra}" if extra else ""
    x = pair(num_tokens, hidden, x_block_size, layout, exponents, extra)
    return Case(name + suffix, make(x, x_block_size, out_block_size, flags), **roles)


SPEC = OpSpec(
    op=tk_quant.per_block_cast_lossless,
    cases=(
        # Every combination of input and output blocks, each layout in and out. 576 and 160 channels leave the last
        # block and the last packed word partial.
        *(
            _case(x_block_size, out_block_size, layout, flags, tokens, hidden, exponents, small=True, modes=modes)
            for x_block_size, out_block_size, layout, flags, tokens, hidden, exponents, modes in (
                ((1, 32), (1, 128), "row", "row", 5, 576, "near", False),
                ((1, 32), (1, 128), "packed", "packed", 5, 576, "apart", True),
                ((1, 32), (1, 128), "swizzled", "col", 9, 160, "any", False),
                ((1, 32), (32, 32), "packed-row", "packed-row", 40, 576, "any", False),
                ((1, 32), (32, 32), "row", "packed", 40, 160, "near", False),
                ((1, 32), (32, 32), "packed", "row", 40, 96, "any", False),
                ((1, 32), (32, 32), "swizzled", "round", 33, 32, "tiny", False),
                ((1, 32), (128, 128), "row", "row", 33, 576, "apart", True),
                ((1, 32), (128, 128), "packed", "packed", 131, 160, "near", False),
                ((1, 32), (128, 128), "swizzled", "packed", 129, 288, "any", False),
                ((1, 32), (128, 128), "col", "col", 1, 64, "tiny", False),
                ((1, 32), (128, 128), "row", "packed", 130, 96, "huge", False),
                # Blocks that are divided differently among threads or within a thread, and other sizes of x.
                ((1, 16), (1, 16), "row", "row", 3, 96, "near", False),
                ((1, 16), (2, 64), "packed", "packed", 11, 96, "any", False),
                ((1, 16), (8, 32), "row", "row", 21, 96, "apart", False),
                ((2, 32), (16, 32), "row", "row", 35, 64, "any", False),
                ((4, 64), (64, 64), "swizzled", "packed", 70, 160, "near", False),
                ((32, 32), (128, 128), "packed", "packed", 131, 160, "apart", False),
                ((128, 128), (128, 128), "row", "row", 131, 160, "any", False),
                ((1, 128), (1, 128), "packed", "packed", 3, 1088, "any", False),
            )
        ),
        *(
            _case((1, 32), out_block_size, "packed", "packed", 0, 96, small=True)
            for out_block_size in ((1, 128), (128, 128))
        ),
        # Rows with gaps, down to rows that are not aligned at all.
        *(
            _case((1, 32), (32, 32), "row", "row", 9, 96, "near", extra, small=True, compile=extra == 3)
            for extra in (16, 8, 4, 2, 3)
        ),
        # Sizes of real models.
        *(
            _case((1, 32), out_block_size, layout, flags, tokens, hidden, exponents)
            for out_block_size, layout, flags, exponents in (
                ((1, 128), "packed", "packed", "near"),
                ((32, 32), "row", "row", "any"),
                ((128, 128), "row", "packed", "near"),
            )
            for tokens, hidden in (
                (0, 2048),
                (1, 7168),
                (17, 3072),
                (4001, 576),
                (4001, 4096),
                (8001, 2560),
                (8001, 6144),
                (8001, 7168),
            )
        ),
        _case((1, 32), (128, 128), "swizzled", "row", 4001, 7168, "apart"),
        _case((1, 32), (1, 128), "swizzled", "row", 4001, 2048, "any"),
        _case((1, 32), (32, 32), "packed", "packed", 4001, 7168, "tiny"),
        *(
            _case((1, 32), out_block_size, layout, flags, 8192, 7168, suffix="-bench", **BENCH, **roles)
            for out_block_size, layout, flags, roles in (
                ((128, 128), "row", "row", {"model_shape": True, "compile": True}),
                ((128, 128), "packed", "packed", {"model_shape": True, "compile": True}),
                ((128, 128), "swizzled", "row", {"compile": True}),
                ((32, 32), "row", "row", {}),
                ((32, 32), "packed", "packed", {"compile": True}),
                ((1, 128), "row", "row", {}),
                ((1, 128), "packed", "packed", {"model_shape": True, "compile": True}),
            )
        ),
        *(
            _case((1, 32), (128, 128), "row", "row", tokens, hidden, suffix="-bench", **BENCH)
            for tokens, hidden in NEIGHBOURS
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

# All sixteen codes, twice.
EVERY_CODE = torch.tensor([2 * k | (2 * k + 1) << 4 for k in range(8)] * 2, dtype=torch.uint8).view(torch.int8)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def exponents_of(sf: torch.Tensor) -> list[int]:
    return ((sf.contiguous().view(torch.int32) >> 23) & 0xFF).flatten().tolist()


def values_by_ml_dtypes(data: torch.Tensor) -> np.ndarray:
    codes = data.view(torch.uint8).numpy()
    nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).reshape(codes.shape[0], -1)
    return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def expanded(values: np.ndarray, block_size: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return values.repeat(block_size[0], 0).repeat(block_size[1], 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("layout", ["row", "col", "packed", "swizzled"])
@pytest.mark.parametrize("flags", list(FLAGS))
@pytest.mark.parametrize("out_block_size", [(1, 128), (32, 32), (128, 128)])
@pytest.mark.parametrize("exponents", ["near", "tiny", "huge"])
def test_values_stay(exponents: str, out_block_size: tuple[int, int], flags: str, layout: str) -> None:
    """Against float64: values in and out are equal; a float32 sf of x counts by its exponent bits alone."""
    num_tokens, hidden = 70, 160
    data, sf = pair(num_tokens, hidden, (1, 32), layout, exponents)("cpu")
    if exponents == "huge":
        # Within 2**14.
        sf = pack_scales(decode_ue8m0(torch.randint(240, 255, (num_tokens, 5))), LAYOUTS[layout])
    out, out_sf = tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), out_block_size, **FLAGS[flags])
    rows, cols = -(-num_tokens // out_block_size[0]), -(-hidden // out_block_size[1])
    sf_in = np.exp2(np.array(exponents_of(unpack_scales(sf, num_tokens, 5)), dtype=np.float64) - 127)
    sf_in = sf_in.reshape(num_tokens, 5)
    sf_out = unpack_scales(out_sf, rows, cols).double().numpy()
    shape = (num_tokens, hidden)
    value_in = values_by_ml_dtypes(data) * expanded(sf_in, (1, 32), shape)
    value_out = out.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    value_out = value_out * expanded(sf_out, out_block_size, shape)
    np.testing.assert_array_equal(value_in.view(np.int64), value_out.view(np.int64))


@pytest.mark.parametrize("below", [*range(22), 60, 250])
def test_every_ratio_by_ml_dtypes(below: int) -> None:
    """One token, two blocks of 32: the second sf is 2**-below times the first."""
    largest = 252
    sf = decode_ue8m0(torch.tensor([[largest, largest - below]]))
    out, out_sf = tk_quant.per_block_cast_lossless((EVERY_CODE.repeat(1, 2), sf), "e4m3", (1, 32), (1, 128))
    assert exponents_of(out_sf) == [largest - 6]
    scaled = np.array(E2M1 * 2) * 2.0 ** (6 - below)
    expected = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    got = out.view(torch.uint8).numpy()[0]
    np.testing.assert_array_equal(got[32:], expected)
    np.testing.assert_array_equal(got[:32].view(ml_dtypes.float8_e4m3fn).astype(np.float64), np.array(E2M1 * 2) * 64)
    if below <= 14:
        np.testing.assert_array_equal(expected.view(ml_dtypes.float8_e4m3fn).astype(np.float64), scaled)
    else:
        assert (expected.view(ml_dtypes.float8_e4m3fn).astype(np.float64) != scaled).any()


@pytest.mark.parametrize("largest", list(range(12)))
def test_smallest_exponents(largest: int) -> None:
    """Out exponent max(E - 6, 1), where 0 stands for 2**-127."""
    sf = decode_ue8m0(torch.tensor([[largest, 0]]))
    out, out_sf = tk_quant.per_block_cast_lossless((EVERY_CODE.repeat(1, 2), sf), "e4m3", (1, 32), (1, 128))
    out_exponent = max(largest - 6, 1)
    assert exponents_of(out_sf) == [out_exponent]
    expected = np.concatenate((np.array(E2M1 * 2) * 2.0**largest, np.array(E2M1 * 2))) / 2.0**out_exponent
    np.testing.assert_array_equal(out.double().numpy()[0], expected)


def test_by_hand() -> None:
    """Codes 0.5 and 6 with sf 1 and 2**-14: 32 and 384 of e4m3 beside its least, 2**-9, and 6 * 2**-8, times 2**-6."""
    data = torch.zeros(1, 32, dtype=torch.int8)
    data[0, 0], data[0, 16] = 0x71, 0x71
    out, sf = tk_quant.per_block_cast_lossless((data, torch.tensor([[1.0, 2.0**-14]])), "e4m3", (1, 32), (1, 128))
    assert sf.tolist() == [[2.0**-6]]
    assert out.float()[0, [0, 1, 32, 33]].tolist() == [32.0, 384.0, 2.0**-9, 6 * 2.0**-8]
    assert out.view(torch.uint8)[0, [0, 1, 32, 33]].tolist() == [0x60, 0x7C, 0x01, 0x0C]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_bad_sf_is_nan(bad: float) -> None:
    sf = torch.ones(64, 4)
    sf[40, 1] = bad
    data = EVERY_CODE.repeat(64, 4)
    for flags in FLAGS.values():
        for block_size, rows, cols in (((1, 128), 64, 1), ((32, 32), 2, 4), ((128, 128), 1, 1)):
            out, out_sf = tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), block_size, **flags)
            value = tk_quant.cast_back((out, out_sf), "fp32", block_size)
            expected = torch.zeros(rows, cols, dtype=torch.bool)
            expected[40 // block_size[0], 32 // block_size[1]] = True
            elements = expected.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)[:64, :128]
            assert torch.equal(value.isnan(), elements)
            assert torch.equal(unpack_scales(out_sf, rows, cols).isnan(), expected)
            if flags.get("use_packed_ue8m0"):
                assert out_sf[40 // block_size[0], 0].item() >> 32 // block_size[1] * 8 & 0xFF == 0xFF


def test_float32_counts_by_its_exponent_bits() -> None:
    sf = torch.tensor([[1.0, 1.99, 0.75, 0.0], [3.99, 2.0**-149, 1.0, -1.0]])
    powers = torch.tensor([[1.0, 1.0, 0.5, 2.0**-127], [2.0, 2.0**-127, 1.0, 1.0]])
    data = torch.zeros(2, 64, dtype=torch.int8)
    data[:, :8] = EVERY_CODE[:8]
    actual = tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    assert_equal(actual, tk_quant.per_block_cast_lossless((data, powers), "e4m3", (1, 32), (1, 128)))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no float4_e2m1fn_x2")
def test_float4_dtype() -> None:
    data, sf = pair(3, 64, (1, 32), "packed")("cpu")
    expected = tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (32, 32))
    as_float4 = data.view(torch.float4_e2m1fn_x2)
    assert_equal(tk_quant.per_block_cast_lossless((as_float4, sf), "e4m3", (1, 32), (32, 32)), expected)


def test_debug_mode_finds_what_would_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    data = torch.full((2, 64), 0x11, dtype=torch.int8)
    sf = torch.tensor([[1.0, 2.0**-14, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    sf[0, 1] = 2.0**-15
    with pytest.raises(ValueError, match=r"x\[1\]: expected scale factors of nonzero blocks .* got '2\*\*15 below'"):
        tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    # Alone in its block of the output.
    tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 32))
    # Zeros may lie anywhere, and a block that is NaN anyway may hold anything.
    data[0, 16:32] = -0x78
    tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    data[0, 16:32], sf[0, 2] = 0x11, torch.nan
    tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    sf[0] = torch.tensor([2.0**-121, 0.0, 2.0**-127, 2.0**-126])
    tk_quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 128))
    tk_quant.per_block_cast_lossless((data[:0], sf[:0]), "e4m3", (1, 32), (128, 128))


X = (torch.zeros(8, 96, dtype=torch.int8), torch.ones(8, 6))
PACKED = {"use_packed_ue8m0": True}


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "e4m3", "x_block_size": (1, 32), "out_block_size": (128, 128)},
    [
        ({"x": X[0]}, TypeError, "x: expected a pair"),
        ({"x": (*X, X[1])}, ValueError, "x: expected a pair"),
        ({"x": (X[0][:, :40], X[1])}, ValueError, "x: expected a positive multiple of 32 channels, got 80"),
        ({"x": (X[0][:, :0], X[1])}, ValueError, "x: expected a positive multiple of 32 channels, got 0"),
        ({"x": (X[0], X[1][:, :5])}, ValueError, r"x\[1\]: expected shape \(8, 6\)"),
        ({"x_block_size": (32,)}, ValueError, "x_block_size: expected two numbers"),
        ({"x_block_size": (1, 8)}, ValueError, "x_block_size: expected powers of two"),
        ({"x_block_size": (3, 32)}, ValueError, "x_block_size: expected powers of two"),
        ({"out_block_size": (1, 192)}, ValueError, "out_block_size: expected powers of two"),
        ({"out_block_size": (0, 32)}, ValueError, "out_block_size: expected powers of two"),
        ({"out_block_size": (1, 16)}, ValueError, r"out_block_size: expected multiples of x_block_size \(1, 32\)"),
        (
            {"x_block_size": (8, 32), "x": (X[0], X[1][:1]), "out_block_size": (4, 32)},
            ValueError,
            "out_block_size: expected multiples",
        ),
        (PACKED, ValueError, "use_packed_ue8m0: expected round_sf=True"),
    ],
)
