"""topk_gate_with_weights."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_moe
from tk_core.testing import Case, Make, OpSpec, empty, tiers
from tk_core.testing.numeric import assert_equal
from tk_moe import ScoringFunc

from ..models import MODEL_EXPERTS, benches, name_of

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc

# NaN, infinities, and values whose exponentials overflow, underflow or lose all bits.
_EXTREMES = (
    *(torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 89.0, -89.0, 104.0, -104.0, 20.0, 20.125, -87.5, -20.0),
    *(0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0),
)


def make_logits(
    num_tokens: int, num_experts: int, dtype: torch.dtype, values: str, device: str, first_element: int = 0
) -> torch.Tensor:
    """Logits that are `normal`, `ties` (of 4 values), `equal`, `wide` (to ±30), `close` or `extremes`.

    "close": so close within a token that many scores are equal, and others differ by one rounding.

    They start at element `first_element` of their storage.
    """
    shape = (num_tokens, num_experts)
    logits = empty(*shape, dtype=dtype, device=device, first_element=first_element)
    if values == "normal":
        return logits.copy_(torch.randn(shape, device=device))
    if values == "ties":
        return logits.copy_(torch.randint(-2, 2, shape, device=device))
    if values == "equal":
        return logits.fill_(0.5)
    if values == "wide":
        return logits.copy_(60 * torch.rand(shape, device=device) - 30)
    if values == "close":
        middle = 48 * torch.rand((num_tokens, 1), device=device) - 24
        return logits.copy_(middle * (1 + torch.randint(0, 64, shape, device=device) * 2.0**-23))
    table = torch.tensor(_EXTREMES, device=device)
    return logits.copy_(table[torch.randint(0, len(table), shape, device=device)])


def make_mask(num_tokens: int, device: str) -> torch.Tensor:
    """True for about two of three tokens; the others are padding."""
    return torch.randint(0, 3, (num_tokens,), device=device) > 0


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: ScoringFunc = SIGMOID,
    dtype: torch.dtype = torch.float32,
    values: str = "normal",
    bias: str = "",
    masked: bool = False,
    first_element: int = 0,
    bias_first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments; `bias` is "normal", "ties" (of 3 values) or "" for none."""

    def build(device: str) -> dict[str, Any]:
        logits = make_logits(num_tokens, num_experts, dtype, values, device, first_element)
        shift = None
        if bias:
            shift = empty(num_experts, device=device, first_element=bias_first_element)
            few = torch.randint(0, 3, (num_experts,), device=device).float()
            shift.copy_(few if bias == "ties" else 0.1 * torch.randn(num_experts, device=device))
        return {
            "logits": logits,
            "num_topk": num_topk,
            "scoring_func": scoring_func,
            "bias": shift,
            "mask": make_mask(num_tokens, device) if masked else None,
            **options,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Indices must be equal, weights within rtol 1e-5, atol 1e-8, as a token's slots are added in another order."""
    assert_equal(actual[0], expected[0], name="topk_idx")
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-8, equal_nan=True)


BF16, FLOAT32 = torch.bfloat16, torch.float32
Variant = tuple[torch.dtype, ScoringFunc, dict[str, Any]]


def varied_cases(
    make: Callable[..., Make], sizes: Sequence[tuple[int, int, int]], variants: Sequence[Variant]
) -> Iterator[Case]:
    """A case of each (num_experts, num_topk, num_tokens), which take the variants in turn."""
    for (num_experts, num_topk, num_tokens), (dtype, function, options) in zip(sizes, cycle(variants)):
        name = f"{function}-{name_of(dtype)}-e{num_experts}-k{num_topk}-t{num_tokens}"
        yield Case(name, make(num_tokens, num_experts, num_topk, function, dtype, **options))


_VARIANTS: tuple[Variant, ...] = (
    (FLOAT32, SIGMOID, {"bias": "normal"}),
    (BF16, SQRTSOFTPLUS, {"bias": "ties", "routed_scaling_factor": 2.5}),
    (FLOAT32, SOFTMAX, {"renormalize": False}),
    (BF16, SIGMOID, {"masked": True, "idx_dtype": torch.int32}),
    (FLOAT32, SQRTSOFTPLUS, {}),
    (BF16, SOFTMAX, {"bias": "normal", "masked": True}),
    (FLOAT32, IDENTITY, {"renormalize": False, "bias": "normal"}),
)
_TOPK_AND_TOKENS = ((1, 2), (2, 31), (6, 4001), (7, 1), (8, 8001), (9, 31))
_SIZES = [
    (num_experts, num_topk, num_tokens)
    for num_experts in MODEL_EXPERTS
    for num_topk, num_tokens in _TOPK_AND_TOKENS
    if num_topk <= num_experts
]

