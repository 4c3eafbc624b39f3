"""Named cases of mhc_pre_norm_fn_bwd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import Case, OpSpec, assert_equal
from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.trees import distinct_bytes
from tk_mhc import reference
from tk_mhc.projection.mhc_pre_norm_fn_bwd import mhc_pre_norm_fn_bwd
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error

Make = Callable[[str], dict[str, Any]]

RESIDUAL_ERROR = 5e-3
"""‖d_residual - exact‖ / ‖exact‖ that the contract allows; rounding to bfloat16 takes about 1.7e-3 of it."""
WEIGHT_ERROR = 1e-3
"""The same for d_fn and d_norm_weight."""
MODEL_SCALE = 1e-4
"""Standard deviation of fn in a model."""


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    head: bool = False,
    norm_weight: bool = True,
    given: bool = False,
    scale: float = MODEL_SCALE,
    first_element: int = 0,
) -> Make:
    """Normal values. mixes are large, so that both terms of d_residual matter: in a model the second is about 1 %.

    `head`: fn has m rows, not m(m + 2). `given`: with a d_residual to be added to, of about the gradient's magnitude.
    Tensors start at element `first_element` of their storage.
    """
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        width = mhc_mult * hidden
        num_rows = mhc_mult if head else mhc_mult * (mhc_mult + 2)

        def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            size = torch.Size(shape)
            return torch.empty(first_element + size.numel(), dtype=dtype, device=device)[first_element:].view(size)

        streams = (*leading, mhc_mult, hidden)
        return {
            "d_mixes": tensor(*leading, num_rows).normal_(),
            "residual": tensor(*streams, dtype=torch.bfloat16).normal_(),
            "mhc_fn": tensor(num_rows, width).normal_(std=scale),
            "mhc_norm_weight": tensor(width).uniform_(0.5, 1.5) if norm_weight else None,
            "mixes": tensor(*leading, num_rows).normal_(std=scale * width),
            "rstd": tensor(*leading).uniform_(0.5, 1.5),
            "d_residual": tensor(*streams, dtype=torch.bfloat16).normal_(std=5 * scale) if given else None,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Relative errors to the float32 reference within the contract's bounds; a given d_residual is the one returned."""
    (gradients, written), (expected_gradients, _) = actual, expected
    bounds = {"d_residual": RESIDUAL_ERROR, "d_fn": WEIGHT_ERROR, "d_norm_weight": WEIGHT_ERROR}
    for (name, bound), x, y in zip(bounds.items(), gradients, expected_gradients, strict=True):
        if y is None:
            assert x is None, f"{name}: expected None, got a tensor"
            continue
        assert_same_metadata(x, y, name)
        assert_relative_error(x, y, bound, name)
    if written is not None:
        assert_equal(gradients[0], written, name="d_residual")


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and a given d_residual twice: it is read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["d_residual"])


SPEC = OpSpec(
    op=mhc_pre_norm_fn_bwd,
    reference=reference.mhc_pre_norm_fn_bwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("d_residual",),
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17-given", make(17, 2, 64, given=True), small=True, modes=True),
        Case("m2-h64-t3-head", make(3, 2, 64, head=True), small=True, compile=True),
        Case("m4-h192-t17-no-weight-given", make(17, 4, 192, norm_weight=False, given=True), small=True, compile=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True, compile=True),
        Case("m8-h64-t17-head-given", make(17, 8, 64, head=True, given=True), small=True),
        Case("m2-h576-t1", make(1, 2, 576), small=True),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        # One token more than a tile; one less than two tiles; more tiles than ranges,
        # an odd number of them, so that the last range has fewer, and a partial last tile.
        Case("m2-h64-t65", make(65, 2, 64), small=True),
        Case("m2-h64-t127-no-weight", make(127, 2, 64, norm_weight=False), small=True),
        Case("m2-h64-t2200-given", make(2200, 2, 64, given=True)),
        Case("m4-h64-no-leading-given", make((), 4, 64, given=True), small=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-t0-given", make(0, 4, 64, given=True), small=True),
        Case("m8-h64-t2x0-no-weight", make((2, 0), 8, 64, norm_weight=False), small=True),
        Case("m4-h64-t3-unaligned-given", make(3, 4, 64, given=True, first_element=1), small=True),
        *(Case(f"m4-h7168-t{num_tokens}", make(num_tokens)) for num_tokens in TOKEN_COUNTS),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}-given", make(num_tokens, 4, hidden, given=True))
            for hidden in HIDDEN_SIZES
            for num_tokens in (17, 1001)
        ),
        *(
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}", make(num_tokens, mhc_mult, hidden))
            for mhc_mult in (2, 8)
            for hidden, num_tokens in ((64, 4096), (576, 65), (7168, 1), (8192, 1000))
        ),
        Case("m8-h7168-t1001-given", make(1001, 8, given=True), compile=True),
        Case("m4-h7168-t1001-no-weight", make(1001, norm_weight=False)),
        Case("m4-h7168-t8192-head", make(8192, head=True)),
        Case("m4-h7168-t8192-scale1", make(8192, scale=1.0)),
        Case("m4-h7168-t8192-bench", make(8192), bench=True, model_shape=True, gpu=False, compile=True),
        Case(
            "m4-h7168-t8192-given-bench", make(8192, given=True), bench=True, model_shape=True, gpu=False, compile=True
        ),
        *(
            Case(f"m4-h7168-t{num_tokens}-bench", make(num_tokens), bench=True, gpu=False)
            for num_tokens in (1, 64, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 3072, 4096, 6144)
        ),
        Case("m4-h7168-t8192-head-bench", make(8192, head=True), bench=True, gpu=False),
        *(Case(f"m{mhc_mult}-h7168-t8192-bench", make(8192, mhc_mult), bench=True, gpu=False) for mhc_mult in (2, 8)),
    ),
)
