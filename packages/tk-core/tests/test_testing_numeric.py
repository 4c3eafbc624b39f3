"""tk_core.testing.numeric."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tk_core.testing import assert_equal, calc_diff, check_bias, construct_logits, nearest_float32, quant_level_rank
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


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "e4m3")])
def test_ranks_are_those_of_all_values_in_order(dtype: torch.dtype, fmt: str) -> None:
    codes = torch.arange(256**dtype.itemsize).to(torch.int16 if fmt == "bf16" else torch.uint8)
    values, ranks = codes.view(dtype).double(), quant_level_rank(codes.view(dtype), fmt)
    assert_equal(quant_level_rank(codes, fmt), ranks)
    levels = values[~values.isnan()].unique()
    expected = torch.searchsorted(levels, values) - int((levels < 0).sum())
    assert torch.equal(ranks.long(), torch.where(values.isnan(), 2**20, expected))


def test_ranks_of_packed_codes() -> None:
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a sign.
    codes = torch.tensor([[0x10, 0x98], [0x7F, 0x2A]], dtype=torch.uint8)
    expected = torch.tensor([[0, 1, 0, -1], [-7, 7, -2, 2]], dtype=torch.int32)
    for same in (codes, codes.view(torch.int8), codes.view(torch.float4_e2m1fn_x2)):
        assert_equal(quant_level_rank(same, "e2m1"), expected)
    with pytest.raises(ValueError, match="fmt: expected bf16, e4m3 or e2m1, got 'fp8'"):
        quant_level_rank(codes, "fp8")
    with pytest.raises(ValueError, match="codes: expected elements of 2 bytes for bf16"):
        quant_level_rank(codes, "bf16")


def test_constructed_logits_have_gaps() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, 0.0])
    logits = construct_logits(300, 4, 2, ranks_of=lambda x: x.sigmoid() + bias, gap=0.1)
    assert (logits.shape, logits.dtype) == ((300, 4), torch.float32)
    ranks = (logits.sigmoid() + bias).sort(dim=1, descending=True).values
    assert (ranks[:, :2] - ranks[:, 1:3]).min() > 0.1
    assert (ranks[:, 2] - ranks[:, 3]).min() < 0.1  # which the two best do not depend on
    assert construct_logits(3, 8, 8, dtype=torch.bfloat16, gap=0.01).dtype is torch.bfloat16
    assert construct_logits(3, 8, 2, device="meta").is_meta
    with pytest.raises(ValueError, match="gap: expected ranks that can be further apart than 10, got 3 tokens"):
        construct_logits(3, 8, 2, gap=10)
