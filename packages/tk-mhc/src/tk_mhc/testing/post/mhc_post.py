"""Named cases of mhc_post."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.post.mhc_post import mhc_post
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS

Make = Callable[[str], dict[str, Any]]


def draw_streams(leading: tuple[int, ...], mhc_mult: int, hidden: int, device: str, strided: bool) -> torch.Tensor:
    """Normal values, bfloat16 (..., m, hidden); `strided`: every other channel of a tensor twice as wide."""
    width = 2 * hidden if strided else hidden
    streams = torch.randn((*leading, mhc_mult, width), dtype=torch.bfloat16, device=device)
    return streams[..., ::2] if strided else streams


def draw_mixes(leading: tuple[int, ...], mhc_mult: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """post (..., m, 1) in 0 … 2, as sigmoid times 2 gives it, and comb (..., m, m) whose rows add up to 1."""
    post = 2 * torch.rand((*leading, mhc_mult, 1), device=device)
    comb = torch.randn((*leading, mhc_mult, mhc_mult), device=device).softmax(-1)
    return post, comb


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, *, strided: bool = False, has_out: bool = False) -> Make:
    """Normal values and mixes like those of a model."""

    def build(device: str) -> dict[str, Any]:
        post, comb = draw_mixes(leading, mhc_mult, device)
        out = torch.empty((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device) if has_out else None
        return {
            "x": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "residual": draw_streams(leading, mhc_mult, hidden, device, strided),
            "post_layer_mix": post,
            "comb_res_mix": comb,
            "out": out,
        }

    return build


SPEC = OpSpec(
    op=mhc_post,
    reference=reference.mhc_post,
    mutates=("out",),
    cases=(
        # Full and partial tiles; all numbers of streams.
        Case("m4-h64-t3", make((3,), 4, 64), small=True, modes=True),
        Case("m2-h192-t17", make((17,), 2, 192), small=True),
        Case("m8-h128-t3", make((3,), 8, 128), small=True),
        Case("m4-h576-t3", make((3,), 4, 576), small=True, compile=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t0", make((0,), 4, 64), small=True),
        Case("m4-h64-t1-out", make((1,), 4, 64, has_out=True), small=True, modes=True),
        Case("m4-h64-t2x3-strided", make((2, 3), 4, 64, strided=True), small=True, modes=True),
        *(Case(f"m4-h{hidden}-t64", make((64,), 4, hidden)) for hidden in HIDDEN_SIZES),
        *(
            Case(f"m4-h7168-t{num_tokens}", make((num_tokens,), 4, 7168))
            for num_tokens in TOKEN_COUNTS
            if num_tokens != 64
        ),
        *(Case(f"m{mhc_mult}-h7168-t17", make((17,), mhc_mult, 7168), compile=True) for mhc_mult in (2, 8)),
        Case("m4-h2560-t4001-strided", make((4001,), 4, 2560, strided=True)),
        Case("m4-h7168-t8192-bench", make((8192,), 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"m4-h7168-t{num_tokens}-bench", make((num_tokens,), 4, 7168), bench=True, gpu=False)
            for num_tokens in (1, 64, 4001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make((8192,), 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
    ),
)
