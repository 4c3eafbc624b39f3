"""Tensors of more than 2³¹ elements: the first and last rows come out as they do alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_moe
from tk_core.testing import assert_equal
from tk_core.testing.trees import tensors

HIDDEN, EXPERTS = 8192, 1024
SAMPLE = 64

pytestmark = pytest.mark.gpu(gib=20)


def _rows(num_rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(num_rows, width) on the GPU: zeros, but for the first and last rows."""
    x = torch.zeros(num_rows, width, dtype=dtype, device="cuda")
    for part in (x[: 8 * SAMPLE], x[-8 * SAMPLE :]):
        part.copy_(torch.randn(part.shape, device="cuda"))
    return x


def _maps(num_topk: int) -> tuple[Tensor, Tensor]:
    """token_topk_to_pos and pos_to_expert where the rows of a token are neighbours, more than 2³¹ elements of them."""
    num_tokens = 2**31 // (HIDDEN * num_topk) + SAMPLE
    pos = torch.arange(num_tokens * num_topk, dtype=torch.int32, device="cuda")
    return pos.view(num_tokens, num_topk), torch.zeros_like(pos)


def _ends(x: Tensor, num_rows: int) -> list[Tensor]:
    return [x[:num_rows].clone(), x[-num_rows:].clone()]


@pytest.mark.parametrize("num_topk", [1, 4])
def test_expand(num_topk: int) -> None:
    maps = _maps(num_topk)
    x = _rows(len(maps[0]), HIDDEN)
    out = tk_moe.expand_to_fused(x, *maps)
    for rows, tokens in zip(_ends(out, SAMPLE * num_topk), _ends(x, SAMPLE)):
        assert_equal(rows, tokens.repeat_interleave(num_topk, 0))


@pytest.mark.parametrize("col_major", [False, True])
def test_expand_with_sf(col_major: bool) -> None:
    maps = _maps(4)
    codes = _rows(len(maps[0]), HIDDEN).to(torch.float8_e4m3fn)
    sf = _rows(len(maps[0]), HIDDEN // 128, torch.float32)
    out, out_sf = tk_moe.expand_to_fused_with_sf((codes, sf), 128, *maps, col_major)
    for of_rows, of_tokens in ((out.view(torch.uint8), codes.view(torch.uint8)), (out_sf, sf)):
        for rows, tokens in zip(_ends(of_rows, SAMPLE * 4), _ends(of_tokens, SAMPLE)):
            assert_equal(rows.contiguous(), tokens.repeat_interleave(4, 0))


@pytest.mark.parametrize("num_topk", [1, 4])
def test_reduce(num_topk: int) -> None:
    positions, experts = _maps(num_topk)
    x = _rows(len(experts), HIDDEN)
    weights = torch.rand(positions.shape, device="cuda")
    out = tk_moe.reduce_fused(x, weights, positions)
    grad = out.clone()
    grad_x, grad_weights = tk_moe.reduce_fused_bwd(grad, x, weights, positions, experts)
    near = positions[:SAMPLE], experts[: SAMPLE * num_topk]
    of_tokens = [_ends(each, SAMPLE) for each in (weights, out, grad, grad_weights)]
    of_rows = [_ends(each, SAMPLE * num_topk) for each in (x, grad_x)]
    for (w, total, g, grad_w), (rows, grad_rows) in zip(zip(*of_tokens), zip(*of_rows)):
        assert_equal(total, tk_moe.reduce_fused(rows, w, near[0]))
        assert_equal((grad_rows, grad_w), tk_moe.reduce_fused_bwd(g, rows, w, *near))


GATES: dict[str, Callable[[Tensor], Any]] = {
    "topk_gate": lambda x: tk_moe.topk_gate(x, 8),
    "topk_gate_with_weights": lambda x: tk_moe.topk_gate_with_weights(x, 8, "sigmoid"),
    "top2_sum_gate": lambda x: tk_moe.top2_sum_gate(
        x, torch.zeros(EXPERTS, device="cuda"), 8, 4, 8, False, 0, 2.5, 0, 1, 0, 1, "sigmoid"
    ),
    "topk_sum_and_topk_group_idx": lambda x: tk_moe.topk_sum_and_topk_group_idx(x.view(len(x), 32, 32), 2, 4),
    "gate_weights_bwd": lambda x: tk_moe.gate_weights_bwd(
        torch.ones(len(x), 8, device="cuda"), x, torch.arange(8, device="cuda").repeat(len(x), 1), "softmax"
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    x = _rows(2**31 // EXPERTS + SAMPLE, EXPERTS, torch.float32)
    whole = tensors((GATES[name](x),))
    for end, rows in enumerate(_ends(x, SAMPLE)):
        for of_all, alone in zip(whole, tensors((GATES[name](rows),)), strict=True):
            assert_equal(_ends(of_all, SAMPLE)[end], alone)
