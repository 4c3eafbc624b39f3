"""Bitwise equality; by how much results differ, by how many levels of a format, whether with a bias; exact rounding."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Float64 copies of whole outputs would take several times their memory.
_CHUNK = 1 << 24


def bits_of(x: Tensor) -> Tensor:
    """The same memory as integers of the same size: any dtype, any strides."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_BITS[x.element_size()])


def assert_equal(actual: Any, expected: Any, *, name: str = "result") -> None:
    """Raise AssertionError unless two trees of tensors are equal bit for bit.

    Tuples, lists and dicts are compared item by item, tensors by dtype, shape, strides, device and bits (so that a NaN
    equals only the same NaN, and 0 is not -0), the rest by type and ==. The message says where the first difference is.
    """
    if isinstance(expected, Tensor):
        _assert_equal_tensors(actual, expected, name)
        return
    assert type(actual) is type(expected), f"{name}: expected {type(expected).__name__}, got {type(actual).__name__}"
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), f"{name}: expected {len(expected)} items, got {len(actual)}"
        for index, (got, want) in enumerate(zip(actual, expected)):
            assert_equal(got, want, name=f"{name}[{index}]")
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), f"{name}: expected keys {list(expected)}, got {list(actual)}"
        for key, want in expected.items():
            assert_equal(actual[key], want, name=f"{name}[{key!r}]")
    else:
        assert actual == expected, f"{name}: expected {expected!r}, got {actual!r}"


def assert_same_metadata(actual: Any, expected: Tensor, name: str) -> None:
    """Raise AssertionError unless `actual` is a tensor of the same dtype, shape and strides."""
    assert isinstance(actual, Tensor), f"{name}: expected a tensor, got {type(actual).__name__}"
    assert actual.dtype == expected.dtype, f"{name}: expected dtype {expected.dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, f"{name}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    assert actual.stride() == expected.stride(), f"{name}: expected strides {expected.stride()}, got {actual.stride()}"


def _assert_equal_tensors(actual: Any, expected: Tensor, name: str) -> None:
    assert_same_metadata(actual, expected, name)
    assert actual.device == expected.device, f"{name}: expected device {expected.device}, got {actual.device}"
    if actual.device.type == "meta":
        return
    got, want = bits_of(actual.detach()), bits_of(expected.detach())
    if torch.equal(got, want):
        return
    differ = (got != want).reshape(-1)
    count, total = int(differ.sum()), differ.numel()
    # argmax returns the first of equal elements.
    index = tuple(int(i) for i in torch.unravel_index(differ.view(torch.uint8).argmax(), got.shape))
    digits = 2 * got.element_size()
    mask = (1 << 8 * got.element_size()) - 1
    got_bits, want_bits = (f"0x{int(bits[index]) & mask:0{digits}x}" for bits in (got, want))
    got_value, want_value = (_value(x, index) for x in (actual, expected))
    raise AssertionError(
        f"{name}: {count} of {total} elements differ ({expected.dtype}), the first at {index}: "
        f"got {got_value} ({got_bits}), expected {want_value} ({want_bits})"
    )


def _value(x: Tensor, index: tuple[int, ...]) -> str:
    if x.is_complex():
        return str(torch.view_as_real(x)[index].item())
    try:
        return repr(x[index].item())
    except (RuntimeError, NotImplementedError):  # packed formats such as float4_e2m1fn_x2 have no scalar
        return "?"


