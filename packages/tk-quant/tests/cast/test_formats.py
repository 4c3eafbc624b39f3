"""The formats' codes in plain PyTorch: every code, every midpoint and its neighbours, against other implementations."""

import math

import ml_dtypes
import numpy as np
import torch

from tk_quant.cast.format import FLOAT4_DTYPE
from tk_quant.reference import formats

INF, NAN = math.inf, math.nan


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """The values and the float32 on either side of each, both signs."""
    x = torch.cat((x, torch.nextafter(x, torch.tensor(INF)), torch.nextafter(x, torch.tensor(-INF))))
    return torch.cat((x, -x))


def midpoints(values: torch.Tensor) -> torch.Tensor:
    """The midpoints between neighbouring finite values; they are exact in float32."""
    values = values[values.isfinite()].double().unique()
    return ((values[1:] + values[:-1]) / 2).float()


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Codes of packed e2m1 data, one an element."""
    codes = data.view(torch.uint8)
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def e5m6_codes(data: torch.Tensor) -> np.ndarray:
    """Codes of e5m6 data, one an element, by their places in the 96 bits of three little-endian words."""
    words = data.numpy().reshape(-1, 3, 4).view("<u4")[..., 0].astype(object)
    bits = words[:, 0] << 64 | words[:, 1] << 32 | words[:, 2]
    return np.stack([bits >> (84 - 12 * k) & 0xFFF for k in range(8)], axis=1).astype(np.int64).reshape(-1)


def e5m6_data(codes: np.ndarray) -> torch.Tensor:
    """The data of such codes: the inverse of `e5m6_codes`."""
    bits = sum(codes.reshape(-1, 8)[:, k].astype(object) << (84 - 12 * k) for k in range(8))
    words = np.stack([bits >> shift & 0xFFFFFFFF for shift in (64, 32, 0)], axis=1).astype("<u4")
    return torch.from_numpy(words.view(np.uint8).reshape(-1).copy())


def e5m6_value(code: int) -> float:
    """A code's value by the definition: sign, five bits of exponent (bias 15), six of mantissa."""
    exponent, mantissa = code >> 6 & 31, code & 63
    if exponent == 31:
        magnitude = NAN if mantissa else INF
    elif exponent == 0:
        magnitude = mantissa * 2.0**-20
    else:
        magnitude = (1 + mantissa / 64) * 2.0 ** (exponent - 15)
    return -magnitude if code & 0x800 else magnitude


E5M6_VALUES = torch.tensor([e5m6_value(code) for code in range(4096)])


def test_every_e5m6_code() -> None:
    codes = np.arange(4096)
    decoded = formats.decode_e5m6(e5m6_data(codes))
    np.testing.assert_array_equal(decoded.numpy(), E5M6_VALUES.numpy())
    # A float16 that ends in four zeros is the same number.
    halves = (codes << 4).astype(np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decoded.numpy(), halves)
    assert torch.equal(decoded.signbit(), torch.from_numpy(codes >= 0x800))
    finite = codes & 0x7C0 != 0x7C0
    data = formats.encode_e5m6(decoded)
    np.testing.assert_array_equal(e5m6_codes(data)[finite], codes[finite])
    # An infinity saturates.
    assert e5m6_codes(data)[[0x7C0, 0xFC0]].tolist() == [0x7BF, 0xFBF]


def test_e5m6_rounds_to_nearest() -> None:
    positive = E5M6_VALUES[:0x7C0].double()
    x = torch.cat((neighbours(midpoints(E5M6_VALUES)), neighbours(E5M6_VALUES[:0x7C0])))
    x = torch.cat((x, torch.randn(20000) * torch.exp2(torch.randint(-24, 16, (20000,)).float())))
    x = torch.cat((x, neighbours(torch.tensor([65024.0, 65279.0, 65280.0, 65536.0, 1e30, 1e-45, 0.0, INF]))))
    x = torch.nn.functional.pad(x, (0, -len(x) % 8))
    # The nearest two codes of |x|, the even one of two that are equally near.
    above = torch.searchsorted(positive, x.abs().double().clamp(max=65024.0)).clamp(1, 0x7BF)
    below = above - 1
    up, down = positive[above] - x.abs().double(), x.abs().double() - positive[below]
    expected = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    expected = torch.where(x.abs() > 65024.0, 0x7BF, expected) + 0x800 * x.signbit()
    np.testing.assert_array_equal(e5m6_codes(formats.encode_e5m6(x)), expected.numpy())


def test_every_e2m1_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    decoded = formats.decode_e2m1(codes.view(torch.int8))
    oracle = nibbles(codes).numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(decoded.numpy().view(np.int32), oracle.view(np.int32))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert decoded[0, :32:2].tolist() == magnitudes + [-value for value in magnitudes]
    assert torch.equal(formats.encode_e2m1(decoded).view(torch.uint8), codes)
    if FLOAT4_DTYPE is not None:
        assert torch.equal(formats.decode(codes.view(FLOAT4_DTYPE)), decoded)


def test_e2m1_against_ml_dtypes() -> None:
    values = formats.decode_e2m1(torch.arange(256, dtype=torch.uint8))
    x = torch.cat((neighbours(midpoints(values)), neighbours(values), torch.randn(10000) * 3))
    x = torch.cat((x, neighbours(torch.tensor([7.0, 1e-45, 1e30, INF]))))
    oracle = x.numpy().astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(nibbles(formats.encode_e2m1(x)).numpy(), oracle.view(np.uint8) & 0xF)
    assert nibbles(formats.encode_e2m1(torch.tensor([NAN, -NAN]))).tolist() == [7, 7]


def test_e4m3_against_ml_dtypes_and_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.to(torch.float32)
    x = torch.cat((neighbours(midpoints(values)), torch.randn(10000) * 100)).clamp(-448, 448)
    data = formats.encode_e4m3(x)
    np.testing.assert_array_equal(
        data.view(torch.uint8).numpy(), x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    assert torch.equal(data.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
    special = formats.encode_e4m3(torch.tensor([NAN, -NAN, INF, -INF, 1e30, 465.0, -464.0, -0.0]))
    assert special.view(torch.uint8).tolist() == [0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x80]
    returned = formats.encode_e4m3(formats.decode(codes)).view(torch.uint8)
    # Byte 0xff is NaN too, and NaN has one byte here.
    assert torch.equal(returned, torch.where(torch.arange(256) == 255, 0x7F, torch.arange(256)).to(torch.uint8))
