"""grouped_fp8_linear."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tk_core import env
from tk_core.math import align
from tk_core.testing import assert_equal
from tk_modeling import fp8_linear, grouped_fp8_linear

from .cases import COUNTS, main_grad_of_ones


def arguments(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Rows, of which the last 128, of no expert, are NaN; weights; ends; whether each row is an expert's."""
    torch.manual_seed(3)
    starts = [0]
    for count in COUNTS:
        starts.append(starts[-1] + align(count, 128))
    rows = torch.full((starts[-1] + 128, 256), torch.nan)
    is_row = torch.zeros(len(rows), dtype=torch.bool)
    for (start, end), count in zip(pairwise(starts), COUNTS, strict=True):
        rows[start:end] = 0
        rows[start : start + count] = torch.randn(count, 256)
        is_row[start : start + count] = True
    ends = torch.tensor([s + c for s, c in zip(starts, COUNTS, strict=False)], dtype=torch.int32, device=device)
    weight = nn.Parameter((torch.randn(len(COUNTS), 128, 256) / 16).to(device, dtype))
    return rows.to(device).bfloat16().requires_grad_(), weight, ends, is_row.to(device)


def gradient_of(y: Tensor, is_row: Tensor) -> Tensor:
    """Zero in the padding, NaN past the last segment."""
    torch.manual_seed(7)
    d_y = torch.randn(y.shape).to(y.device, y.dtype) * is_row[:, None]
    d_y[-128:] = torch.nan
    return d_y


@pytest.mark.parametrize("layout", ["", "contiguous", "transposed", "not-on-16-bytes"])
def test_experts_are_linear_layers(layout: str, device: str) -> None:
    """Output and gradients have the bits of fp8_linear's: segments begin at multiples of 128, so factors agree.

    A main_grad of any layout takes the gradient of the weights.
    """
    rows, weight, ends, is_row = arguments(torch.float32, device)
    if layout:
        weight.main_grad = main_grad_of_ones(weight, layout)
    y = grouped_fp8_linear(rows, weight, ends)
    d_y = gradient_of(y, is_row)
    y.backward(d_y)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        part, own = rows.detach()[start:end].requires_grad_(), weight.detach()[expert].requires_grad_()
        one = fp8_linear(part, own)
        d_part, d_own = torch.autograd.grad(one, (part, own), d_y[start:end])
        assert_equal(y.detach()[start:end], one.detach())
        assert_equal(rows.grad[start:end], d_part)
        if layout:
            torch.testing.assert_close(weight.main_grad[expert], 1 + d_own, rtol=1e-5, atol=1e-5)
        else:
            assert_equal(weight.grad[expert], d_own)
        assert not y.detach()[end : align(end, 128)].any()
        start = align(end, 128)


ROWS, WEIGHT, ENDS, _ = arguments()


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (ValueError, r"rows.shape\[0\]", {"rows": ROWS[:100]}),
        (ValueError, "^rows", {"rows": ROWS[:, :128]}),
        (TypeError, "^rows", {"rows": ROWS.float()}),
        (ValueError, "in_features", {"weight": WEIGHT[:, :, :192].contiguous()}),
        (ValueError, "out_features", {"weight": WEIGHT[:, :64].contiguous()}),
        (TypeError, "^weight", {"weight": WEIGHT.half()}),
        (ValueError, "^ends", {"ends": ENDS[:4]}),
        (TypeError, "^ends", {"ends": ENDS.long()}),
    ],
)
def test_bad_input(error: type[Exception], match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        grouped_fp8_linear(**{"rows": ROWS, "weight": WEIGHT, "ends": ENDS, **changes})


def test_debug_mode_looks_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    with pytest.raises(ValueError, match=r"^ends\[1\]: expected at least 128, where the segment begins, got 0$"):
        grouped_fp8_linear(ROWS, WEIGHT, torch.tensor([1, 0, 0, 0, 0], dtype=torch.int32))


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_debug_mode_refuses_padding_that_is_not_zero(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    rows, ends = torch.zeros(384, 128).bfloat16(), torch.tensor([3, 130], dtype=torch.int32)
    rows[:3] = rows[128:130] = rows[256:] = 1  # also what is past the last segment
    weight = torch.randn(2, 128, 128)
    grouped_fp8_linear(rows, weight, ends)
    rows[255, 7] = value
    with pytest.raises(
        ValueError, match=r"^rows: expected zeros in the padding from row 130 on, got others in row 255"
    ):
        grouped_fp8_linear(rows, weight, ends)
