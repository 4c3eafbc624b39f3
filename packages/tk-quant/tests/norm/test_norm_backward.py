"""norm_backward."""

from typing import Any

import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, assert_equal, calc_diff, tiers
from tk_quant.norm.tile import num_parts, row_tile

from ..per_token.test_per_token_cast import BENCH
from .test_norm_forward import BF16, EPS, FP32, HIDDEN, NAMES, MakeRows, apart, extreme_rows, normal, transposed


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: MakeRows = normal,
    weight: torch.dtype | None = FP32,
    row_weights: bool = False,
    residual: bool = False,
    buffer: torch.dtype | None = None,
    **options: Any,
) -> Make:
    """Arguments of the op; `buffer`: the dtype of a weight_grad that is added to."""

    def build(device: str) -> dict[str, Any]:
        x, of_weight = rows(device, shape, dtype), shape[-2:] if row_weights else shape[-1:]
        kwargs = {"out_grad": rows(device, shape, dtype), "x": x, "weight": None}
        kwargs["rstd"] = (x.float().square().mean(-1) + EPS).rsqrt().contiguous()
        if weight is not None:
            kwargs["weight"] = (1 + 0.5 * torch.randn(of_weight, device=device)).to(weight)
        if residual:
            kwargs["residual_out_grad"] = rows(device, shape, dtype)
        kwargs["weight_grad"] = None if buffer is None else torch.randn(of_weight, device=device).to(buffer)
        return {**kwargs, **options}

    return build


