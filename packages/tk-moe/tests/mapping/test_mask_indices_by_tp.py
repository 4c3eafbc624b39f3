"""mask_indices_by_tp."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core import env
from tk_core.testing import tiers
from tk_moe.testing.mapping.mask_indices_by_tp import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


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


def test_debug_mode_finds_an_index_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_moe.mask_indices_by_tp(torch.tensor([[7, -1]]), 8, 4, 0, 2)
    with pytest.raises(ValueError, match=r"indices.*n = 8.*8"):
        tk_moe.mask_indices_by_tp(torch.tensor([[8, -1]]), 8, 4, 0, 2)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"indices": [[0]]}, TypeError, "indices.*Tensor"),
        ({"indices": torch.zeros(4, 2, dtype=torch.int16)}, TypeError, "indices.*int64.*int16"),
        ({"indices": torch.zeros(4, dtype=torch.int64)}, ValueError, "indices.*shape"),
        ({"indices": torch.zeros(2, 4, dtype=torch.int64).T}, ValueError, "indices.*contiguous"),
        ({"n": 3}, ValueError, "n: expected 4 to"),
        ({"n": 2**31}, ValueError, "n: expected 4 to"),
        ({"n": 8.0}, TypeError, "n: expected an int"),
        ({"num_ep_ranks": 0}, ValueError, "num_ep_ranks"),
        ({"num_ep_ranks": None}, TypeError, "num_ep_ranks"),
        ({"tp_rank": -1}, ValueError, "tp_rank: expected 0 to 1"),
        ({"tp_rank": 2}, ValueError, "tp_rank: expected 0 to 1"),
        ({"tp_rank": True}, TypeError, "tp_rank"),
        ({"num_tp_ranks": 0}, ValueError, "num_tp_ranks"),
        ({"num_tp_ranks": 2.0}, TypeError, "num_tp_ranks"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    good = {
        "indices": torch.zeros(4, 2, dtype=torch.int64),
        "n": 8,
        "num_ep_ranks": 4,
        "tp_rank": 1,
        "num_tp_ranks": 2,
    }
    with pytest.raises(error, match=match):
        tk_moe.mask_indices_by_tp(**{**good, **change})
