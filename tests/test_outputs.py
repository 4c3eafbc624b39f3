"""Ops that write into a tensor given by the caller reject one that shares memory with another argument."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tk_engram
import tk_mhc
import tk_moe

Call = Callable[[Tensor], object]

BF16 = torch.bfloat16
# Memory of the arguments, part of which each call also takes as `out`.
ROWS = torch.zeros(8, 4, 64, dtype=BF16)
MATRIX = torch.ones(4, 8)
POS = torch.zeros(8, 2, dtype=torch.int32)
CALLS: dict[str, tuple[Call, Tensor, str]] = {
    "reduce_fused": (
        lambda out: tk_moe.reduce_fused(ROWS.view(32, 64), None, POS, out=out),
        ROWS.view(32, 64)[:8],
        "x",
    ),
    "expand_to_mhc": (lambda out: tk_mhc.expand_to_mhc(ROWS[0], 4, out), ROWS[:4].view(4, 4, 64), "hidden"),
    "mhc_post": (
        lambda out: tk_mhc.mhc_post(ROWS[:, 0] + 0, ROWS, torch.zeros(8, 4, 1), torch.zeros(8, 4, 4), out),
        ROWS,
        "residual",
    ),
    "mhc_pre_apply_mix": (
        lambda out: tk_mhc.mhc_pre_apply_mix(ROWS, torch.zeros(8, 4, 1), out),
        ROWS.view(32, 64)[:8],
        "x",
    ),
    "engram_lookup": (
        lambda out: tk_engram.engram_lookup(torch.zeros(2, 4, dtype=torch.int32), ROWS.view(32, 64), out=out),
        ROWS[:2],
        "table",
    ),
    "engram_sinkhorn_finalize": (
        lambda out: tk_engram.engram_sinkhorn_finalize(MATRIX[1:], torch.ones(3), torch.ones(8), 1e-6, 1.0, out),
        MATRIX[:3],
        "matrix",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_out_is_not_an_input(name: str) -> None:
    call, out, other = CALLS[name]
    before = out.clone()
    with pytest.raises(ValueError, match=f"^out: expected memory of its own, got some of {other}$"):
        call(out)
    assert torch.equal(out, before)
    call(out.clone())


@pytest.mark.gpu
def test_a_remembered_call_looks_too() -> None:
    x = torch.ones(32, 64, dtype=BF16, device="cuda")
    pos = torch.zeros(8, 2, dtype=torch.int32, device="cuda")
    for _ in range(3):
        tk_moe.reduce_fused(x, None, pos, out=torch.empty(8, 64, dtype=BF16, device="cuda"))
    with pytest.raises(ValueError, match="out: expected memory of its own, got some of x"):
        tk_moe.reduce_fused(x, None, pos, out=x[:8])
