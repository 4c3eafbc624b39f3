"""inplace_unique_group_indices."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers

from ..balance.test_group_count import make_indices
from ..models import benches


def make(num_tokens: int, num_topk: int, num_groups: int, *drawn: Any, **options: Any) -> Make:
    """Arguments of inplace_unique_group_indices; the rest is as in `make_indices`."""
    return make_indices("group_indices", (num_tokens, num_topk), num_groups, *drawn, **options, num_groups=num_groups)


SPEC = OpSpec(
    op=tk_moe.inplace_unique_group_indices,
    mutates=("group_indices",),
    cases=(
        # Rows aligned to 16 bytes and to 8.
        Case("g8-k8-t67", make(67, 8, 8), small=True, modes=True, compile=True),
        Case("g33-k9-t67", make(67, 9, 33), small=True, compile=True),
        Case("g128-k32-t9", make(9, 32, 128), small=True, compile=True),
        Case("g64-k6-t31", make(31, 6, 64), small=True),
        Case("g1-k1-t3", make(3, 1, 1), small=True),
        Case("g8-k8-t0", make(0, 8, 8), small=True),
        Case("g8-k8-t1", make(1, 8, 8), small=True),
        Case("g64-k8-t67-int32", make(67, 8, 64, dtype=torch.int32), small=True, modes=True, compile=True),
        Case("g33-k9-t67-int32-none", make(67, 9, 33, "none", 1, torch.int32), small=True),
        Case("g128-k8-t8001-int32", make(8001, 8, 128, dtype=torch.int32)),
        Case("g16-k8-t67-last", make(67, 8, 16, "last"), small=True),
        Case("g16-k8-t67-none", make(67, 8, 16, "none"), small=True),
        *(
            Case(f"g{num_groups}-k{num_topk}-t{num_tokens}-{routing}", make(num_tokens, num_topk, num_groups, routing))
            for num_groups in (4, 8, 36, 72, 128)
            for num_topk, num_tokens, routing in ((2, 2, "any"), (8, 8001, "any"), (9, 4001, "none"), (7, 31, "half"))
        ),
        *benches(
            "g{}-k8-t{}",
            lambda g, t: make(t, 8, g),
            ((8, 8192), (8, 1), (8, 128), (8, 1024), (128, 8192)),
            models=((8, 8192),),
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_by_hand(dtype: torch.dtype) -> None:
    group_indices = torch.tensor([[3, 1, 3, 3], [0, 0, 1, 1], [-1, 2, -1, 2]], dtype=dtype)
    assert tk_moe.inplace_unique_group_indices(group_indices, 4) is None
    assert group_indices.tolist() == [[3, 1, -1, -1], [0, -1, 1, -1], [-1, 2, -1, -1]]


def test_what_is_no_group_stays() -> None:
    group_indices = torch.tensor([[-2, -2, 4, 4, 2**32, 2**32, 0, 0]])
    tk_moe.inplace_unique_group_indices(group_indices, 4)
    assert group_indices.tolist() == [[-2, -2, 4, 4, 2**32, 2**32, 0, -1]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reference_against_a_set(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 128))
    row = data.draw(st.lists(st.integers(-1, num_groups - 1), min_size=1, max_size=32))
    seen: set[int] = set()
    expected = []
    for group in row:
        expected.append(-1 if group in seen else group)
        seen.add(group)
    group_indices = torch.tensor([row])
    tk_moe.inplace_unique_group_indices(group_indices, num_groups)
    assert group_indices.tolist() == [expected]


test_bad_input = tiers.bad_input(
    SPEC,
    {"group_indices": torch.zeros(4, 2, dtype=torch.int64), "num_groups": 4},
    [
        ({"group_indices": torch.zeros(4, 33, dtype=torch.int64)}, ValueError, "group_indices.*1 to 32"),
        ({"num_groups": 129}, ValueError, "num_groups.*1 to 128"),
    ],
)
