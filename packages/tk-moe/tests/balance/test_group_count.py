"""group_count."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_core
import tk_moe
from tk_core.arch import ARCHS, arch_from_name
from tk_core.testing import Case, Make, OpSpec, empty, tiers
from tk_moe.balance.group_count import MAX_PAIRS, cluster_size_for

from ..models import MODEL_EXPERTS, benches

# Not a group for any number of groups; includes values whose low 32 bits alone would be one.
_NO_GROUP = (-1, -2, -(2**31), -(2**32), -(2**32) + 3, -(2**63), 1024, 2**31, 2**32, 2**32 + 3, 2**63 - 1)


def make_indices(
    name: str,
    shape: tuple[int, int],
    limit: int,
    routing: str = "any",
    first_element: int = 0,
    dtype: torch.dtype = torch.int64,
    **others: Any,
) -> Make:
    """An op's arguments: indices below `limit`, called `name`, and others.

    Indices are "any", all the "last", "half" of them group 0, or mostly of "none". They start at element
    `first_element` of their storage.
    """
    return lambda device: {name: _indices(shape, limit, routing, first_element, dtype, device), **others}


def _indices(
    shape: tuple[int, int], num_groups: int, routing: str, first_element: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    out = empty(*shape, dtype=dtype, device=device, first_element=first_element)
    if routing == "last":
        return out.fill_(num_groups - 1)
    out.random_(0, num_groups)
    if routing == "half":
        out.masked_fill_(torch.rand(shape, device=device) < 0.5, 0)
    if routing == "none":
        table = torch.tensor(_NO_GROUP, device=device).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
        nothing = table[torch.randint(0, len(_NO_GROUP), shape, device=device)]
        out.copy_(torch.where(torch.rand(shape, device=device) < 0.7, nothing, out))
    return out


def make(num_tokens: int, num_topk: int, num_groups: int, *drawn: Any, **options: Any) -> Make:
    """Arguments of group_count; the rest is as in `make_indices`."""
    return make_indices("group_idx", (num_tokens, num_topk), num_groups, *drawn, **options, num_groups=num_groups)


def count_cases(letter: str, make: Callable[..., Make]) -> list[Case]:
    """Cases of the kernel that counts; their names begin with `letter` and the number of groups."""
    return [
        # One block: up to 4096 pairs.
        Case(f"{letter}256-k8-t31", make(31, 8, 256), small=True, modes=True, compile=True),
        Case(f"{letter}13-k3-t31", make(31, 3, 13), small=True),
        Case(f"{letter}1024-k32-t9", make(9, 32, 1024), small=True),
        Case(f"{letter}1-k1-t5", make(5, 1, 1), small=True),
        Case(f"{letter}8-k2-t0", make(0, 2, 8), small=True),
        Case(f"{letter}8-k2-t1", make(1, 2, 8), small=True),
        Case(f"{letter}32-k6-t67-unaligned", make(67, 6, 32, first_element=1), small=True),
        Case(f"{letter}32-k6-t67-last", make(67, 6, 32, "last"), small=True),
        Case(f"{letter}32-k6-t67-none", make(67, 6, 32, "none"), small=True),
        Case(f"{letter}32-k6-t67-int32", make(67, 6, 32, dtype=torch.int32), small=True, modes=True, compile=True),
        # A cluster.
        Case(f"{letter}256-k8-t8001-int32", make(8001, 8, 256, dtype=torch.int32)),
        Case(f"{letter}256-k8-t600", make(600, 8, 256), small=True, modes=True, compile=True),
        Case(f"{letter}13-k9-t500-none", make(500, 9, 13, "none"), small=True),
        *(Case(f"{letter}256-k8-t{num_tokens}", make(num_tokens, 8, 256)) for num_tokens in (512, 513, 4001, 8001)),
        *(Case(f"{letter}256-k8-t4001-{routing}", make(4001, 8, 256, routing)) for routing in ("last", "half", "none")),
    ]


SPEC = OpSpec(
    op=tk_moe.group_count,
    cases=(
        *count_cases("g", make),
        Case("g32-k6-t67-int32-none", make(67, 6, 32, "none", 1, torch.int32), small=True),
        Case("g1024-k32-t8001", make(8001, 32, 1024)),
        Case("g7-k32-t65536", make(65536, 32, 7)),
        *(
            Case(f"g{num_groups}-k{num_topk}-t{num_tokens}", make(num_tokens, num_topk, num_groups))
            for num_groups in MODEL_EXPERTS
            for num_topk, num_tokens in ((1, 2), (6, 8001), (9, 31))
        ),
        *benches("g256-k8-t{}", lambda t: make(t, 8, 256), (8192, 1, 64, 128, 1024), models=(8192,)),
        *benches("g8-k8-t{}", lambda t: make(t, 8, 8), (8192,)),
        *benches("g256-k8-t{}-half", lambda t: make(t, 8, 256, "half"), (8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    counts = tk_moe.group_count(torch.tensor([[2, 0, 2], [-1, 3, 4], [2, -(2**63), 2**32]]), 4)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 0, 3, 1]
    assert tk_moe.group_count(torch.tensor([[2, 0], [-7, 4]], dtype=torch.int32), 3).tolist() == [1, 0, 1]


def test_no_tokens() -> None:
    assert tk_moe.group_count(torch.empty(0, 8, dtype=torch.int64), 3).tolist() == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reference_against_a_counter(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 6))
    num_topk = data.draw(st.integers(1, 4))
    index = st.integers(-2, num_groups) | st.sampled_from([-(2**63), 2**32, 2**63 - 1])
    rows = data.draw(st.lists(st.lists(index, min_size=num_topk, max_size=num_topk), min_size=1, max_size=9))
    counted = Counter(index for row in rows for index in row)
    assert tk_moe.group_count(torch.tensor(rows), num_groups).tolist() == [counted[g] for g in range(num_groups)]


test_bad_input = tiers.bad_input(
    SPEC,
    {"group_idx": torch.zeros(4, 2, dtype=torch.int64), "num_groups": 4},
    [
        ({"group_idx": torch.zeros(4, 33, dtype=torch.int64)}, ValueError, "group_idx.*1 to 32"),
        (
            {"group_idx": torch.empty(MAX_PAIRS // 32 + 1, 32, dtype=torch.int64, device="meta")},
            ValueError,
            "group_idx.*at most",
        ),
        ({"num_groups": 1025}, ValueError, "num_groups.*1 to 1024"),
    ],
)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_clusters_are_those_that_the_device_has(arch: tk_core.Arch) -> None:
    for num_sms in (1, 7, 8, 60, 132):
        assert cluster_size_for(4096, num_sms, arch) == 1
        size = cluster_size_for(4097, num_sms, arch)
        assert size <= num_sms
        assert size == 1 or arch.sm >= 90
    assert cluster_size_for(4097, 132, arch_from_name("sm_90a")) == 16
    assert cluster_size_for(4097, 188, arch_from_name("sm_120a")) == 8
