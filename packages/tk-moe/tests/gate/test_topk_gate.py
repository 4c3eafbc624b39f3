"""topk_gate."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, empty, tiers

from ..models import MODEL_EXPERTS, benches

# Of both signs: ∞, the largest, least normal and least subnormal numbers, 1, 0, and NaNs of several payloads.
_EXTREMES = (
    *(0xFF800000, 0xFF7FFFFF, 0xBF800000, 0x80800000, 0x80000001, 0x80000000, 0x00000000, 0x00000001, 0x00800000),
    *(0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF),
)


def make(num_tokens: int, num_experts: int, num_topk: int, values: str = "normal", first_element: int = 0) -> Make:
    """Scores that are `normal`, `ties` (of 4 values), `equal`, `extremes`, any `bits`, or as follows.

    "neighbours": each token's best scores are neighbours. "lane": one lane of a warp has them all, where a lane has 4
    experts of every 128. "last": a neighbour of the last expert chosen has the same score. The scores start at element
    `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        shape = (num_tokens, num_experts)
        if values == "normal":
            scores = torch.randn(shape, device=device)
        elif values == "ties":
            scores = torch.randint(0, 4, shape, device=device).float()
        elif values == "equal":
            scores = torch.zeros(shape, device=device)
        elif values == "extremes":
            patterns = torch.tensor([x - (x >> 31 << 32) for x in _EXTREMES], dtype=torch.int32, device=device)
            scores = patterns[torch.randint(0, len(_EXTREMES), shape, device=device)].view(torch.float32)
        elif values == "bits":
            scores = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device).view(torch.float32)
        elif values == "last":
            scores = torch.randn(shape, device=device)
            last = scores.argsort(1, descending=True)[:, num_topk - 1 : num_topk]
            scores.scatter_(1, (last ^ 1).clamp(max=num_experts - 1), scores.gather(1, last))
        elif values == "lane":
            lanes = torch.arange(num_experts, device=device) // 4 % 32
            scores = torch.rand(shape, device=device)
            scores += lanes == torch.randint(0, 32, (num_tokens, 1), device=device)
        else:
            first = torch.randint(0, num_experts, (num_tokens, 1), device=device)
            scores = torch.rand(shape, device=device) - (torch.arange(num_experts, device=device) - first).abs() // 8
        if first_element:
            scores = empty(*shape, device=device, first_element=first_element).copy_(scores)
        return {"scores": scores, "num_topk": num_topk}

    return build


SPEC = OpSpec(
    op=tk_moe.topk_gate,
    cases=(
        # One, several and 32 scores per lane, in vectors of 4, 2 and 1; lanes without any.
        Case("e256-k8-t9", make(9, 256, 8), small=True, modes=True),
        Case("e13-k3-t17", make(17, 13, 3), small=True, compile=True),
        Case("e66-k6-t5", make(5, 66, 6), small=True),
        Case("e72-k6-t33", make(33, 72, 6), small=True),
        Case("e108-k9-t3", make(3, 108, 9), small=True),
        Case("e1-k1-t3", make(3, 1, 1), small=True, compile=True),
        Case("e32-k32-t2", make(2, 32, 32), small=True),
        Case("e1024-k32-t3", make(3, 1024, 32), small=True, compile=True),
        Case("e1023-k32-t3", make(3, 1023, 32), small=True),
        Case("e33-k32-t3", make(3, 33, 32), small=True),
        Case("e256-k8-t0", make(0, 256, 8), small=True),
        Case("e256-k8-t1", make(1, 256, 8), small=True),
        Case("e256-k8-t5-unaligned", make(5, 256, 8, first_element=1), small=True),
        Case("e256-k8-t5-ties", make(5, 256, 8, "ties"), small=True),
        Case("e256-k32-t5-equal", make(5, 256, 32, "equal"), small=True),
        Case("e256-k32-t5-extremes", make(5, 256, 32, "extremes"), small=True),
        Case("e256-k32-t5-bits", make(5, 256, 32, "bits"), small=True),
        Case("e256-k16-t5-neighbours", make(5, 256, 16, "neighbours"), small=True),
        Case("e256-k8-t5-lane", make(5, 256, 8, "lane"), small=True),
        Case("e256-k16-t5-lane", make(5, 256, 16, "lane"), small=True),
        Case("e256-k8-t5-last", make(5, 256, 8, "last"), small=True),
        *(
            Case(f"e256-k8-t4001-{values}", make(4001, 256, 8, values))
            for values in ("ties", "equal", "extremes", "bits", "neighbours", "lane", "last")
        ),
        *(
            Case(f"e{num_experts}-k{num_topk}-t2003-extremes", make(2003, num_experts, num_topk, "extremes"))
            for num_experts, num_topk in ((8, 8), (13, 13), (72, 32), (129, 9), (513, 32), (1000, 32), (1024, 1))
        ),
        *(
            Case(f"e{num_experts}-k{num_topk}-t{num_tokens}", make(num_tokens, num_experts, num_topk, "ties"))
            for num_experts in MODEL_EXPERTS
            for num_topk, num_tokens in ((1, 2), (2, 31), (6, 0), (7, 1), (8, 4001), (8, 8001), (9, 31))
            if num_topk <= num_experts
        ),
        *(
            Case(f"e{num_experts}-k{num_topk}-t8001-normal", make(8001, num_experts, num_topk))
            for num_experts, num_topk in ((64, 6), (128, 8), (256, 8), (384, 8), (512, 10))
        ),
        *benches("e256-k8-t{}", lambda t: make(t, 256, 8), (8192, 128, 1, 64, 4001, 8001), models=(8192, 128)),
        *benches(
            "e{}-k{}-t8192",
            lambda e, k: make(8192, e, k),
            ((64, 6), (72, 6), (128, 8), (384, 8), (512, 8), (256, 32)),
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

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


GOOD: dict[str, Any] = {"scores": torch.zeros(2, 8), "num_topk": 2}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"scores": torch.zeros(2, 1025)}, ValueError, "scores.*1 to 1024.*1025"),
        ({"num_topk": 9}, ValueError, "num_topk.*1 to 8.*9"),
        ({"scores": torch.zeros(2, 64), "num_topk": 33}, ValueError, "num_topk.*1 to 32.*33"),
    ],
)
