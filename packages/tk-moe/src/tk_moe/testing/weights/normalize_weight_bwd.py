"""Named cases of normalize_weight_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_moe import reference
from tk_moe.weights.normalize_weight_bwd import normalize_weight_bwd

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int, num_topk: int, grad_denominator: bool = False, values: str = "uniform", first_element: int = 0
) -> Make:
    """Outputs of the forward for weights in 0 … 1 (`uniform`) or of all magnitudes (`wide`), and gradients.

    The matrices start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def matrix() -> torch.Tensor:
            storage = torch.empty(first_element + num_tokens * num_topk, device=device)
            return storage[first_element:].view(num_tokens, num_topk)

        grad, normalized = matrix(), matrix()
        denominator = torch.empty(num_tokens, device=device)
        grad_of_sum = torch.empty(num_tokens, device=device) if grad_denominator else None
        if device != "meta":
            w = torch.rand((num_tokens, num_topk), device=device)
            if values == "wide":
                w = w * torch.exp2(torch.randint(-140, 120, w.shape, device=device))
            total, shares = reference.normalize_weight(w)
            denominator.copy_(total)
            normalized.copy_(shares)
            grad.normal_()
            if grad_of_sum is not None:
                grad_of_sum.normal_()
        return {
            "grad_normalized": grad,
            "grad_denominator": grad_of_sum,
            "denominator": denominator,
            "normalized": normalized,
        }

    return build


SPEC = OpSpec(
    op=normalize_weight_bwd,
    reference=reference.normalize_weight_bwd,
    cases=(
        # Vectors of 4, 2 and 1 weights.
        Case("k8-t67", make(67, 8), small=True, modes=True, compile=True),
        Case("k8-t67-denominator", make(67, 8, True), small=True, modes=True, compile=True),
        Case("k6-t67-denominator", make(67, 6, True), small=True, compile=True),
        Case("k9-t67", make(67, 9), small=True, compile=True),
        Case("k32-t3-denominator", make(3, 32, True), small=True, compile=True),
        Case("k1-t3", make(3, 1), small=True),
        Case("k8-t67-unaligned", make(67, 8, first_element=1), small=True),
        Case("k8-t0", make(0, 8, True), small=True),
        Case("k8-t1", make(1, 8, True), small=True),
        Case("k7-t67-wide", make(67, 7, True, "wide"), small=True),
        *(
            Case(f"k{num_topk}-t{num_tokens}-wide", make(num_tokens, num_topk, num_tokens > 31, "wide"))
            for num_topk in (1, 2, 6, 7, 8, 9)
            for num_tokens in (0, 2, 31, 4001, 8001)
        ),
        Case("k8-t8192-bench", make(8192, 8), bench=True, model_shape=True, gpu=False),
        *(
            Case(f"k8-t{num_tokens}-bench", make(num_tokens, 8), bench=True, gpu=False)
            for num_tokens in (1, 8, 64, 128, 1024)
        ),
    ),
)
