"""The references' fused multiply-add."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_core.reference.fma import fma
from tk_core.testing import nearest_float32


def fma_of(a: float, b: float, c: float) -> float:
    return fma(*(torch.tensor([x], dtype=torch.float32) for x in (a, b, c))).item()


def test_is_rounded_once() -> None:
    # 16519105 · 130 = 2³¹ + 2. Added to 1, the product 2⁻²⁴ + 2⁻⁵⁴ is just more than half of float32's step 2⁻²³, but
    # exactly half after a first rounding to float64's 53 bits.
    a, b = 16519105 * 2.0**-48, 130 * 2.0**-7
    assert Fraction(a) * Fraction(b) == Fraction(1, 2**24) + Fraction(1, 2**54)
    assert fma_of(a, b, 1.0) == 1 + 2.0**-23
    assert fma_of(-a, b, -1.0) == -1 - 2.0**-23
    # 14221746 · 151 = 2³¹ - 2: just less than half.
    assert fma_of(14221746 * 2.0**-48, 151 * 2.0**-7, 1 + 2.0**-23) == 1 + 2.0**-23


def test_ties_go_to_the_even_neighbour() -> None:
    tie = torch.tensor([2.0**-24, 3 * 2.0**-24, 2.0**-24 + 2.0**-47])
    assert fma(tie, torch.ones(3), torch.ones(3)).tolist() == [1, 1 + 2.0**-22, 1 + 2.0**-23]


def test_sums_that_cancel_and_terms_of_different_size() -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(3000).astype(np.float32) for _ in range(2))
    c = np.where(generator.random(3000) < 0.5, -(a * b), np.float32(1)).astype(np.float32)
    a[:500] = np.float32(1 + 2.0**-12)
    b[:500] = np.float32(1 - 2.0**-12) * np.exp2(generator.integers(-60, 60, 500)).astype(np.float32)
    c[:250] = 1
    got = fma(*(torch.from_numpy(x) for x in (a, b, c)))
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert Fraction(result) == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z))


_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@given(_FLOATS, _FLOATS, _FLOATS)
def test_is_the_nearest_float32(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert Fraction(fma_of(a, b, c)) == nearest_float32(exact)


@given(st.integers(2**23, 2**24 - 1), st.integers(2**23, 2**24 - 1), st.integers(-60, 60), st.booleans())
def test_is_the_nearest_float32_of_long_sums(a: int, b: int, shift: int, is_negative: bool) -> None:
    c = -(2.0**shift) if is_negative else 2.0**shift
    assert Fraction(fma_of(a, b * 2.0**-24, c)) == nearest_float32(Fraction(a * b, 2**24) + Fraction(c))


def test_infinity_nan_and_zeros() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 3.4e38])
    a, b, c = torch.tensor(list(product(values, repeat=3))).T
    # With these values a sum is exact in float64, unless it is infinite or NaN.
    expected = (a.double() * b.double() + c.double()).float()
    torch.testing.assert_close(fma(a, b, c), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(fma(a, b, c).signbit() | expected.isnan(), expected.signbit() | expected.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(50, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(50)
    grads = torch.autograd.grad(fma(a, b, c), (a, b, c), grad)
    for got, expected in zip(grads, (grad * b, grad * a, grad), strict=True):
        torch.testing.assert_close(got, expected.to(dtype))


def test_float64_is_plain() -> None:
    a, b, c = torch.randn(3, 50, dtype=torch.float64)
    assert torch.equal(fma(a, b, c), a * b + c)


def test_large_tensors_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = torch.randn(7, 1, 5), torch.randn(3, 5), torch.randn(7, 3, 1)
    whole = fma(a, b, c)
    monkeypatch.setattr("tk_core.reference.fma._AT_ONCE", 31)
    assert torch.equal(fma(a, b, c), whole)
    assert torch.equal(fma(a[:1], b, c[:1]), whole[:1])
