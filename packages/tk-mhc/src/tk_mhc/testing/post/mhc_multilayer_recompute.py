"""Named cases of mhc_multilayer_recompute."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.post.mhc_multilayer_recompute import mhc_multilayer_recompute
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS
from tk_mhc.testing.post.mhc_post import draw_mixes

Make = Callable[[str], dict[str, Any]]


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, num_layers: int, num_posts: int) -> Make:
    """Normal values and mixes like those of a model, and output tensors."""

    def build(device: str) -> dict[str, Any]:
        bfloat16 = {"dtype": torch.bfloat16, "device": device}
        mixes = [draw_mixes(leading, mhc_mult, device) for _ in range(num_posts)]
        return {
            "initial_residual": torch.randn((*leading, mhc_mult, hidden), **bfloat16),
            "pre_mix_list": [torch.rand((*leading, mhc_mult, 1), device=device) for _ in range(num_layers)],
            "layer_output_list": [torch.randn((*leading, hidden), **bfloat16) for _ in range(num_posts)],
            "post_mix_list": [post for post, _ in mixes],
            "comb_mix_list": [comb for _, comb in mixes],
            "layer_input_list": [torch.empty((*leading, hidden), **bfloat16) for _ in range(num_layers)],
            "residual_list": [torch.empty((*leading, mhc_mult, hidden), **bfloat16) for _ in range(num_posts)],
        }

    return build


SPEC = OpSpec(
    op=mhc_multilayer_recompute,
    reference=reference.mhc_multilayer_recompute,
    mutates=("layer_input_list", "residual_list"),
    cases=(
        # With and without a post after the last layer; one layer; partial tiles; all numbers of streams.
        Case("m4-h64-t3-l3-p2", make((3,), 4, 64, 3, 2), small=True, modes=True),
        Case("m4-h64-t3-l2-p2", make((3,), 4, 64, 2, 2), small=True, modes=True),
        Case("m2-h192-t3-l4-p3", make((3,), 2, 192, 4, 3), small=True),
        Case("m8-h128-t3-l2-p1", make((3,), 8, 128, 2, 1), small=True),
        Case("m4-h64-t17-l1-p0", make((17,), 4, 64, 1, 0), small=True),
        Case("m4-h64-t17-l1-p1", make((17,), 4, 64, 1, 1), small=True),
        Case("m4-h576-t1-l2-p1", make((1,), 4, 576, 2, 1), small=True, compile=True),
        Case("m4-h64-t2x3-l2-p2", make((2, 3), 4, 64, 2, 2), small=True),
        Case("m4-h64-no-leading-l2-p1", make((), 4, 64, 2, 1), small=True),
        Case("m4-h64-t0-l2-p2", make((0,), 4, 64, 2, 2), small=True),
        *(Case(f"m4-h{hidden}-t64-l3-p2", make((64,), 4, hidden, 3, 2)) for hidden in HIDDEN_SIZES),
        *(Case(f"m4-h7168-t{tokens}-l3-p3", make((tokens,), 4, 7168, 3, 3)) for tokens in TOKEN_COUNTS),
        Case("m2-h7168-t17-l10-p10", make((17,), 2, 7168, 10, 10)),
        Case("m8-h7168-t17-l10-p9", make((17,), 8, 7168, 10, 9), compile=True),
        # More layers than one round of a thread block's threads can load mixes for.
        Case("m8-h64-t3-l20-p20", make((3,), 8, 64, 20, 20)),
        Case(
            "m4-h7168-t8192-l10-p9-bench",
            make((8192,), 4, 7168, 10, 9),
            bench=True,
            model_shape=True,
            gpu=False,
            compile=True,
        ),
        *(
            Case(f"m4-h7168-t{tokens}-l10-p9-bench", make((tokens,), 4, 7168, 10, 9), bench=True, gpu=False)
            for tokens in (1, 64, 4001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-l10-p9-bench", make((8192,), 4, hidden, 10, 9), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
    ),
)
