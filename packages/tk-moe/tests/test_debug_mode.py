"""With TK_DEBUG=1, ops refuse data that is out of range."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk_moe
from tk_core import env

from .expand.test_expand_to_fused import EXPAND
from .gate.test_hash_gate import ROW, TABLE
from .gate.test_moe_topk_gate import GOOD as GATE
from .gate.test_moe_topk_gate import MAP
from .gate.test_top2_sum_gate import GOOD as ROUTE
from .gate.test_top2_sum_gate import SHARED
from .reduce.test_reduce_fused import GOOD as REDUCE
from .reduce.test_reduce_fused_bwd import GOOD as REDUCE_BWD

IDX, WRONG = torch.tensor([[2, -1]]), torch.tensor([[3, -1]])
POS = REDUCE_BWD["token_topk_to_pos"]
HASH = {"token_ids": torch.tensor([0, 3]), "table": TABLE[:4], "logits": torch.tensor([ROW] * 2)}
HASH |= {"scoring_func": "sigmoid"}
GIVEN = {
    "fix_routing_mask": torch.tensor([True, False, True]),
    "unmapped_topk_idx": torch.tensor([[0, 7]] * 3),
}
ROUTE, GATE = {**ROUTE, **SHARED, **GIVEN}, {**GATE, **MAP, **GIVEN}
ROWS = {"grad_rows": torch.ones(4, 64), "token_topk_to_pos": REDUCE["token_topk_to_pos"]}


def counts(count: int) -> dict[str, torch.Tensor]:
    return {"logical_count": torch.full((9,), count, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("op", "good", "changes", "match"),
    [
        (tk_moe.group_count, {"group_idx": IDX, "num_groups": 3}, {"group_idx": WRONG}, "num_groups = 3.*3"),
        (tk_moe.aux_fi, {"topk_idx": IDX, "num_experts": 3, "num_aux_topk": 2}, {"topk_idx": WRONG}, "experts = 3.*3"),
        (
            tk_moe.inplace_unique_group_indices,
            {"group_indices": IDX.clone(), "num_groups": 3},
            {"group_indices": WRONG},
            "num_groups = 3.*3",
        ),
        (
            tk_moe.mask_indices_by_tp,
            {"indices": IDX, "n": 3, "num_ep_ranks": 1, "tp_rank": 0, "num_tp_ranks": 2},
            {"indices": WRONG},
            "n = 3.*3",
        ),
        (
            tk_moe.get_fused_mapping,
            {"topk_idx": IDX, "num_experts": 3, "num_expanded_tokens": 0, "alignment": 2},
            {"topk_idx": WRONG},
            "num_experts = 3.*3",
        ),
        (tk_moe.hash_gate, HASH, {"token_ids": torch.tensor([0, 4])}, "expected 0 to 3, got 4$"),
        (tk_moe.hash_gate, HASH, {"token_ids": torch.tensor([0, -1])}, "expected 0 to 3, got -1$"),
        (tk_moe.hash_gate, HASH, {"table": TABLE}, "below 4.*4"),
        (tk_moe.top2_sum_gate, ROUTE, {"unmapped_topk_idx": torch.tensor([[0, 8]] * 3)}, "below 8.*8"),
        (tk_moe.top2_sum_gate, ROUTE, counts(0), "expected 1 to 3, got 0$"),
        (tk_moe.top2_sum_gate, ROUTE, counts(4), "expected 1 to 3, got 4$"),
        (tk_moe.top2_sum_gate, ROUTE, {"to_physical_map": torch.full((9, 3), 10, dtype=torch.int32)}, "below 10"),
        (tk_moe.moe_topk_gate, GATE, {"unmapped_topk_idx": torch.tensor([[0, 8]] * 3)}, "below 8.*8"),
        (tk_moe.moe_topk_gate, GATE, {"logical_count": torch.zeros(8, dtype=torch.int32)}, "expected 1 to 3, got 0$"),
        (tk_moe.expand_to_fused, EXPAND, {"token_topk_to_pos": EXPAND["token_topk_to_pos"] - 1}, "every row"),
        (tk_moe.reduce_fused, REDUCE, {"token_topk_to_pos": REDUCE["token_topk_to_pos"] + 2}, "positions below 5"),
        (tk_moe.expand_to_fused_bwd, ROWS, {"token_topk_to_pos": ROWS["token_topk_to_pos"] + 1}, "positions below 4"),
        (
            tk_moe.reduce_fused_bwd,
            {**REDUCE_BWD, "token_topk_to_pos": POS.where(POS < 5, -1)},
            {"token_topk_to_pos": POS},
            "positions below 5",
        ),
    ],
)
def test_data_out_of_range(
    op: Callable[..., Any], good: dict[str, Any], changes: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    op(**good)
    with pytest.raises(ValueError, match=f"^{next(iter(changes))}.*{match}"):
        op(**{**good, **changes})
