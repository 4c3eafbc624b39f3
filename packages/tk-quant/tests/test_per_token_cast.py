"""per_token_cast, per_token_cast_with_sf_only, per_token_cast_with_precomputed_sf."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.scales import ScaleLayout, check_scales, pack_scales, unpack_scales
from tk_core.testing import tiers
from tk_quant import reference
from tk_quant.conversions import E2M1_FROM_BF16, e2m1_source
from tk_quant.per_token_cast import PerTokenCastConfig
from tk_quant.reference import formats
from tk_quant.testing.per_token_cast import FLAGS, SPEC, WITH_PRECOMPUTED_SF_SPEC, WITH_SF_ONLY_SPEC, extremes

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


def row_with(values: list[float], largest: float) -> torch.Tensor:
    """One token of 64 channels: `largest` (so that nothing is scaled), the values, zeros."""
    row = torch.zeros(1, 64)
    row[0, 0] = largest
    row[0, 1 : 1 + len(values)] = torch.tensor(values)
    return row


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Codes of packed e2m1 data, one an element."""
    codes = data.view(torch.uint8)
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def neighbours(values: list[float]) -> torch.Tensor:
    """The values and the float32 on either side of each, both signs."""
    x = torch.tensor(values)
    x = torch.cat((x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(-INF))))
    return torch.cat((x, -x))


E4M3_TABLE = [
    (1.0, 0x38),
    (-1.0, 0xB8),
    (0.0, 0x00),
    (-0.0, 0x80),
    (448.0, 0x7E),
    (-448.0, 0xFE),
    (440.0, 0x7E),  # 432 lies between 416 and 448
    (432.0, 0x7E),  # tie between 416 (0x7d) and 448 (0x7e)
    (431.9, 0x7D),
    (17.0, 0x58),  # tie between 16 (0x58) and 18 (0x59)
    (19.0, 0x5A),  # tie between 18 (0x59) and 20 (0x5a)
    (1.0625, 0x38),  # tie between 1 and 1.125
    (1.1875, 0x3A),  # tie between 1.125 and 1.25
    (2.0**-6, 0x08),  # least normal
    (2.0**-9, 0x01),  # least subnormal
    (2.0**-10, 0x00),  # tie between 0 and the least subnormal
    (-(2.0**-10), 0x80),
    (1.5 * 2.0**-9, 0x02),  # tie between the first two subnormals
    (7.5 * 2.0**-9, 0x08),  # tie between the largest subnormal and the least normal
    (1.001 * 2.0**-10, 0x01),
]

E2M1_TABLE = [
    (0.0, 0x0),
    (0.5, 0x1),
    (1.0, 0x2),
    (1.5, 0x3),
    (2.0, 0x4),
    (3.0, 0x5),
    (4.0, 0x6),
    (6.0, 0x7),
    (-0.0, 0x8),
    (-0.5, 0x9),
    (-1.0, 0xA),
    (-1.5, 0xB),
    (-2.0, 0xC),
    (-3.0, 0xD),
    (-4.0, 0xE),
    (-6.0, 0xF),
    # Ties go to the even code.
    (0.25, 0x0),
    (0.75, 0x2),
    (1.25, 0x2),
    (1.75, 0x4),
    (2.5, 0x4),
    (3.5, 0x6),
    (5.0, 0x6),
    (-0.25, 0x8),
    (-0.75, 0xA),
    (-1.25, 0xA),
    (-1.75, 0xC),
    (-2.5, 0xC),
    (-3.5, 0xE),
    (-5.0, 0xE),
    (0.251, 0x1),
    (0.749, 0x1),
    (1.251, 0x3),
    (1.749, 0x3),
    (2.501, 0x5),
    (3.499, 0x5),
    (5.001, 0x7),
    (1e-40, 0x0),
    (-1e-40, 0x8),
]


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_by_hand(dtype: torch.dtype, round_sf: bool) -> None:
    table = [(value, code) for value, code in E4M3_TABLE if torch.tensor(value, dtype=dtype).item() == value]
    assert len(table) > 10
    x = row_with([value for value, _ in table], 448.0).to(dtype)
    data, sf = tk_quant.per_token_cast(x, "e4m3", 64, round_sf=round_sf)
    assert sf.tolist() == [[1.0]]
    assert data.view(torch.uint8)[0, 1 : 1 + len(table)].tolist() == [code for _, code in table]


