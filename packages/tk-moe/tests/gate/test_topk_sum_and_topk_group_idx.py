"""topk_sum_and_topk_group_idx."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import tiers
from tk_moe.testing.gate.topk_sum_and_topk_group_idx import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("scores", "num_topk_sum", "expected"),
    [
        ([[1.0, 5.0, 0.0], [3.0, 4.0, -9.0], [2.0, 2.0, 2.0]], 1, [0, 1, 2]),
        ([[1.0, 5.0, 0.0], [3.0, 4.0, -9.0], [2.0, 2.0, 2.0]], 2, [1, 0, 2]),
        ([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]], 2, [0, 1, 2]),
        ([[-0.0, 0.0], [0.0, 0.0], [-0.0, -0.0]], 2, [0, 1, 2]),
        ([[INF, -INF, 0.0], [INF, INF, -1.0], [NAN, -INF, -INF]], 2, [2, 0, 1]),
        ([[INF, -INF], [1.0, 1.0]], 2, [0, 1]),  # ∞ - ∞ is NaN
        ([[-INF, -INF], [-3e38, -3e38], [-3e38, -1.0]], 2, [2, 0, 1]),
        ([[1.0, 2.0**-25], [1.0, 0.0], [1.0, 2.0**-23]], 2, [2, 0, 1]),  # 1 + 2^-25 rounds to 1
    ],
)
def test_by_hand(scores: list[list[float]], num_topk_sum: int, expected: list[int]) -> None:
    for num_topk_groups in range(1, len(scores) + 1):
        out = tk_moe.topk_sum_and_topk_group_idx(torch.tensor([scores]), num_topk_sum, num_topk_groups)
        assert out.dtype == torch.int64
        assert out.tolist() == [expected[:num_topk_groups]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reference_against_sorted(data: st.DataObject) -> None:
    num_groups, group_size = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 5))
    num_topk_sum, num_topk_groups = data.draw(st.integers(1, 2)), data.draw(st.integers(1, num_groups))
    # Halves add without rounding.
    value = st.integers(-3, 3).map(lambda x: x / 2)
    group = st.lists(value, min_size=group_size, max_size=group_size)
    scores = data.draw(st.lists(group, min_size=num_groups, max_size=num_groups))
    sums = [sum(sorted(row)[-num_topk_sum:]) for row in scores]
    expected = sorted(range(num_groups), key=lambda g: (-sums[g], g))[:num_topk_groups]
    out = tk_moe.topk_sum_and_topk_group_idx(torch.tensor([scores]), num_topk_sum, num_topk_groups)
    assert out.tolist() == [expected]


GOOD: dict[str, Any] = {"scores": torch.zeros(2, 4, 3), "num_topk_sum": 2, "num_topk_groups": 2}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scores": [[1.0, 2.0]]}, TypeError, "scores.*Tensor"),
        ({"scores": torch.zeros(2, 4, 3, dtype=torch.bfloat16)}, TypeError, "scores.*float32.*bfloat16"),
        ({"scores": torch.zeros(2, 12)}, ValueError, "scores.*shape"),
        ({"scores": torch.zeros(2, 4, 6)[:, :, ::2]}, ValueError, "scores.*contiguous"),
        ({"scores": torch.zeros(2, 0, 3)}, ValueError, "num_groups.*1 to 32.*0"),
        ({"scores": torch.zeros(2, 33, 3)}, ValueError, "num_groups.*1 to 32.*33"),
        ({"scores": torch.zeros(2, 4, 0)}, ValueError, "num_experts_per_group.*1 to 256.*0"),
        ({"scores": torch.zeros(2, 4, 257)}, ValueError, "num_experts_per_group.*1 to 256.*257"),
        ({"num_topk_sum": 0}, ValueError, "num_topk_sum.*1 to 2.*0"),
        ({"num_topk_sum": 3}, ValueError, "num_topk_sum.*1 to 2.*3"),
        ({"scores": torch.zeros(2, 4, 1)}, ValueError, "num_topk_sum.*1 to 1.*2"),
        ({"num_topk_sum": 2.0}, TypeError, "num_topk_sum.*int"),
        ({"num_topk_groups": 0}, ValueError, "num_topk_groups.*1 to 4.*0"),
        ({"num_topk_groups": 5}, ValueError, "num_topk_groups.*1 to 4.*5"),
        ({"num_topk_groups": True}, TypeError, "num_topk_groups.*int"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.topk_sum_and_topk_group_idx(**{**GOOD, **change})
