"""swiglu_forward_and_per_token_cast."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.arch import arch_from_name
from tk_core.reference.scales import unpack_scales
from tk_core.scales import ScaleLayout
from tk_core.testing import assert_equal, tiers
from tk_quant import reference
from tk_quant.lib.swiglu_forward_and_per_token_cast_kernel import SwigluCastConfig
from tk_quant.testing.swiglu.swiglu_forward_and_per_token_cast import FLAGS, SPEC, compare

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

INF, NAN = math.inf, math.nan
F32 = np.float32
op = tk_quant.swiglu_forward_and_per_token_cast


def row(left: list[float], right: list[float]) -> torch.Tensor:
    """One position of 128 channels, zeros where nothing is given."""
    x = torch.zeros(1, 256)
    x[0, : len(left)], x[0, 128 : 128 + len(right)] = torch.tensor(left), torch.tensor(right)
    return x


def by_numpy(x: torch.Tensor, weight: torch.Tensor | None, clamp: float | None) -> np.ndarray:
    """The formula in float32, by numpy, with exp from float64."""
    x = x.float().numpy()
    left, right = np.split(x, 2, axis=1)
    if clamp is not None:
        left, right = np.minimum(left, F32(clamp)), np.clip(right, -F32(clamp), F32(clamp))
    with np.errstate(over="ignore"):
        out = left / (F32(1) + np.exp(-left.astype(np.float64)).astype(F32)) * right
    return out if weight is None else out * weight.numpy()[:, None]


def test_by_hand() -> None:
    # From 16.64 on 1 + exp(-l) rounds to 1; below -88.73 it is infinite.
    left = [100.0, 100.0, 18.0, 18.0, -100.0, -100.0, 0.0, -0.0, 0.0, 32.0]
    right = [4.48, -2.24, 1.0, -1.0, 3.0, -3.0, 5.0, 5.0, -5.0, 6.0]
    data, sf = op(row(left, right), "e4m3", 128)
    assert sf.tolist() == [[1.0]]
    # 448, -224, 18, -18, -0, 0, 0, -0, -0, 192
    assert data.view(torch.uint8)[0, :10].tolist() == [0x7E, 0xF6, 0x59, 0xD9, 0x80, 0x00, 0x00, 0x80, 0x80, 0x74]
    assert not data.view(torch.uint8)[0, 10:].any()
    data, sf = op(row(left, right), "e2m1", 32, round_sf=True)
    assert sf.tolist() == [[128.0] + 3 * [2.0**-126]]
    # 3.5 (tie: 4), -1.75 (tie: -2), 0.14, -0.14, -0, 0, 0, -0, -0, 1.5
    assert data.view(torch.uint8)[0, :5].tolist() == [0xC6, 0x80, 0x08, 0x80, 0x38]


def test_not_finite_by_hand() -> None:
    for left, right, expected in (
        (INF, 1.0, INF),
        (-INF, 1.0, NAN),
        (NAN, 1.0, NAN),
        (1.0, NAN, NAN),
        (2.0, -INF, INF),
        (0.0, INF, NAN),
        (-100.0, INF, NAN),
    ):
        data, sf = op(row([left, 1.0], [right, 1.0]), "e4m3", 32)
        assert_equal(sf[0, :1].isnan(), torch.tensor([math.isnan(expected)]))
        assert sf[0, 0].item() == expected or math.isnan(expected)
        assert sf[0, 1:].isfinite().all()
        assert data.view(torch.uint8)[0, 0] == 0x7F
        packed = op(row([left, 1.0], [right, 1.0]), "e4m3", 32, **FLAGS["packed"])[1]
        assert packed[0, 0] & 0xFF == 255


@pytest.mark.parametrize("clamp", [None, 1.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [32, 128, 384])
def test_against_numpy_and_ml_dtypes(group: int, dtype: torch.dtype, clamp: float | None) -> None:
    x = (3 * torch.randn(40, 768)).to(dtype)
    index, weights = torch.randperm(40).to(torch.int32), torch.rand(5, 8)
    data, sf = op(x, "e4m3", group, index, weights, swiglu_clamp_value=clamp)
    out = by_numpy(x, weights.flatten()[index.long()], clamp)
    blocks = out.reshape(40, -1, group)
    amax = np.maximum(np.abs(blocks).max(axis=2), F32(1e-4))
    # torch's exp on the CPU and that of float64 differ in the last place at times.
    np.testing.assert_allclose(sf.numpy(), amax / F32(448), rtol=3e-7)
    scaled = (blocks * (F32(448) / amax)[..., None]).reshape(40, 384)
    expected = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    different = data.view(torch.uint8).numpy() != expected.view(np.uint8)
    assert different.mean() < 1e-3
    np.testing.assert_allclose(data.float().numpy()[different], expected.astype(F32)[different], rtol=0.13)


def test_silu_of_torch_is_near() -> None:
    x = torch.randn(16, 512, dtype=torch.float64)
    expected = torch.nn.functional.silu(x[:, :256]) * x[:, 256:]
    torch.testing.assert_close(reference.swiglu_forward(x.float()).double(), expected, rtol=1e-6, atol=1e-7)


def test_weight_comes_last() -> None:
    x, weights = torch.randn(64, 256), torch.rand(8, 8)
    index = torch.arange(64, dtype=torch.int32)
    _, sf = op(x, "e2m1", 32, index, weights)
    silu = x[:, :128] / (1 + torch.exp(-x[:, :128]))
    last = (silu * x[:, 128:]) * weights.view(64, 1)
    first = silu * (x[:, 128:] * weights.view(64, 1))
    expected = last.abs().view(64, 4, 32).amax(2) / torch.tensor(6.0)
    assert torch.equal(sf, expected)
    assert not torch.equal(sf, first.abs().view(64, 4, 32).amax(2) / torch.tensor(6.0))


def test_nothing_is_rounded_before_the_cast() -> None:
    x = torch.randn(64, 256).to(torch.bfloat16)
    _, sf = op(x, "e4m3", 128)
    rounded = tk_quant.per_token_cast(reference.swiglu_forward(x).to(torch.bfloat16), "e4m3", 128)[1]
    exact = tk_quant.per_token_cast(reference.swiglu_forward(x), "e4m3", 128)[1]
    assert torch.equal(sf, exact)
    assert not torch.equal(sf, rounded)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("group", [32, 128])
def test_layouts_hold_the_same(fmt: str, group: int) -> None:
    x = torch.randn(131, 1280)
    data, sf = op(x, fmt, group, round_sf=True)
    num_groups = 640 // group
    for flags in ("col-round", "packed", "swizzled"):
        other_data, other_sf = op(x, fmt, group, **FLAGS[flags])
        assert torch.equal(other_data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, 131, num_groups), sf)
    # Swizzled sf past the last row and column is 0.
    assert int((other_sf.view(torch.uint8) != 0).sum()) == 131 * num_groups


def test_hidden_is_0_too() -> None:
    x = torch.randn(3, 512)
    assert_equal(op(x, "e4m3", 0), op(x, "e4m3", 256))


def test_clamp_and_count() -> None:
    left = [3.0, 2.0, 2.5, -9.0, 0.0, 0.0, 0.0, NAN, 1.0, INF]
    right = [1.0, 1.0, 1.0, 1.0, 2.5, -2.5, -2.0, 1.0, NAN, -INF]
    count = torch.tensor([10, 20, 30])
    _, sf = op(row(left, right), "e4m3", 128, swiglu_clamp_value=2, clamped_count=count)
    assert count.tolist() == [13, 21, 32]
    assert sf.isnan().all()
    finite = row(left[:7], right[:7])
    expected = op(row([2.0, 2.0, 2.0, -9.0], [1.0, 1.0, 1.0, 1.0, 2.0, -2.0, -2.0]), "e4m3", 128)
    assert_equal(op(finite, "e4m3", 128, swiglu_clamp_value=2.0), expected)
    assert_equal(op(finite, "e4m3", 128, swiglu_clamp_value=INF), op(finite, "e4m3", 128))


def test_padding() -> None:
    x = torch.full((6, 256), 5.0)
    index = torch.tensor([0, -1, 15, 16, 2**31 - 1, -(2**31)], dtype=torch.int32)
    expert = torch.tensor([0, 0, -5, 3, 0, 0], dtype=torch.int32)
    weights, count = torch.arange(16.0).view(2, 8) + 1, torch.zeros(3, dtype=torch.int64)
    _, sf = op(x, "e4m3", 128, index, weights, swiglu_clamp_value=1.0, clamped_count=count)
    assert count.tolist() == [256, 256, 0]
    # 1 / (1 + exp(-1)) is 0.7310586.
    assert sf[[0, 2], 0].tolist() == pytest.approx([0.7310586 / 448, 16 * 0.7310586 / 448])
    op(x, "e4m3", 128, index, weights, expert, swiglu_clamp_value=1.0, clamped_count=count)
    assert count.tolist() == [384, 384, 0]
    op(x, "e4m3", 128, pos_to_expert=expert, swiglu_clamp_value=1.0, clamped_count=count)
    assert count.tolist() == [384 + 5 * 128, 384 + 5 * 128, 0]


def test_index_past_the_weights_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.zeros(3, 256), torch.ones(2, 8)
    monkeypatch.setattr(env, "debug", lambda: True)
    op(x, "e4m3", 128, torch.tensor([15, -1, 0], dtype=torch.int32), weights)
    op(x[:0], "e4m3", 128, torch.empty(0, dtype=torch.int32), weights)
    with pytest.raises(ValueError, match="pos_to_token_topk: expected indices into topk_weights, below 16, got 16"):
        op(x, "e4m3", 128, torch.tensor([15, 16, 0], dtype=torch.int32), weights)


def test_least_amax() -> None:
    x = row([100.0], [0.25])
    assert op(x, "e4m3", 128, sf_clamp_min=56)[1].item() == 0.125
    assert op(x, "e4m3", 128, sf_clamp_min=28.0, round_sf=True)[1].item() == 0.0625
    assert op(x, "e4m3", 128, sf_clamp_min=1e-30)[1].item() == 25 / F32(448)
    assert op(0 * x, "e4m3", 128, sf_clamp_min=448 * 2.0**-100)[1].item() == 2.0**-100
    assert op(0 * x, "e4m3", 128)[1].item() == F32(1e-4) / F32(448)


def test_compare_looks_at_real_rows_only() -> None:
    expected = op(torch.randn(3, 256), "e4m3", 32, **FLAGS["packed"])
    expected[1][1] = 0
    actual = tuple(each.clone() for each in expected)
    actual = (actual[0], torch.empty_strided((3, 1), (1, 4), dtype=torch.int32).copy_(expected[1]))
    actual[0].view(torch.uint8)[1] = 1
    actual[1][1] = 5
    compare((actual, None), (expected, None))
    actual[1][2] += 1
    with pytest.raises(AssertionError, match="real rows"):
        compare((actual, None), (expected, None))


@pytest.mark.parametrize("hidden", [128, 256, 640, 2048, 4096, 7168, 16384, 20480, 65536])
def test_configurations_are_admissible(hidden: int) -> None:
    for group, share_word, clamps in product((32, 128, hidden), (False, True), (False, True)):
        config = SwigluCastConfig.best(hidden, group, 16, share_word, clamps, arch_from_name("sm_90a"))
        assert hidden % config.vec == 0
        assert config.lanes * config.rows <= 1024
        assert config.lanes * config.rows % 32 == 0
        blocks = config.num_blocks(1000, hidden)
        assert blocks * config.rows * config.pieces * config.lanes * config.vec >= 1000 * hidden


X = torch.zeros(8, 256)
INDEX, WEIGHTS, COUNT = torch.zeros(8, dtype=torch.int32), torch.ones(2, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": 1.0}, TypeError, "x: expected a torch.Tensor"),
        ({"x": X.half()}, TypeError, "x: expected dtype"),
        ({"x": X[0]}, ValueError, "x: expected shape"),
        ({"x": X[:, :128]}, ValueError, "x: expected a positive multiple of 256 columns, got 128"),
        ({"x": X[:, :0]}, ValueError, "x: expected a positive multiple of 256 columns, got 0"),
        ({"x": torch.zeros(256, 256).t()}, ValueError, "x: expected stride 1"),
        ({"fmt": "e5m6"}, ValueError, "fmt: expected one of 'e4m3', 'e2m1', got 'e5m6'"),
        ({"num_per_channels": 64}, ValueError, "num_per_channels: expected one of 32, 128, 128, 0, got 64"),
        ({"num_per_channels": 128.0}, TypeError, "num_per_channels: expected an int"),
        ({"pos_to_token_topk": INDEX}, TypeError, "topk_weights: expected a torch.Tensor"),
        ({"topk_weights": WEIGHTS}, ValueError, "pos_to_token_topk: expected a tensor beside topk_weights"),
        ({"pos_to_token_topk": INDEX.long(), "topk_weights": WEIGHTS}, TypeError, "pos_to_token_topk: expected dtype"),
        ({"pos_to_token_topk": INDEX[1:], "topk_weights": WEIGHTS}, ValueError, "pos_to_token_topk: expected shape"),
        ({"pos_to_token_topk": INDEX, "topk_weights": WEIGHTS[0]}, ValueError, "topk_weights: expected shape"),
        ({"pos_to_token_topk": INDEX, "topk_weights": WEIGHTS.double()}, TypeError, "topk_weights: expected dtype"),
        ({"pos_to_token_topk": INDEX, "topk_weights": WEIGHTS.t()}, ValueError, "topk_weights: expected contiguous"),
        (
            {"pos_to_token_topk": INDEX, "topk_weights": WEIGHTS.to("meta")},
            ValueError,
            "topk_weights: expected device cpu",
        ),
        ({"pos_to_expert": INDEX[:5]}, ValueError, "pos_to_expert: expected shape"),
        ({"pos_to_expert": INDEX.long()}, TypeError, "pos_to_expert: expected dtype"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected round_sf"),
        ({"use_packed_ue8m0": True, "round_sf": True}, ValueError, "use_packed_ue8m0: expected use_tma"),
        ({"use_swizzled_sf": True}, ValueError, "use_swizzled_sf: expected False without round_sf"),
        (
            {"use_swizzled_sf": True, "round_sf": True, "use_tma_aligned_col_major_sf": True},
            ValueError,
            "use_tma_aligned_col_major_sf: expected False beside use_swizzled_sf",
        ),
        (
            {"x": torch.zeros(2, 512), "num_per_channels": 0, "use_tma_aligned_col_major_sf": True},
            ValueError,
            "num_per_channels: expected 32 or 128 for sf in layout COL_MAJOR, got 256",
        ),
        ({"clamped_count": COUNT}, ValueError, "swiglu_clamp_value: expected a number beside clamped_count"),
        ({"clamped_count": COUNT.int(), "swiglu_clamp_value": 1.0}, TypeError, "clamped_count: expected dtype"),
        ({"clamped_count": COUNT[:2], "swiglu_clamp_value": 1.0}, ValueError, "clamped_count: expected shape"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    before = COUNT.clone()
    with pytest.raises(error, match=match):
        op(**{"x": X, "fmt": "e4m3", "num_per_channels": 128, **change})
    assert torch.equal(COUNT, before)


def test_layouts_of_the_specification() -> None:
    x = torch.randn(5, 1280).to(torch.bfloat16)
    sf = {flags: op(x, "e4m3", 128, **FLAGS[flags])[1] for flags in FLAGS}
    assert sf["row"].shape == (5, 5)
    assert sf["row"].stride() == (5, 1)
    assert sf["col"].stride() == (1, 8)
    assert (sf["packed"].shape, sf["packed"].stride()) == ((5, 2), (1, 8))
    assert sf["swizzled"].shape == (1, 2, 32, 4, 4)
    assert {each.dtype for each in sf.values()} == {torch.float32, torch.int32, torch.float8_e8m0fnu}
    assert {layout.name for layout in ScaleLayout} == {"ROW_MAJOR", "COL_MAJOR", "PACKED_UE8M0", "SWIZZLED"}
