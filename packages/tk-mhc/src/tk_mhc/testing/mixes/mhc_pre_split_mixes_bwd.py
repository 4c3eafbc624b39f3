"""Named cases of mhc_pre_split_mixes_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.mixes.mhc_pre_split_mixes_bwd import mhc_pre_split_mixes_bwd
from tk_mhc.testing.compare import TOKEN_COUNTS, within
from tk_mhc.testing.mixes.mhc_pre_split_mixes import make_mixes

Make = Callable[[str], dict[str, Any]]


def make(leading: tuple[int, ...], mhc_mult: int, *, first_element: int = 0, std: float = 1.0) -> Make:
    """Arguments of the op: normal gradients, which start at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        def draw(*shape: int) -> torch.Tensor:
            count = torch.Size(shape).numel()
            return torch.randn(first_element + count, device=device)[first_element:].view(shape)

        return {
            "d_pre": draw(*leading, mhc_mult, 1),
            "d_post": draw(*leading, mhc_mult, 1),
            "d_comb": draw(*leading, mhc_mult, mhc_mult),
            **make_mixes(leading, mhc_mult, device, first_element=first_element, std=std),
            "mhc_post_mult_value": 2.0,
        }

    return build


SPEC = OpSpec(
    op=mhc_pre_split_mixes_bwd,
    reference=reference.mhc_pre_split_mixes_bwd,
    compare=within(rtol=1e-5, atol=2e-5),
    cases=(
        Case("m4-t17", make((17,), 4), small=True, modes=True, compile=True),
        Case("m2-t67", make((67,), 2), small=True),
        Case("m8-t33", make((33,), 8), small=True, compile=True),
        Case("m4-2x3", make((2, 3), 4), small=True, modes=True),
        Case("m4-one-token", make((), 4), small=True),
        Case("m4-t1", make((1,), 4), small=True),
        Case("m4-t0", make((0,), 4), small=True),
        Case("m8-0x3", make((0, 3), 8), small=True),
        Case("m4-t67-wide", make((67,), 4, std=10.0), small=True),
        Case("m4-t67-unaligned", make((67,), 4, first_element=1), small=True),
        *(Case(f"m4-t{num_tokens}", make((num_tokens,), 4)) for num_tokens in TOKEN_COUNTS if num_tokens > 17),
        # Several tiles per range, empty ranges at the end, and a partial tile.
        Case("m4-t20001", make((20001,), 4)),
        Case("m2-t40001", make((40001,), 2)),
        Case("m8-t4001", make((4001,), 8)),
        Case("m4-t8192-bench", make((8192,), 4), bench=True, model_shape=True, gpu=False),
        *(Case(f"m4-t{n}-bench", make((n,), 4), bench=True, gpu=False) for n in (1, 64, 4096)),
    ),
)
