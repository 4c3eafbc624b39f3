"""GroupedFP8Linear."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tk_core import env
from tk_core.math import align
from tk_core.testing import assert_equal
from tk_core.testing.numeric import calc_diff
from tk_modeling import GroupedFP8Linear, fp8_linear, grouped_fp8_linear, reference

from .cases import COUNTS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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


def run(rows: Tensor, weight: Tensor, ends: Tensor, is_row: Tensor, function: Any = grouped_fp8_linear) -> Any:
    """Output and gradient of the experts' rows, the weight's gradient."""
    y = function(rows, weight, ends)
    d_rows, d_weight = torch.autograd.grad(y, (rows, weight), gradient_of(y, is_row))
    return y.detach()[is_row], d_rows[is_row], d_weight


def by_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The reference, in the dtype of its rows."""
    return functional_call(reference.GroupedFP8Linear(len(weight), 256, 128), {"weight": weight}, (rows, ends))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_bf16(dtype: torch.dtype, device: str) -> None:
    rows, weight, ends, is_row = arguments(dtype, device)
    found = run(rows, weight, ends, is_row)
    exact = [z.detach().double().requires_grad_() for z in (rows, weight)]
    expected = run(*exact, ends, is_row, by_expert)
    assert [z.dtype for z in found] == [torch.bfloat16, torch.bfloat16, dtype]
    for name, got, want in zip(("y", "rows", "weight"), found, expected, strict=True):
        assert 1e-5 < calc_diff(got, want) < 1e-3, name
    for expert, count in enumerate(COUNTS):
        assert bool(found[2][expert].any()) == (count > 0)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_are_linear_layers(device: str) -> None:
    """Output and gradients have the bits of FP8Linear's: segments begin at multiples of 128, so factors agree."""
    rows, weight, ends, is_row = arguments(torch.float32, device)
    y = grouped_fp8_linear(rows, weight, ends)
    d_y = gradient_of(y, is_row)
    d_rows, d_weight = torch.autograd.grad(y, (rows, weight), d_y)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        part, own = rows.detach()[start:end].requires_grad_(), weight.detach()[expert].requires_grad_()
        one = fp8_linear(part, own)
        d_part, d_own = torch.autograd.grad(one, (part, own), d_y[start:end])
        assert_equal(y.detach()[start:end], one.detach())
        assert_equal(d_rows[start:end], d_part)
        assert_equal(d_weight[expert], d_own)
        assert not y.detach()[end : align(end, 128)].any()
        start = align(end, 128)


@pytest.mark.parametrize("device", DEVICES)
def test_main_grad_takes_float32_gradients(device: str) -> None:
    rows, weight, ends, is_row = arguments(torch.float32, device)
    _, _, expected = run(rows, weight, ends, is_row)
    weight.main_grad = torch.ones_like(weight)
    y = grouped_fp8_linear(rows, weight, ends)
    y.backward(gradient_of(y, is_row))
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_small_gradients_keep_their_codes(device: str) -> None:
    """A power of two in dY goes through to both gradients exactly."""
    rows, weight, ends, is_row = arguments(torch.float32, device)
    y = grouped_fp8_linear(rows, weight, ends)
    d_y = gradient_of(y, is_row)
    d_rows, d_weight = torch.autograd.grad(y, (rows, weight), d_y, retain_graph=True)
    for scale in (2.0**-20, 2.0**-60):
        found = torch.autograd.grad(y, (rows, weight), d_y * scale, retain_graph=True)
        assert_equal((found[0][is_row], found[1]), (d_rows[is_row] * scale, d_weight * scale))


@pytest.mark.parametrize("layout", ["transposed", "not on 16 bytes"])
def test_main_grad_of_any_strides_and_offset(layout: str) -> None:
    rows, weight, ends, is_row = arguments(torch.float32)
    _, _, expected = run(rows, weight, ends, is_row)
    if layout == "transposed":
        weight.main_grad = torch.ones_like(weight).mT.contiguous().mT
    else:
        weight.main_grad = torch.ones(weight.numel() + 1)[1:].view(weight.shape)
    y = grouped_fp8_linear(rows, weight, ends)
    y.backward(gradient_of(y, is_row))
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_frozen(frozen: str) -> None:
    rows, weight, ends, is_row = arguments()
    y, d_rows, d_weight = run(rows, weight, ends, is_row)
    (rows if frozen == "rows" else weight).requires_grad_(False)
    out = grouped_fp8_linear(rows, weight, ends)
    assert_equal(out.detach()[is_row], y)
    out.backward(gradient_of(out, is_row))
    if frozen == "rows":
        assert_equal(weight.grad, d_weight)
    else:
        assert_equal(rows.grad[is_row], d_rows)


def test_under_compile() -> None:
    torch._dynamo.reset()
    arguments_ = arguments()
    compiled = torch.compile(grouped_fp8_linear, fullgraph=True, backend="aot_eager")
    assert_equal(run(*arguments_, compiled), run(*arguments_))


def test_module() -> None:
    module = GroupedFP8Linear(5, 256, 128, dtype=torch.bfloat16)
    rows, _, ends, is_row = arguments()
    with torch.no_grad():
        assert_equal(module(rows, ends)[is_row], grouped_fp8_linear(rows, module.weight, ends)[is_row])
    assert repr(module) == "GroupedFP8Linear(5, 256, 128)"


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


@pytest.mark.parametrize(
    ("sizes", "error", "match"),
    [
        ((0, 128, 128), ValueError, "^num_experts: expected 1 to .*, got 0"),
        ((2.0, 128, 128), TypeError, "^num_experts: expected an int, got 2.0"),
        ((2, 0, 128), ValueError, "^in_features: expected 128 to .*, got 0"),
        ((2, 128, 128.0), TypeError, "^out_features: expected an int, got 128.0"),
    ],
)
def test_bad_sizes(sizes: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GroupedFP8Linear(*sizes)


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
