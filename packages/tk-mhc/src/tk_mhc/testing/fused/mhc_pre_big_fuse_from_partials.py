"""Named cases of mhc_pre_big_fuse_from_partials."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference
from tk_mhc.fused.mhc_pre_big_fuse_from_partials import mhc_pre_big_fuse_from_partials
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS
from tk_mhc.testing.fused.mhc_pre_big_fuse import MODEL_EPS, assert_close_input, draw_options, draw_parameters
from tk_mhc.testing.projection.mhc_pre_norm_fn import MODEL_SCALE

Make = Callable[[str], dict[str, Any]]


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    n_splits: int = 16,
    *,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    layer_norm: torch.dtype | None = None,
    shifted: bool = False,
    pre_mix: bool = True,
) -> Make:
    """Normal residual and fn, and the reference's partial sums of them."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        residual = torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device)
        parameters = draw_parameters(mhc_mult, mhc_mult * hidden, scale, eps, device)
        mul, sqrsum = reference.mhc_prenorm_gemm(residual, parameters.pop("fn"), n_splits)
        return {
            "gemm_out_mul": mul,
            "gemm_out_sqrsum": sqrsum,
            "residual": residual,
            **parameters,
            **draw_options(leading, mhc_mult, hidden, layer_norm, shifted, pre_mix, eps, device),
        }

    return build


def compare(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Both add the same float32 numbers in the same order, so only rsqrt, exp and sums of few numbers differ.

    They change weights by about 1e-6; the sum of rounding errors of ten Sinkhorn iterations stays below 1e-5.
    """
    assert len(actual) == len(expected), f"expected {len(expected)} results, got {len(actual)}"
    for name, x, y in zip(("post", "comb", "layer_input", "next_pre_mix"), actual, expected):
        if name == "layer_input":
            assert_close_input(x, y, atol=1e-4)
        else:
            assert_same_metadata(x, y, name)
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=mhc_pre_big_fuse_from_partials,
    reference=reference.mhc_pre_big_fuse_from_partials,
    compare=compare,
    cases=(
        Case("m4-h64-t3-splits2", make(3, 4, 64, 2), small=True, modes=True),
        Case("m2-h64-t17-splits1", make(17, 2, 64, 1), small=True, compile=True),
        Case("m8-h64-t3-splits3", make(3, 8, 64, 3), small=True, compile=True),
        # Empty splits.
        Case("m4-h64-t3-splits7", make(3, 4, 64, 7), small=True),
        Case("m2-h576-t3-splits16", make(3, 2, 576), small=True),
        Case("m4-h128-t3-splits4-layer-norm-bf16", make(3, 4, 128, 4, layer_norm=_BF16), small=True, modes=True),
        Case("m4-h576-t1-splits4-layer-norm-float32", make(1, 4, 576, 4, layer_norm=_FLOAT32), small=True),
        Case("m4-h64-t17-splits2-shifted", make(17, 4, 64, 2, shifted=True), small=True, modes=True),
        Case(
            "m4-h128-t3-splits2-shifted-stream0",
            make(3, 4, 128, 2, shifted=True, pre_mix=False),
            small=True,
            compile=True,
        ),
        Case(
            "m4-h192-t3-splits2-shifted-layer-norm",
            make(3, 4, 192, 2, layer_norm=_BF16, shifted=True),
            small=True,
            compile=True,
        ),
        Case("m4-h64-no-leading-splits2", make((), 4, 64, 2), small=True),
        Case("m4-h64-t2x3-splits2-shifted", make((2, 3), 4, 64, 2, shifted=True), small=True),
        Case("m4-h64-t0-splits2", make(0, 4, 64, 2), small=True),
        Case(
            "m4-h64-t2x0-splits2-shifted-layer-norm",
            make((2, 0), 4, 64, 2, layer_norm=_BF16, shifted=True),
            small=True,
        ),
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
        *(Case(f"m4-h7168-t129-splits{n_splits}", make(129, n_splits=n_splits)) for n_splits in (1, 16, 500)),
        *(Case(f"m4-h7168-t{t}-splits16-layer-norm", make(t, layer_norm=_BF16)) for t in (64, 8192)),
        *(Case(f"m4-h7168-t{t}-splits16-shifted", make(t, shifted=True)) for t in (64, 8192)),
        Case("m4-h7168-t64-splits16-scale1", make(64, scale=1.0)),
        *(
            Case(
                f"m4-h7168-t{num_tokens}-splits{n_splits}-bench",
                make(num_tokens, n_splits=n_splits, eps=MODEL_EPS),
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
                make(num_tokens, n_splits=n_splits, eps=MODEL_EPS),
                bench=True,
                gpu=False,
            )
            for num_tokens, n_splits in ((1, 16), (128, 16), (1024, 4), (4001, 1), (8001, 1), (8192, 16))
        ),
        *(
            Case(f"m4-h{hidden}-t8192-splits1-bench", make(8192, 4, hidden, 1, eps=MODEL_EPS), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
        *(
            Case(
                f"m4-h7168-t8192-splits1-{name}-bench",
                make(8192, n_splits=1, eps=MODEL_EPS, **options),
                bench=True,
                gpu=False,
            )
            for name, options in (("layer-norm", {"layer_norm": _BF16}), ("shifted", {"shifted": True}))
        ),
    ),
)
