"""Named cases of inplace_unique_group_indices."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.mapping.inplace_unique_group_indices import inplace_unique_group_indices
from tk_moe.testing.balance.group_count import indices

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    num_topk: int,
    num_groups: int,
    routing: str = "any",
    first_element: int = 0,
    dtype: torch.dtype = torch.int64,
) -> Make:
    """Arguments of inplace_unique_group_indices; routing as in `testing.balance.group_count.indices`."""

    def build(device: str) -> dict[str, Any]:
        drawn = indices(num_tokens, num_topk, num_groups, routing, device, first_element, dtype)
        return {"group_indices": drawn, "num_groups": num_groups}

    return build


SPEC = OpSpec(
    op=inplace_unique_group_indices,
    reference=reference.inplace_unique_group_indices,
    mutates=("group_indices",),
    cases=(
        # Rows aligned to 16 bytes and to 8.
        Case("g8-k8-t67", make(67, 8, 8), small=True, modes=True, compile=True),
        Case("g33-k9-t67", make(67, 9, 33), small=True, compile=True),
        Case("g128-k32-t9", make(9, 32, 128), small=True, compile=True),
        Case("g64-k6-t31", make(31, 6, 64), small=True),
        Case("g1-k1-t3", make(3, 1, 1), small=True),
        Case("g8-k8-t0", make(0, 8, 8), small=True),
        Case("g8-k8-t1", make(1, 8, 8), small=True),
        Case("g8-k8-t67-unaligned", make(67, 8, 8, first_element=1), small=True),
        Case("g64-k8-t67-int32", make(67, 8, 64, dtype=torch.int32), small=True, modes=True, compile=True),
        Case("g33-k9-t67-int32-none", make(67, 9, 33, "none", 1, torch.int32), small=True),
        Case("g128-k8-t8001-int32", make(8001, 8, 128, dtype=torch.int32)),
        Case("g16-k8-t67-last", make(67, 8, 16, "last"), small=True),
        Case("g16-k8-t67-none", make(67, 8, 16, "none"), small=True),
        *(
            Case(f"g{num_groups}-k{num_topk}-t{num_tokens}-{routing}", make(num_tokens, num_topk, num_groups, routing))
            for num_groups in (4, 8, 36, 72, 128)
            for num_topk, num_tokens, routing in ((2, 2, "any"), (8, 8001, "any"), (9, 4001, "none"), (7, 31, "half"))
        ),
        Case("g8-k8-t8192-bench", make(8192, 8, 8), bench=True, model_shape=True, gpu=False),
        *(
            Case(f"g{num_groups}-k8-t{num_tokens}-bench", make(num_tokens, 8, num_groups), bench=True, gpu=False)
            for num_groups, num_tokens in ((8, 1), (8, 128), (8, 1024), (128, 8192))
        ),
    ),
)
