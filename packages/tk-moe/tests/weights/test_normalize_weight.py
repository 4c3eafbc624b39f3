"""normalize_weight."""

import struct
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import nearest_float32, tiers
from tk_moe.testing.weights.normalize_weight import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


def test_by_hand() -> None:
    denominator, normalized = tk_moe.normalize_weight(torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]))
    assert denominator.tolist() == [4.0, torch.tensor(1e-20).item()]
    assert normalized.tolist() == [[0.25, 0.5, 0.25], [0.0, 0.0, 0.0]]


def test_sum_is_in_order() -> None:
    # 2^24 + 1 rounds down to 2^24 each time; the other way around the ones would count.
    denominator, _ = tk_moe.normalize_weight(torch.tensor([[2.0**24, 1.0, 1.0], [1.0, 1.0, 2.0**24]]))
    assert denominator.tolist() == [2.0**24, 2.0**24 + 2]


def test_no_weight_at_all_divides_by_the_small_constant() -> None:
    _, normalized = tk_moe.normalize_weight(torch.tensor([[0.0, 1e-30]]))
    assert normalized.tolist() == [[0.0, (torch.tensor(1e-30) / torch.tensor(1e-20)).item()]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(2.0**-30, 2.0**30, width=32), min_size=1, max_size=9))
def test_reference_against_exact_arithmetic(weights: list[float]) -> None:
    total = Fraction(struct.unpack("<f", struct.pack("<f", 1e-20))[0])
    for weight in weights:
        total = nearest_float32(total + Fraction(weight))
    denominator, normalized = tk_moe.normalize_weight(torch.tensor([weights]))
    assert Fraction(denominator.item()) == total
    assert [Fraction(x) for x in normalized[0].tolist()] == [
        nearest_float32(Fraction(weight) / total) for weight in weights
    ]


@pytest.mark.parametrize(
    ("topk_weights", "error", "match"),
    [
        ([[1.0]], TypeError, "topk_weights.*Tensor"),
        (torch.zeros(2, 8, dtype=torch.bfloat16), TypeError, "topk_weights.*float32"),
        (torch.zeros(2, 8, dtype=torch.float64), TypeError, "topk_weights.*float32"),
        (torch.zeros(8), ValueError, "topk_weights.*shape"),
        (torch.zeros(2, 2, 8), ValueError, "topk_weights.*shape"),
        (torch.zeros(8, 2).T, ValueError, "topk_weights.*contiguous"),
        (torch.zeros(2, 16)[:, :8], ValueError, "topk_weights.*contiguous"),
        (torch.zeros(2, 0), ValueError, "topk_weights.*1 to 32"),
        (torch.zeros(2, 33), ValueError, "topk_weights.*1 to 32"),
    ],
)
def test_bad_input(topk_weights: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.normalize_weight(topk_weights)
