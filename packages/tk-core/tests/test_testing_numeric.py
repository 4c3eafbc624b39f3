"""tk_core.testing.numeric."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tk_core.testing import assert_equal, calc_diff, check_bias, nearest_float32
from tk_core.testing.trees import transfer

_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.bool),
    torch.complex64,
)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_any_bits_are_equal_to_themselves_and_to_no_others(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (5, 8 * dtype.itemsize), dtype=torch.uint8)
    whole = values.view(dtype)
    for x in (whole, whole[:, :6]):
        assert_equal(x, transfer(x))
        other = transfer(x)
        other.view(torch.uint8)[3, 2 * dtype.itemsize] ^= 1
        with pytest.raises(AssertionError, match=r"result: 1 of \d+ elements differ .* the first at \(3, 2(, 0)?\)"):
            assert_equal(other, x)


def test_the_message_shows_values_and_bits() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    y = torch.tensor([[1.0, 2.5], [3.0, -0.0]])
    message = r"2 of 4 elements differ \(torch.float32\), the first at \(0, 1\): got 2.0 \(0x40000000\), expected 2.5"
    with pytest.raises(AssertionError, match=message):
        assert_equal(x, y)


def test_nan_equals_the_same_nan_only() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert_equal(quiet, quiet.clone())
    with pytest.raises(AssertionError, match="0x7fc00001"):
        assert_equal(other, quiet)


_ONES = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (_ONES, _ONES.double(), "result: expected dtype torch.float64, got torch.float32"),
        (_ONES, torch.ones(4, 2), r"result: expected shape \(4, 2\), got \(2, 4\)"),
        (_ONES, torch.ones(4, 2).t(), r"result: expected strides \(1, 2\), got \(4, 1\)"),
        (_ONES, _ONES.to("meta"), "result: expected device meta, got cpu"),
        (None, _ONES, "result: expected a tensor, got NoneType"),
        (_ONES, None, "result: expected NoneType, got Tensor"),
        ((_ONES,), (_ONES, _ONES), "result: expected 2 items, got 1"),
        ([_ONES], (_ONES,), "result: expected tuple, got list"),
        ((_ONES, [_ONES * 2]), (_ONES, [_ONES]), r"result\[1\]\[0\]: 8 of 8 elements differ"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, r"result\['b'\]: expected 3, got 2"),
        ({"a": 1}, {"b": 1}, r"result: expected keys \['b'\], got \['a'\]"),
        (3, 4, "result: expected 4, got 3"),
        (True, 1, "result: expected int, got bool"),
    ],
)
def test_what_differs_is_named(actual: Any, expected: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_equal(actual, expected)


def test_equal_trees() -> None:
    tree = (torch.zeros(0, 4), [None, 3], {"a": torch.tensor(1.0)}, "text")
    assert_equal(tree, (torch.zeros(0, 4), [None, 3], {"a": torch.tensor(1.0)}, "text"))


def test_calc_diff() -> None:
    x = torch.randn(100, 7)
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-15)
    assert calc_diff(torch.zeros(3), torch.zeros(3)) == 0
    assert calc_diff(torch.zeros(0), torch.zeros(0)) == 0
    # 1 - 2·(1·2 + 2·1) / ((1 + 4) + (4 + 1))
    assert calc_diff(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])) == pytest.approx(0.2)
    assert not calc_diff(torch.tensor([float("nan")]), torch.ones(1)) < 1
    with pytest.raises(ValueError, match=r"y: expected shape \(3,\), got \(4,\)"):
        calc_diff(torch.zeros(3), torch.zeros(4))


def test_calc_diff_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(10, 10), torch.randn(10, 10)
    whole = calc_diff(x, y)
    monkeypatch.setattr("tk_core.testing.numeric._CHUNK", 7)
    assert calc_diff(x, y) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_to_nearest_is_unbiased(dtype: torch.dtype) -> None:
    x = torch.randn(100_000)
    check_bias(x.to(dtype), x)
    check_bias(x.abs().to(dtype), x.abs())


def test_biases_are_found() -> None:
    x = torch.randn(100_000)
    truncated = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    with pytest.raises(AssertionError, match=r"mean of \(x - ref\)·sign\(ref\) over \d+ elements"):
        check_bias(truncated, x)
    down = torch.where(truncated > x, truncated - truncated.abs() / 128, truncated)
    with pytest.raises(AssertionError, match="mean of x - ref over"):
        check_bias(down, x)
    check_bias(x, x)


@pytest.mark.parametrize("scale", [-1074, -149, -140, -126, -1, 0, 60])
def test_nearest_float32_is_numpys(scale: int) -> None:
    generator = np.random.default_rng(0)
    ties = generator.integers(-(2**26), 2**26, 200) / 2.0**24
    for x in (0.0, *np.ldexp([*ties, *generator.standard_normal(200)], scale).tolist()):
        assert nearest_float32(Fraction(x)) == Fraction(float(np.float32(x)))
