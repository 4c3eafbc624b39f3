"""The SwiGLU ops take the positional arguments of TileKernels 2.1.0, and return its results."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core.testing import assert_equal

X = torch.linspace(-4, 4, 16 * 256).view(16, 256).bfloat16()
GRAD = torch.linspace(-1, 2, 16 * 128).view(16, 128).bfloat16()
PAIR = tk_quant.per_token_cast(X, "e4m3", 128)
ENDS = torch.tensor([7, 133], dtype=torch.int32)
WEIGHTS = torch.linspace(0.1, 1, 16)
KEYWORDS: dict[str, Any] = {
    "psum_num_tokens_per_expert": ENDS,
    "topk_weights": WEIGHTS,
    "routed_scaling_factor": 2.5,
    "clamp_value": 1.5,
}
COL_MAJOR: dict[str, Any] = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": False}
REAL = slice(0, 7)


def counted(call: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[int]]:
    count = torch.zeros(4, dtype=torch.int64)
    return call(*args, clamped_count=count, **kwargs), count.tolist()


def test_forward() -> None:
    op, count = tk_quant.swiglu_forward, torch.zeros(4, dtype=torch.int64)
    expected = counted(op, X, fmt="bf16", **KEYWORDS)
    assert_equal(op(X, "bf16", ENDS, WEIGHTS, 2.5, 1.5, count), expected[0])
    assert count.tolist() == expected[1]
    assert_equal(op(X, "fp32"), op(X))
    assert_equal(op(X, "fp32", topk_weights=WEIGHTS), op(X, topk_weights=WEIGHTS))


def test_forward_and_cast() -> None:
    op, count = tk_quant.swiglu_forward_and_per_token_cast, torch.zeros(4, dtype=torch.int64)
    expected = counted(op, X, "e4m3", 128, **KEYWORDS, **COL_MAJOR)
    assert_equal(op(X, "e4m3", 128, ENDS, WEIGHTS, 2.5, True, True, False, 1.5, count), expected[0])
    assert count.tolist() == expected[1]
    by_end = op(X, "e4m3", 128, psum_num_tokens_per_expert=ENDS)
    assert_equal(op(X, "e4m3", 128, ENDS), by_end)
    assert_equal(op(X, "e4m3", 128, ENDS, None, None, False), by_end)
    weighted = op(X, "e4m3", 128, topk_weights=WEIGHTS)
    assert_equal(op(X, "e4m3", 128, None, WEIGHTS), weighted)
    assert_equal(op(X, "e4m3", 128, None, topk_weights=WEIGHTS), weighted)
    scaled = op(X, "e4m3", 128, topk_weights=WEIGHTS, routed_scaling_factor=3)
    assert_equal(op(X, "e4m3", 128, None, WEIGHTS, 3), scaled)


def test_maps_of_1_0_0_are_told_from_ends() -> None:
    op, index = tk_quant.swiglu_forward_and_per_token_cast, torch.arange(16, dtype=torch.int32)
    pairs = WEIGHTS.view(4, 4)
    expected = op(X, "e4m3", 128, pos_to_token_topk=index, topk_weights=pairs, pos_to_expert=index - 3)
    assert_equal(op(X, "e4m3", 128, index, pairs, index - 3), expected)
    assert_equal(op(X, "e4m3", 128, index, pairs), op(X, "e4m3", 128, topk_weights=WEIGHTS))
    with pytest.raises(ValueError, match="the fourth argument: expected psum_num_tokens_per_expert or pos_to_token"):
        op(X, "e4m3", 128, index)
    with pytest.raises(ValueError, match="topk_weights: expected a tensor beside routed_scaling_factor"):
        op(X, "e4m3", 128, ENDS, None, 2.5)


def test_backward() -> None:
    op = tk_quant.swiglu_backward
    out, x_grad, weight_grad = op(X, GRAD, fmt="bf16", with_out=True, **KEYWORDS)
    assert_equal(op(X, GRAD, "bf16", ENDS, WEIGHTS, 2.5, 1.5, True), (x_grad, weight_grad, out))
    assert_equal(op(X, GRAD, "bf16", ENDS, WEIGHTS, 2.5, 1.5), (x_grad, weight_grad))
    assert_equal(op(X, act_x_grad=GRAD, fmt="bf16", **KEYWORDS, do_recompute=True), (x_grad, weight_grad, out))
    plain = op(X, GRAD, fmt="fp32", with_out=True)
    assert_equal(op(X, GRAD, "fp32"), (plain[1],))
    assert_equal(op(X, GRAD, "fp32", do_recompute=True), (plain[1], plain[0]))
    assert_equal(op(X.view(2, 8, 256), GRAD, "fp32"), (plain[1],))


def test_backward_and_cast() -> None:
    op = tk_quant.swiglu_backward_and_per_token_cast
    maps: tuple[Tensor | None, ...] = (None, None, None)
    out, quantized, x_grad, weight_grad = op(PAIR, GRAD, *maps, 128, **KEYWORDS, **COL_MAJOR)
    args = PAIR, GRAD, "e4m3", 128, ENDS, WEIGHTS, 2.5, True, True, False, 1.5
    assert_equal(op(*args), (x_grad, quantized, weight_grad))
    assert_equal(op(*args, True), (x_grad, quantized, weight_grad, out))
    assert quantized[1].stride() == (1, 16)
    out, quantized, x_grad, weight_grad = op(PAIR, GRAD, *maps, 128)
    assert weight_grad is None
    assert_equal(op(PAIR, GRAD, "e4m3", 128), (x_grad, quantized))
    batched = tuple(each.view(2, 8, -1) for each in PAIR)
    got = op(batched, act_x_grad=GRAD, fmt="e4m3", num_per_channels=128, do_recompute=True)
    assert_equal(got, (x_grad, quantized, out))
    with pytest.raises(ValueError, match="fmt: expected one of 'e4m3', got 'e2m1'"):
        op(PAIR, GRAD, "e2m1", 128)


def test_compiled() -> None:
    def forward(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        data, sf = tk_quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128, ENDS, WEIGHTS, 2.5)
        return data, sf, *tk_quant.swiglu_backward(x, grad, "bf16", ENDS, WEIGHTS, 2.5, None, True)

    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    assert_equal(compiled(X, GRAD), forward(X, GRAD))
