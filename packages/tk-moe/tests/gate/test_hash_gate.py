"""hash_gate."""

import math
from typing import Any

import pytest
import torch

import tk_moe
from tk_core import env
from tk_core.testing import tiers
from tk_moe import ScoringFunc, reference
from tk_moe.testing.gate.hash_gate import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc
TABLE = torch.tensor([[0, 1], [3, -1], [-1, -2], [2, 2], [1, 4]], dtype=torch.int32)
ROW = [0.0, math.log(3), math.log(1 / 3), -math.inf]


def gate(ids: list[int], **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """hash_gate with TABLE and logits ROW for each token."""
    kwargs = {"scoring_func": SIGMOID, **options}
    topk_idx, weights = tk_moe.hash_gate(torch.tensor(ids), TABLE, torch.tensor([ROW] * len(ids)), **kwargs)
    return topk_idx.tolist(), weights


def test_by_hand() -> None:
    # Sigmoids 1/2, 3/4, 1/4, 0. The table's expert 4 is none of four.
    topk_idx, weights = gate([0, 1, 2, 3, 4, 0])
    assert topk_idx == [[0, 1], [3, -1], [-1, -1], [2, 2], [1, -1], [0, 1]]
    expected = [[0.4, 0.6], [0.0, 0.0], [0.0, 0.0], [0.5, 0.5], [1.0, 0.0], [0.4, 0.6]]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-6, atol=0.0)


def test_options() -> None:
    topk_idx, weights = gate([0, 0], renormalize=False, routed_scaling_factor=2.0, mask=torch.tensor([True, False]))
    assert topk_idx == [[0, 1], [-1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.5], [0.0, 0.0]]), rtol=1e-6, atol=0.0)
    _, weights = gate([0], scoring_func=SOFTMAX, renormalize=False)
    torch.testing.assert_close(weights, torch.tensor([[3 / 13, 9 / 13]]), rtol=1e-6, atol=0.0)
    _, weights = gate([0], scoring_func=SQRTSOFTPLUS, renormalize=False)
    torch.testing.assert_close(weights, torch.tensor([[math.log(2), math.log(4)]]).sqrt(), rtol=1e-6, atol=0.0)
    _, weights = gate([0], scoring_func=IDENTITY, renormalize=False)
    torch.testing.assert_close(weights, torch.tensor([[0.0, math.log(3)]]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("ids", [[-1], [5], [2**32], [2**32 + 1], [-(2**63)], [2**63 - 1]])
def test_ids_outside_the_table(ids: list[int]) -> None:
    topk_idx, weights = gate(ids)
    assert topk_idx == [[-1, -1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_padding_may_hold_anything() -> None:
    logits = torch.tensor([[math.nan, math.inf, 0.0, 0.0], ROW])
    for scoring_func in ScoringFunc:
        ids, mask = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([False, True])
        topk_idx, weights = tk_moe.hash_gate(ids, TABLE, logits, scoring_func, mask=mask, idx_dtype=torch.int32)
        assert topk_idx.dtype == torch.int32
        assert topk_idx.tolist() == [[-1, -1], [0, 1]]
        assert weights[0].tolist() == [0.0, 0.0]
        assert weights[1].isfinite().all()


def test_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    with pytest.raises(ValueError, match=r"token_ids: expected 0 to 4, got 5$"):
        gate([0, 5])
    with pytest.raises(ValueError, match=r"token_ids: expected 0 to 4, got -1$"):
        gate([0, -1])
    with pytest.raises(ValueError, match=r"table.*below 4.*4"):
        gate([0])
    assert tk_moe.hash_gate(torch.tensor([0, 3]), TABLE[:4], torch.tensor([ROW] * 2), SIGMOID)[0].shape == (2, 2)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring_func", ScoringFunc)
def test_gradcheck(scoring_func: ScoringFunc, renormalize: bool) -> None:
    # Positive, so that sums of logits stay away from the clamp.
    logits = (torch.rand(6, 4, dtype=torch.float64) + 0.1).requires_grad_()
    ids = torch.tensor([0, 1, 2, 3, 4, 7])
    assert torch.autograd.gradcheck(
        lambda x: reference.hash_gate(ids, TABLE, x, scoring_func, renormalize, 2.5)[1], logits
    )


GOOD: dict[str, Any] = {
    "token_ids": torch.zeros(2, dtype=torch.int64),
    "table": torch.zeros(5, 2, dtype=torch.int32),
    "logits": torch.zeros(2, 8),
    "scoring_func": SQRTSOFTPLUS,
}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"token_ids": [0, 1]}, TypeError, "token_ids.*Tensor"),
        ({"token_ids": torch.zeros(2)}, TypeError, "token_ids.*int32 or torch.int64"),
        ({"token_ids": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, "token_ids.*shape"),
        ({"token_ids": torch.zeros(4, dtype=torch.int64)[::2]}, ValueError, "token_ids.*contiguous"),
        ({"table": torch.zeros(5, 2, dtype=torch.int64)}, TypeError, "table.*int32"),
        ({"table": torch.zeros(5, dtype=torch.int32)}, ValueError, "table.*shape"),
        ({"table": torch.zeros(0, 2, dtype=torch.int32)}, ValueError, "table.*at least one row"),
        ({"table": torch.zeros(5, 0, dtype=torch.int32)}, ValueError, "table.*1 to 32"),
        ({"table": torch.zeros(5, 33, dtype=torch.int32)}, ValueError, "table.*1 to 32.*33"),
        ({"table": torch.zeros(2, 5, dtype=torch.int32).T}, ValueError, "table.*contiguous"),
        ({"table": torch.zeros(5, 2, dtype=torch.int32, device="meta")}, ValueError, "table.*device"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, TypeError, "logits.*float32"),
        ({"logits": torch.zeros(3, 8)}, ValueError, "logits.*shape"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits.*1 to 1024"),
        ({"logits": torch.zeros(2, 1025)}, ValueError, "logits.*1 to 1024"),
        ({"logits": torch.zeros(2, 8, device="meta")}, ValueError, "logits.*device"),
        ({"scoring_func": 1}, TypeError, "scoring_func.*ScoringFunc"),
        ({"renormalize": None}, TypeError, "renormalize.*bool"),
        ({"routed_scaling_factor": None}, TypeError, "routed_scaling_factor.*number"),
        ({"mask": torch.zeros(2, dtype=torch.uint8)}, TypeError, "mask.*bool"),
        ({"mask": torch.zeros(1, dtype=torch.bool)}, ValueError, "mask.*shape"),
        ({"idx_dtype": torch.uint8}, TypeError, "idx_dtype"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.hash_gate(**{**GOOD, **change})
