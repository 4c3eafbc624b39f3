"""Named cases of mask_indices_by_tp."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.mapping.mask_indices_by_tp import mask_indices_by_tp
from tk_moe.testing.balance.group_count import indices

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    num_topk: int,
    n: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    routing: str = "any",
    first_element: int = 0,
    dtype: torch.dtype = torch.int64,
) -> Make:
    """Arguments of mask_indices_by_tp; routing as in `testing.balance.group_count.indices`."""

    def build(device: str) -> dict[str, Any]:
        return {
            "indices": indices(num_tokens, num_topk, n, routing, device, first_element, dtype),
            "n": n,
            "num_ep_ranks": num_ep_ranks,
            "tp_rank": tp_rank,
            "num_tp_ranks": num_tp_ranks,
        }

    return build


SPEC = OpSpec(
    op=mask_indices_by_tp,
    reference=reference.mask_indices_by_tp,
    cases=(
        Case("n256-k8-t67-ep8-tp1of2", make(67, 8, 256, 8, 1, 2), small=True, modes=True, compile=True),
        # Numbers of ranks that do not divide n or each other, one rank, indices from n on and beyond 32 bits.
        Case("n256-k7-t31-ep6-tp2of4", make(31, 7, 256, 6, 2, 4), small=True),
        Case("n13-k3-t17-ep13-tp4of5", make(17, 3, 13, 13, 4, 5), small=True),
        Case("n8-k2-t5-ep1-tp0of1", make(5, 2, 8, 1, 0, 1), small=True),
        Case("n8-k2-t5-ep1-tp1of2", make(5, 2, 8, 1, 1, 2), small=True),
        Case("n256-k8-t67-ep8-tp1of2-none", make(67, 8, 256, 8, 1, 2, "none"), small=True),
        Case("n256-k8-t67-ep8-tp0of3-unaligned", make(67, 8, 256, 8, 0, 3, first_element=1), small=True),
        Case("n256-k8-t0-ep8-tp0of2", make(0, 8, 256, 8, 0, 2), small=True),
        Case("n256-k8-t1-ep8-tp0of2", make(1, 8, 256, 8, 0, 2), small=True),
        Case("n256-k8-t67-ep8-tp1of2-int32", make(67, 8, 256, 8, 1, 2, dtype=torch.int32), small=True, compile=True),
        Case("n256-k7-t31-ep6-tp2of4-int32-none", make(31, 7, 256, 6, 2, 4, "none", 1, torch.int32), small=True),
        Case("n2147483647-k8-t4001-ep64-tp5of8-int32", make(4001, 8, 2**31 - 1, 64, 5, 8, dtype=torch.int32)),
        *(
            Case(
                f"n{n}-k{num_topk}-t{num_tokens}-ep{num_ep_ranks}-tp{tp_rank}of{num_tp_ranks}-none",
                make(num_tokens, num_topk, n, num_ep_ranks, tp_rank, num_tp_ranks, "none"),
            )
            for n, num_topk, num_tokens, num_ep_ranks, tp_rank, num_tp_ranks in (
                (256, 8, 8001, 32, 3, 4),
                (288, 9, 4001, 36, 0, 2),
                (72, 6, 31, 8, 7, 8),
                (108, 6, 8001, 4, 1, 3),
                (2**31 - 1, 8, 4001, 64, 5, 8),
                (512, 1, 2, 16, 1, 2),
            )
        ),
        Case("n256-k8-t8192-ep8-tp1of2-bench", make(8192, 8, 256, 8, 1, 2), bench=True, model_shape=True, gpu=False),
        *(
            Case(f"n256-k8-t{num_tokens}-ep8-tp1of2-bench", make(num_tokens, 8, 256, 8, 1, 2), bench=True, gpu=False)
            for num_tokens in (1, 128, 1024)
        ),
    ),
)