def case(shape: tuple[int, ...], dtype: torch.dtype, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{NAMES[dtype]}-{'x'.join(map(str, shape))}{suffix}"
    return Case(name, make(shape, dtype, **more), **dict.fromkeys(roles.split(), True))


def bench(shape: tuple[int, ...], dtype: torch.dtype, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{NAMES[dtype]}-{'x'.join(map(str, shape))}{suffix}-bench"
    flags = {**BENCH, **dict.fromkeys(roles.split(), True)}
    return Case(name, make(shape, dtype, weight=dtype, **more), **flags)


SPEC = OpSpec(
    op=tk_quant.norm_backward,
    mutates=("weight_grad",),
    cases=(
        # Several rows a tile, one; ranges of unequal length, and without rows; a vector's half, idle lanes, pieces.
        case((300, 8), BF16, "-one-lane", "small modes compile", residual=True),
        case((300, 72), BF16, "-half", "small"),
        case((600, 136), FP32, "-ranges", "small compile", residual=True),
        case((9, 1000), BF16, "-idle", "small compile", weight=BF16, residual=True),
        case((530, 1032), BF16, "-ranges", "small", weight=BF16),
        case((5, 264), FP32, "-idle", "small modes"),
        case((3, 16384), FP32, "-pieces", "small compile", residual=True),
        case((3, 16384), BF16, "-pieces", "small", weight=BF16, residual=True),
        case((3, 8256), FP32, "-pieces", "small"),
        # Options, each alone; buffers to add to.
        case((9, 320), BF16, "-plain", "small compile", weight=None, residual=True),
        case((9, 320), BF16, "-scaled", "small", weight=BF16, out_scale=-0.3, weight_offset=1.0),
        case((9, 320), BF16, "-add-fp32", "small modes compile", weight=BF16, buffer=FP32),
        case((9, 320), FP32, "-add-bf16", "small", buffer=BF16),
        # Batches, strides, weights of rows.
        case((3, 5, 64), BF16, "-batches", "small", residual=True),
        case((3, 5, 64), BF16, "-apart", "small", rows=apart(24), residual=True),
        case((3, 5, 64), FP32, "-unaligned", "small", rows=apart(3, 1), residual=True),
        case((4, 7, 72), BF16, "-transposed", "small", rows=transposed),
        case((50, 4, 512), BF16, "-row-weights", "small modes compile", row_weights=True, residual=True),
        case((7, 1032), FP32, "-row-weights", "small", row_weights=True, buffer=FP32),
        case((2, 3, 5, 64), FP32, "-four-dims", "small", residual=True),
        # No rows, one row.
        case((0, 128), BF16, "", "small", residual=True),
        case((0, 128), BF16, "-add", "small", buffer=FP32),
        case((3, 0, 64), FP32, "", "small", row_weights=True),
        case((1, 7168), BF16, "", "small"),
        # Zeros, infinity, NaN, subnormals, random bits.
        *(case((24, 256), dtype, "-extremes", "small", rows=extreme_rows, residual=True) for dtype in (BF16, FP32)),
        # Sizes of real models; the order of the sums at every number of lanes.
        *(case((531, hidden), BF16, weight=BF16, residual=True) for hidden in HIDDEN),
        *(case((531, hidden), FP32, residual=hidden % 16 == 0) for hidden in HIDDEN),
        *(case((40, hidden), FP32, residual=True) for hidden in (1408, 3200, 5632, 6656, 7680)),
        case((8001, 7168), BF16, residual=True, buffer=FP32),
        case((4001, 8, 128), BF16, "-heads", rows=apart(128), weight=BF16),
        case((2001, 4, 4096), BF16, "-streams", row_weights=True),
        # Benchmarks.
        bench((8192, 7168), BF16, "", "model_shape"),
        bench((8192, 7168), BF16, "-residual", "model_shape compile", residual=True),
        bench((8192, 7168), FP32, "", "compile"),
        bench((524288, 128), BF16),
        *(bench((8192, hidden), BF16, "-residual", residual=True) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
        *(bench((num_tokens, 7168), BF16, "-residual", residual=True) for num_tokens in (1, 64, 4001, 8001)),
    ),
)


test_tiers = tiers.tests(SPEC)

op = tk_quant.norm_backward


def exact(kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """By autograd in float64, with rstd as a function of x."""
    x, weight = (kwargs[name].double().requires_grad_() for name in ("x", "weight"))
    out = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    out = out * (weight + kwargs.get("weight_offset", 0.0)) * kwargs.get("out_scale", 1.0)
    out.backward(kwargs["out_grad"].double())
    x_grad = x.grad if kwargs.get("residual_out_grad") is None else x.grad + kwargs["residual_out_grad"].double()
    return x_grad, weight.grad


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("num_rows", "hidden"), [(700, 128), (530, 1000), (20, 7168), (9, 16384)])
def test_to_float64(device: str, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    unit = lambda where, shape, dtype: torch.randn(shape, device=where).to(dtype)  # noqa: E731
    options = {"residual": True, "out_scale": 0.7, "weight_offset": 1.0, "buffer": FP32}
    kwargs = make((num_rows, hidden), dtype, unit, FP32, **options)(device)
    kwargs["weight_grad"].zero_()
    x_grad, weight_grad = op(**kwargs)
    expected = exact(kwargs)
    assert calc_diff(x_grad, expected[0]) <= (3e-6 if dtype is BF16 else 1e-12)
    assert (weight_grad.double() - expected[1]).norm() <= 1e-6 * expected[1].norm()


def test_by_hand(device: str) -> None:
    """Rows with mean squares of 1 and 4; the gradient of a row along itself vanishes."""
    x = torch.tensor([[1.0, -1.0] * 4, [2.0, 2.0] * 4], device=device)
    rstd, grad = torch.tensor([1.0, 0.5], device=device), torch.tensor([[3.0] * 8, [8.0] + [0.0] * 7], device=device)
    x_grad, weight_grad = op(grad, x, torch.full((8,), 2.0, device=device), rstd)
    assert x_grad.tolist() == [[6.0] * 8, [7.0] + [-1.0] * 7]
    assert weight_grad.tolist() == [11.0, *[-3.0, 3.0] * 3, -3.0]
    assert op(x, x, None, rstd, out_scale=5.0)[0].tolist() == [[0.0] * 8] * 2


def test_adds_to_the_buffer_and_rounds_once(device: str) -> None:
    kwargs = make((50, 64), BF16)(device)
    plain = op(**kwargs)[1]
    buffer = torch.randn(64, device=device)
    into = buffer.clone()
    assert op(**{**kwargs, "weight_grad": into})[1] is into
    torch.testing.assert_close(into, buffer + plain, rtol=3e-7, atol=3e-7 * float(plain.abs().max()))
    rounded = op(**{**kwargs, "weight_grad": torch.zeros(64, dtype=BF16, device=device)})[1]
    assert_equal(rounded, plain.bfloat16())


def test_each_row_its_weight(device: str) -> None:
    kwargs = make((40, 3, 64), BF16, row_weights=True)(device)
    x_grad, weight_grad = op(**kwargs)
    for g in range(3):
        rows = {name: kwargs[name][:, g].contiguous() for name in ("out_grad", "x", "rstd")}
        assert_equal((x_grad[:, g].contiguous(), weight_grad[g]), op(**rows, weight=kwargs["weight"][g]))


def test_x_grad_depends_on_no_other_row(device: str) -> None:
    kwargs = make((300, 320), BF16, residual=True)(device)
    whole = op(**kwargs)[0]
    names = ("out_grad", "x", "rstd", "residual_out_grad")
    part = op(weight=kwargs["weight"], **{name: kwargs[name][17:19] for name in names})[0]
    assert_equal(part, whole[17:19])


@pytest.mark.parametrize("num_rows", [1, 131, 264, 265, 8192, 2**31 - 1])
@pytest.mark.parametrize("hidden", [8, 128, 576, 7168])
def test_ranges_cover_all_rows_once(hidden: int, num_rows: int) -> None:
    ranges = num_parts(num_rows, hidden, BF16) * row_tile(hidden, BF16).blocks_down
    length, longer = divmod(num_rows, ranges)
    assert (ranges - 1) * length + min(ranges - 1, longer) + length == num_rows
    assert num_parts(num_rows, hidden, BF16) <= 132 * 7


X = torch.ones(3, 2, 16)
GOOD = {"out_grad": X, "x": X, "weight": torch.ones(16), "rstd": torch.ones(3, 2)}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"x": torch.ones(3, 12)}, ValueError, "x: .*multiple of 8 channels"),
        ({"out_grad": torch.ones(2, 3, 16)}, ValueError, "out_grad: .*shape"),
        ({"out_grad": X.bfloat16()}, TypeError, "out_grad: .*float32"),
        ({"rstd": torch.ones(6)}, ValueError, "rstd: .*shape"),
        ({"residual_out_grad": torch.ones(3, 2, 8)}, ValueError, "residual_out_grad: .*shape"),
        ({"weight": None, "weight_grad": torch.ones(16)}, ValueError, "weight_grad: .*None without weight"),
        ({"weight_grad": torch.ones(2, 16)}, ValueError, "weight_grad: .*shape"),
        ({"weight_grad": GOOD["weight"]}, ValueError, "weight_grad: .*memory of its own"),
        ({"weight_offset": float("inf")}, ValueError, "weight_offset: .*finite"),
    ],
)
