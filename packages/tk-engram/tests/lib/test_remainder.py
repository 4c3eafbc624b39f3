"""The remainder without a division, on numpy's integers, which wrap: the kernel runs the same expressions."""

from typing import Any

import numpy as np
import pytest

from tk_engram.lib.remainder import floor_remainder, reciprocal_of

EXTREME_SIZES = [1, 2, 3, 5, 7, 2**16 - 1, 2**16, 2**16 + 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 2, 2**31 - 1]


def u32(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.uint32)


def u64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.uint64)


def assert_remainders(x: np.ndarray, size: np.ndarray) -> None:
    """Of int64 x by int32 size."""
    reciprocal = reciprocal_of(size, u64, np.floor_divide)
    actual = floor_remainder(x.view(np.uint64), u32(size), reciprocal, u32, u64, np.where)
    assert actual.dtype == np.uint32
    np.testing.assert_array_equal(actual, np.remainder(x, size.astype(np.int64)))


def test_by_hand() -> None:
    x = np.array([7, -7, -1, 0, -(2**63), 2**63 - 1])
    assert_remainders(x, np.full(6, 5, np.int32))
    reciprocal = reciprocal_of(5, u64, np.floor_divide)
    actual = floor_remainder(x.view(np.uint64), u32(5), reciprocal, u32, u64, np.where)
    # 2⁶³ = 4 · (2⁴)¹⁵ · … : powers of 16 are 1 mod 5, so 2⁶³ mod 5 = 8 mod 5 = 3.
    assert actual.tolist() == [2, 3, 4, 0, 2, 2]


@pytest.mark.parametrize("size", EXTREME_SIZES)
def test_where_quotients_change(size: int) -> None:
    """Where the quotient grows by one, of either sign: there an estimate may be one off; and where halves change."""
    last = (2**63 - 1) // size
    quotients = {*range(min(last, 100)), last // 2, last - 1, last, *(min(2**k, last) for k in range(63))}
    near = {y + i for y in (*(q * size for q in quotients), *(2**k for k in range(64))) for i in range(-3, 4)}
    values = [x for y in near for x in (y, -y, ~y) if -(2**63) <= x < 2**63]
    assert_remainders(np.array(values, np.int64), np.full(len(values), size, np.int32))


def test_random() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**63), 2**63 - 1, 10**6, np.int64, endpoint=True) >> rng.integers(0, 63, 10**6)
    size = (rng.integers(1, 2**31, 10**6) >> rng.integers(0, 31, 10**6)).clip(1).astype(np.int32)
    assert_remainders(x, size)
    assert_remainders(x - x % size + (np.arange(10**6) % 3 - 1), size)
