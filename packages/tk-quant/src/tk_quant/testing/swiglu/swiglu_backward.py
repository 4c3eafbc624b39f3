"""Named cases of swiglu_backward."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec, assert_equal
from tk_core.testing.numeric import assert_same_metadata
from tk_quant import reference
from tk_quant.swiglu.swiglu_backward import swiglu_backward
from tk_quant.testing.per_token.per_token_cast import MakeInput, extremes
from tk_quant.testing.swiglu.swiglu_backward_and_per_token_cast import maps
from tk_quant.testing.swiglu.swiglu_forward import FORMATS, NUM_TOPK, real_rows
from tk_quant.testing.swiglu.swiglu_forward_and_per_token_cast import activations, every_gate

Make = Callable[[str], dict[str, Any]]

_BF16, _FP32 = torch.bfloat16, torch.float32


def make(
    x: MakeInput,
    *,
    num_real: int | None = None,
    weight_grad: bool = True,
    experts: bool = False,
    grad_dtype: torch.dtype | None = None,
    first_element: int = 0,
    **more: Any,
) -> Make:
    """Arguments of the op. `num_real`: with weights, so many of which have a position; `weight_grad`: and a gradient.

    x and grad_out start at element `first_element` of their storage, and are NaN in rows of padding.
    """

    def shifted(values: torch.Tensor) -> torch.Tensor:
        return torch.cat((values.new_zeros(first_element), values.flatten()))[first_element:].view(values.shape)

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        num_positions, hidden = values.shape[0], values.shape[1] // 2
        grad_out = torch.randn(num_positions, hidden, device=device).to(grad_dtype or values.dtype)
        kwargs: dict[str, Any] = {"fmt": FORMATS[values.dtype], **more}
        if num_real is not None:
            # Includes pairs without a position.
            num_tokens = num_positions // NUM_TOPK + 2
            pos_to_token_topk, token_topk_to_pos = maps(num_positions, num_tokens, NUM_TOPK, num_real)(device)
            kwargs["pos_to_token_topk"] = pos_to_token_topk
            kwargs["topk_weights"] = torch.rand(num_tokens, NUM_TOPK, device=device)
            if weight_grad:
                # Positions past the last row count as none.
                is_none = torch.arange(num_tokens * NUM_TOPK, device=device).view(num_tokens, NUM_TOPK) % 3 == 0
                beyond = torch.where(is_none & (token_topk_to_pos < 0), num_positions + 5, token_topk_to_pos)
                kwargs["token_topk_to_pos"] = beyond.int()
        if experts:
            expert = torch.arange(num_positions, dtype=torch.int32, device=device)
            kwargs["pos_to_expert"] = torch.where(expert % 5 == 3, -1, expert)
        is_padding = ~real_rows(kwargs, num_positions, values.device).unsqueeze(1)
        values, grad_out = (each.masked_fill(is_padding, torch.nan) for each in (values, grad_out))
        return {"x": shifted(values), "grad_out": shifted(grad_out), **kwargs}

    return build


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except weight_grad, which is summed in another order."""
    assert_equal(actual[:2], expected[:2])
    got, want = actual[2], expected[2]
    if want is None:
        assert got is None
        return
    assert_same_metadata(got, want, "weight_grad")
    if not want.is_meta:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Real rows of x and grad_out; maps, weights and outputs."""
    rows = (kwargs["x"], kwargs["grad_out"])
    names = ("pos_to_token_topk", "topk_weights", "token_topk_to_pos", "pos_to_expert")
    once = [each for each in (*outputs, *map(kwargs.get, names)) if each is not None]
    num_real = int(real_rows(kwargs, rows[0].shape[0], rows[0].device).sum())
    row_bytes = sum(each.shape[1] * each.element_size() for each in rows)
    return num_real * row_bytes + sum(each.numel() * each.element_size() for each in once)


def _case(dtype: torch.dtype, num_positions: int, hidden: int, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{'bf16' if dtype is _BF16 else 'fp32'}-h{hidden}-t{num_positions}{suffix}"
    made = make(activations(num_positions, 2 * hidden, dtype), **more)
    return Case(name, made, gpu="bench" not in roles, **dict.fromkeys(roles.split(), True))


SPEC = OpSpec(
    op=swiglu_backward,
    reference=reference.swiglu_backward,
    compare=compare,
    least_bytes=least_bytes,
    cases=(
        # One tile or several along a row; with and without the optional arguments.
        _case(_BF16, 7, 256, "-plain", "small modes"),
        _case(_BF16, 33, 64, "-weights", "small modes", num_real=25),
        _case(_BF16, 33, 320, "-experts", "small compile", experts=True),
        _case(_BF16, 33, 128, "-all", "small modes", num_real=30, experts=True, with_out=True),
        _case(_BF16, 33, 128, "-constant-weights", "small", num_real=30, weight_grad=False),
        _case(_BF16, 9, 2112, "-clamped", "small compile", num_real=7, swiglu_clamp_value=1.5),
        _case(_BF16, 9, 192, "-to-fp32", "small compile", num_real=7, fmt="fp32", grad_dtype=_FP32, with_out=True),
        _case(_FP32, 9, 192, "-plain", "small"),
        _case(_FP32, 9, 192, "-to-bf16", "small compile", num_real=7, fmt="bf16", grad_dtype=_BF16),
        _case(_FP32, 33, 640, "-clamped", "small compile", num_real=30, swiglu_clamp_value=2, with_out=True),
        # More pairs than threads; zero rows, one row; views that start at an odd element.
        _case(_BF16, 1, 64, "", "small", num_real=1),
        _case(_BF16, 0, 128, "", "small", num_real=0),
        _case(_BF16, 0, 128, "-plain", "small", with_out=True),
        _case(_BF16, 9, 128, "-unaligned", "small", num_real=7, first_element=1),
        _case(_FP32, 9, 128, "-unaligned", "small", first_element=1, with_out=True),
        # Zeros, infinity, NaN, subnormals, random bits; every possible gate.
        *(
            Case(f"{name}-h256-extremes{'-clamped' * bool(more)}", make(extremes(512, dtype), **more), small=True)
            for name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for more in ({}, {"swiglu_clamp_value": 3.3, "with_out": True})
        ),
        Case("bf16-h128-every-gate", make(every_gate)),
        # Sizes of real models.
        *(
            _case(_BF16, num_positions, hidden, num_real=num_positions * 7 // 8)
            for num_positions, hidden in ((4001, 640), (8001, 2048), (17, 3072), (4001, 7168), (3, 40960))
        ),
        _case(_FP32, 4001, 2048, num_real=3500, with_out=True),
        # More than 2**31 elements.
        _case(_BF16, 300001, 4096, "-large", num_real=1000),
        # Benchmarks.
        _case(_BF16, 34816, 2048, "-bench", "bench model_shape compile", num_real=32768),
        _case(_BF16, 34816, 2048, "-out-bench", "bench", num_real=32768, with_out=True),
        _case(_FP32, 34816, 2048, "-bench", "bench compile", num_real=32768),
        *(_case(_BF16, 34816, hidden, "-bench", "bench", num_real=32768) for hidden in (256, 640, 1536, 7168)),
        *(_case(_BF16, n, 2048, "-bench", "bench", num_real=n * 15 // 16) for n in (64, 4001)),
    ),
)
