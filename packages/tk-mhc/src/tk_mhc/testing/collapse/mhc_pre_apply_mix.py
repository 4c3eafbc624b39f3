"""Named cases of mhc_pre_apply_mix."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_mhc import reference
from tk_mhc.collapse.mhc_pre_apply_mix import mhc_pre_apply_mix
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS

Make = Callable[[str], dict[str, Any]]


def make(
    leading: tuple[int, ...],
    mhc_mult: int,
    hidden: int,
    *,
    out: bool = False,
    values: str = "normal",
    first_element: int = 0,
) -> Make:
    """A residual of normal values, or of all magnitudes with infinities and NaN (`wide`), and weights of 0 … 1.

    Tensors start at element `first_element` of their storage. `out` is filled with NaN.
    """

    def build(device: str) -> dict[str, Any]:
        def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = torch.Size(shape)
            return torch.empty(first_element + size.numel(), dtype=dtype, device=device)[first_element:].view(size)

        x = tensor((*leading, mhc_mult, hidden), torch.bfloat16).normal_()
        mix = tensor((*leading, mhc_mult, 1), torch.float32).uniform_()
        if values == "wide":
            x.mul_(torch.exp2(torch.randint(-130, 127, x.shape, device=device)))
            x[..., 5], x[..., 0, 6] = torch.inf, torch.nan
            mix[..., 0, :].neg_()
        written = tensor((*leading, hidden), torch.bfloat16).fill_(torch.nan) if out else None
        return {"x": x, "mix": mix, "out": written}

    return build


SPEC = OpSpec(
    op=mhc_pre_apply_mix,
    reference=reference.mhc_pre_apply_mix,
    mutates=("out",),
    cases=(
        # One tile with idle threads and without, two tiles with an idle warp; the gpu tier also has more tiles.
        Case("m4-h64-t3", make((3,), 4, 64), small=True, modes=True),
        Case("m2-h576-t2x3-out", make((2, 3), 2, 576, out=True), small=True, modes=True, compile=True),
        Case("m8-h192-t3", make((3,), 8, 192), small=True),
        Case("m2-h256-t17", make((17,), 2, 256), small=True),
        Case("m4-h2112-t1", make((1,), 4, 2112), small=True, compile=True),
        Case("m4-h128-no-leading", make((), 4, 128), small=True),
        Case("m4-h64-t0-out", make((0,), 4, 64, out=True), small=True),
        Case("m8-h64-t2x0", make((2, 0), 8, 64), small=True),
        Case("m4-h64-t17-wide", make((17,), 4, 64, values="wide"), small=True),
        Case("m4-h64-t3-unaligned-out", make((3,), 4, 64, out=True, first_element=1), small=True),
        Case("m2-h64-t3-aligned-to-8", make((3,), 2, 64, first_element=2), small=True),
        *(Case(f"m4-h7168-t{num_tokens}", make((num_tokens,), 4, 7168)) for num_tokens in TOKEN_COUNTS),
        *(Case(f"m4-h{hidden}-t65", make((65,), 4, hidden, out=True)) for hidden in HIDDEN_SIZES),
        *(Case(f"m{m}-h{hidden}-t1001", make((1001,), m, hidden)) for m in (2, 8) for hidden in (576, 7168)),
        Case("m4-h7168-t257-wide", make((257,), 4, 7168, values="wide")),
        Case("m4-h7168-t8192-bench", make((8192,), 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        *(
            Case(f"m4-h7168-t{num_tokens}-bench", make((num_tokens,), 4, 7168), bench=True, gpu=False)
            for num_tokens in (1, 64, 4096)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make((8192,), 4, hidden), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
        *(Case(f"m{m}-h7168-t8192-bench", make((8192,), m, 7168), bench=True, gpu=False) for m in (2, 8)),
    ),
)
