"""Named cases of engram_gate_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.gate.engram_gate_bwd import engram_gate_bwd
from tk_engram.testing.gate.compare import assert_calc_diff, assert_close_bfloat16
from tk_engram.testing.gate.engram_gate_fwd import CLAMP_VALUE, Layout
from tk_engram.testing.gate.engram_gate_fwd import make as make_forward

Make = Callable[[str], dict[str, Any]]


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    layout: Layout = "dense",
    zeros: bool = False,
    mask: bool = False,
    given: bool = False,
    first_element: int = 0,
    clamp_value: float = CLAMP_VALUE,
    **options: bool,
) -> Make:
    """Arguments as for the forward, with the tensors that it saves.

    `given`: with a grad_kv, which starts at element `first_element` of its storage.
    """

    def build(device: str) -> dict[str, Any]:
        inputs = make_forward(
            num_tokens, mhc_mult, hidden, layout=layout, zeros=zeros, mask=mask, first_element=first_element, **options
        )(device)
        inputs["clamp_value"] = clamp_value
        _, *saved = reference.engram_gate_fwd(**inputs)
        del inputs["eps"]
        inputs["grad_out"] = torch.randn((num_tokens, mhc_mult, hidden), dtype=torch.bfloat16, device=device)
        inputs |= zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved)
        grad_kv = None
        if given:
            size = num_tokens * (mhc_mult + 1) * hidden
            grad_kv = torch.empty(first_element + size, dtype=torch.bfloat16, device=device)[first_element:]
            grad_kv = grad_kv.view(num_tokens, mhc_mult + 1, hidden).normal_()
        return {**inputs, "grad_kv": grad_kv}

    return build


def compare(actual: Any, expected: Any) -> None:
    """bfloat16 gradients by `assert_close_bfloat16`, those written to grad_kv too; parts within 1e-8."""
    (result, written), (expected_result, expected_written) = actual, expected
    for name, got, want in zip(("grad_x", "grad_k", "grad_v"), result, expected_result):
        assert_close_bfloat16(got, want, 1e-8, name)
    assert_calc_diff(result[3], expected_result[3], 1e-8, "grad_w_partial")
    assert (written is None) == (expected_written is None)
    if expected_written is not None:
        assert_close_bfloat16(written, expected_written, 1e-8, "grad_kv")


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every input and every output once; grad_kv is the same memory as two of these."""
    return distinct_bytes({name: x for name, x in inputs.items() if name != "grad_kv"}) + distinct_bytes(outputs)


SPEC = OpSpec(
    op=engram_gate_bwd,
    reference=reference.engram_gate_bwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("grad_kv",),
    cases=(
        # One warp and several, one round of channels and several, the last one full or partial; any number of streams.
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m1-h576-t2", make(2, 1, 576), small=True),
        Case("m8-h128-t1", make(1, 8, 128), small=True),
        Case("m2-h1088-t1", make(1, 2, 1088), small=True),
        Case("m3-h320-t5-packed-mask", make(5, 3, 320, layout="packed", mask=True, given=True), small=True, modes=True),
        Case("m2-h64-t5-strided-zeros", make(5, 2, 64, layout="strided", zeros=True), small=True),
        Case("m2-h64-t5-zeros-clamp0", make(5, 2, 64, zeros=True, clamp_value=0.0), small=True),
        Case("m2-h64-t5-unaligned", make(5, 2, 64, layout="unaligned", first_element=1, given=True), small=True),
        Case("m4-h64-t5-mask-alone", make(5, 4, 64, mask=True, add_residual=False), small=True),
        Case("m2-h64-t5-clamp", make(5, 2, 64, clamp_value=0.5), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        Case("m1-h64-t533", make(533, 1, 64)),
        *(Case(f"m4-h7168-t{tokens}", make(tokens, 4, 7168)) for tokens in (0, 1, 17, 4001, 8001)),
        *(Case(f"m4-h{hidden}-t1001", make(1001, 4, hidden)) for hidden in (576, 1280, 2560, 5120, 8192)),
        *(Case(f"m{m}-h4096-t1001", make(1001, m, 4096, layout="packed", given=True)) for m in (1, 2, 8)),
        Case("m8-h7168-t1001-strided-mask", make(1001, 8, 7168, layout="strided", mask=True), compile=True),
        Case("m5-h8192-t401-given", make(401, 5, 8192, given=True, add_residual=False)),
        Case("m1-h16384-t401", make(401, 1, 16384)),
        Case("m4-h7168-t1001-mask", make(1001, 4, 7168, layout="packed", mask=True, given=True), compile=True),
        Case("m4-h4096-t401-alone", make(401, 4, 4096, given=True, add_residual=False), compile=True),
        Case("m4-h7168-t8192-bench", make(8192, 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"m4-h7168-t{tokens}-bench", make(tokens, 4, 7168), bench=True, gpu=False)
            for tokens in (1, 64, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560)
        ),
        Case("m4-h4096-t8192-bench", make(8192, 4, 4096), bench=True, gpu=False),
        Case("m4-h2048-t4001-bench", make(4001, 4, 2048), bench=True, gpu=False),
        Case(
            "m4-h7168-t8192-packed-bench",
            make(8192, 4, 7168, layout="packed", given=True),
            bench=True,
            gpu=False,
        ),
    ),
)