@pytest.mark.parametrize("round_sf", [False, True])
def test_e2m1_by_hand(round_sf: bool) -> None:
    x = row_with([value for value, _ in E2M1_TABLE], 6.0)
    data, sf = tk_quant.per_token_cast(x, "e2m1", 64, round_sf=round_sf)
    assert sf.tolist() == [[1.0]]
    assert data.dtype is torch.int8
    assert nibbles(data)[0, 1 : 1 + len(E2M1_TABLE)].tolist() == [code for _, code in E2M1_TABLE]


def test_even_channel_in_the_low_nibble() -> None:
    x = row_with([0.5, -1.0], 6.0)
    data, _ = tk_quant.per_token_cast(x, "e2m1", 64)
    assert data.view(torch.uint8)[0, :2].tolist() == [0x17, 0x0A]


def test_e2m1_against_ml_dtypes() -> None:
    x = neighbours(
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 1e-45, 1e30, INF]
    )
    x = torch.cat((x, torch.randn(10000) * 3))
    oracle = x.numpy().astype(ml_dtypes.float4_e2m1fn)
    data = formats.encode_e2m1(x)
    np.testing.assert_array_equal(nibbles(data).numpy(), oracle.view(np.uint8) & 0xF)
    decoded = formats.decode_e2m1(data)
    np.testing.assert_array_equal(decoded.numpy().view(np.int32), oracle.astype(np.float32).view(np.int32))
    assert nibbles(formats.encode_e2m1(torch.tensor([NAN, -NAN]))).tolist() == [7, 7]


def test_every_e2m1_code_returns() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(2, 128)
    assert torch.equal(formats.encode_e2m1(formats.decode_e2m1(codes)), codes)
    if formats.FLOAT4_DTYPE is not None:
        assert torch.equal(formats.decode(codes.view(formats.FLOAT4_DTYPE)), formats.decode(codes))


def test_e4m3_against_ml_dtypes_and_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.to(torch.float32)
    finite = values[values.isfinite()].sort().values
    midpoints = ((finite[1:].double() + finite[:-1].double()) / 2).tolist()
    x = torch.cat((neighbours(midpoints), torch.randn(10000) * 100)).clamp(-448, 448)
    data = formats.encode_e4m3(x)
    np.testing.assert_array_equal(
        data.view(torch.uint8).numpy(), x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    assert torch.equal(data.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
    special = formats.encode_e4m3(torch.tensor([NAN, -NAN, INF, -INF, 1e30, 465.0, -464.0, -0.0]))
    assert special.view(torch.uint8).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x80]
    returned = formats.encode_e4m3(formats.decode_e4m3(codes)).view(torch.uint8)
    # Byte 0xff is NaN too, and NaN has one byte here.
    assert torch.equal(returned, torch.where(torch.arange(256) == 255, 0x7F, torch.arange(256)).to(torch.uint8))


def test_scaling_against_numpy() -> None:
    x = (torch.randn(64, 192) * torch.exp2(torch.randint(-20, 20, (64, 1)).float())).to(torch.bfloat16)
    values = x.float().numpy()
    for (fmt, largest, oracle), group in product(
        (("e4m3", 448.0, ml_dtypes.float8_e4m3fn), ("e2m1", 6.0, ml_dtypes.float4_e2m1fn)), (16, 32, 64, 128, 192)
    ):
        data, sf = tk_quant.per_token_cast(x, fmt, group)
        for index, start in enumerate(range(0, 192, group)):
            block = values[:, start : start + group]
            amax = np.maximum(np.abs(block).max(axis=1, keepdims=True), np.float32(1e-4 if fmt == "e4m3" else 0))
            np.testing.assert_array_equal(sf[:, index].numpy(), (amax / np.float32(largest))[:, 0])
            expected = (block * (np.float32(largest) / amax)).astype(oracle).view(np.uint8)
            codes = data.view(torch.uint8) if fmt == "e4m3" else nibbles(data)
            np.testing.assert_array_equal(
                codes[:, start : start + group].numpy(), expected & (0xFF if fmt == "e4m3" else 0xF)
            )


@pytest.mark.parametrize(
    ("fmt", "amax", "sf", "rounded"),
    [
        ("e4m3", 0.0, float(np.float32(1e-4) / np.float32(448)), 2.0**-22),
        ("e4m3", 5e-5, float(np.float32(1e-4) / np.float32(448)), 2.0**-22),
        ("e4m3", 448.0, 1.0, 1.0),
        ("e4m3", 3.5, 2.0**-7, 2.0**-7),
        ("e4m3", float(np.nextafter(np.float32(448), np.float32(500))), 1 + 2.0**-23, 2.0),
        ("e4m3", float(np.nextafter(np.float32(448), np.float32(0))), 1 - 2.0**-24, 1.0),
        ("e2m1", 0.0, 2.0**-126, 2.0**-126),
        ("e2m1", 2.0**-149, 2.0**-126, 2.0**-126),
        ("e2m1", 12 * 2.0**-126, 2.0**-125, 2.0**-125),
        ("e2m1", 7.0, float(np.float32(7) / np.float32(6)), 2.0),
        ("e2m1", float(np.finfo(np.float32).max), float(np.finfo(np.float32).max / np.float32(6)), 2.0**126),
    ],
)
def test_sf_by_hand(fmt: str, amax: float, sf: float, rounded: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 17] = -amax
    assert tk_quant.per_token_cast_with_sf_only(x, fmt, 64).item() == sf
    assert tk_quant.per_token_cast_with_sf_only(x, fmt, 64, round_sf=True).item() == rounded


@pytest.mark.parametrize(("fmt", "largest"), [("e4m3", 448.0), ("e2m1", 6.0)])
def test_rounded_sf_is_the_least_admissible(fmt: str, largest: float) -> None:
    x = torch.randn(512, 64) * torch.exp2(torch.randint(-10, 60, (512, 1)).float())
    exact = tk_quant.per_token_cast_with_sf_only(x, fmt, 64)
    sf = tk_quant.per_token_cast_with_sf_only(x, fmt, 64, round_sf=True)
    assert bool((torch.frexp(sf).mantissa == 0.5).all())
    assert bool((sf >= exact).all())
    assert bool((sf / 2 < exact).all())
    assert bool((x.abs().amax(1, keepdim=True) / sf <= largest).all())


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_layouts_hold_the_same(fmt: str) -> None:
    x = torch.randn(6, 576)
    data, sf = tk_quant.per_token_cast(x, fmt, 64, round_sf=True)
    assert sf.is_contiguous()
    for name in ("col-round", "packed"):
        other_data, other_sf = tk_quant.per_token_cast(x, fmt, 64, **FLAGS[name])
        assert torch.equal(other_data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, 6, 9), sf)
        assert other_sf.stride() == (1, 8)
    assert other_sf.shape == (6, 3)


