"""hash_gate."""

import math
from typing import Any

import pytest
import torch

import tk_moe
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_moe import ScoringFunc

from ..models import benches, name_of
from .test_topk_gate_with_weights import Variant, compare, make_logits, make_mask, varied_cases

SIGMOID, SQRTSOFTPLUS, SOFTMAX, IDENTITY = ScoringFunc
BF16, FLOAT32 = torch.bfloat16, torch.float32

# Ids that no table has, some of which would be in it by their low 32 bits.
_NO_TOKEN = (-1, -(2**31), 2**31 - 1, 2**32, 2**32 + 3, -(2**63), 2**63 - 1)


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: ScoringFunc = SQRTSOFTPLUS,
    dtype: torch.dtype = FLOAT32,
    values: str = "normal",
    *,
    vocab_size: int = 1000,
    ids_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype = torch.int32,
    faults: bool = False,
    masked: bool = False,
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments; with `faults` some ids are not in the table, and some entries of the table are not experts."""

    def build(device: str) -> dict[str, Any]:
        token_ids = torch.randint(0, vocab_size, (num_tokens,), device=device)
        shape = (vocab_size, num_topk)
        if num_topk <= num_experts and not faults:
            table = torch.rand((vocab_size, num_experts), device=device).topk(num_topk).indices.int()
        else:
            table = torch.randint(0, num_experts, shape, dtype=torch.int32, device=device)
        if faults:
            missing = torch.tensor(_NO_TOKEN, device=device)
            if ids_dtype == torch.int32:
                missing = missing.clamp(-(2**31), 2**31 - 1)
            token_ids[::3] = missing[torch.randint(0, len(missing), token_ids[::3].shape, device=device)]
            none = torch.tensor((-1, -7, num_experts, 2**31 - 1, -(2**31)), dtype=torch.int32, device=device)
            nothing = none[torch.randint(0, len(none), shape, device=device)]
            table = torch.where(torch.rand(shape, device=device) < 0.3, nothing, table)
            table[::5] = -1
        table = table.to(table_dtype)
        if faults and table_dtype is torch.int64:
            table[1::3, 0] += 2**40
        return {
            "token_ids": token_ids.to(ids_dtype),
            "table": table,
            "logits": make_logits(num_tokens, num_experts, dtype, values, device, first_element),
            "scoring_func": scoring_func,
            "mask": make_mask(num_tokens, device) if masked else None,
            **options,
        }

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Bytes of each token's id, row of the table, logits (all for softmax, else those of its experts) and outputs."""
    num_slots = outputs[0].numel()
    logits = kwargs["logits"]
    wanted = logits.numel() if kwargs["scoring_func"] is SOFTMAX else num_slots
    written = num_slots * (outputs[0].element_size() + 4)
    looked_up = kwargs["table"].element_size() * num_slots
    return kwargs["token_ids"].nbytes + looked_up + wanted * logits.element_size() + written


_VARIANTS: tuple[Variant, ...] = (
    (FLOAT32, SQRTSOFTPLUS, {"routed_scaling_factor": 2.5}),
    (BF16, SIGMOID, {"ids_dtype": torch.int32, "faults": True, "idx_dtype": torch.int32}),
    (FLOAT32, SOFTMAX, {"faults": True}),
    (BF16, SOFTMAX, {"masked": True, "ids_dtype": torch.int32, "renormalize": False}),
    (FLOAT32, IDENTITY, {"renormalize": False, "masked": True, "faults": True}),
)
_SIZES = (
    *((8, 1, 2), (8, 8, 8001), (16, 2, 31), (32, 6, 4001), (36, 7, 1), (64, 6, 8001), (72, 6, 4001), (96, 9, 31)),
    *((108, 8, 4001), (128, 8, 8001), (144, 7, 31), (256, 6, 4001), (256, 8, 8001), (288, 8, 31), (384, 6, 8001)),
    *((384, 8, 1), (512, 8, 4001), (512, 1, 31), (1024, 32, 31), (1000, 9, 2)),
)

