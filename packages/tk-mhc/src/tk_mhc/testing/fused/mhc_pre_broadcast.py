"""Named cases of mhc_pre_broadcast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import Case, OpSpec, assert_equal
from tk_mhc import reference
from tk_mhc.fused.mhc_pre_broadcast import mhc_pre_broadcast
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS
from tk_mhc.testing.fused.mhc_pre_big_fuse import MODEL_EPS, assert_close_input, assert_close_mix, draw_parameters
from tk_mhc.testing.projection.mhc_pre_norm_fn import MODEL_SCALE

Make = Callable[[str], dict[str, Any]]


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    n_splits: int | None = None,
) -> Make:
    """Normal hidden states and fn_folded: sums of mhc_mult normal values are normal too."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        parameters = draw_parameters(mhc_mult, hidden, scale, eps, device)
        return {
            "hidden": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "fn_folded": parameters.pop("fn"),
            **parameters,
            "n_splits": n_splits,
        }

    return build


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """The expanded residual bit for bit, the rest as mhc_pre_big_fuse's."""
    residual, post, comb, layer_input = actual
    assert_equal(residual, expected[0], name="residual")
    assert_close_mix("post", post, expected[1])
    assert_close_mix("comb", comb, expected[2])
    # Streams are equal and their weights positive, so nothing cancels.
    assert_close_input(layer_input, expected[3], atol=1e-5)


SPEC = OpSpec(
    op=mhc_pre_broadcast,
    reference=reference.mhc_pre_broadcast,
    compare=compare,
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True, compile=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True, compile=True),
        Case("m4-h192-t17", make(17, 4, 192), small=True),
        Case("m2-h576-t3", make(3, 2, 576), small=True, modes=True),
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 2, 10_000)
        ),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}", make(num_tokens, 4, hidden))
            for hidden in HIDDEN_SIZES
            for num_tokens in ((65, 4096) if hidden != 7168 else TOKEN_COUNTS)
        ),
        *(
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}", make(num_tokens, mhc_mult, hidden))
            for mhc_mult in (2, 8)
            for hidden, num_tokens in ((64, 4096), (576, 65), (7168, 1), (8192, 1000))
        ),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 112)),
        Case("m4-h7168-t64-scale1", make(64, scale=1.0)),
        *(
            Case(
                f"m4-h7168-t{num_tokens}-bench",
                make(num_tokens, eps=MODEL_EPS),
                bench=True,
                model_shape=True,
                gpu=False,
                compile=True,
            )
            for num_tokens in (64, 8192)
        ),
        *(
            Case(f"m4-h7168-t{num_tokens}-bench", make(num_tokens, eps=MODEL_EPS), bench=True, gpu=False)
            for num_tokens in (1, 128, 1024, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden, eps=MODEL_EPS), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
    ),
)
