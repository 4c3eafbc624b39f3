"""mask_indices_by_tp."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers

from ..balance.test_group_count import make_indices
from ..models import benches


def make(
    num_tokens: int,
    num_topk: int,
    n: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    *drawn: Any,
    **options: Any,
) -> Make:
    """Arguments of mask_indices_by_tp; the rest is as in `make_indices`."""
    ranks = {"n": n, "num_ep_ranks": num_ep_ranks, "tp_rank": tp_rank, "num_tp_ranks": num_tp_ranks}
    return make_indices("indices", (num_tokens, num_topk), n, *drawn, **options, **ranks)


SPEC = OpSpec(
    op=tk_moe.mask_indices_by_tp,
    cases=(
        Case("n256-k8-t67-ep8-tp1of2", make(67, 8, 256, 8, 1, 2), small=True, modes=True, compile=True),
        # Numbers of ranks that do not divide n or each other, one rank, indices from n on and beyond 32 bits.
        Case("n256-k7-t31-ep6-tp2of4", make(31, 7, 256, 6, 2, 4), small=True),
        Case("n13-k3-t17-ep13-tp4of5", make(17, 3, 13, 13, 4, 5), small=True),
        Case("n8-k2-t5-ep1-tp0of1", make(5, 2, 8, 1, 0, 1), small=True),
        Case("n8-k2-t5-ep1-tp1of2", make(5, 2, 8, 1, 1, 2), small=True),
        Case("n256-k8-t67-ep8-tp1of2-none", make(67, 8, 256, 8, 1, 2, "none"), small=True),
        Case("n256-k8-t67-ep8-tp0of3-unaligned", make(67, 8, 256, 8, 0, 3, first_element=1), small=True),
        Case("n256-k8-t0-ep8-tp0of2", make(0, 8, 256, 8, 0, 2), small=True),
        Case("n256-k8-t1-ep8-tp0of2", make(1, 8, 256, 8, 0, 2), small=True),
        Case("n256-k8-t67-ep8-tp1of2-int32", make(67, 8, 256, 8, 1, 2, dtype=torch.int32), small=True, compile=True),
        Case("n256-k7-t31-ep6-tp2of4-int32-none", make(31, 7, 256, 6, 2, 4, "none", 1, torch.int32), small=True),
        Case("n2147483647-k8-t4001-ep64-tp5of8-int32", make(4001, 8, 2**31 - 1, 64, 5, 8, dtype=torch.int32)),
        *(
            Case(
                f"n{n}-k{num_topk}-t{num_tokens}-ep{num_ep_ranks}-tp{tp_rank}of{num_tp_ranks}-none",
                make(num_tokens, num_topk, n, num_ep_ranks, tp_rank, num_tp_ranks, "none"),
            )
            for n, num_topk, num_tokens, num_ep_ranks, tp_rank, num_tp_ranks in (
                (256, 8, 8001, 32, 3, 4),
                (288, 9, 4001, 36, 0, 2),
                (72, 6, 31, 8, 7, 8),
                (108, 6, 8001, 4, 1, 3),
                (2**31 - 1, 8, 4001, 64, 5, 8),
                (512, 1, 2, 16, 1, 2),
            )
        ),
        *benches("n256-k8-t{}-ep8-tp1of2", lambda t: make(t, 8, 256, 8, 1, 2), (8192, 1, 128, 1024), models=(8192,)),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tp_rank", "expected"),
    [(0, [0, 1, -1, -1, 2, 3, -1, -1, -1]), (1, [-1, -1, 0, 1, -1, -1, 2, 3, -1])],
)
def test_by_hand(tp_rank: int, expected: list[int], dtype: torch.dtype) -> None:
    # Four ranks of two experts, of which every second is this one's.
    out = tk_moe.mask_indices_by_tp(torch.tensor([[*range(8), -5]], dtype=dtype), 8, 4, tp_rank, 2)
    assert out.dtype == dtype
    assert out.tolist() == [expected]


def test_one_tensor_parallel_rank_keeps_all() -> None:
    indices = torch.tensor([[3, -2], [0, 7]])
    assert tk_moe.mask_indices_by_tp(indices, 8, 4, 0, 1).tolist() == [[3, -1], [0, 7]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_kept_experts_are_numbered_in_order(data: st.DataObject) -> None:
    num_ep_ranks = data.draw(st.integers(1, 6))
    num_tp_ranks = data.draw(st.integers(1, 4))
    tp_rank = data.draw(st.integers(0, num_tp_ranks - 1))
    per_rank = data.draw(st.integers(1, 5))
    n = num_ep_ranks * per_rank
    kept = [i for i in range(n) if (i // per_rank) % num_tp_ranks == tp_rank]
    expected = [kept.index(i) if i in kept else -1 for i in range(n)]
    out = tk_moe.mask_indices_by_tp(torch.arange(n)[None], n, num_ep_ranks, tp_rank, num_tp_ranks)
    assert out.tolist() == [expected]


test_bad_input = tiers.bad_input(
    SPEC,
    {
        "indices": torch.zeros(4, 2, dtype=torch.int64),
        "n": 8,
        "num_ep_ranks": 4,
        "tp_rank": 1,
        "num_tp_ranks": 2,
    },
    [
        ({"indices": torch.zeros(2**29 + 1, 2, dtype=torch.int64, device="meta")}, ValueError, "indices.*1073741824"),
        ({"n": 3}, ValueError, "n: expected 4 to"),
        ({"num_ep_ranks": 0}, ValueError, "num_ep_ranks"),
        ({"tp_rank": 2}, ValueError, "tp_rank: expected 0 to 1"),
        ({"num_tp_ranks": 0}, ValueError, "num_tp_ranks"),
    ],
)