SPEC = OpSpec(
    op=tk_moe.topk_gate_with_weights,
    compare=compare,
    cases=(
        Case("sigmoid-float32-e256-k8-t9", make(9, 256, 8, bias="normal"), small=True, modes=True, compile=True),
        Case(
            "sqrtsoftplus-bf16-e256-k6-t9",
            make(9, 256, 6, SQRTSOFTPLUS, BF16, bias="normal", masked=True, idx_dtype=torch.int32),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("softmax-bf16-e72-k6-t9", make(9, 72, 6, SOFTMAX, BF16, masked=True), small=True, compile=True),
        Case(
            "softmax-float32-e384-k8-t9",
            make(9, 384, 8, SOFTMAX, bias="normal", renormalize=False, routed_scaling_factor=2.5),
            small=True,
        ),
        Case("identity-float32-e33-k7-t9", make(9, 33, 7, IDENTITY, renormalize=False), small=True),
        # One expert, all of them, lanes without any, 32 per lane; rows and biases that are not aligned to 16 bytes.
        Case("sigmoid-bf16-e1-k1-t3", make(3, 1, 1, SIGMOID, BF16), small=True),
        Case("sigmoid-float32-e32-k32-t2", make(2, 32, 32, bias="ties"), small=True),
        Case("sqrtsoftplus-bf16-e1024-k32-t3", make(3, 1024, 32, SQRTSOFTPLUS, BF16, bias="normal"), small=True),
        Case("softmax-float32-e1023-k32-t3", make(3, 1023, 32, SOFTMAX, bias="normal"), small=True, compile=True),
        Case("sigmoid-bf16-e13-k3-t17", make(17, 13, 3, SIGMOID, BF16, bias="normal"), small=True),
        Case("sigmoid-bf16-e256-k8-t5-unaligned", make(5, 256, 8, SIGMOID, BF16, first_element=1), small=True),
        Case(
            "sigmoid-float32-e256-k8-t5-bias-unaligned",
            make(5, 256, 8, bias="normal", bias_first_element=1),
            small=True,
        ),
        Case("sigmoid-float32-e256-k8-t0", make(0, 256, 8, bias="normal", masked=True), small=True),
        Case("sigmoid-bf16-e256-k8-t1", make(1, 256, 8, SIGMOID, BF16, bias="normal"), small=True),
        *(
            Case(
                f"{function}-float32-e64-k{k}-t31-{values}",
                # If a sum of numbers of both signs overflows, its result depends on their order.
                make(31, 64, k, function, values=values, renormalize=function is not IDENTITY),
                small=True,
            )
            for function in ScoringFunc
            for k, values in ((8, "extremes"), (32, "close"))
        ),
        *(
            Case(
                f"{function}-{name_of(dtype)}-e256-k8-t4001-{values}{'-biased' if bias else ''}",
                make(4001, 256, 8, function, dtype, values, bias=bias, renormalize=function is not IDENTITY),
            )
            for function, dtype, values, bias in (
                (SIGMOID, BF16, "ties", "ties"),
                (SIGMOID, FLOAT32, "extremes", ""),
                (SIGMOID, FLOAT32, "extremes", "normal"),
                (SIGMOID, FLOAT32, "equal", ""),
                (SIGMOID, FLOAT32, "wide", ""),
                (SIGMOID, FLOAT32, "close", ""),
                (SQRTSOFTPLUS, FLOAT32, "close", ""),
                (SQRTSOFTPLUS, BF16, "extremes", ""),
                (SQRTSOFTPLUS, FLOAT32, "wide", ""),
                (SQRTSOFTPLUS, FLOAT32, "ties", "ties"),
                (SOFTMAX, FLOAT32, "extremes", "normal"),
                (SOFTMAX, BF16, "wide", ""),
                (IDENTITY, BF16, "extremes", ""),
            )
        ),
        # Two of five sizes, to save time: every variant still gets sizes of all kinds.
        *(case for index, case in enumerate(varied_cases(make, _SIZES, _VARIANTS)) if index % 5 in (0, 2)),
        *benches(
            "sigmoid-float32-e256-k8-t{}",
            lambda t: make(t, 256, 8, bias="normal"),
            (1, 8, 64, 128, 1024, 4001, 8192),
            models=(128, 8192),
        ),
        *(
            case
            for function, dtype, e, k, bias in (
                (SIGMOID, BF16, 256, 8, "normal"),
                (SQRTSOFTPLUS, FLOAT32, 256, 6, "normal"),
                (SOFTMAX, BF16, 128, 8, ""),
                (SOFTMAX, FLOAT32, 512, 10, ""),
                (SIGMOID, FLOAT32, 384, 8, "normal"),
                (SOFTMAX, FLOAT32, 64, 6, ""),
            )
            for case in benches(
                f"{function}-{name_of(dtype)}-e{e}-k{k}-t{{}}",
                partial(make, num_experts=e, num_topk=k, scoring_func=function, dtype=dtype, bias=bias),
                (128, 8192),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

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


GOOD: dict[str, Any] = {"logits": torch.zeros(2, 8), "num_topk": 2, "scoring_func": SIGMOID}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"logits": torch.zeros(2, 1025)}, ValueError, "logits.*1 to 1024.*1025"),
        ({"num_topk": 9}, ValueError, "num_topk.*1 to 8.*9"),
        ({"logits": torch.zeros(2, 64), "num_topk": 33}, ValueError, "num_topk.*1 to 32.*33"),
        ({"bias": torch.zeros(7)}, ValueError, "bias.*shape"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ValueError, "mask.*shape"),
    ],
)