def _chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if x.shape != y.shape:
        raise ValueError(f"y: expected shape {tuple(x.shape)}, got {tuple(y.shape)}")
    x, y = x.detach().reshape(-1), y.detach().reshape(-1)
    for start in range(0, x.numel(), _CHUNK):
        yield x[start : start + _CHUNK].double(), y[start : start + _CHUNK].double()


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2·Σxy / Σ(x² + y²) in float64: 0 for equal tensors and if both are all zeros, NaN if either has a NaN.

    Raises ValueError for tensors of different shapes.
    """
    product = squares = 0.0
    for a, b in _chunks(x, y):
        product += float((a * b).sum())
        squares += float((a * a + b * b).sum())
    return 1 - 2 * product / squares if squares else 0.0


_SIGN_BITS = {"bf16": 15, "e4m3": 7, "e2m1": 3}
_NOT_A_LEVEL = 1 << 20


def quant_level_rank(codes: Tensor, fmt: str) -> Tensor:
    """Rank of each code among the values that a format has: those of neighbouring values differ by 1.

    Both zeros have rank 0, infinities those next to the largest values; NaN has 2^20, far from all of them.

    Args:
        codes: torch.bfloat16, or integers of 16 bits, for "bf16"; torch.float8_e4m3fn, or bytes, for "e4m3"; for "e2m1"
            bytes of any dtype with two codes each, the first one in the lower bits. Any shape.
        fmt: "bf16", "e4m3" or "e2m1".

    Returns:
        int32 of the codes' shape, for "e2m1" with a last dimension of twice the size.

    Raises:
        ValueError: another format, or elements of another size.
    """
    if fmt not in _SIGN_BITS:
        raise ValueError(f"fmt: expected bf16, e4m3 or e2m1, got {fmt!r}")
    size = 2 if fmt == "bf16" else 1
    if codes.element_size() != size:
        raise ValueError(f"codes: expected elements of {size} bytes for {fmt}, got {codes.dtype}")
    bits = bits_of(codes).int() & (0xFFFF if size == 2 else 0xFF)
    if fmt == "e2m1":
        bits = torch.stack((bits & 15, bits >> 4), dim=-1).flatten(-2)
    sign = 1 << _SIGN_BITS[fmt]
    magnitude = bits & (sign - 1)
    rank = torch.where((bits & sign) != 0, -magnitude, magnitude)
    is_nan = {"bf16": magnitude > 0x7F80, "e4m3": magnitude == 0x7F}.get(fmt)
    return rank if is_nan is None else rank.masked_fill(is_nan, _NOT_A_LEVEL)


def check_bias(x: Tensor, ref: Tensor, *, sigmas: float = 5.0, allowance: float = 0.1) -> None:
    """Raise AssertionError if the errors of `x`, a rounding of `ref`, are biased.

    With e = x - ref, counting finite errors that are not 0, the means of e and of e·sign(ref) must be within `sigmas`
    standard errors plus `allowance` · rms(e) of 0. With five standard errors, unbiased rounding fails once in a
    million. The allowance is needed where the density of the data is not constant within one step of a coarse format
    (rounding to the nearest e4m3 has a bias of 0.04 rms on normal data; truncation has 0.87 in e·sign(ref)); a format
    with one mantissa bit needs 0.2.
    """
    count = 0
    sum_squares = 0.0
    sums = [0.0, 0.0]
    for a, b in _chunks(x, ref):
        error = a - b
        keep = error.isfinite() & (error != 0)
        error, sign = error[keep], b[keep].sign()
        count += error.numel()
        sum_squares += float(error.square().sum())
        sums[0] += float(error.sum())
        sums[1] += float((error * sign).sum())
    if count < 2:
        return
    rms = math.sqrt(sum_squares / count)
    for what, total in zip(("x - ref", "(x - ref)·sign(ref)"), sums):
        mean = total / count
        standard_error = math.sqrt(max(sum_squares / count - mean * mean, 0.0) / (count - 1))
        limit = sigmas * standard_error + allowance * rms
        assert abs(mean) <= limit, f"mean of {what} over {count} elements: expected within ±{limit:.3g}, got {mean:.3g}"


def nearest_float32(value: Fraction) -> Fraction:
    """The float32 nearest to an exact value, of two the one with an even last bit. There is no overflow."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(value)
    unit = Fraction(2) ** max(exponent - 23, -149)
    return round(value / unit) * unit
