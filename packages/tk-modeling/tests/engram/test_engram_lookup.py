"""engram_lookup."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_engram
import tk_modeling
from tk_core.testing import assert_equal

from .cases import parameter

NUM_ROWS, DIM = 41, 96


def indices_of(*shape: int, device: str = "cpu") -> Tensor:
    """Rows 4 to 29, and some -1."""
    torch.manual_seed(0)
    return torch.randint(4, 30, shape, device=device, dtype=torch.int32).where(
        torch.rand(shape, device=device) < 0.9, -1
    )


def lookup_gradient(indices: Tensor, grad_rows: Tensor) -> Tensor:
    """The table's gradient in float64."""
    grad = torch.zeros(NUM_ROWS + 1, DIM, dtype=torch.float64, device=indices.device)
    # Those of negative indices go to a row of their own.
    return grad.index_add_(0, indices.flatten() % (NUM_ROWS + 1), grad_rows.double().flatten(0, -2))[:NUM_ROWS]


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("shape", [(2, 9, 5), (7, 3), (0, 3), (4,)])
def test_lookup_gradients(shape: tuple[int, ...], sparse_grad: bool, device: str) -> None:
    table = parameter(NUM_ROWS, DIM, device=device)
    indices = indices_of(*shape, device=device)
    rows = tk_modeling.engram_lookup(indices, table, sparse_grad=sparse_grad)
    assert_equal(rows.detach().view(-1, 1, DIM), tk_engram.engram_lookup(indices.view(-1, 1), table.detach()))
    assert rows.shape == (*shape, DIM)
    grad_rows = torch.randn_like(rows)
    rows.backward(grad_rows)
    assert table.grad.dtype == torch.bfloat16
    assert table.grad.is_sparse == sparse_grad
    assert_equal(table.grad.to_dense(), lookup_gradient(indices, grad_rows).bfloat16())


@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 0, 0)])
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_lookup_of_no_indices(shape: tuple[int, ...], sparse_grad: bool) -> None:
    table = torch.randn(NUM_ROWS, DIM).bfloat16().requires_grad_()
    rows = tk_modeling.engram_lookup(torch.zeros(shape, dtype=torch.int32), table, sparse_grad=sparse_grad)
    assert rows.shape == (*shape, DIM)
    rows.sum().backward()
    assert not table.grad.to_dense().any()


def test_sparse_gradients_name_rows_that_were_looked_up_and_no_others() -> None:
    table = parameter(NUM_ROWS, DIM)
    for indices in (indices_of(11, 3), indices_of(2, 2)):
        rows = tk_modeling.engram_lookup(indices, table, sparse_grad=True)
        (grad,) = torch.autograd.grad(rows.sum(), table)
        assert grad._nnz() == indices.numel()
        assert_equal(grad.coalesce().indices()[0], indices[indices >= 0].unique().long())
    none = torch.full((2, 3), -1, dtype=torch.int32)
    (grad,) = torch.autograd.grad(tk_modeling.engram_lookup(none, table, sparse_grad=True).sum(), table)
    assert not grad.to_dense().any()


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("contiguous", [True, False])
def test_lookup_adds_to_main_grad(contiguous: bool, sparse_grad: bool) -> None:
    table = parameter(NUM_ROWS, DIM)
    buffer = torch.ones(DIM, NUM_ROWS).t()
    table.main_grad = buffer = buffer.contiguous() if contiguous else buffer
    indices, grad_rows = indices_of(11, 3), torch.randn(11, 3, DIM).bfloat16()
    tk_modeling.engram_lookup(indices, table, sparse_grad=sparse_grad).backward(grad_rows)
    assert table.grad is None
    assert table.main_grad is buffer
    torch.testing.assert_close(buffer.double(), lookup_gradient(indices, grad_rows) + 1, rtol=0, atol=1e-5)


def test_lookup_lets_the_table_change_before_the_backward() -> None:
    table = parameter(NUM_ROWS, DIM)
    indices = indices_of(11, 3)
    rows = tk_modeling.engram_lookup(indices, table)
    with torch.no_grad():
        table.zero_()
    rows.sum().backward()
    assert_equal(table.grad, lookup_gradient(indices, torch.ones(11, 3, DIM)).bfloat16())


def test_lookup_of_a_float32_table_under_autocast() -> None:
    wide = parameter(NUM_ROWS, DIM, dtype=torch.float32)
    indices = indices_of(11, 3)
    expected = tk_engram.engram_lookup(indices, wide.detach().bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found = tk_modeling.engram_lookup(indices, wide)
        with torch.no_grad():
            assert_equal(tk_modeling.engram_lookup(indices, wide), expected)
    assert_equal(found.detach(), expected)
    found.sum().backward()
    assert_equal(wide.grad, lookup_gradient(indices, torch.ones(11, 3, DIM)).float())
    with pytest.raises(TypeError, match=r"^table"):
        tk_modeling.engram_lookup(indices, wide)


@pytest.mark.parametrize(("shape", "name"), [((0, 32), "table"), ((3, 0), "D ")])
def test_lookup_in_an_empty_table_under_autocast(shape: tuple[int, int], name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=f"^{name}.*expected at least"):
        tk_modeling.engram_lookup(indices_of(5, 2), torch.zeros(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_lookup_gradients_wait_for_nothing(sparse_grad: bool) -> None:
    table = parameter(NUM_ROWS, DIM, device="cuda")
    indices = indices_of(11, 3, device="cuda")

    def step() -> None:
        tk_modeling.engram_lookup(indices, table, sparse_grad=sparse_grad).sum().backward()
        table.grad = None

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_lookup_in_pinned_memory() -> None:
    table = torch.randn(NUM_ROWS, DIM).bfloat16().pin_memory()
    indices = indices_of(11, 3)
    found = tk_modeling.engram_lookup(indices.cuda(), table)
    assert_equal(found.cpu(), tk_engram.engram_lookup(indices, table))
    with pytest.raises(ValueError, match=r"^table"):
        tk_modeling.engram_lookup(indices.cuda(), table.requires_grad_())


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"indices": torch.zeros(3, 2)}, TypeError, "indices"),
        ({"indices": torch.zeros(()).int()}, ValueError, "indices"),
        ({"table": torch.zeros(3, 4, 32).bfloat16()}, ValueError, "table"),
        ({"table": [1.0]}, TypeError, "table"),
        ({"table": torch.zeros(3, 32).to(torch.float8_e4m3fn).requires_grad_()}, ValueError, "table"),
        ({"table": torch.zeros(3, 32, device="meta").bfloat16().requires_grad_()}, ValueError, "table"),
        ({"table": torch.zeros(3, 40).bfloat16()}, ValueError, "D "),
        ({"table_sf": torch.zeros(NUM_ROWS, 3)}, ValueError, "table_sf"),
        ({"sparse_grad": 1}, TypeError, "sparse_grad"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_lookup_names_what_is_wrong(change: dict[str, Any], error: type[Exception], name: str, trains: bool) -> None:
    table = torch.zeros(NUM_ROWS, DIM).bfloat16().requires_grad_(trains)
    with pytest.raises(error, match=f"^{name}"):
        tk_modeling.engram_lookup(**({"indices": indices_of(5, 2), "table": table} | change))
