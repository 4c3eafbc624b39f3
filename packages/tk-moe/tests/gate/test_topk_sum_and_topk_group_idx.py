"""topk_sum_and_topk_group_idx."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers

from ..models import benches
from . import test_topk_gate as gate_cases


def make(
    num_tokens: int,
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    values: str = "normal",
    first_element: int = 0,
) -> Make:
    """Scores as in topk_gate's cases, in groups."""
    make_scores = gate_cases.make(num_tokens, num_groups * group_size, 1, values, first_element)

    def build(device: str) -> dict[str, Any]:
        scores = make_scores(device)["scores"].view(num_tokens, num_groups, group_size)
        return {"scores": scores, "num_topk_sum": num_topk_sum, "num_topk_groups": num_topk_groups}

    return build


SPEC = OpSpec(
    op=tk_moe.topk_sum_and_topk_group_idx,
    cases=(
        # Numbers of groups that are powers of two or not, idle lanes, one score per lane and more, vectors of 4, 2, 1.
        Case("g8-e32-s2-k4-t9", make(9, 8, 32, 2, 4), small=True, modes=True, compile=True),
        Case("g8-e32-s1-k4-t9", make(9, 8, 32, 1, 4), small=True),
        Case("g3-e14-s2-k2-t7", make(7, 3, 14, 2, 2), small=True, compile=True),
        Case("g5-e13-s1-k5-t7", make(7, 5, 13, 1, 5), small=True, compile=True),
        Case("g32-e32-s2-k32-t3", make(3, 32, 32, 2, 32), small=True),
        Case("g17-e60-s2-k9-t3", make(3, 17, 60, 2, 9), small=True, compile=True),
        Case("g1-e1-s1-k1-t3", make(3, 1, 1, 1, 1), small=True),
        Case("g1-e1024-s2-k1-t3", make(3, 1, 1024, 2, 1), small=True),
        Case("g32-e1-s1-k8-t3", make(3, 32, 1, 1, 8), small=True),
        Case("g4-e2-s2-k2-t5", make(5, 4, 2, 2, 2), small=True),
        Case("g8-e32-s2-k4-t0", make(0, 8, 32, 2, 4), small=True),
        Case("g8-e32-s2-k4-t1", make(1, 8, 32, 2, 4), small=True),
        Case("g8-e32-s2-k4-t5-unaligned", make(5, 8, 32, 2, 4, first_element=1), small=True),
        *(
            Case(f"g8-e32-s2-k8-t7-{values}", make(7, 8, 32, 2, 8, values), small=True)
            for values in ("ties", "equal", "extremes", "bits", "lane")
        ),
        *(
            Case(f"g{groups}-e{size}-s{num}-k{kept}-t{tokens}-{values}", make(tokens, groups, size, num, kept, values))
            for groups, size, kept in ((8, 32, 4), (4, 72, 2), (16, 16, 16), (6, 6, 3), (12, 32, 4), (3, 341, 2))
            for num, tokens, values in ((1, 31, "ties"), (2, 4001, "ties"), (2, 8001, "normal"), (2, 2003, "extremes"))
        ),
        Case("g8-e32-s2-k4-t4001-bits", make(4001, 8, 32, 2, 4, "bits")),
        *benches("g8-e32-s2-k4-t{}", lambda t: make(t, 8, 32, 2, 4), (1, 8, 64, 128, 1024, 8192), models=(8192,)),
        *benches("g{}-e{}-s2-k{}-t8192", lambda g, e, k: make(8192, g, e, 2, k), ((4, 32, 2), (8, 48, 4), (16, 32, 4))),
    ),
)


test_tiers = tiers.tests(SPEC)

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


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"scores": torch.zeros(2, 33, 3)}, ValueError, "num_groups.*1 to 32.*33"),
        ({"scores": torch.zeros(2, 4, 257)}, ValueError, "num_experts_per_group.*1 to 256.*257"),
        ({"num_topk_sum": 3}, ValueError, "num_topk_sum.*1 to 2.*3"),
        ({"scores": torch.zeros(2, 4, 1)}, ValueError, "num_topk_sum.*1 to 1.*2"),
        ({"num_topk_groups": 5}, ValueError, "num_topk_groups.*1 to 4.*5"),
    ],
)
