"""Named cases of aux_fi."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.balance.aux_fi import aux_fi
from tk_moe.testing.balance.group_count import indices
from tk_moe.testing.models import MODEL_EXPERTS

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    routing: str = "any",
    num_aux_topk: int | None = None,
    first_element: int = 0,
    dtype: torch.dtype = torch.int64,
) -> Make:
    """Arguments of aux_fi; num_aux_topk is num_topk unless given. The rest is as in `group_count.indices`."""

    def build(device: str) -> dict[str, Any]:
        return {
            "topk_idx": indices(num_tokens, num_topk, num_experts, routing, device, first_element, dtype),
            "num_experts": num_experts,
            "num_aux_topk": num_aux_topk or num_topk,
        }

    return build


SPEC = OpSpec(
    op=aux_fi,
    reference=reference.aux_fi,
    cases=(
        # One block: up to 4096 pairs.
        Case("e256-k8-t31", make(31, 8, 256), small=True, modes=True, compile=True),
        Case("e13-k3-t31", make(31, 3, 13), small=True),
        Case("e1024-k32-t9", make(9, 32, 1024), small=True, compile=True),
        Case("e1-k1-t5", make(5, 1, 1), small=True),
        Case("e8-k2-t0", make(0, 2, 8), small=True),
        Case("e8-k2-t1", make(1, 2, 8), small=True),
        Case("e32-k6-t67-aux5", make(67, 6, 32, num_aux_topk=5), small=True),
        Case("e32-k6-t67-unaligned", make(67, 6, 32, first_element=1), small=True),
        Case("e32-k6-t67-last", make(67, 6, 32, "last"), small=True),
        Case("e32-k6-t67-none", make(67, 6, 32, "none"), small=True),
        Case("e32-k6-t67-int32", make(67, 6, 32, dtype=torch.int32), small=True, modes=True, compile=True),
        # A cluster.
        Case("e256-k8-t8001-int32", make(8001, 8, 256, dtype=torch.int32)),
        Case("e256-k8-t600", make(600, 8, 256), small=True, modes=True, compile=True),
        Case("e13-k9-t500-none", make(500, 9, 13, "none"), small=True),
        # count · num_experts takes more than 24 bits, then more than 31.
        Case("e1024-k32-t8001-last", make(8001, 32, 1024, "last"), compile=True),
        Case("e1023-k32-t131071-last", make(131071, 32, 1023, "last", 31)),
        *(Case(f"e256-k8-t{num_tokens}", make(num_tokens, 8, 256)) for num_tokens in (512, 513, 4001, 8001)),
        *(Case(f"e256-k8-t4001-{routing}", make(4001, 8, 256, routing)) for routing in ("last", "half", "none")),
        *(
            Case(f"e{num_experts}-k{num_topk}-t{num_tokens}", make(num_tokens, num_topk, num_experts))
            for num_experts in MODEL_EXPERTS
            for num_topk, num_tokens in ((1, 2), (7, 8001), (9, 31))
        ),
        Case("e256-k8-t8192-bench", make(8192, 8, 256), bench=True, model_shape=True, gpu=False),
        Case("e256-k8-t8192-half-bench", make(8192, 8, 256, "half"), bench=True, gpu=False),
        *(
            Case(f"e256-k8-t{num_tokens}-bench", make(num_tokens, 8, 256), bench=True, gpu=False)
            for num_tokens in (1, 8, 64, 128, 1024)
        ),
    ),
)
