"""Named cases of group_count, and indices that cases of other ops use too."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.balance.group_count import group_count
from tk_moe.testing.models import MODEL_EXPERTS

Make = Callable[[str], dict[str, Any]]

# Not a group for any number of groups; includes values whose low 32 bits alone would be one.
_NO_GROUP = (-1, -2, -(2**31), -(2**32), -(2**32) + 3, -(2**63), 1024, 2**31, 2**32, 2**32 + 3, 2**63 - 1)


def indices(
    num_tokens: int,
    num_topk: int,
    num_groups: int,
    routing: str,
    device: str,
    first_element: int = 0,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Indices that are "any", all the "last", "half" of them group 0, or mostly of "none"; contiguous.

    They start at element `first_element` of their storage.
    """
    shape = (num_tokens, num_topk)
    out = torch.empty(first_element + num_tokens * num_topk, dtype=dtype, device=device)[first_element:]
    out = out.view(shape)
    if device == "meta":
        return out
    if routing == "last":
        return out.fill_(num_groups - 1)
    out.random_(0, num_groups)
    if routing == "half":
        out[torch.rand(shape, device=device) < 0.5] = 0
    if routing == "none":
        table = torch.tensor(_NO_GROUP, device=device).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
        nothing = table[torch.randint(0, len(_NO_GROUP), shape, device=device)]
        out.copy_(torch.where(torch.rand(shape, device=device) < 0.7, nothing, out))
    return out


def make(
    num_tokens: int,
    num_topk: int,
    num_groups: int,
    routing: str = "any",
    first_element: int = 0,
    dtype: torch.dtype = torch.int64,
) -> Make:
    """Arguments of group_count; see `indices`."""

    def build(device: str) -> dict[str, Any]:
        drawn = indices(num_tokens, num_topk, num_groups, routing, device, first_element, dtype)
        return {"group_idx": drawn, "num_groups": num_groups}

    return build


SPEC = OpSpec(
    op=group_count,
    reference=reference.group_count,
    cases=(
        # One block: up to 4096 pairs.
        Case("g256-k8-t31", make(31, 8, 256), small=True, modes=True, compile=True),
        Case("g13-k3-t31", make(31, 3, 13), small=True),
        Case("g1024-k32-t9", make(9, 32, 1024), small=True, compile=True),
        Case("g1-k1-t5", make(5, 1, 1), small=True),
        Case("g8-k2-t0", make(0, 2, 8), small=True),
        Case("g8-k2-t1", make(1, 2, 8), small=True),
        Case("g32-k6-t67-unaligned", make(67, 6, 32, first_element=1), small=True),
        Case("g32-k6-t67-last", make(67, 6, 32, "last"), small=True),
        Case("g32-k6-t67-none", make(67, 6, 32, "none"), small=True),
        Case("g32-k6-t67-int32", make(67, 6, 32, dtype=torch.int32), small=True, modes=True, compile=True),
        Case("g32-k6-t67-int32-none", make(67, 6, 32, "none", 1, torch.int32), small=True),
        # A cluster.
        Case("g256-k8-t8001-int32", make(8001, 8, 256, dtype=torch.int32)),
        Case("g256-k8-t600", make(600, 8, 256), small=True, modes=True, compile=True),
        Case("g13-k9-t500-none", make(500, 9, 13, "none"), small=True),
        Case("g1024-k32-t8001", make(8001, 32, 1024), compile=True),
        Case("g7-k32-t65536", make(65536, 32, 7)),
        *(Case(f"g256-k8-t{num_tokens}", make(num_tokens, 8, 256)) for num_tokens in (512, 513, 4001, 8001)),
        *(Case(f"g256-k8-t4001-{routing}", make(4001, 8, 256, routing)) for routing in ("last", "half", "none")),
        *(
            Case(f"g{num_groups}-k{num_topk}-t{num_tokens}", make(num_tokens, num_topk, num_groups))
            for num_groups in MODEL_EXPERTS
            for num_topk, num_tokens in ((1, 2), (6, 8001), (9, 31))
        ),
        Case("g256-k8-t8192-bench", make(8192, 8, 256), bench=True, model_shape=True, gpu=False),
        Case("g8-k8-t8192-bench", make(8192, 8, 8), bench=True, gpu=False),
        Case("g256-k8-t8192-half-bench", make(8192, 8, 256, "half"), bench=True, gpu=False),
        *(
            Case(f"g256-k8-t{num_tokens}-bench", make(num_tokens, 8, 256), bench=True, gpu=False)
            for num_tokens in (1, 64, 128, 1024)
        ),
    ),
)
