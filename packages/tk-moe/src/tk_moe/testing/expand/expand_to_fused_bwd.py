"""Named cases of expand_to_fused_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.expand.expand_to_fused_bwd import expand_to_fused_bwd
from tk_moe.testing.expand.expand_to_fused import make_maps, model_rows

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    hidden: int,
    num_topk: int,
    dtype: torch.dtype = torch.bfloat16,
    num_rows: int | None = None,
    first_element: int = 0,
    **routing: Any,
) -> Make:
    """Normal gradients, which start at element `first_element` of their storage, and the map of a random routing."""

    def build(device: str) -> dict[str, Any]:
        rows = model_rows(num_tokens, num_topk) if num_rows is None else num_rows
        token_topk_to_pos, _ = make_maps(num_tokens, num_topk, rows, device, **routing)
        grad_rows = torch.randn((first_element + rows * hidden,), dtype=dtype, device=device)[first_element:]
        return {"grad_rows": grad_rows.view(rows, hidden), "token_topk_to_pos": token_topk_to_pos}

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Bytes of the rows that have a token, of the map and of the output: rows of padding need not be read."""
    grad_rows, pos = inputs["grad_rows"], inputs["token_topk_to_pos"]
    used = int((pos >= 0).sum()) * grad_rows.shape[1] * grad_rows.element_size()
    return used + pos.numel() * pos.element_size() + outputs.numel() * outputs.element_size()


_SMALL_ROUTING = {"num_rows": 40, "num_experts": 4, "alignment": 4, "share_without_position": 0.2}

SPEC = OpSpec(
    op=expand_to_fused_bwd,
    reference=reference.expand_to_fused_bwd,
    least_bytes=least_bytes,
    cases=(
        Case("bf16-h64-t7", make(7, 64, 3, **_SMALL_ROUTING), small=True, modes=True, compile=True),
        Case("float32-h192-t7", make(7, 192, 3, torch.float32, **_SMALL_ROUTING), small=True, compile=True),
        Case("bf16-h64-t7-unaligned", make(7, 64, 3, first_element=1, **_SMALL_ROUTING), small=True),
        Case("bf16-h64-t0", make(0, 64, 3, **_SMALL_ROUTING), small=True),
        Case("bf16-h64-t7-no-rows", make(7, 64, 3, **{**_SMALL_ROUTING, "num_rows": 0}), small=True),
        Case(
            "bf16-h64-t40-past-the-end",
            make(40, 64, 3, drop_what_does_not_fit=False, **{**_SMALL_ROUTING, "num_rows": 30}),
            small=True,
        ),
        *(
            Case(f"bf16-h{hidden}-t{num_tokens}", make(num_tokens, hidden, num_topk))
            for hidden, num_topk in ((576, 9), (2048, 8), (7168, 8))
            for num_tokens in (0, 1, 2, 31, 4001)
        ),
        Case("float32-h7168-t4001-k2", make(4001, 7168, 2, torch.float32)),
        Case("bf16-h7168-t8001-k1", make(8001, 7168, 1)),
        Case("bf16-h7168-t4096-bench", make(4096, 7168, 8), bench=True, model_shape=True, gpu=False),
        *(
            Case(f"bf16-h7168-t{num_tokens}-bench", make(num_tokens, 7168, 8), bench=True, gpu=False)
            for num_tokens in (1, 64, 1024, 4001)
        ),
    ),
)
