"""inplace_unique_group_indices."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core import env
from tk_core.testing import tiers
from tk_moe.testing.mapping.inplace_unique_group_indices import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


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


def test_debug_mode_finds_an_index_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_moe.inplace_unique_group_indices(torch.tensor([[2, -1]]), 3)
    with pytest.raises(ValueError, match=r"group_indices.*num_groups = 3.*3"):
        tk_moe.inplace_unique_group_indices(torch.tensor([[3, -1]]), 3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"group_indices": [[0]]}, TypeError, "group_indices.*Tensor"),
        ({"group_indices": torch.zeros(4, 2, dtype=torch.int16)}, TypeError, "group_indices.*int64.*int16"),
        ({"group_indices": torch.zeros(4, dtype=torch.int64)}, ValueError, "group_indices.*shape"),
        ({"group_indices": torch.zeros(2, 4, dtype=torch.int64).T}, ValueError, "group_indices.*contiguous"),
        ({"group_indices": torch.zeros(4, 33, dtype=torch.int64)}, ValueError, "group_indices.*1 to 32"),
        ({"num_groups": 0}, ValueError, "num_groups.*1 to 128"),
        ({"num_groups": 129}, ValueError, "num_groups.*1 to 128"),
        ({"num_groups": 4.0}, TypeError, "num_groups.*int"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    good = {"group_indices": torch.zeros(4, 2, dtype=torch.int64), "num_groups": 4}
    with pytest.raises(error, match=match):
        tk_moe.inplace_unique_group_indices(**{**good, **change})
