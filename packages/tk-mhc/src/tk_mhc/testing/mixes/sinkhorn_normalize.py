"""Named cases of sinkhorn_normalize."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.mixes.sinkhorn_normalize import sinkhorn_normalize
from tk_mhc.testing.compare import TOKEN_COUNTS, within

Make = Callable[[str], dict[str, Any]]


def make_logits(
    leading: tuple[int, ...],
    mhc_mult: int,
    device: str,
    *,
    std: float = 1.0,
    transposed: bool = False,
    first_element: int = 0,
) -> torch.Tensor:
    """Normal matrices, transposed views of them, or views that start at element `first_element` of their storage."""
    shape = (*leading, mhc_mult, mhc_mult)
    x = (torch.randn(first_element + torch.Size(shape).numel(), device=device) * std)[first_element:].view(shape)
    return x.transpose(-2, -1) if transposed else x


def make(leading: tuple[int, ...], mhc_mult: int, repeat: int = 10, eps: float = 1e-6, **values: Any) -> Make:
    """Arguments of the op."""
    return lambda device: {"x": make_logits(leading, mhc_mult, device, **values), "repeat": repeat, "eps": eps}


SPEC = OpSpec(
    op=sinkhorn_normalize,
    reference=reference.sinkhorn_normalize,
    compare=within(),
    cases=(
        Case("m4-t17", make((17,), 4), small=True, modes=True, compile=True),
        Case("m2-t67", make((67,), 2), small=True),
        Case("m8-t33", make((33,), 8), small=True, compile=True),
        Case("m4-t33-once", make((33,), 4, repeat=1), small=True, compile=True),
        Case("m8-t33-r20", make((33,), 8, repeat=20), small=True),
        Case("m4-2x3", make((2, 3), 4, repeat=2, eps=1e-3), small=True, modes=True),
        Case("m4-one-token", make((), 4), small=True),
        Case("m4-t1", make((1,), 4), small=True),
        Case("m4-t0", make((0,), 4), small=True),
        Case("m8-0x3", make((0, 3), 8), small=True),
        Case("m4-t33-no-eps", make((33,), 4, eps=0.0), small=True),
        # Rows with one large logit: columns with a sum of nearly 0, and others with that of several rows.
        Case("m4-t67-wide", make((67,), 4, std=20.0), small=True),
        Case("m8-t67-very-wide", make((67,), 8, std=80.0), small=True),
        Case("m4-t67-transposed", make((67,), 4, transposed=True), small=True),
        Case("m4-t67-unaligned", make((67,), 4, first_element=1), small=True),
        *(Case(f"m4-t{num_tokens}", make((num_tokens,), 4, std=3.0)) for num_tokens in TOKEN_COUNTS if num_tokens > 17),
        *(
            Case(f"m{mhc_mult}-t4001-r{repeat}", make((4001,), mhc_mult, repeat=repeat, std=3.0))
            for mhc_mult in (2, 4, 8)
            for repeat in (1, 2, 20)
        ),
        Case("m4-t8192-bench", make((8192,), 4), bench=True, model_shape=True, gpu=False),
        *(Case(f"m4-t{n}-bench", make((n,), 4), bench=True, gpu=False) for n in (1, 64, 4096)),
        Case("m8-t8192-bench", make((8192,), 8), bench=True, gpu=False),
    ),
)
