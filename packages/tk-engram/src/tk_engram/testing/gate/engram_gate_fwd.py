"""Named cases of engram_gate_fwd."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from tk_core.testing import Case, OpSpec
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.gate.engram_gate_fwd import engram_gate_fwd
from tk_engram.testing.gate.compare import assert_calc_diff, assert_close_bfloat16

Make = Callable[[str], dict[str, Any]]
Layout = Literal["dense", "packed", "strided", "unaligned"]
EPS, CLAMP_VALUE = 1e-5, 1e-6


def draw_kv(num_tokens: int, mhc_mult: int, hidden: int, layout: Layout, device: str) -> tuple[Tensor, Tensor]:
    """Normal k (T, m, H) and v (T, H).

    packed: views of one (T, m + 1, H). strided: gaps between streams and tokens, rows at multiples of 16 bytes.
    unaligned: slices of a projection whose rows are not aligned.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    if layout == "packed":
        kv = normal(num_tokens, mhc_mult + 1, hidden)
        return kv[:, :mhc_mult], kv[:, mhc_mult]
    if layout == "strided":
        return normal(num_tokens, mhc_mult, 2 * hidden)[..., hidden:], normal(num_tokens, 3 * hidden)[:, :hidden]
    if layout == "unaligned":
        projection = normal(num_tokens, (mhc_mult + 1) * hidden + 3)
        k, v = projection[:, 1 : 1 + mhc_mult * hidden], projection[:, 1 + mhc_mult * hidden : -2]
        return k.unflatten(-1, (mhc_mult, hidden)), v
    return normal(num_tokens, mhc_mult, hidden), normal(num_tokens, hidden)


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    layout: Layout = "dense",
    zeros: bool = False,
    mask: bool = False,
    first_element: int = 0,
    **options: bool,
) -> Make:
    """Normal values.

    `zeros`: every other token's k is 0, as rows of padding are. `mask`: every third token is an image's. The streams
    begin at element `first_element` of their storage. `options` are the op's.
    """

    def build(device: str) -> dict[str, Any]:
        size = num_tokens * mhc_mult * hidden
        x = torch.empty(first_element + size, dtype=torch.bfloat16, device=device)[first_element:]
        k, v = draw_kv(num_tokens, mhc_mult, hidden, layout, device)
        if zeros:
            k[::2] = 0
        image_token_mask = (torch.arange(num_tokens, device=device) % 3 == 1) if mask else None
        return {
            "hidden_states": x.view(num_tokens, mhc_mult, hidden).normal_(),
            "k": k,
            "v": v,
            "weight_fused": torch.randn((mhc_mult, hidden), device=device),
            "eps": EPS,
            "clamp_value": CLAMP_VALUE,
            **({"image_token_mask": image_token_mask} if mask else {}),
            **options,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """out by `assert_close_bfloat16`, also where it was written in place; saved tensors within 2e-10."""
    (result, written), (expected_result, expected_written) = actual, expected
    assert_close_bfloat16(result[0], expected_result[0], 2e-10, "out")
    assert_close_bfloat16(written, expected_written, 2e-10, "hidden_states")
    names = ("dot", "gate_score", "rstd_x", "rstd_k")
    for name, got, want in zip(names, result[1:], expected_result[1:], strict=True):
        assert (got is None) == (want is None), f"{name}: expected {want}, got {got}"
        if want is not None:
            assert_calc_diff(got, want, 2e-10, name)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and streams that are overwritten twice."""
    return distinct_bytes((inputs, outputs)) + (distinct_bytes(outputs[0]) if inputs.get("inplace") else 0)


IN_PLACE = {"inplace": True, "save_for_backward": False}

SPEC = OpSpec(
    op=engram_gate_fwd,
    reference=reference.engram_gate_fwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("hidden_states",),
    cases=(
        # One warp and several, one round of channels and several, the last one full or partial; any number of streams.
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m1-h576-t2", make(2, 1, 576), small=True),
        Case("m8-h128-t1", make(1, 8, 128), small=True),
        Case("m2-h1088-t1", make(1, 2, 1088), small=True),
        Case("m3-h320-t5-packed-mask", make(5, 3, 320, layout="packed", mask=True), small=True, modes=True),
        Case("m2-h64-t5-strided-zeros", make(5, 2, 64, layout="strided", zeros=True), small=True),
        Case("m2-h64-t5-unaligned", make(5, 2, 64, layout="unaligned", first_element=1), small=True),
        Case("m4-h64-t7-inplace", make(7, 4, 64, **IN_PLACE), small=True, modes=True),
        Case("m2-h64-t3-inplace-unaligned", make(3, 2, 64, first_element=3, **IN_PLACE), small=True),
        Case("m2-h192-t4-inplace-mask", make(4, 2, 192, mask=True, **IN_PLACE), small=True),
        Case("m4-h64-t3-not-saved", make(3, 4, 64, save_for_backward=False), small=True),
        Case("m4-h64-t4-mask-alone", make(4, 4, 64, mask=True, add_residual=False), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        *(Case(f"m4-h7168-t{tokens}", make(tokens, 4, 7168)) for tokens in (0, 1, 17, 4001, 8001)),
        *(Case(f"m4-h{hidden}-t65", make(65, 4, hidden)) for hidden in (576, 1280, 2560, 5120, 16384)),
        *(Case(f"m{m}-h4096-t1001", make(1001, m, 4096, layout="packed")) for m in (1, 2, 8)),
        Case("m8-h8192-t1001-strided-mask", make(1001, 8, 8192, layout="strided", mask=True)),
        Case("m4-h2048-t4001-not-saved", make(4001, 4, 2048, save_for_backward=False)),
        Case(
            "m4-h7168-t1001-mask-alone-not-saved",
            make(1001, 4, 7168, mask=True, add_residual=False, save_for_backward=False),
            compile=True,
        ),
        Case("m3-h576-t17-inplace", make(17, 3, 576, layout="unaligned", **IN_PLACE)),
        Case("m4-h7168-t8192-bench", make(8192, 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"m4-h7168-t{tokens}-bench", make(tokens, 4, 7168), bench=True, gpu=False)
            for tokens in (1, 64, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
        Case("m4-h2048-t4001-bench", make(4001, 4, 2048), bench=True, gpu=False),
        Case("m4-h7168-t8192-packed-bench", make(8192, 4, 7168, layout="packed"), bench=True, gpu=False),
        Case("m4-h7168-t8192-inplace-bench", make(8192, 4, 7168, **IN_PLACE), bench=True, gpu=False),
    ),
)
