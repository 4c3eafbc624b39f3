"""Named cases of mhc_post_pre."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference
from tk_mhc.fused.mhc_post_pre import mhc_post_pre
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error
from tk_mhc.testing.fused.mhc_pre_big_fuse import (
    MODEL_EPS,
    assert_close_input,
    assert_close_mix,
    draw_options,
    draw_parameters,
)
from tk_mhc.testing.projection.mhc_pre_norm_fn import MODEL_SCALE, draw_norm_weight

Make = Callable[[str], dict[str, Any]]


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    norm_weight: bool = True,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    n_splits: int | None = None,
    layer_norm: torch.dtype | None = None,
    shifted: bool = False,
    pre_mix: bool = True,
) -> Make:
    """A sublayer's output and residual, normal; post from 0 to 2, rows of comb that add up to 1."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        return {
            "x": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            "post_layer_mix": 2 * torch.rand((*leading, mhc_mult, 1), device=device),
            "comb_res_mix": torch.randn((*leading, mhc_mult, mhc_mult), device=device).softmax(-1),
            **draw_parameters(mhc_mult, num_channels, scale, eps, device),
            "n_splits": n_splits,
            "norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
            **draw_options(leading, mhc_mult, hidden, layer_norm, shifted, pre_mix, eps, device),
        }

    return build


def compare(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """new_residual as for mhc_post, the rest as for mhc_pre_big_fuse, whose input is new_residual.

    An element of new_residual that lies between two bfloat16 may round to either. Those up to 8 are then 2⁻⁵ apart,
    and so is layer_input, wherever streams cancel. Such elements are few: new_residual as a whole is within 1e-3.
    """
    assert len(actual) == len(expected), f"expected {len(expected)} results, got {len(actual)}"
    assert_same_metadata(actual[0], expected[0], "new_residual")
    torch.testing.assert_close(actual[0], expected[0], msg=lambda message: f"new_residual: {message}")
    assert_relative_error(actual[0], expected[0], 1e-3, "new_residual")
    for name, x, y in zip(("post", "comb", "layer_input", "next_pre_mix"), actual[1:], expected[1:]):
        if name == "layer_input":
            assert_close_input(x, y, atol=4e-2)
        else:
            assert_close_mix(name, x, y)


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=mhc_post_pre,
    reference=reference.mhc_post_pre,
    compare=compare,
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True, compile=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True, compile=True),
        Case("m4-h192-t17-no-weight", make(17, 4, 192, norm_weight=False), small=True),
        Case("m2-h576-t3", make(3, 2, 576), small=True),
        Case("m4-h128-t3-layer-norm-bf16", make(3, 4, 128, layer_norm=_BF16), small=True, modes=True),
        Case("m4-h576-t1-layer-norm-float32", make(1, 4, 576, layer_norm=_FLOAT32), small=True),
        Case("m4-h64-t17-shifted", make(17, 4, 64, shifted=True), small=True, modes=True),
        Case("m4-h128-t3-shifted-stream0", make(3, 4, 128, shifted=True, pre_mix=False), small=True, compile=True),
        Case(
            "m4-h192-t3-shifted-layer-norm",
            make(3, 4, 192, layer_norm=_BF16, shifted=True),
            small=True,
            compile=True,
        ),
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 5, 10_000)
        ),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t2x3-shifted", make((2, 3), 4, 64, shifted=True), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        Case("m4-h64-t2x0-shifted-layer-norm", make((2, 0), 4, 64, layer_norm=_BF16, shifted=True), small=True),
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
        *(
            Case(
                f"m{mhc_mult}-h{hidden}-t{num_tokens}-shifted-layer-norm",
                make(num_tokens, mhc_mult, hidden, layer_norm=weight_dtype, shifted=True),
            )
            for mhc_mult, hidden, weight_dtype in ((2, 2560, _FLOAT32), (4, 7168, _BF16), (8, 8192, _BF16))
            for num_tokens in (17, 1000)
        ),
        *(Case(f"m4-h7168-t{t}-layer-norm", make(t, layer_norm=_BF16)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t{t}-shifted", make(t, shifted=True)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 448)),
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
            for num_tokens in (1, 8, 128, 1024, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden, eps=MODEL_EPS), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
        *(
            Case(f"m4-h7168-t{t}-{name}-bench", make(t, eps=MODEL_EPS, **options), bench=True, gpu=False)
            for t in (64, 8192)
            for name, options in (("layer-norm", {"layer_norm": _BF16}), ("shifted", {"shifted": True}))
        ),
    ),
)
