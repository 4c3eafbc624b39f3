"""ScoringFunc and the reference's scores."""

import math
from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import assert_equal
from tk_moe import ScoringFunc, reference
from tk_moe.reference.gate.gate import scores_of
from tk_moe.scoring import scoring_func_of

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc


def test_members() -> None:
    assert [(member.name, int(member)) for member in ScoringFunc] == [
        *(("SIGMOID", 0), ("SQRTSOFTPLUS", 1), ("SOFTMAX", 2), ("IDENTITY", 3))
    ]
    assert [str(member) for member in ScoringFunc] == ["sigmoid", "sqrtsoftplus", "softmax", "identity"]


@pytest.mark.parametrize("label", ["sqrtsoftplus", "SQRTSOFTPLUS", "SqrtSoftplus"])
def test_from_str_takes_any_case(label: str) -> None:
    assert ScoringFunc.from_str(label) is SQRTSOFTPLUS
    for member in ScoringFunc:
        assert ScoringFunc.from_str(str(member)) is member


@pytest.mark.parametrize("label", ["", "tanh", "softmax ", "0", 0, None])
def test_from_str_refuses_others(label: Any) -> None:
    with pytest.raises(ValueError, match=r"label.*'sigmoid'.*'identity'"):
        ScoringFunc.from_str(label)


@pytest.mark.parametrize("scoring_func", [SOFTMAX, "softmax", "SoftMax"])
def test_ops_take_members_and_their_names(scoring_func: Any) -> None:
    assert scoring_func_of(scoring_func) is SOFTMAX


@pytest.mark.parametrize(
    ("scoring_func", "error"), [(0, TypeError), (None, TypeError), (True, TypeError), ("tanh", ValueError)]
)
def test_only_members_are_scoring_functions(scoring_func: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"scoring_func"):
        scoring_func_of(scoring_func)


def test_every_op_and_reference_takes_the_name() -> None:
    logits, bias, one = torch.randn(5, 8), torch.randn(8), torch.ones(5, 2)
    for module in (tk_moe, reference):
        for name in ("sigmoid", "softmax"):
            member = ScoringFunc.from_str(name)
            idx, weights = module.topk_gate_with_weights(logits, 2, name)
            assert_equal((idx, weights), module.topk_gate_with_weights(logits, 2, member))
            table = torch.arange(16, dtype=torch.int32).view(8, 2) % 8
            ids = torch.arange(5)
            assert_equal(module.hash_gate(ids, table, logits, name), module.hash_gate(ids, table, logits, member))
            grads = [module.gate_weights_bwd(one, logits, idx, func) for func in (name, member)]
            assert_equal(*grads)
            routed = [module.top2_sum_gate(logits, bias, 2, 0, 0, False, 0, 1.0, 0, 1, 0, 1, f) for f in (name, member)]
            assert_equal(*routed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_against_the_math_module(dtype: torch.dtype) -> None:
    logits = torch.linspace(-60, 60, 97, dtype=dtype)[None]
    row = logits[0].tolist()
    total = math.fsum(math.exp(x - 60) for x in row)
    expected = {
        SIGMOID: [1 / (1 + math.exp(-x)) for x in row],
        SQRTSOFTPLUS: [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row],
        SOFTMAX: [math.exp(x - 60) / total for x in row],
        IDENTITY: row,
    }
    for scoring_func, values in expected.items():
        scores = scores_of(logits, scoring_func)
        assert scores.dtype == dtype
        rtol = 1e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(scores, torch.tensor([values], dtype=dtype), rtol=rtol, atol=1e-30)


def test_scores_at_the_ends() -> None:
    logits = torch.tensor([[-math.inf, -200.0, 200.0, 20.0, math.inf, math.nan]])
    assert scores_of(logits, SIGMOID)[0, :5].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    root = scores_of(logits, SQRTSOFTPLUS)[0, :5]
    assert root.tolist() == [0.0, 0.0, torch.tensor(200.0).sqrt(), torch.tensor(20.0).exp().log1p().sqrt(), math.inf]
    assert all(scores_of(logits, scoring_func)[0, 5].isnan() for scoring_func in ScoringFunc)
    assert scores_of(logits.bfloat16(), IDENTITY).dtype == torch.float32


def test_a_score_of_zero_has_no_slope() -> None:
    logits = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    scores_of(logits, SQRTSOFTPLUS).sum().backward()
    assert logits.grad[0, 0].item() == 0.0
    assert logits.grad[0, 1].item() == pytest.approx(0.25 / math.sqrt(math.log(2)))


@pytest.mark.parametrize("scoring_func", ScoringFunc)
def test_equal_logits_have_equal_scores(scoring_func: ScoringFunc) -> None:
    """Wherever they stand in a row: of 20, a CPU computes the last four by another loop than the first 16."""
    logits = torch.linspace(-8, 8, 4001)[:, None].expand(-1, 20).contiguous()
    scores = scores_of(logits, scoring_func)
    assert torch.equal(scores, scores[:, :1].expand(-1, 20))
