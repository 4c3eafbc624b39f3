"""Named cases of short_conv_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec, calc_diff
from tk_core.testing.numeric import assert_same_metadata
from tk_engram import reference
from tk_engram.conv.short_conv_bwd import short_conv_bwd
from tk_engram.testing.conv.compare import assert_within_a_step
from tk_engram.testing.conv.short_conv import make_conv, rows

Make = Callable[[str], dict[str, Any]]
_FP32 = torch.float32


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    has_residual: bool = False,
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments of the op: those of `make_conv`, and a normal gradient."""

    def build(device: str) -> dict[str, Any]:
        d_out = rows((num_tokens, mhc_mult, hidden), device, first_element)
        inputs = make_conv(num_tokens, mhc_mult, hidden, device, first_element=first_element, **options)
        return {"d_out": d_out, **inputs, "has_residual": has_residual}

    return build


def compare(actual: Any, expected: Any) -> None:
    """d_u within a step of bfloat16, the gradients of the weights by calc_diff."""
    assert_within_a_step(actual[0], expected[0], "d_u")
    for name, x, y in zip(("d_norm_weight", "d_conv_weight"), actual[1:], expected[1:], strict=True):
        assert_same_metadata(x, y, name)
        difference = calc_diff(x, y)
        assert difference < 1e-8, f"{name}: expected a calc_diff below 1e-8, got {difference:.3g}"


SPEC = OpSpec(
    op=short_conv_bwd,
    reference=reference.short_conv_bwd,
    compare=compare,
    cases=(
        # Sequences shorter and longer than the reach of the taps, and an empty one; empty ranges of tokens.
        Case("m2-h64-t17", make(17, 2, 64), small=True, modes=True),
        Case(
            "m1-h64-t23-packed-residual",
            make(23, 1, 64, lengths=(1, 0, 15, 7), has_residual=True, dilation=2),
            small=True,
            modes=True,
        ),
        Case("m2-h64-t11-float32-norm", make(11, 2, 64, dilation=1, dtypes=(_FP32, torch.bfloat16)), small=True),
        Case(
            "m1-h576-t9-packed-residual-float32",
            make(9, 1, 576, lengths=(4, 5), has_residual=True, dtypes=(_FP32, _FP32)),
            small=True,
            compile=True,
        ),
        Case("m3-h64-t5-far-taps", make(5, 3, 64, dilation=4, has_residual=True), small=True),
        Case("m2-h64-t0", make(0, 2, 64), small=True),
        Case("m1-h64-t1", make(1, 1, 64), small=True),
        Case("m2-h64-t6-unaligned", make(6, 2, 64, has_residual=True, first_element=1), small=True),
        Case("m4-h7168-t17", make(17, 4, 7168)),
        Case("m4-h7168-t4001-packed", make(4001, 4, 7168, lengths=(1000, 1, 3000))),
        Case("m4-h7168-t8001-residual", make(8001, 4, 7168, has_residual=True)),
        Case("m1-h576-t8001", make(8001, 1, 576, lengths=(4000, 2, 3999))),
        Case("m2-h1280-t4001-residual", make(4001, 2, 1280, has_residual=True, dilation=2)),
        Case("m8-h2560-t1001", make(1001, 8, 2560)),
        Case("m2-h4096-t1001-float32", make(1001, 2, 4096, dtypes=(_FP32, _FP32))),
        Case("m1-h5120-t1001-far-taps", make(1001, 1, 5120, dilation=500)),
        Case("m2-h8192-t257-packed", make(257, 2, 8192, lengths=(100, 157), has_residual=True)),
        Case("m1-h16384-t65", make(65, 1, 16384)),
        Case("m4-h7168-t8192-bench", make(8192, 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        Case(
            "m4-h7168-t8192-packed-residual-bench",
            make(8192, 4, 7168, has_residual=True, lengths=(2048,) * 4),
            bench=True,
            model_shape=True,
            gpu=False,
        ),
        *(Case(f"m4-h7168-t{n}-bench", make(n, 4, 7168), bench=True, gpu=False) for n in (1, 64, 4001, 8001)),
        *(Case(f"m4-h{h}-t8192-bench", make(8192, 4, h), bench=True, gpu=False) for h in (2048, 4096)),
    ),
)
