"""Named cases of short_conv."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec, assert_equal
from tk_engram import reference
from tk_engram.conv.short_conv import short_conv
from tk_engram.testing.conv.compare import assert_within_a_step

Make = Callable[[str], dict[str, Any]]
_BF16, _FP32 = torch.bfloat16, torch.float32


def make_conv(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    device: str,
    *,
    dilation: int = 3,
    lengths: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] = (_BF16, _BF16),
    first_element: int = 0,
) -> dict[str, Any]:
    """Normal tokens of several magnitudes, norm weights around 1, normal taps. The sequences' `lengths` add up to T.

    Tensors start at element `first_element` of their storage.
    """
    u = rows((num_tokens, mhc_mult, hidden), device, first_element)
    u.mul_(torch.exp2(torch.randint(-2, 3, (num_tokens, mhc_mult, 1), device=device)))
    cu_seqlens = None
    if lengths is not None:
        assert sum(lengths) == num_tokens
        offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32).to(device)
    norm_weight = rows((mhc_mult, hidden), device, first_element, dtypes[0])
    conv_weight = rows((mhc_mult, hidden, 4), device, first_element, dtypes[1])
    return {
        "u": u,
        "norm_weight": norm_weight.mul_(0.2).add_(1.0),
        "conv_weight": conv_weight.mul_(0.5),
        "dilation": dilation,
        "cu_seqlens": cu_seqlens,
    }


def rows(shape: tuple[int, ...], device: str, first_element: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    """Normal values that start at element `first_element` of their storage."""
    x = torch.empty(first_element + torch.Size(shape).numel(), dtype=dtype, device=device).normal_()
    return x[first_element:].view(shape)


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    residual: bool = False,
    state: bool = False,
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments of the op: those of `make_conv`, and a residual or a state if wanted."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_conv(num_tokens, mhc_mult, hidden, device, first_element=first_element, **options)
        shape = (num_tokens, mhc_mult, hidden)
        num_sequences = 1 if inputs["cu_seqlens"] is None else len(inputs["cu_seqlens"]) - 1
        state_shape = (num_sequences, 3 * inputs["dilation"], mhc_mult, hidden)
        inputs["residual"] = rows(shape, device, first_element) if residual else None
        inputs["state"] = rows(state_shape, device, first_element) if state else None
        return inputs

    return build


def compare(actual: Any, expected: Any) -> None:
    """The result within a step of bfloat16, the state bit for bit."""
    assert_within_a_step(actual[0], expected[0], "out")
    assert_equal(actual[1], expected[1], name="state")


SPEC = OpSpec(
    op=short_conv,
    reference=reference.short_conv,
    compare=compare,
    mutates=("state",),
    cases=(
        # Sequences shorter and longer than the reach of the taps, and an empty one; full and partial steps.
        Case("m2-h64-t17", make(17, 2, 64), small=True, modes=True),
        Case(
            "m1-h64-t23-packed-residual-state",
            make(23, 1, 64, lengths=(1, 0, 15, 7), residual=True, state=True, dilation=2),
            small=True,
            modes=True,
            compile=True,
        ),
        Case("m2-h64-t11-residual", make(11, 2, 64, residual=True, dilation=1, dtypes=(_FP32, _FP32)), small=True),
        Case("m1-h576-t9-packed", make(9, 1, 576, lengths=(4, 5), dtypes=(_FP32, _BF16)), small=True),
        Case("m3-h64-t5-far-taps", make(5, 3, 64, dilation=4), small=True),
        Case("m1-h8256-t9-two-passes", make(9, 1, 8256, lengths=(4, 5))),
        Case("m1-h64-t3-state-far-taps", make(3, 1, 64, dilation=7, state=True), small=True),
        Case("m1-h128-t4-decode", make(4, 1, 128, lengths=(1, 1, 1, 1), state=True), small=True),
        Case("m2-h64-t0-state", make(0, 2, 64, state=True), small=True),
        Case("m2-h64-t6-unaligned", make(6, 2, 64, residual=True, state=True, first_element=1), small=True),
        Case("m4-h7168-t1-state-float32", make(1, 4, 7168, state=True, dtypes=(_FP32, _FP32)), compile=True),
        Case("m4-h7168-t17", make(17, 4, 7168)),
        Case("m4-h7168-t4001-packed", make(4001, 4, 7168, lengths=(1000, 1, 3000))),
        Case("m4-h7168-t8001-residual", make(8001, 4, 7168, residual=True)),
        Case("m1-h576-t8001-state", make(8001, 1, 576, lengths=(4000, 2, 3999), state=True)),
        Case("m2-h1280-t4001-residual-state", make(4001, 2, 1280, residual=True, state=True, dilation=2)),
        Case("m8-h2560-t1001", make(1001, 8, 2560)),
        Case("m2-h4096-t1001-float32", make(1001, 2, 4096, dtypes=(_FP32, _FP32))),
        Case("m1-h5120-t1001-far-taps", make(1001, 1, 5120, dilation=500)),
        Case("m2-h8192-t257-packed", make(257, 2, 8192, lengths=(100, 157), residual=True)),
        Case("m1-h16384-t65", make(65, 1, 16384)),
        Case("m4-h7168-t64-decode", make(64, 4, 7168, lengths=(1,) * 64, state=True, residual=True)),
        Case("m4-h7168-t8192-bench", make(8192, 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        Case(
            "m4-h7168-t8192-residual-bench", make(8192, 4, 7168, residual=True), bench=True, model_shape=True, gpu=False
        ),
        Case(
            "m4-h7168-t8192-packed-bench",
            make(8192, 4, 7168, residual=True, lengths=(2048,) * 4),
            bench=True,
            model_shape=True,
            gpu=False,
            compile=True,
        ),
        Case(
            "m4-h7168-t64-decode-bench",
            make(64, 4, 7168, residual=True, lengths=(1,) * 64, state=True),
            bench=True,
            model_shape=True,
            gpu=False,
        ),
        *(Case(f"m4-h7168-t{n}-bench", make(n, 4, 7168), bench=True, gpu=False) for n in (1, 64, 4001, 8001)),
        *(Case(f"m4-h{h}-t8192-bench", make(8192, 4, h), bench=True, gpu=False) for h in (2048, 4096)),
    ),
)
