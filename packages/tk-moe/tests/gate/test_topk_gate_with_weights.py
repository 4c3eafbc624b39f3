"""topk_gate_with_weights."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import tiers
from tk_moe import ScoringFunc, reference
from tk_moe.testing.gate.topk_gate_with_weights import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc
INF, NAN = math.inf, math.nan
LOGITS = torch.tensor([[0.0, math.log(3), -INF, math.log(1 / 3)]])


@pytest.mark.parametrize(
    ("options", "experts", "weights"),
    [
        # Sigmoids 1/2, 3/4, 0, 1/4.
        ({}, [1, 0, 3], [0.5, 1 / 3, 1 / 6]),
        ({"renormalize": False}, [1, 0, 3], [0.75, 0.5, 0.25]),
        ({"routed_scaling_factor": 3.0}, [1, 0, 3], [1.5, 1.0, 0.5]),
        # The bias chooses, and has no part in the weights.
        ({"bias": torch.tensor([0.0, 0.0, 0.5, -1.0])}, [1, 0, 2], [0.6, 0.4, 0.0]),
        ({"bias": torch.tensor([0.5, 0.0, 1.0, 0.0])}, [0, 2, 1], [0.4, 0.0, 0.6]),
        # Probabilities 3/13, 9/13, 0, 1/13; ranked by the logits.
        ({"scoring_func": SOFTMAX, "renormalize": False}, [1, 0, 3], [9 / 13, 3 / 13, 1 / 13]),
        # -∞ + ∞ is NaN, which is above all, though its score is 0.
        ({"scoring_func": SOFTMAX, "bias": torch.tensor([5.0, 0.0, INF, 0.0])}, [2, 0, 1], [0.0, 0.25, 0.75]),
        ({"scoring_func": SOFTMAX, "bias": torch.tensor([5.0, 0.0, 0.0, 0.0])}, [0, 1, 3], [3 / 13, 9 / 13, 1 / 13]),
        (
            {"scoring_func": SQRTSOFTPLUS, "renormalize": False},
            [1, 0, 3],
            [math.sqrt(math.log(4)), math.sqrt(math.log(2)), math.sqrt(math.log(4 / 3))],
        ),
        ({"scoring_func": IDENTITY, "renormalize": False}, [1, 0, 3], [math.log(3), 0.0, -math.log(3)]),
    ],
)
def test_by_hand(options: dict[str, Any], experts: list[int], weights: list[float]) -> None:
    kwargs = {"scoring_func": SIGMOID, **options}
    topk_idx, topk_weights = tk_moe.topk_gate_with_weights(LOGITS, 3, **kwargs)
    assert topk_idx.tolist() == [experts]
    assert topk_idx.dtype == torch.int64
    torch.testing.assert_close(topk_weights, torch.tensor([weights]), rtol=1e-6, atol=0.0)


def test_scores_too_small_to_divide_by() -> None:
    logits = torch.full((1, 4), -60.0)
    _, weights = tk_moe.topk_gate_with_weights(logits, 2, SIGMOID)
    # 2 exp(-60) is less than 1e-20.
    torch.testing.assert_close(weights, torch.full((1, 2), math.exp(-60) / 1e-20))
    _, weights = tk_moe.topk_gate_with_weights(torch.full((1, 4), -INF), 2, SIGMOID)
    assert weights.tolist() == [[0.0, 0.0]]


def test_nan_is_best_and_spreads_over_the_weights_of_its_token_only() -> None:
    logits = torch.tensor([[0.0, NAN, 1.0], [0.0, 0.0, 1.0]])
    topk_idx, weights = tk_moe.topk_gate_with_weights(logits, 2, SIGMOID)
    assert topk_idx.tolist() == [[1, 2], [2, 0]]
    assert weights.isnan().tolist() == [[True, True], [False, False]]


def test_scores_that_round_to_one_tie() -> None:
    # sigmoid(40) = sigmoid(50) = 1 in float32; softmax ranks by the logits.
    logits = torch.tensor([[40.0, 50.0, 30.0]])
    assert tk_moe.topk_gate_with_weights(logits, 2, SIGMOID)[0].tolist() == [[0, 1]]
    assert tk_moe.topk_gate_with_weights(logits, 2, SOFTMAX)[0].tolist() == [[1, 0]]


def test_padding_may_hold_anything() -> None:
    logits = torch.tensor([[1.0, 2.0], [NAN, INF], [2.0, 1.0]])
    mask = torch.tensor([True, False, True])
    topk_idx, weights = tk_moe.topk_gate_with_weights(logits, 2, SIGMOID, mask=mask, idx_dtype=torch.int32)
    assert topk_idx.dtype == torch.int32
    assert topk_idx.tolist() == [[1, 0], [-1, -1], [0, 1]]
    assert weights[1].tolist() == [0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_reference_against_a_loop(data: st.DataObject) -> None:
    few = st.sampled_from([-100.0, -1.0, 0.0, 0.5, 2.0, 100.0])
    num_experts = data.draw(st.integers(1, 12))
    num_topk = data.draw(st.integers(1, num_experts))
    row = data.draw(st.lists(few, min_size=num_experts, max_size=num_experts))
    bias = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=num_experts, max_size=num_experts))
    topk_idx, weights = tk_moe.topk_gate_with_weights(torch.tensor([row]), num_topk, SIGMOID, torch.tensor(bias))
    score = {x: torch.sigmoid(torch.tensor(x)).item() for x in row}
    rank = [(torch.tensor(score[x]) + torch.tensor(b)).item() for x, b in zip(row, bias)]
    expected = sorted(range(num_experts), key=lambda e: (-rank[e], e))[:num_topk]
    assert topk_idx[0].tolist() == expected
    total = max(math.fsum(score[row[e]] for e in expected), 1e-20)
    torch.testing.assert_close(weights[0].tolist(), [score[row[e]] / total for e in expected], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring_func", ScoringFunc)
def test_gradcheck(scoring_func: ScoringFunc, renormalize: bool) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64)
    # A sum of logits may come close to 0, where the clamp has no derivative.
    logits = (logits.abs() + 0.1 if scoring_func is IDENTITY else logits).requires_grad_()
    mask = torch.tensor([True, True, False, True])

    bias = torch.randn(9, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: reference.topk_gate_with_weights(x, 3, scoring_func, bias, renormalize, 2.5, mask)[1], logits
    )


GOOD: dict[str, Any] = {"logits": torch.zeros(2, 8), "num_topk": 2, "scoring_func": SIGMOID}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"logits": [[1.0, 2.0]]}, TypeError, "logits.*Tensor"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float16)}, TypeError, "logits.*bfloat16 or torch.float32.*float16"),
        ({"logits": torch.zeros(8)}, ValueError, "logits.*shape"),
        ({"logits": torch.zeros(2, 16)[:, :8]}, ValueError, "logits.*contiguous"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits.*1 to 1024"),
        ({"logits": torch.zeros(2, 1025)}, ValueError, "logits.*1 to 1024.*1025"),
        ({"num_topk": 0}, ValueError, "num_topk.*1 to 8"),
        ({"num_topk": 9}, ValueError, "num_topk.*1 to 8.*9"),
        ({"logits": torch.zeros(2, 64), "num_topk": 33}, ValueError, "num_topk.*1 to 32.*33"),
        ({"num_topk": 2.0}, TypeError, "num_topk.*int"),
        ({"scoring_func": 0}, TypeError, "scoring_func.*ScoringFunc"),
        ({"bias": torch.zeros(8, dtype=torch.bfloat16)}, TypeError, "bias.*float32"),
        ({"bias": torch.zeros(7)}, ValueError, "bias.*shape"),
        ({"bias": torch.zeros(16)[::2]}, ValueError, "bias.*contiguous"),
        ({"bias": torch.zeros(8, device="meta")}, ValueError, "bias.*device"),
        ({"renormalize": 1}, TypeError, "renormalize.*bool"),
        ({"routed_scaling_factor": "1"}, TypeError, "routed_scaling_factor.*number"),
        ({"routed_scaling_factor": True}, TypeError, "routed_scaling_factor.*number"),
        ({"mask": torch.zeros(2)}, TypeError, "mask.*bool"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ValueError, "mask.*shape"),
        ({"mask": torch.zeros(2, dtype=torch.bool, device="meta")}, ValueError, "mask.*device"),
        ({"idx_dtype": torch.int16}, TypeError, "idx_dtype.*int64 or torch.int32"),
        ({"idx_dtype": int}, TypeError, "idx_dtype"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_moe.topk_gate_with_weights(**{**GOOD, **change})
