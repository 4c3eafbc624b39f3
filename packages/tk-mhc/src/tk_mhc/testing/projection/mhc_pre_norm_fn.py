"""Named cases of mhc_pre_norm_fn."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import Case, OpSpec
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference
from tk_mhc.projection.mhc_pre_norm_fn import mhc_pre_norm_fn
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error

Make = Callable[[str], dict[str, Any]]

RELATIVE_ERROR = 5e-4
"""‖mixes - exact‖ / ‖exact‖ that the contract allows."""
MODEL_SCALE = 1e-4
"""Standard deviation of fn in a model."""


def draw_fn(num_rows: int, num_channels: int, scale: float, device: str) -> Tensor:
    """fn of normal values."""
    return scale * torch.randn((num_rows, num_channels), device=device)


def draw_norm_weight(num_channels: int, device: str) -> Tensor:
    """A weight from 0.5 to 1.5."""
    return 0.5 + torch.rand((num_channels,), device=device)


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    head: bool = False,
    norm_weight: bool = True,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    n_splits: int | None = None,
    return_rstd: bool = False,
) -> Make:
    """Normal residual and fn. The default eps is so large that leaving it out would give ten times the allowed error.

    `head`: fn has m rows, not m(m + 2).
    """
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        return {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            "mhc_fn": draw_fn(mhc_mult if head else mhc_mult * (mhc_mult + 2), num_channels, scale, device),
            "mhc_norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
            "mhc_norm_eps": eps,
            "n_splits": n_splits,
            "return_rstd": return_rstd,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Mixes within `RELATIVE_ERROR` of the reference's, which is in float32; rstd within 1e-5.

    One wrong element of 8192 tokens is a relative error of about 2e-3.
    """
    assert isinstance(actual, tuple) == isinstance(expected, tuple)
    mixes, rstd = expected if isinstance(expected, tuple) else (expected, None)
    actual_mixes, actual_rstd = actual if isinstance(actual, tuple) else (actual, None)
    assert_same_metadata(actual_mixes, mixes, "mixes")
    assert_relative_error(actual_mixes, mixes, RELATIVE_ERROR, "mixes")
    if rstd is not None:
        assert_same_metadata(actual_rstd, rstd, "rstd")
        torch.testing.assert_close(actual_rstd, rstd, rtol=1e-5, atol=0)


SPEC = OpSpec(
    op=mhc_pre_norm_fn,
    reference=reference.mhc_pre_norm_fn,
    compare=compare,
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m4-h192-t17-rstd", make(17, 4, 192, return_rstd=True), small=True, modes=True, compile=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True, compile=True),
        Case("m8-h64-t3-no-weight-rstd", make(3, 8, 64, norm_weight=False, return_rstd=True), small=True, compile=True),
        Case("m2-h576-t3-no-weight", make(3, 2, 576, norm_weight=False), small=True),
        Case("m4-h128-t17-head", make(17, 4, 128, head=True, return_rstd=True), small=True, compile=True),
        Case("m2-h64-t3-head", make(3, 2, 64, head=True), small=True),
        Case("m8-h64-t3-head-no-weight", make(3, 8, 64, head=True, norm_weight=False), small=True),
        # One split, splits of two lengths, one per block of channels, more than blocks.
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 7, 12, 10_000)
        ),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        Case("m4-h64-no-leading-rstd", make((), 4, 64, return_rstd=True), small=True),
        Case("m4-h64-t2x3-rstd", make((2, 3), 4, 64, return_rstd=True), small=True),
        Case("m4-h64-t2x0-rstd", make((2, 0), 4, 64, return_rstd=True), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}-rstd", make(num_tokens, 4, hidden, return_rstd=True))
            for hidden in HIDDEN_SIZES
            for num_tokens in ((17, 4096) if hidden != 7168 else TOKEN_COUNTS)
        ),
        *(
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}", make(num_tokens, mhc_mult, hidden))
            for mhc_mult in (2, 8)
            for hidden, num_tokens in ((64, 4096), (576, 65), (7168, 1), (8192, 1000))
        ),
        Case("m4-h7168-t1000-no-weight", make(1000, norm_weight=False)),
        Case("m4-h7168-t64-head", make(64, head=True)),
        Case("m4-h7168-t8192-head", make(8192, head=True)),
        *(Case(f"m4-h7168-t129-splits{n_splits}", make(129, n_splits=n_splits)) for n_splits in (1, 2, 7, 16, 448)),
        *(Case(f"m4-h7168-t{num_tokens}-scale1", make(num_tokens, scale=1.0)) for num_tokens in (64, 8192)),
        *(
            Case(
                f"m4-h7168-t{num_tokens}-bench",
                make(num_tokens, eps=1e-6),
                bench=True,
                model_shape=True,
                gpu=False,
                compile=True,
            )
            for num_tokens in (64, 8192)
        ),
        *(
            Case(f"m4-h7168-t{num_tokens}-bench", make(num_tokens, eps=1e-6), bench=True, gpu=False)
            for num_tokens in (1, 128, 1024, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden, eps=1e-6), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 3072, 4096, 6144)
        ),
        Case("m4-h7168-t8192-scale1-bench", make(8192, scale=1.0, eps=1e-6), bench=True, gpu=False),
        Case("m4-h7168-t64-head-bench", make(64, head=True, eps=1e-6), bench=True, gpu=False),
        *(
            Case(f"m{mhc_mult}-h7168-t8192-bench", make(8192, mhc_mult, eps=1e-6), bench=True, gpu=False)
            for mhc_mult in (2, 8)
        ),
    ),
)
