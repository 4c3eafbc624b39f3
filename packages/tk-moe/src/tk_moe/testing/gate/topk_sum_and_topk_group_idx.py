"""Named cases of topk_sum_and_topk_group_idx."""

from collections.abc import Callable
from typing import Any

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.gate.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx
from tk_moe.testing.gate import topk_gate as gate_cases

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    num_groups: int,
    group_size: int,
    num_topk_sum: int,
    num_topk_groups: int,
    values: str = "normal",
    first_element: int = 0,
) -> Make:
    """Scores as in topk_gate's cases, in groups."""
    make_scores = gate_cases.make(num_tokens, num_groups * group_size, 1, values, first_element)

    def build(device: str) -> dict[str, Any]:
        scores = make_scores(device)["scores"].view(num_tokens, num_groups, group_size)
        return {"scores": scores, "num_topk_sum": num_topk_sum, "num_topk_groups": num_topk_groups}

    return build


SPEC = OpSpec(
    op=topk_sum_and_topk_group_idx,
    reference=reference.topk_sum_and_topk_group_idx,
    cases=(
        # Numbers of groups that are powers of two or not, idle lanes, one score per lane and more, vectors of 4, 2, 1.
        Case("g8-e32-s2-k4-t9", make(9, 8, 32, 2, 4), small=True, modes=True, compile=True),
        Case("g8-e32-s1-k4-t9", make(9, 8, 32, 1, 4), small=True, compile=True),
        Case("g3-e14-s2-k2-t7", make(7, 3, 14, 2, 2), small=True, compile=True),
        Case("g5-e13-s1-k5-t7", make(7, 5, 13, 1, 5), small=True, compile=True),
        Case("g32-e32-s2-k32-t3", make(3, 32, 32, 2, 32), small=True, compile=True),
        Case("g17-e60-s2-k9-t3", make(3, 17, 60, 2, 9), small=True, compile=True),
        Case("g1-e1-s1-k1-t3", make(3, 1, 1, 1, 1), small=True, compile=True),
        Case("g1-e1024-s2-k1-t3", make(3, 1, 1024, 2, 1), small=True),
        Case("g32-e1-s1-k8-t3", make(3, 32, 1, 1, 8), small=True),
        Case("g4-e2-s2-k2-t5", make(5, 4, 2, 2, 2), small=True),
        Case("g8-e32-s2-k4-t0", make(0, 8, 32, 2, 4), small=True),
        Case("g8-e32-s2-k4-t1", make(1, 8, 32, 2, 4), small=True),
        Case("g8-e32-s2-k4-t5-unaligned", make(5, 8, 32, 2, 4, first_element=1), small=True, compile=True),
        *(
            Case(f"g8-e32-s2-k8-t7-{values}", make(7, 8, 32, 2, 8, values), small=True)
            for values in ("ties", "equal", "extremes", "bits", "lane")
        ),
        *(
            Case(f"g{groups}-e{size}-s{num}-k{kept}-t{tokens}-{values}", make(tokens, groups, size, num, kept, values))
            for groups, size, kept in ((8, 32, 4), (4, 72, 2), (16, 16, 16), (6, 6, 3), (12, 32, 4), (3, 341, 2))
            for num, tokens, values in ((1, 31, "ties"), (2, 4001, "ties"), (2, 8001, "normal"), (2, 2003, "extremes"))
        ),
        Case("g8-e32-s2-k4-t4001-bits", make(4001, 8, 32, 2, 4, "bits")),
        *(
            Case(
                f"g8-e32-s2-k4-t{tokens}-bench",
                make(tokens, 8, 32, 2, 4),
                bench=True,
                model_shape=tokens == 8192,
                gpu=False,
            )
            for tokens in (1, 8, 64, 128, 1024, 8192)
        ),
        *(
            Case(f"g{groups}-e{size}-s2-k{kept}-t8192-bench", make(8192, groups, size, 2, kept), bench=True, gpu=False)
            for groups, size, kept in ((4, 32, 2), (8, 48, 4), (16, 32, 4))
        ),
    ),
)
