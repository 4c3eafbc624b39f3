"""Named cases of mhc_pre_split_mixes."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.mixes.mhc_pre_split_mixes import mhc_pre_split_mixes
from tk_mhc.testing.compare import TOKEN_COUNTS, within

Make = Callable[[str], dict[str, Any]]


def make_mixes(
    leading: tuple[int, ...], mhc_mult: int, device: str, *, std: float = 1.0, first_element: int = 0
) -> dict[str, Any]:
    """Normal mixes of standard deviation `std`, scales and bases, from element `first_element` of their storage on."""
    num_columns = mhc_mult * (mhc_mult + 2)

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return (torch.randn(first_element + count, device=device) * std)[first_element:].view(shape)

    return {
        "input_mixes": draw(*leading, num_columns, std=std),
        "mhc_scale": draw(3),
        "mhc_base": draw(num_columns),
        "mhc_mult": mhc_mult,
    }


def make(leading: tuple[int, ...], mhc_mult: int, **values: Any) -> Make:
    """Arguments of the op."""

    def build(device: str) -> dict[str, Any]:
        mixes = make_mixes(leading, mhc_mult, device, **values)
        return {**mixes, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}

    return build


SPEC = OpSpec(
    op=mhc_pre_split_mixes,
    reference=reference.mhc_pre_split_mixes,
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
        # Sigmoids that round to 0 and 1, and exponentials that overflow.
        Case("m4-t67-wide", make((67,), 4, std=100.0), small=True),
        Case("m4-t67-unaligned", make((67,), 4, first_element=1), small=True),
        *(Case(f"m4-t{num_tokens}", make((num_tokens,), 4)) for num_tokens in TOKEN_COUNTS if num_tokens > 17),
        Case("m2-t4001", make((4001,), 2)),
        Case("m8-t4001", make((4001,), 8)),
        Case("m4-t8192-bench", make((8192,), 4), bench=True, model_shape=True, gpu=False),
        *(Case(f"m4-t{n}-bench", make((n,), 4), bench=True, gpu=False) for n in (1, 64, 4096)),
    ),
)
