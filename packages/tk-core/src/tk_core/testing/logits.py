"""Logits of which a gate's choice of experts does not depend on how it rounds scores."""

from collections.abc import Callable

import torch
from torch import Tensor


def construct_logits(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    *,
    ranks_of: Callable[[Tensor], Tensor] = torch.Tensor.float,
    dtype: torch.dtype = torch.float32,
    gap: float = 1e-6,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Normal logits (num_tokens, num_experts), drawn again where a token's best ranks are not further apart than `gap`.

    `ranks_of` takes rows of logits and returns what experts are ranked by, of the same shape, such as scores with a
    bias. Each of the num_topk best ranks and the next one after them differ by more than `gap`, so that a gate whose
    ranks are off by less than half of it chooses the same experts, in the same order. On the meta device nothing is
    drawn again.

    Raises:
        ValueError: no draw of a hundred has such gaps.
    """
    logits = torch.randn((num_tokens, num_experts), device=device).to(dtype)
    if logits.is_meta:
        return logits
    rows = torch.arange(num_tokens, device=device)
    for _ in range(100):
        best = ranks_of(logits[rows]).topk(min(num_topk + 1, num_experts), dim=1).values
        rows = rows[(best.diff(dim=1) >= -gap).any(dim=1)]
        if not len(rows):
            return logits
        logits[rows] = torch.randn((len(rows), num_experts), device=device).to(dtype)
    raise ValueError(f"gap: expected ranks that can be further apart than {gap}, got {len(rows)} tokens without")