@pytest.mark.parametrize("num_per_channels", [16, 32, 64, 128, 192])
def test_groups_do_not_mix(num_per_channels: int) -> None:
    x = torch.ones(3, 192)
    x[1, 100] = 448.0
    _, sf = tk_quant.per_token_cast(x, "e4m3", num_per_channels, round_sf=True)
    expected = torch.full_like(sf, 2.0**-8)
    expected[1, 100 // num_per_channels] = 1.0
    assert torch.equal(sf, expected)


def test_not_finite() -> None:
    x = torch.ones(3, 64)
    x[0, 1], x[1, 2], x[2, 3], x[2, 4] = INF, NAN, -INF, NAN
    for flags in ("row", "row-round", "col"):
        data, sf = tk_quant.per_token_cast(x, "e4m3", 32, **FLAGS[flags])
        assert sf[0, 0] == INF
        assert sf[1:, 0].isnan().all()
        assert sf[:, 1].isfinite().all()
        codes = data.view(torch.uint8)
        assert codes[0, :3].tolist() == [0x00, 0x7F, 0x00]
        assert (codes[1:, :32] == 0x7F).all()
    for fmt in ("e4m3", "e2m1"):
        sf = tk_quant.per_token_cast_with_sf_only(x, fmt, 32, **FLAGS["packed"])
        assert (sf & 0xFF == 255).all()
        back = formats.dequantize(tk_quant.per_token_cast(x, fmt, 32, **FLAGS["packed"]), (1, 32))
        assert back[:, :32].isnan().all()
        assert back[:, 32:].isfinite().all()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("flags", ["row", "row-round"])
def test_relatives_agree(fmt: str, flags: str) -> None:
    x = extremes(192, torch.bfloat16)("cpu")
    data, sf = tk_quant.per_token_cast(x, fmt, 64, **FLAGS[flags])
    only = tk_quant.per_token_cast_with_sf_only(x, fmt, 64, **FLAGS[flags])
    assert torch.equal(only.view(torch.int32), sf.view(torch.int32))
    if flags == "row-round":
        again = tk_quant.per_token_cast_with_precomputed_sf(x, fmt, 64, sf, **FLAGS[flags])
        assert torch.equal(again.view(torch.uint8), data.view(torch.uint8))


def test_precomputed_sf_by_hand() -> None:
    # 1 / 3 is rounded before it multiplies; 7 * (1 / 3) and 7 / 3 are both near 2.333, but 1000 / 3 saturates in e2m1.
    x = row_with([7.5, 1000.0, -1000.0, 0.0, INF], 3.0)
    data = tk_quant.per_token_cast_with_precomputed_sf(x, "e2m1", 64, torch.full((1, 1), 3.0))
    assert nibbles(data)[0, :6].tolist() == [0x2, 0x4, 0x7, 0xF, 0x0, 0x7]
    data = tk_quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, torch.zeros(1, 1))
    assert data.view(torch.uint8)[0, :6].tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7E]


