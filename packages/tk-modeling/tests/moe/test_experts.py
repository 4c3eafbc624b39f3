"""grouped_linear."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tk_modeling.moe import experts
from tk_modeling.moe.experts import grouped_linear

ENDS = (0, 7, 7, 16, 20)
"""Of five experts the first and the third have no rows; of 24 rows the last four belong to none."""


def arguments(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[Tensor, nn.Parameter, Tensor]:
    rows = torch.randn(24, 16, device=device).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(5, 8, 16, device=device).to(dtype))
    return rows, weight, torch.tensor(ENDS, dtype=torch.int32, device=device)


def by_masks(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row times the weight of its expert; 0 for rows of none."""
    expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    own = nn.functional.one_hot(expert, len(weight) + 1)[:, :-1].to(rows.dtype)
    return torch.einsum("rk,enk,re->rn", rows, weight, own)


def gradients(function: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of the rows that belong to an expert, the weight's gradient."""
    y = function(rows, weight, ends)[: ENDS[-1]]
    d_y = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    d_rows, d_weight = torch.autograd.grad(y, (rows, weight), d_y)
    return y.detach(), d_rows[: ENDS[-1]], d_weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_float64(dtype: torch.dtype, device: str) -> None:
    rows, weight, ends = arguments(dtype, device)
    found = gradients(grouped_linear, rows, weight, ends)
    expected = gradients(
        by_masks, rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), ends
    )
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= (2**-8 if dtype == torch.bfloat16 else 1e-5) * want.norm()
    assert not found[2][[0, 2]].any()


def test_main_grad_takes_float32_products() -> None:
    rows, weight, ends = arguments()
    weight.main_grad = torch.ones(5, 8, 16)
    y = grouped_linear(rows, weight, ends)[: ENDS[-1]]
    d_y = torch.linspace(-1, 1, y.numel()).view_as(y).bfloat16()
    y.backward(d_y)
    assert weight.grad is None
    exact = weight.detach().double().requires_grad_()
    by_masks(rows.detach().double(), exact, ends)[: ENDS[-1]].backward(d_y.double())
    torch.testing.assert_close(weight.main_grad - 1, exact.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_the_product_for_what_is_frozen_is_not_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, ends = arguments()
    (rows if frozen == "rows" else weight).requires_grad_(False)
    products = []
    compute = experts._products
    monkeypatch.setattr(experts, "_products", lambda *args: products.append(compute(*args)) or products[-1])
    grouped_linear(rows, weight, ends).sum().backward()
    assert len(products) == 2


def test_operator_agrees_with_its_fake() -> None:
    rows, weight, ends = (x.detach() for x in arguments())
    for operands in ((rows, weight.transpose(1, 2), ends), (rows.t(), rows, ends)):
        torch.library.opcheck(torch.ops.tk_modeling.products_by_loop.default, operands, test_utils="test_faketensor")


ROWS, WEIGHT, INT_ENDS = (x.detach() for x in arguments())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rows": ROWS.half()}, TypeError, "rows: .*bfloat16"),
        ({"rows": ROWS[0]}, ValueError, "rows: .*shape"),
        ({"rows": ROWS.repeat(1, 2)[:, :16]}, ValueError, "rows: .*contiguous"),
        ({"rows": ROWS[:, :12].contiguous(), "weight": WEIGHT[..., :12].contiguous()}, ValueError, "in_features .*8"),
        ({"weight": None}, TypeError, "weight: expected a torch.Tensor"),
        ({"weight": WEIGHT.float()}, TypeError, "weight: .*bfloat16"),
        ({"weight": WEIGHT[..., :8].contiguous()}, ValueError, "weight: .*shape"),
        ({"weight": WEIGHT[:, :4].contiguous()}, ValueError, "out_features .*8"),
        ({"ends": INT_ENDS.long()}, TypeError, "ends: .*int32"),
        ({"ends": INT_ENDS[:4]}, ValueError, "ends: .*shape"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        grouped_linear(**{"rows": ROWS, "weight": WEIGHT, "ends": INT_ENDS, **change})
