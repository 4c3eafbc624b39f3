"""All SwiGLU ops take the same swiglu_clamp_value."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk_quant
from tk_core.testing import assert_equal

Call = Callable[[float | None], Any]

X = torch.linspace(-9, 9, 128 * 256).view(128, 256).bfloat16()
GRAD = torch.linspace(-1, 1, 128 * 128).view(128, 128).bfloat16()
PAIRS = torch.arange(128, dtype=torch.int32)
CALLS: dict[str, Call] = {
    "forward": lambda c: tk_quant.swiglu_forward(X, c),
    "backward": lambda c: tk_quant.swiglu_backward(X, GRAD, c)[1],
    "forward_and_per_token_cast": lambda c: tk_quant.swiglu_forward_and_per_token_cast(
        X, "e4m3", 128, swiglu_clamp_value=c
    ),
    "forward_and_per_channel_cast": lambda c: tk_quant.swiglu_forward_and_per_channel_cast_and_transpose(
        X, "e4m3", 128, swiglu_clamp_value=c
    ),
    "backward_and_per_token_cast": lambda c: tk_quant.swiglu_backward_and_per_token_cast(
        (X.to(torch.float8_e4m3fn), torch.ones(128, 2)),
        *(GRAD, torch.ones(128, 1), PAIRS, PAIRS.view(128, 1), 128),
        swiglu_clamp_value=c,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_range_is_the_same_everywhere(name: str) -> None:
    call = CALLS[name]
    assert_equal(call(math.inf), call(None))
    assert_equal(call(3), call(3.0))
    call(2.0**-126)
    for wrong in (0, 0.0, -1.0, 2.0**-127, math.nan, -math.inf, 1e300, 10**400):
        with pytest.raises(ValueError, match="swiglu_clamp_value: expected"):
            call(wrong)
    for wrong in (True, "1", torch.ones(())):
        with pytest.raises(TypeError, match="swiglu_clamp_value: expected a number"):
            call(wrong)