@pytest.mark.parametrize("x_fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("block_size", [(128, 128), (32, 32), (1, 32), (1, 192), (3, 24)])
@pytest.mark.parametrize("flags", list(FLAGS))
def test_requantizing_is_dequantizing_first(x_fmt: str, block_size: tuple[int, int], flags: str) -> None:
    x = torch.randn(40, 192) * torch.exp2(torch.randint(-5, 5, (40, 1)).float())
    pair = reference.cast(x, x_fmt, block_size, **FLAGS[flags])
    values = formats.decode(pair[0])
    sf = unpack_scales(pair[1], -(-40 // block_size[0]), -(-192 // block_size[1]))
    for row, col in ((0, 0), (39, 191), (20, 100), (33, 31)):
        values[row, col] *= sf[row // block_size[0], col // block_size[1]]
        assert values[row, col] == formats.dequantize(pair, block_size)[row, col]
    whole = formats.dequantize(pair, block_size)
    for fmt in ("e4m3", "e2m1"):
        data, out_sf = tk_quant.per_token_cast(pair, fmt, 32, block_size, round_sf=True)
        expected_data, expected_sf = tk_quant.per_token_cast(whole, fmt, 32, round_sf=True)
        assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
        assert torch.equal(out_sf, expected_sf)


def test_float4_dtype() -> None:
    if formats.FLOAT4_DTYPE is None:
        pytest.skip("torch has no float4_e2m1fn_x2")
    data = torch.randint(-128, 128, (5, 96), dtype=torch.int8)
    sf = torch.rand(5, 6)
    expected = tk_quant.per_token_cast((data, sf), "e4m3", 64, (1, 32))
    found = tk_quant.per_token_cast((data.view(formats.FLOAT4_DTYPE), sf), "e4m3", 64, (1, 32))
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


def test_reference_cast_of_blocks() -> None:
    x = torch.randn(70, 192)
    data, sf = reference.cast(x, "e4m3", (32, 64))
    assert sf.shape == (3, 3)
    assert sf[2, 1] == x[64:, 64:128].abs().max() / torch.tensor(448.0)
    assert torch.equal(reference.cast(x, "e4m3", (32, 64), sf=torch.ones(3, 3)).float(), formats.encode_e4m3(x).float())
    assert torch.equal(
        formats.encode_e4m3(formats.dequantize((data, torch.ones_like(sf)), (32, 64))).float(), data.float()
    )


def test_configurations_are_admissible() -> None:
    for hidden, x_bits, packed in product((64, 192, 576, 2048, 7168, 20480), (4, 8, 16, 32), (False, True)):
        for group in (16, 32, 64, 128, hidden):
            config = PerTokenCastConfig.best(hidden, group, x_bits, packed, None)
            assert hidden % config.vec == 0
            assert config.vec <= group
            assert config.vec * x_bits % 32 == 0
            assert config.lanes * config.rows <= 1024


def test_conversions_are_chosen_by_architecture() -> None:
    from tk_core.arch import arch_from_name

    assert "__nv_cvt_float2_to_fp4x2" in e2m1_source(arch_from_name("sm_100a"))
    assert "__viaddmin_s32" in e2m1_source(arch_from_name("sm_90a"))
    assert "tk_e2m1x8_bf16" in E2M1_FROM_BF16


X = torch.zeros(8, 192)
PAIR = (torch.zeros(8, 192, dtype=torch.float8_e4m3fn), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": [[1.0]]}, ValueError, "x: expected a pair"),
        ({"x": 1.0}, TypeError, "x: expected a tensor or a pair"),
        ({"x": X.half()}, TypeError, "x: expected dtype"),
        ({"x": X[0]}, ValueError, "x: expected shape"),
        ({"x": X[:, :100]}, ValueError, "x: expected a positive multiple of 64 channels, got 100"),
        ({"x": X[:, :0]}, ValueError, "x: expected a positive multiple of 64 channels"),
        ({"x": torch.zeros(192, 8).t()}, ValueError, "x: expected stride 1"),
        ({"fmt": "e5m2"}, ValueError, "fmt: expected one of 'e4m3', 'e2m1'"),
        ({"fmt": "e5m6"}, ValueError, "fmt: expected one of 'e4m3', 'e2m1'"),
        ({"num_per_channels": 48}, ValueError, "num_per_channels: expected one of 16, 32, 64, 128, 192, got 48"),
        ({"num_per_channels": 0}, ValueError, "num_per_channels"),
        ({"x_block_size": (1, 32)}, ValueError, "x_block_size: expected None"),
        ({"x": PAIR}, ValueError, "x_block_size: expected the block size"),
        ({"x": PAIR, "x_block_size": (128,)}, ValueError, "x_block_size: expected two"),
        ({"x": PAIR, "x_block_size": (128, 0)}, ValueError, "x_block_size: expected two positive"),
        ({"x": PAIR, "x_block_size": (128, 1.5)}, TypeError, "x_block_size: expected an int"),
        ({"x": PAIR, "x_block_size": (128, 64)}, ValueError, r"x\[1\]: expected shape \(1, 3\)"),
        ({"x": (X, PAIR[1]), "x_block_size": (128, 128)}, TypeError, r"x\[0\]: expected dtype"),
        ({"x": (PAIR[0], PAIR[1].half()), "x_block_size": (128, 128)}, TypeError, r"x\[1\]: expected dtype"),
        ({"x": (PAIR[0], PAIR[1].to("meta")), "x_block_size": (128, 128)}, ValueError, r"x\[1\]: expected device"),
        ({"x": (PAIR[0], torch.ones(8, 12)[:, ::2]), "x_block_size": (1, 32)}, ValueError, r"x\[1\]: expected strides"),
        ({"x": (PAIR[0], PAIR[1], 0), "x_block_size": (128, 128)}, ValueError, "x: expected a pair"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0"),
        ({"use_packed_ue8m0": True, "round_sf": True}, ValueError, "use_packed_ue8m0"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    kwargs = {"x": X, "fmt": "e4m3", "num_per_channels": 32, **change}
    for function in (tk_quant.per_token_cast, tk_quant.per_token_cast_with_sf_only):
        with pytest.raises(error, match=match):
            function(**kwargs)
    with pytest.raises(error, match=match):
        tk_quant.per_token_cast_with_precomputed_sf(**kwargs, sf=torch.ones(8, 6))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"sf": None}, TypeError, "sf: expected a torch.Tensor"),
        ({"sf": torch.ones(8, 6, dtype=torch.int32)}, TypeError, "sf: expected dtype"),
        ({"sf": torch.ones(8, 5)}, ValueError, r"sf: expected shape \(8, 6\)"),
        ({"sf": torch.ones(6, 8).t()}, ValueError, "sf: expected contiguous"),
        ({"sf": torch.ones(8, 6, device="meta")}, ValueError, "sf: expected device"),
        ({"use_tma_aligned_col_major_sf": True}, ValueError, "use_tma_aligned_col_major_sf: expected False"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected False"),
    ],
)
def test_bad_precomputed_sf(change: dict[str, Any], error: type[Exception], match: str) -> None:
    kwargs = {"x": X, "fmt": "e4m3", "num_per_channels": 32, "sf": torch.ones(8, 6), **change}
    with pytest.raises(error, match=match):
        tk_quant.per_token_cast_with_precomputed_sf(**kwargs)


def test_any_layout_of_an_input_with_one_block() -> None:
    data = torch.full((1, 64), 2.0).to(torch.float8_e4m3fn)
    for layout in ScaleLayout:
        sf = pack_scales(torch.full((1, 1), 4.0), layout)
        assert check_scales("sf", sf, 1, 1, sf.device) is layout
        assert tk_quant.per_token_cast((data, sf), "e4m3", 64, (1, 64), round_sf=True)[1].item() == 2.0**-5
