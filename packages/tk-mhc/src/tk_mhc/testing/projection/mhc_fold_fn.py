"""Named cases of mhc_fold_fn."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.projection.mhc_fold_fn import mhc_fold_fn
from tk_mhc.testing.compare import HIDDEN_SIZES

Make = Callable[[str], dict[str, Any]]


def make(mhc_mult: int, hidden: int, *, weight: bool = True, first_element: int = 0) -> Make:
    """A projection of normal values, norm weights around 1; both start at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        def tensor(*shape: int) -> torch.Tensor:
            size = torch.Size(shape)
            return torch.empty(first_element + size.numel(), device=device)[first_element:].view(size)

        return {
            "fn": tensor(mhc_mult * (mhc_mult + 2), mhc_mult * hidden).normal_(),
            "mhc_mult": mhc_mult,
            "norm_weight": tensor(mhc_mult * hidden).normal_(1.0, 0.2) if weight else None,
        }

    return build


SPEC = OpSpec(
    op=mhc_fold_fn,
    reference=reference.mhc_fold_fn,
    cases=(
        # One tile with and without idle threads; in the gpu tier several, the last full or partial.
        Case("m2-h64", make(2, 64), small=True, modes=True),
        Case("m2-h192-no-weight", make(2, 192, weight=False), small=True, modes=True, compile=True),
        Case("m4-h64", make(4, 64), small=True),
        Case("m2-h256", make(2, 256), small=True),
        Case("m2-h320", make(2, 320), small=True),
        Case("m4-h64-no-weight", make(4, 64, weight=False), small=True),
        Case("m2-h64-unaligned", make(2, 64, first_element=1), small=True),
        *(Case(f"m{m}-h{hidden}", make(m, hidden)) for m in (2, 4) for hidden in HIDDEN_SIZES),
        *(Case(f"m8-h{hidden}", make(8, hidden)) for hidden in (64, 576, 8192)),
        Case("m8-h7168", make(8, 7168), compile=True),
        Case("m4-h2560-no-weight", make(4, 2560, weight=False)),
        Case("m4-h7168-bench", make(4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(Case(f"m4-h{hidden}-bench", make(4, hidden), bench=True, gpu=False) for hidden in (576, 2048, 2560, 4096)),
    ),
)