SPEC = OpSpec(
    op=tk_moe.hash_gate,
    compare=compare,
    least_bytes=least_bytes,
    cases=(
        Case("sqrtsoftplus-float32-e256-k6-t9", make(9, 256, 6), small=True, modes=True, compile=True),
        Case(
            "softmax-bf16-e256-k8-t33",
            make(33, 256, 8, SOFTMAX, BF16, faults=True, masked=True, idx_dtype=torch.int32),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("sigmoid-bf16-e72-k6-t9", make(9, 72, 6, SIGMOID, BF16, ids_dtype=torch.int32, masked=True), small=True),
        Case("softmax-float32-e33-k3-t9", make(9, 33, 3, SOFTMAX, faults=True, first_element=1), small=True),
        Case(
            "sqrtsoftplus-float32-e256-k6-t33-int64",
            make(33, 256, 6, table_dtype=torch.int64, faults=True),
            small=True,
        ),
        Case("identity-float32-e8-k2-t33", make(33, 8, 2, IDENTITY, faults=True, renormalize=False), small=True),
        Case("softmax-float32-e1023-k32-t3", make(3, 1023, 32, SOFTMAX, renormalize=False), small=True, compile=True),
        Case("sigmoid-float32-e1-k1-t3-one-id", make(3, 1, 1, SIGMOID, vocab_size=1, faults=True), small=True),
        Case("sqrtsoftplus-float32-e4-k32-t3-repeats", make(3, 4, 32, faults=True), small=True),
        Case("sqrtsoftplus-float32-e256-k6-t0", make(0, 256, 6, masked=True), small=True),
        Case("sqrtsoftplus-bf16-e256-k6-t1", make(1, 256, 6, SQRTSOFTPLUS, BF16), small=True),
        *(
            Case(
                f"{function}-float32-e64-k6-t31-extremes",
                make(
                    *(31, 64, 6, function),
                    values="extremes",
                    faults=True,
                    vocab_size=50,
                    # If a sum of numbers of both signs overflows, its result depends on their order.
                    renormalize=function is not IDENTITY,
                ),
                small=True,
            )
            for function in ScoringFunc
        ),
        *(
            Case(
                f"{function}-{name_of(dtype)}-e256-k8-t4001-{values}",
                make(
                    *(4001, 256, 8, function, dtype, values),
                    masked=True,
                    faults=True,
                    renormalize=function is not IDENTITY,
                ),
            )
            for function in ScoringFunc
            for dtype, values in ((FLOAT32, "extremes"), (BF16, "wide"))
        ),
        *varied_cases(make, _SIZES, _VARIANTS),
        *benches(
            "sqrtsoftplus-float32-e256-k6-t{}",
            lambda t: make(t, 256, 6, vocab_size=129280),
            (1, 8, 64, 128, 1024, 4001, 8192),
            models=(128, 8192),
        ),
        *benches(
            "softmax-float32-e256-k6-t{}",
            lambda t: make(t, 256, 6, SOFTMAX, vocab_size=129280),
            (1, 8, 64, 128, 1024, 4001, 8192),
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_a_table_of_wide_entries() -> None:
    table = torch.tensor([[1, 2**32], [-(2**63), 0]])
    topk_idx, weights = tk_moe.hash_gate(torch.tensor([0, 1]), table, torch.zeros(2, 3), SIGMOID)
    assert topk_idx.tolist() == [[1, -1], [-1, 0]]
    assert weights.tolist() == [[1.0, 0.0], [0.0, 1.0]]


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


GOOD: dict[str, Any] = {
    "token_ids": torch.zeros(2, dtype=torch.int64),
    "table": torch.zeros(5, 2, dtype=torch.int32),
    "logits": torch.zeros(2, 8),
    "scoring_func": SQRTSOFTPLUS,
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"table": torch.zeros(0, 2, dtype=torch.int32)}, ValueError, "table.*at least one row"),
        ({"table": torch.zeros(5, 33, dtype=torch.int32)}, ValueError, "table.*1 to 32.*33"),
        ({"logits": torch.zeros(3, 8)}, ValueError, "logits.*shape"),
        ({"logits": torch.zeros(2, 1025)}, ValueError, "logits.*1 to 1024"),
        ({"mask": torch.zeros(1, dtype=torch.bool)}, ValueError, "mask.*shape"),
    ],
)
