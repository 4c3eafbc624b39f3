"""swiglu_forward_and_per_channel_cast_and_transpose."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.testing import tiers
from tk_quant.testing.swiglu.swiglu_forward_and_per_channel_cast_and_transpose import FLAGS, SPEC, extremes, normal

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

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
    blocks = activation.reshape(-1, num_per_tokens, 64)
    amax = np.maximum(np.abs(blocks).max(axis=1), np.float32(1e-4))
    expected_sf = amax / np.float32(448)
    factor = np.float32(448) / amax
    if FLAGS[flags].get("round_sf"):
        expected_sf = np.exp2(np.ceil(np.log2(expected_sf.astype(np.float64)))).astype(np.float32)
        factor = np.float32(1) / expected_sf
    expected = (blocks * factor[:, None]).reshape(256, 64).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if not FLAGS[flags].get("without_transpose"):
        expected = expected.T
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), expected)
    np.testing.assert_array_equal(sf.numpy(), expected_sf)
    assert data.is_contiguous()
    assert sf.is_contiguous()


def test_clamp_value() -> None:
    x = tokens([(100.0, 3.0), (8.0, 3.0), (-100.0, 3.0), (8.0, 100.0), (8.0, -100.0), (INF, INF), (-8.0, 8.0)])
    clamped = tokens([(8.0, 3.0), (8.0, 3.0), (-100.0, 3.0), (8.0, 8.0), (8.0, -8.0), (8.0, 8.0), (-8.0, 8.0)])
    for given, expected in zip(cast(x, "e4m3", 32, swiglu_clamp_value=8), cast(clamped, "e4m3", 32)):
        assert torch.equal(given.view(torch.uint8), expected.view(torch.uint8))
    # Next to nothing is left.
    data, sf = cast(x, "e4m3", 32, swiglu_clamp_value=2.0**-126)
    assert (data.float() == 0).all()
    assert (sf == np.float32(1e-4) / np.float32(448)).all()


@pytest.mark.parametrize("round_sf", [False, True])
def test_not_finite(round_sf: bool) -> None:
    data, sf = cast(extremes(128, 64)("cpu"), "e4m3", 128, round_sf)
    for channel, expected in ((0, INF), (1, NAN), (2, NAN), (3, NAN), (4, INF), (5, INF), (6, NAN), (7, NAN)):
        assert str(sf[0, channel].item()) == str(expected)
        codes = data.view(torch.uint8)[channel]
        assert (codes & 0x7F == 0x7F).any()
        assert not (codes & 0x7F).bool().logical_and(codes & 0x7F != 0x7F).any()
    assert sf[:, 8:14].isfinite().all()


def test_blocks_do_not_mix() -> None:
    x = torch.ones(256, 256, dtype=torch.bfloat16) * 20
    x[70, 128 + 33] = 40.0
    for num_per_tokens in (32, 128):
        _, sf = cast(x, "e4m3", num_per_tokens, round_sf=True)
        expected = torch.ones_like(sf)
        expected[70 // num_per_tokens, 33] = 2.0
        assert torch.equal(sf, expected)


X = torch.zeros(128, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, "x: expected a torch.Tensor"),
        ({"x": (X, X)}, TypeError, "x: expected a torch.Tensor"),
        ({"x": X.float()}, TypeError, "x: expected dtype torch.bfloat16"),
        ({"x": X[0]}, ValueError, "x: expected shape"),
        ({"x": X[:127]}, ValueError, r"x.shape\[0\]: expected a multiple of 128, got 127"),
        ({"x": X[:, :64]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 128, got 64"),
        ({"x": X[:, :0]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 128, got 0"),
        ({"x": X.t()}, ValueError, "x: expected stride 1"),
        ({"fmt": "e2m1"}, ValueError, "fmt: expected one of 'e4m3', got 'e2m1'"),
        ({"num_per_tokens": 64}, ValueError, "num_per_tokens: expected one of 32, 128, got 64"),
        ({"num_per_tokens": 32.0}, TypeError, "num_per_tokens: expected an int"),
        ({"round_sf": 1}, TypeError, "round_sf: expected a bool, got 1"),
        ({"without_transpose": None}, TypeError, "without_transpose: expected a bool, got None"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cast(**{"x": X, "fmt": "e4m3", "num_per_tokens": 128, **change})
