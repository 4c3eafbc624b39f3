"""group_count."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_core
import tk_moe
from tk_core import env
from tk_core.arch import ARCHS, arch_from_name
from tk_core.testing import tiers
from tk_moe.balance.group_count import MAX_PAIRS, GroupCountConfig
from tk_moe.testing.balance.group_count import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


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


def test_debug_mode_finds_an_index_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_moe.group_count(torch.tensor([[2, -1]]), 3)
    with pytest.raises(ValueError, match=r"group_idx.*num_groups = 3.*3"):
        tk_moe.group_count(torch.tensor([[3, -1]]), 3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"group_idx": [[0]]}, TypeError, "group_idx.*Tensor"),
        ({"group_idx": torch.zeros(4, 2, dtype=torch.int16)}, TypeError, "group_idx.*int64.*int32.*int16"),
        ({"group_idx": torch.zeros(4, dtype=torch.int64)}, ValueError, "group_idx.*shape"),
        ({"group_idx": torch.zeros(2, 4, dtype=torch.int64).T}, ValueError, "group_idx.*contiguous"),
        ({"group_idx": torch.zeros(4, 0, dtype=torch.int64)}, ValueError, "group_idx.*1 to 32"),
        ({"group_idx": torch.zeros(4, 33, dtype=torch.int64)}, ValueError, "group_idx.*1 to 32"),
        (
            {"group_idx": torch.empty(MAX_PAIRS // 32 + 1, 32, dtype=torch.int64, device="meta")},
            ValueError,
            "group_idx.*at most",
        ),
        ({"num_groups": 0}, ValueError, "num_groups.*1 to 1024"),
        ({"num_groups": 1025}, ValueError, "num_groups.*1 to 1024"),
        ({"num_groups": 4.0}, TypeError, "num_groups.*int"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.group_count(**{"group_idx": torch.zeros(4, 2, dtype=torch.int64), "num_groups": 4, **change})


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_clusters_are_those_that_the_device_has(arch: tk_core.Arch) -> None:
    for num_sms in (1, 7, 8, 60, 132):
        assert GroupCountConfig.best(True, num_sms, arch).cluster_size == 1
        size = GroupCountConfig.best(False, num_sms, arch).cluster_size
        assert size <= num_sms
        assert size == 1 or arch.sm >= 90
    assert GroupCountConfig.best(False, 132, arch_from_name("sm_90a")).cluster_size == 16
    assert GroupCountConfig.best(False, 188, arch_from_name("sm_120a")).cluster_size == 8


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [None, 100, 8, 1])
@pytest.mark.parametrize("num_tokens", [1, 300, 8001])
def test_gpu_counts_do_not_depend_on_the_number_of_blocks(num_tokens: int, num_sms: int | None) -> None:
    group_idx = torch.randint(-1, 300, (num_tokens, 8), device="cuda")
    expected = torch.bincount(group_idx[(group_idx >= 0) & (group_idx < 288)], minlength=288).int()
    with tk_core.num_sms(num_sms):
        assert torch.equal(tk_moe.group_count(group_idx, 288), expected)
