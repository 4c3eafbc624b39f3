"""Named cases of mhc_post_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec, assert_equal
from tk_mhc import reference
from tk_mhc.post.mhc_post_bwd import mhc_post_bwd
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, within
from tk_mhc.testing.post.mhc_post import draw_mixes, draw_streams

Make = Callable[[str], dict[str, Any]]


def compare(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """d_x and d_residual bit for bit, d_post and d_comb within 1e-4: they are added in another order."""
    assert_equal(actual[:2], expected[:2], name="d_x, d_residual")
    within(rtol=1e-4, atol=1e-4)(actual[2:], expected[2:])


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, *, strided: bool = False) -> Make:
    """Normal values and mixes like those of a model; `strided`: residual and d_o are not contiguous."""

    def build(device: str) -> dict[str, Any]:
        post, comb = draw_mixes(leading, mhc_mult, device)
        return {
            "x": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "residual": draw_streams(leading, mhc_mult, hidden, device, strided),
            "post_layer_mix": post,
            "comb_res_mix": comb,
            "d_o": draw_streams(leading, mhc_mult, hidden, device, strided),
        }

    return build


SPEC = OpSpec(
    op=mhc_post_bwd,
    reference=reference.mhc_post_bwd,
    compare=compare,
    cases=(
        # One warp per token and several, rounds with and without idle threads; all numbers of streams.
        Case("m4-h64-t3", make((3,), 4, 64), small=True, modes=True),
        Case("m2-h192-t17", make((17,), 2, 192), small=True),
        Case("m8-h128-t3", make((3,), 8, 128), small=True),
        Case("m4-h576-t3", make((3,), 4, 576), small=True, compile=True),
        Case("m2-h512-t3", make((3,), 2, 512), small=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t0", make((0,), 4, 64), small=True),
        Case("m4-h64-t2x3-strided", make((2, 3), 4, 64, strided=True), small=True, modes=True),
        *(Case(f"m4-h{hidden}-t64", make((64,), 4, hidden)) for hidden in HIDDEN_SIZES),
        *(Case(f"m4-h7168-t{tokens}", make((tokens,), 4, 7168)) for tokens in TOKEN_COUNTS if tokens != 64),
        Case("m8-h576-t17", make((17,), 8, 576), compile=True),
        Case("m8-h7168-t17", make((17,), 8, 7168), compile=True),
        Case("m2-h7168-t17", make((17,), 2, 7168)),
        Case("m4-h2560-t4001-strided", make((4001,), 4, 2560, strided=True)),
        Case("m4-h7168-t8192-bench", make((8192,), 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"m4-h7168-t{tokens}-bench", make((tokens,), 4, 7168), bench=True, gpu=False)
            for tokens in (1, 64, 4001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make((8192,), 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
    ),
)
