"""Named cases of mhc_prenorm_gemm."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference
from tk_mhc.projection.mhc_prenorm_gemm import mhc_prenorm_gemm
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error
from tk_mhc.testing.projection.mhc_pre_norm_fn import MODEL_SCALE, RELATIVE_ERROR, draw_fn

Make = Callable[[str], dict[str, Any]]


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    n_splits: int = 16,
    *,
    num_rms_groups: int = 1,
    head: bool = False,
    scale: float = MODEL_SCALE,
) -> Make:
    """Normal residual and fn. `head`: fn has m rows, not m(m + 2)."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_rows = mhc_mult if head else mhc_mult * (mhc_mult + 2)
        return {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            "fn": draw_fn(num_rows, mhc_mult * hidden, scale, device),
            "n_splits": n_splits,
            "num_rms_groups": num_rms_groups,
        }

    return build


def compare(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Each split of mul within the relative error of mixes, sums of squares within 1e-5; empty splits are 0."""
    for name, x, y in zip(("mul", "sqrsum"), actual, expected, strict=True):
        assert_same_metadata(x, y, name)
    for split, (x, y) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert_relative_error(x, y, RELATIVE_ERROR, f"mul[{split}]")
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=0)


SPEC = OpSpec(
    op=mhc_prenorm_gemm,
    reference=reference.mhc_prenorm_gemm,
    compare=compare,
    cases=(
        Case("m4-h64-t3-splits2", make(3, 4, 64, 2), small=True, modes=True),
        Case("m2-h64-t17-splits1", make(17, 2, 64, 1), small=True, compile=True),
        Case("m8-h64-t3-splits3", make(3, 8, 64, 3), small=True, compile=True),
        # Splits of two lengths; one per block of channels; more, so that some are empty; more than twice as many.
        *(Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits), small=True) for n_splits in (5, 12, 13, 31)),
        Case("m4-h128-t17-splits3-head", make(17, 4, 128, 3, head=True), small=True, compile=True),
        Case(
            "m4-h192-t3-splits2-groups4",
            make(3, 4, 192, 2, num_rms_groups=4),
            small=True,
            modes=True,
            compile=True,
        ),
        # A group of several streams, one that ends within a stream, one block per group, empty splits.
        Case("m4-h64-t17-splits1-groups2", make(17, 4, 64, 1, num_rms_groups=2), small=True),
        Case("m2-h192-t3-splits2-groups3", make(3, 2, 192, 2, num_rms_groups=3), small=True),
        Case("m4-h64-t3-splits3-groups4", make(3, 4, 64, 3, num_rms_groups=4), small=True),
        Case("m8-h64-t3-splits2-groups2-head", make(3, 8, 64, 2, num_rms_groups=2, head=True), small=True),
        Case("m4-h64-no-leading-splits2", make((), 4, 64, 2), small=True),
        Case("m4-h64-t2x3-splits2", make((2, 3), 4, 64, 2), small=True),
        Case("m4-h64-t0-splits2", make(0, 4, 64, 2), small=True),
        Case("m4-h64-t2x0-splits2-groups2", make((2, 0), 4, 64, 2, num_rms_groups=2), small=True),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}-splits7", make(num_tokens, 4, hidden, 7))
            for hidden in HIDDEN_SIZES
            for num_tokens in ((65, 4096) if hidden != 7168 else TOKEN_COUNTS)
        ),
        *(
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}-splits16", make(num_tokens, mhc_mult, hidden))
            for mhc_mult in (2, 8)
            for hidden, num_tokens in ((64, 4096), (576, 65), (7168, 1), (8192, 1000))
        ),
        *(Case(f"m4-h7168-t129-splits{n_splits}", make(129, n_splits=n_splits)) for n_splits in (1, 2, 16, 448, 1000)),
        *(Case(f"m4-h7168-t1000-splits4-groups{g}", make(1000, n_splits=4, num_rms_groups=g)) for g in (2, 4, 7, 448)),
        Case("m4-h7168-t8192-splits1-scale1", make(8192, n_splits=1, scale=1.0)),
        Case("m4-h7168-t64-splits16-head", make(64, head=True)),
        *(
            Case(
                f"m4-h7168-t{num_tokens}-splits{n_splits}-bench",
                make(num_tokens, n_splits=n_splits),
                bench=True,
                model_shape=True,
                gpu=False,
                compile=True,
            )
            for num_tokens, n_splits in ((64, 16), (8192, 1))
        ),
        *(
            Case(
                f"m4-h7168-t{num_tokens}-splits{n_splits}-bench",
                make(num_tokens, n_splits=n_splits),
                bench=True,
                gpu=False,
            )
            for num_tokens, n_splits in ((1, 16), (128, 16), (1024, 4), (4001, 1), (8001, 1), (8192, 16))
        ),
        *(
            Case(f"m4-h{hidden}-t8192-splits1-bench", make(8192, 4, hidden, 1), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
        Case(
            "m4-h7168-t8192-splits1-groups4-bench",
            make(8192, n_splits=1, num_rms_groups=4),
            bench=True,
            gpu=False,
        ),
    ),
)
