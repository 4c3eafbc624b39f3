"""topk_gate."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import tiers
from tk_moe.testing.gate.topk_gate import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 3.0, 2.0], [1, 2, 0]),
        ([2.0, 2.0, 2.0], [0, 1, 2]),
        ([0.0, -0.0, 0.0, -0.0], [0, 1, 2, 3]),
        ([-0.0, 1e-45, -1e-45, 0.0], [1, 0, 3, 2]),
        ([INF, NAN, -INF, NAN, -NAN], [1, 3, 4, 0, 2]),
        ([-INF, -INF, -3.4e38], [2, 0, 1]),
        ([1.0, 1.0 + 2**-23, 1.0, 1.0 + 2**-23], [1, 3, 0, 2]),
    ],
)
def test_order_by_hand(scores: list[float], expected: list[int]) -> None:
    for num_topk in range(1, len(scores) + 1):
        out = tk_moe.topk_gate(torch.tensor([scores]), num_topk)
        assert out.dtype == torch.int64
        assert out.tolist() == [expected[:num_topk]]


def naive_topk(scores: list[float], num_topk: int) -> list[int]:
    """Repeatedly take the first of the best experts left."""
    left = list(range(len(scores)))
    chosen = []
    for _ in range(num_topk):
        best = left[0]
        for index in left[1:]:
            score, record = scores[index], scores[best]
            if score > record or (math.isnan(score) and not math.isnan(record)):
                best = index
        left.remove(best)
        chosen.append(best)
    return chosen


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reference_against_a_loop(data: st.DataObject) -> None:
    few = st.sampled_from([-INF, -1.0, -0.0, 0.0, 1e-45, 1.0, INF, NAN, -NAN])
    value = data.draw(st.sampled_from([few, st.floats(width=32)]))
    num_experts = data.draw(st.integers(1, 20))
    rows = data.draw(st.lists(st.lists(value, min_size=num_experts, max_size=num_experts), min_size=1, max_size=3))
    num_topk = data.draw(st.integers(1, num_experts))
    out = tk_moe.topk_gate(torch.tensor(rows), num_topk)
    assert out.tolist() == [naive_topk(row, num_topk) for row in rows]


def test_ties_by_the_thousand() -> None:
    scores = torch.randint(0, 3, (50, 1024)).float()
    out = tk_moe.topk_gate(scores, 32).tolist()
    assert out == [naive_topk(row, 32) for row in scores.tolist()]


def test_input_is_left_alone() -> None:
    scores = torch.tensor([[-0.0, -NAN, 1.0]])
    before = scores.clone()
    tk_moe.topk_gate(scores, 2)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


GOOD: dict[str, Any] = {"scores": torch.zeros(2, 8), "num_topk": 2}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scores": [[1.0, 2.0]]}, TypeError, "scores.*Tensor"),
        ({"scores": torch.zeros(2, 8, dtype=torch.bfloat16)}, TypeError, "scores.*float32.*bfloat16"),
        ({"scores": torch.zeros(2, 8, dtype=torch.float64)}, TypeError, "scores.*float32"),
        ({"scores": torch.zeros(8)}, ValueError, "scores.*shape"),
        ({"scores": torch.zeros(1, 2, 8)}, ValueError, "scores.*shape"),
        ({"scores": torch.zeros(2, 16)[:, ::2]}, ValueError, "scores.*contiguous"),
        ({"scores": torch.zeros(2, 16)[:, :8]}, ValueError, "scores.*contiguous"),
        ({"scores": torch.zeros(2, 0)}, ValueError, "scores.*1 to 1024"),
        ({"scores": torch.zeros(2, 1025)}, ValueError, "scores.*1 to 1024.*1025"),
        ({"num_topk": 0}, ValueError, "num_topk.*1 to 8"),
        ({"num_topk": -1}, ValueError, "num_topk"),
        ({"num_topk": 9}, ValueError, "num_topk.*1 to 8.*9"),
        ({"scores": torch.zeros(2, 64), "num_topk": 33}, ValueError, "num_topk.*1 to 32.*33"),
        ({"num_topk": 2.0}, TypeError, "num_topk.*int"),
        ({"num_topk": True}, TypeError, "num_topk.*int"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.topk_gate(**{**GOOD, **change})
