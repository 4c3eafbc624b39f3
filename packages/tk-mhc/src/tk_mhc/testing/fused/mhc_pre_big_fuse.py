"""Named cases of mhc_pre_big_fuse, and the parts that the other fused ops' cases share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import Case, OpSpec
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference
from tk_mhc.fused.mhc_pre_big_fuse import mhc_pre_big_fuse
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error
from tk_mhc.testing.projection.mhc_pre_norm_fn import MODEL_SCALE, draw_fn, draw_norm_weight

Make = Callable[[str], dict[str, Any]]

MODEL_EPS = 1e-6


def draw_parameters(mhc_mult: int, num_channels: int, scale: float, eps: float, device: str) -> dict[str, Any]:
    """fn, scale, base and the numbers. The sums of num_channels products times mhc_scale are about 1 for any `scale`.

    Cases for tests have an eps of 1e-2, large enough to detect a result that leaves one out.
    """
    num_mixes = mhc_mult * (mhc_mult + 2)
    return {
        "fn": draw_fn(num_mixes, num_channels, scale, device),
        "mhc_scale": (0.5 + torch.rand((3,), device=device)) / (scale * num_channels**0.5),
        "mhc_base": 0.5 * torch.randn((num_mixes,), device=device),
        "rms_eps": eps,
        "mhc_pre_eps": eps,
        "mhc_sinkhorn_eps": eps,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 10,
    }


def draw_options(
    leading: tuple[int, ...],
    mhc_mult: int,
    hidden: int,
    layer_norm: torch.dtype | None,
    shifted: bool,
    pre_mix: bool,
    eps: float,
    device: str,
) -> dict[str, Any]:
    """The keyword arguments for the layer norm and for the shifted form, if wanted."""
    options: dict[str, Any] = {}
    if layer_norm is not None:
        weight = 0.5 + torch.rand((hidden,), device=device)
        options |= {"layer_norm_weight": weight.to(layer_norm), "layer_norm_eps": eps}
    if shifted:
        options |= {
            "shifted": True,
            "pre_mix": torch.rand((*leading, mhc_mult, 1), device=device) if pre_mix else None,
        }
    return options


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
    """Normal residual and fn; `layer_norm` is the dtype of the layer norm's weight."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        return {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            **draw_parameters(mhc_mult, num_channels, scale, eps, device),
            "n_splits": n_splits,
            "norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
            **draw_options(leading, mhc_mult, hidden, layer_norm, shifted, pre_mix, eps, device),
        }

    return build


def assert_close_mix(name: str, actual: Tensor, expected: Tensor) -> None:
    """post, comb or next_pre_mix within rtol = atol = 1e-3.

    Mixes may have a relative error of 5e-4. Then z, which is about 1, has this error, and twice that in its tail. A
    sigmoid passes on at most a quarter of it, times post_mult_value = 2; for a softmax it is a relative error.
    """
    assert_same_metadata(actual, expected, name)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, msg=lambda message: f"{name}: {message}")


def assert_close_input(actual: Tensor, expected: Tensor, atol: float = 4e-3) -> None:
    """layer_input: each element within the tolerance of bfloat16 plus `atol`, and as a whole within 5e-3.

    Weights of streams may be off by 2.5e-4, in their tail by twice that, as in `assert_close_mix`; times Σ|residual|,
    8 in its tail, that is 4e-3, however small the sum. As a whole, layer_input has the error of such weights, and of
    the elements that therefore round to the next bfloat16.
    """
    assert_same_metadata(actual, expected, "layer_input")
    torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=atol, msg=lambda message: f"layer_input: {message}")
    assert_relative_error(actual, expected, 5e-3, "layer_input")


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """(post, comb, layer_input) and next_pre_mix, if there is one."""
    assert len(actual) == len(expected), f"expected {len(expected)} results, got {len(actual)}"
    names = ("post", "comb", "layer_input", "next_pre_mix")
    for name, x, y in zip(names, actual, expected):
        if name == "layer_input":
            assert_close_input(x, y)
        else:
            assert_close_mix(name, x, y)


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=mhc_pre_big_fuse,
    reference=reference.mhc_pre_big_fuse,
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
        Case(
            "m2-h64-t3-shifted-stream0-layer-norm",
            make(3, 2, 64, layer_norm=_FLOAT32, shifted=True, pre_mix=False),
            small=True,
        ),
        Case("m8-h64-t3-shifted-layer-norm", make(3, 8, 64, layer_norm=_FLOAT32, shifted=True), small=True),
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 5, 10_000)
        ),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
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
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}-shifted-layer-norm", make(num_tokens, mhc_mult, hidden, **both))
            for mhc_mult, hidden, both in (
                (2, 2560, {"layer_norm": _FLOAT32, "shifted": True}),
                (4, 7168, {"layer_norm": _BF16, "shifted": True}),
                (8, 8192, {"layer_norm": _BF16, "shifted": True}),
            )
            for num_tokens in (17, 1000)
        ),
        *(Case(f"m4-h7168-t{t}-layer-norm", make(t, layer_norm=_BF16)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t{t}-shifted", make(t, shifted=True)) for t in (1, 64, 8192)),
        Case("m4-h7168-t129-shifted-stream0", make(129, shifted=True, pre_mix=False)),
        Case("m4-h7168-t1000-no-weight", make(1000, norm_weight=False)),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 448)),
        *(Case(f"m4-h7168-t{num_tokens}-scale1", make(num_tokens, scale=1.0)) for num_tokens in (64, 8192)),
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
            for hidden in (576, 2048, 2560, 3072, 4096, 6144)
        ),
        Case("m4-h7168-t8192-scale1-bench", make(8192, scale=1.0, eps=MODEL_EPS), bench=True, gpu=False),
        *(
            Case(f"m4-h7168-t{t}-layer-norm-bench", make(t, eps=MODEL_EPS, layer_norm=_BF16), bench=True, gpu=False)
            for t in (64, 8192)
        ),
        *(
            Case(f"m4-h7168-t{t}-shifted-bench", make(t, eps=MODEL_EPS, shifted=True), bench=True, gpu=False)
            for t in (64, 8192)
        ),
        *(
            Case(f"m{mhc_mult}-h7168-t8192-bench", make(8192, mhc_mult, eps=MODEL_EPS), bench=True, gpu=False)
            for mhc_mult in (2, 8)
        ),
    ),
)
