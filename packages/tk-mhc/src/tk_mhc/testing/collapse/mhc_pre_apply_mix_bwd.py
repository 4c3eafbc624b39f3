"""Named cases of mhc_pre_apply_mix_bwd."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec, assert_equal
from tk_core.testing.trees import distinct_bytes
from tk_mhc import reference
from tk_mhc.collapse.mhc_pre_apply_mix_bwd import mhc_pre_apply_mix_bwd
from tk_mhc.testing.compare import HIDDEN_SIZES, TOKEN_COUNTS, within

Make = Callable[[str], dict[str, Any]]


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, *, given: bool = False, first_element: int = 0) -> Make:
    """Normal values, and weights of 0 … 1. Tensors start at element `first_element` of their storage.

    `given`: with a d_x to be added to.
    """

    def build(device: str) -> dict[str, Any]:
        def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = torch.Size(shape)
            return torch.empty(first_element + size.numel(), dtype=dtype, device=device)[first_element:].view(size)

        return {
            "d_o": tensor((*leading, hidden), torch.bfloat16).normal_(),
            "x": tensor((*leading, mhc_mult, hidden), torch.bfloat16).normal_(),
            "mix": tensor((*leading, mhc_mult, 1), torch.float32).uniform_(),
            "d_x": tensor((*leading, mhc_mult, hidden), torch.bfloat16).normal_() if given else None,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """d_x bit for bit, as returned and as written; d_mix within 1e-4."""
    ((d_x, d_mix), written), ((expected_d_x, expected_d_mix), expected_written) = actual, expected
    assert_equal((d_x, written), (expected_d_x, expected_written), name="d_x")
    within(rtol=1e-4, atol=1e-4)(d_mix, expected_d_mix)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and a given d_x twice: it is read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["d_x"])


SPEC = OpSpec(
    op=mhc_pre_apply_mix_bwd,
    reference=reference.mhc_pre_apply_mix_bwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("d_x",),
    cases=(
        # One tile; several tiles of one, two and four warps, the last tile full or partial.
        Case("m4-h64-t3", make((3,), 4, 64), small=True, modes=True),
        Case("m2-h576-t2x3-given", make((2, 3), 2, 576, given=True), small=True, modes=True, compile=True),
        Case("m8-h192-t3-given", make((3,), 8, 192, given=True), small=True),
        Case("m2-h512-t17", make((17,), 2, 512), small=True),
        Case("m4-h2048-t1", make((1,), 4, 2048), small=True),
        Case("m4-h960-t1-given", make((1,), 4, 960, given=True), small=True, compile=True),
        Case("m4-h128-no-leading", make((), 4, 128), small=True),
        Case("m4-h64-t0-given", make((0,), 4, 64, given=True), small=True),
        Case("m8-h64-t2x0", make((2, 0), 8, 64), small=True),
        Case("m4-h64-t3-unaligned-given", make((3,), 4, 64, given=True, first_element=1), small=True),
        *(Case(f"m4-h7168-t{num_tokens}", make((num_tokens,), 4, 7168)) for num_tokens in TOKEN_COUNTS),
        *(Case(f"m4-h{hidden}-t65-given", make((65,), 4, hidden, given=True)) for hidden in HIDDEN_SIZES),
        *(Case(f"m{m}-h{hidden}-t1001", make((1001,), m, hidden)) for m in (2, 8) for hidden in (576, 7168)),
        Case("m8-h7168-t1001-given", make((1001,), 8, 7168, given=True), compile=True),
        Case("m4-h7168-t8192-bench", make((8192,), 4, 7168), bench=True, model_shape=True, gpu=False, compile=True),
        Case("m4-h7168-t8192-given-bench", make((8192,), 4, 7168, given=True), bench=True, model_shape=True, gpu=False),
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
