"""Named cases of engram_hash."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_engram import reference
from tk_engram.hash.engram_hash import engram_hash

Make = Callable[[str], dict[str, Any]]

# Sizes of tables with the largest and smallest quotients and remainders.
_EXTREME_SIZES = (1, 2, 3, 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, 2**31 - 1)


def make(
    num_tokens: int,
    num_layers: int = 2,
    max_ngram: int = 3,
    num_heads: int = 8,
    *,
    values: str = "model",
    masked: bool = False,
    first_element: int = 0,
) -> Make:
    """Ids of a vocabulary, multipliers as a layout has them, tables of some 650,000 rows; with `values` "wide" all ids,
    all multipliers and sizes of all magnitudes.

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            x = torch.empty(first_element + torch.Size(shape).numel(), dtype=dtype, device=device)
            return x.random_(low, high)[first_element:].view(shape)

        columns = (num_layers, (max_ngram - 1) * num_heads)
        if values == "wide":
            ids = integers(-(2**31), 2**31 - 1, (num_tokens, max_ngram))
            ids[::3, -1] = 0
            multipliers = integers(-(2**63), 2**63 - 1, (num_layers, max_ngram), torch.int64)
            sizes = integers(1, 2**31 - 1, columns)
            extremes = torch.tensor(_EXTREME_SIZES, dtype=torch.int32, device=device)[: columns[1]]
            sizes[0, : len(extremes)] = extremes
            offsets = torch.zeros_like(sizes)
        else:
            ids = integers(0, 129280, (num_tokens, max_ngram))
            multipliers = integers(0, (2**63 - 1) // 129280 // 2, (num_layers, max_ngram), torch.int64).mul_(2).add_(1)
            sizes = integers(646400, 650000, columns)
            offsets = integers(0, 2**30, columns).copy_(reference.make_offsets(sizes[:, None]))
        mask = torch.rand(num_tokens, device=device) < 0.3 if masked else None
        return {
            "ngram_token_ids": ids,
            "multipliers": multipliers,
            "vocab_sizes": sizes.view(num_layers, max_ngram - 1, num_heads),
            "offsets": offsets,
            "image_token_mask": mask,
        }

    return build


SPEC = OpSpec(
    op=engram_hash,
    reference=reference.engram_hash,
    cases=(
        # Blocks of whole warps, and (l2-n4-m7, l1-n6-m17) of 252 and 255 threads.
        Case("l2-n3-m8-t65", make(65), small=True, modes=True),
        Case("l2-n3-m8-t33-mask", make(33, masked=True), small=True, modes=True),
        Case("l1-n2-m1-t300", make(300, 1, 2, 1), small=True),
        Case("l3-n3-m1-t9", make(9, 3, 3, 1), small=True),
        Case("l2-n4-m7-t40-wide-mask", make(40, 2, 4, 7, values="wide", masked=True), small=True, compile=True),
        Case("l1-n6-m17-t3", make(3, 1, 6, 17), small=True),
        Case("l2-n3-m8-t65-wide", make(65, values="wide"), small=True),
        Case("l2-n3-m8-t17-unaligned", make(17, first_element=1), small=True),
        Case("l2-n3-m8-t1", make(1), small=True),
        Case("l2-n3-m8-t0", make(0), small=True),
        Case("l3-n4-m8-t0-mask", make(0, 3, 4, masked=True), small=True),
        *(Case(f"l3-n4-m8-t{num_tokens}", make(num_tokens, 3, 4)) for num_tokens in (1, 17, 4001)),
        *(Case(f"l2-n3-m8-t{num_tokens}-mask", make(num_tokens, masked=True)) for num_tokens in (64, 8001)),
        Case("l4-n5-m16-t4001-wide", make(4001, 4, 5, 16, values="wide")),
        Case("l2-n3-m9-t4001-wide", make(4001, 2, 3, 9, values="wide")),
        Case("l30-n3-m64-t257", make(257, 30, 3, 64)),
        Case("l2-n16-m64-t129", make(129, 2, 16, 64)),
        Case("l2-n3-m8-t8192-bench", make(8192), bench=True, model_shape=True, gpu=False),
        Case("l3-n4-m8-t8192-bench", make(8192, 3, 4), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"l2-n3-m8-t{num_tokens}-bench", make(num_tokens), bench=True, gpu=False)
            for num_tokens in (1, 64, 4001, 8001, 65536)
        ),
        Case("l3-n4-m8-t65536-bench", make(65536, 3, 4), bench=True, gpu=False),
    ),
)
