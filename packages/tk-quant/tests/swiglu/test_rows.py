"""All SwiGLU ops take weights by position, and rows of experts by where these end."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core.testing import assert_equal

NAN = torch.nan
NUM_ROWS, HIDDEN = 12, 128
ENDS = torch.tensor([3, 4, 4, 9], dtype=torch.int32)
SEGMENTS: dict[str, Any] = {"psum_num_tokens_per_expert": ENDS, "token_alignment": 4}
REAL = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8])
"""Rows 0 to 2, none from 4 on, none again, and 4 to 8."""
PADDING = torch.tensor([3, 9, 10, 11])


def inputs(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(NUM_ROWS, 2 * HIDDEN, device=device), torch.randn(NUM_ROWS, HIDDEN, device=device).bfloat16()


def backward(x: Tensor, grad: Tensor, **more: Any) -> tuple[Tensor, ...]:
    return tk_quant.swiglu_backward(x, grad, with_out=True, **more)


def backward_cast(x: Tensor, grad: Tensor, **more: Any) -> tuple[Tensor, ...]:
    pair = tk_quant.per_token_cast(x, "e4m3", 128)
    out, quantized, x_grad, weight_grad = tk_quant.swiglu_backward_and_per_token_cast(
        *(pair, grad, None, None, None, 128), **more
    )
    return out, *quantized, x_grad, weight_grad


# Named by whether padding is written.
CALLS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], bool]] = {
    "forward": (lambda x, grad, **more: (tk_quant.swiglu_forward(x, **more),), False),
    "forward_cast": (lambda x, grad, **more: tk_quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128, **more), False),
    "backward": (backward, True),
    "backward_cast": (backward_cast, True),
}
each_call = pytest.mark.parametrize("name", CALLS)


@each_call
def test_rows_of_experts(name: str, device: str) -> None:
    call, writes_padding = CALLS[name]
    (x, grad), segments = inputs(device), {**SEGMENTS, "psum_num_tokens_per_expert": ENDS.to(device)}
    expected = call(x, grad)
    x[PADDING], grad[PADDING] = NAN, NAN
    for got, want in zip(call(x, grad, **segments), expected, strict=True):
        if want is None:
            assert got is None
            continue
        assert_equal(got[REAL], want[REAL])
        if writes_padding:
            assert not got[PADDING].float().any()


@each_call
@pytest.mark.parametrize("factor", [None, 2.5])
def test_weights_by_position(name: str, factor: float | None, device: str) -> None:
    call, has_grad = CALLS[name]
    (x, grad), weights = inputs(device), torch.rand(NUM_ROWS, device=device)
    got = call(x, grad, topk_weights=weights, routed_scaling_factor=factor)
    expected = call(x, grad, topk_weights=weights * (factor or 1))
    if has_grad:
        *got, weight_grad = got
        *expected, unscaled = expected
        assert weight_grad.shape == weights.shape
        assert_equal(weight_grad, unscaled * (factor or 1))
    assert_equal(tuple(got), tuple(expected))
    if name in ("forward", "backward"):
        index = torch.arange(NUM_ROWS, dtype=torch.int32, device=device)
        by_pairs = {"pos_to_token_topk": index, "topk_weights": weights.view(3, 4), "routed_scaling_factor": factor}
        if has_grad:
            by_pairs["token_topk_to_pos"] = index.view(3, 4)
        again = call(x, grad, **by_pairs)
        assert_equal(again[: len(got)], tuple(got))
        if has_grad:
            assert_equal(again[-1].flatten(), weight_grad)


@each_call
def test_weight_times_factor_is_rounded(name: str) -> None:
    call, has_grad = CALLS[name]
    x, grad = inputs("cpu")
    weights = torch.full((NUM_ROWS,), 1 + 2.0**-23)
    # (1 + 2**-23) * (1 + 2**-23) lies just above 1 + 2**-22.
    got = call(x, grad, topk_weights=weights, routed_scaling_factor=1 + 2.0**-23)
    expected = call(x, grad, topk_weights=torch.full((NUM_ROWS,), 1 + 2.0**-22))
    assert_equal(got[: len(got) - has_grad], expected[: len(got) - has_grad])


@pytest.mark.parametrize("name", ["forward", "forward_cast"])
def test_fourth_count_is_that_of_all_elements(name: str, device: str) -> None:
    call, (x, grad) = CALLS[name][0], inputs(device)
    count = torch.tensor([1, 2, 3, 4], device=device)
    call(x, grad, clamp_value=0.5, clamped_count=count, **{**SEGMENTS, "psum_num_tokens_per_expert": ENDS.to(device)})
    gate, value = x[REAL].chunk(2, dim=1)
    found = [(gate > 0.5).sum(), (value > 0.5).sum(), (value < -0.5).sum(), torch.tensor(REAL.numel() * HIDDEN)]
    assert (count.cpu() - torch.tensor([1, 2, 3, 4])).tolist() == [int(each) for each in found]


@each_call
def test_debug_mode_finds_ends_before_beginnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tk_core.env.debug", lambda: True)
    call, (x, grad) = CALLS[name][0], inputs("cpu")
    call(x, grad, **SEGMENTS)
    wrong = torch.tensor([3, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"psum_num_tokens_per_expert\[1\]: expected at least 4, .*, got 3"):
        call(x, grad, psum_num_tokens_per_expert=wrong, token_alignment=4)
