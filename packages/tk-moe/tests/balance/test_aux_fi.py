"""aux_fi."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers

from ..models import benches
from .test_group_count import count_cases, make_indices


def make(
    num_tokens: int, num_topk: int, num_experts: int, routing: str = "any", num_aux_topk: int = 0, **drawn: Any
) -> Make:
    """Arguments of aux_fi; num_aux_topk is num_topk unless given. The rest is as in `make_indices`."""
    others = {"num_experts": num_experts, "num_aux_topk": num_aux_topk or num_topk}
    return make_indices("topk_idx", (num_tokens, num_topk), num_experts, routing, **drawn, **others)


SPEC = OpSpec(
    op=tk_moe.aux_fi,
    cases=(
        *count_cases("e", make),
        Case("e32-k6-t67-aux5", make(67, 6, 32, num_aux_topk=5), small=True),
        # count · num_experts takes more than 24 bits, then more than 31.
        Case("e1024-k32-t8001-last", make(8001, 32, 1024, "last")),
        Case("e1023-k32-t131071-last", make(131071, 32, 1023, "last", 31)),
        *benches("e256-k8-t{}", lambda t: make(t, 8, 256), (8192, 1, 8, 64, 128, 1024), models=(8192,)),
        *benches("e256-k8-t{}-half", lambda t: make(t, 8, 256, "half"), (8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    fi = tk_moe.aux_fi(torch.tensor([[2, 0], [-1, 2], [2, 4], [1, -7]]), 4, 2)
    assert fi.dtype == torch.float32
    assert fi.tolist() == [4 / 8, 4 / 8, 12 / 8, 0.0]
    assert tk_moe.aux_fi(torch.tensor([[2, 0], [-7, 4]], dtype=torch.int32), 3, 2).tolist() == [3 / 4, 0.0, 3 / 4]


def test_no_tokens() -> None:
    assert tk_moe.aux_fi(torch.empty(0, 8, dtype=torch.int64), 3, 8).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_aux_topk"), [(3, 7, 3), (1001, 13, 4), (70001, 1023, 31)])
def test_products_are_rounded_to_float32_and_divided_once(num_tokens: int, num_experts: int, num_aux_topk: int) -> None:
    topk_idx = torch.randint(0, 2, (num_tokens, 4)) * (num_experts - 1)
    fi = tk_moe.aux_fi(topk_idx, num_experts, num_aux_topk)
    count = int((topk_idx == 0).sum())
    # numpy's float32 of an int rounds to nearest even; the quotient of two float32 in float64, rounded again, is exact
    # enough: twice 24 bits and two more are 50.
    numerator, divisor = np.float32(count * num_experts), np.float32(num_tokens * num_aux_topk)
    quotient = np.float32(float(Fraction(float(numerator)) / Fraction(float(divisor))))
    assert fi[0].item() == quotient


test_bad_input = tiers.bad_input(
    SPEC,
    {"topk_idx": torch.zeros(4, 2, dtype=torch.int64), "num_experts": 4, "num_aux_topk": 2},
    [
        ({"topk_idx": torch.zeros(4, 0, dtype=torch.int64)}, ValueError, "topk_idx.*1 to 32"),
        ({"num_experts": 0}, ValueError, "num_experts.*1 to 1024"),
        ({"num_aux_topk": 33}, ValueError, "num_aux_topk.*1 to 32"),
    ],
)
