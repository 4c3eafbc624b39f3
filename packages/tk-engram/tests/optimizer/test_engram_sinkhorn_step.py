"""engram_sinkhorn_step."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference
from tk_engram.lib.scaled_rows import RowTile

from .rows import compare, make_rows


def make(num_rows: int, width: int, *, first_element: int = 0) -> Make:
    """Arguments of the op."""
    return lambda device: make_rows(num_rows, width, device, first_element=first_element)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and the rows' scales twice: they are read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["row_scale"])


SPEC = OpSpec(
    op=tk_engram.engram_sinkhorn_step,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("row_scale",),
    cases=(
        # At most one row per range, and several; a shorter last range; columns in vectors of 4, 2 and 1; one column.
        Case("r5-d64", make(5, 64), small=True, modes=True),
        Case("r797-d8", make(797, 8), small=True, modes=True),
        Case("r40-d100", make(40, 100), small=True),
        Case("r9-d262", make(9, 262), small=True),
        Case("r9-d67", make(9, 67), small=True),
        Case("r400-d1", make(400, 1), small=True),
        Case("r0-d64", make(0, 64), small=True),
        Case("r3-d640-unaligned", make(3, 640, first_element=1), small=True),
        *(Case(f"r4001-d{width}", make(4001, width)) for width in (32, 127, 512, 576, 1280, 2560, 4096)),
        Case("r1000-d8192", make(1000, 8192)),
        Case("r1000-d16384", make(1000, 16384), compile=True),
        Case("r100003-d256", make(100003, 256)),
        Case("r1048576-d256-bench", make(1048576, 256), bench=True, model_shape=True, gpu=False, compile=True),
        Case("r65536-d256-bench", make(65536, 256), bench=True, gpu=False),
        Case("r262144-d1024-bench", make(262144, 1024), bench=True, gpu=False),
        Case("r65536-d4096-bench", make(65536, 4096), bench=True, gpu=False),
    ),
)


test_tiers = tiers.tests(SPEC)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_by_hand(device: str) -> None:
    matrix = torch.tensor([[3.0, 8.0], [0.0, 2.0]], device=device)
    row_scale = torch.tensor([1.0, 10.0], device=device)
    col_scale = torch.tensor([1.0, 0.5], device=device)
    norm, partial = tk_engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 5.0)
    # x = (3, 4) and (0, 10); q = 1/10 and 1/15.
    assert norm.tolist() == [5.0, 10.0]
    torch.testing.assert_close(row_scale.cpu(), torch.tensor([0.1, 10 / 15]))
    assert partial.shape == (396, 2)
    torch.testing.assert_close(partial[:2].cpu(), torch.tensor([[0.09, 0.16], [0.0, 100 / 225]]))
    assert (partial[2:] == 0).all()
    assert matrix.tolist() == [[3.0, 8.0], [0.0, 2.0]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_range_has_so_many_rows_that_396_are_enough(device: str) -> None:
    # 1000 rows: 3 a range, so that range 333 has the last row and no later one any.
    matrix = torch.arange(1.0, 1001.0, device=device)[:, None].expand(1000, 4).contiguous()
    # A large eps: y = x / eps keeps the rows apart.
    _, partial = tk_engram.engram_sinkhorn_step(
        matrix, torch.ones(1000, device=device), torch.ones(4, device=device), 2.0**60
    )
    rows = (torch.arange(1.0, 1003.0) * (torch.arange(1.0, 1003.0) < 1001)).square().view(334, 3).sum(1)
    torch.testing.assert_close(partial[:334, 0].cpu() * 2.0**120, rows)
    assert (partial[334:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_iterations_even_out_rows_and_columns(device: str) -> None:
    # What the optimizer does: after some steps, and scales of columns made from the sums, all norms agree.
    num_rows, width = 300, 64
    inputs = make(num_rows, width)(device)
    matrix, row_scale, col_scale = (inputs[name] for name in ("matrix", "row_scale", "col_scale"))
    sums = torch.empty_like(col_scale)
    for _ in range(30):
        _, partial = tk_engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
        tk_engram.engram_sinkhorn_step_reduce(partial, sums)
        col_scale /= (sums * width / num_rows).sqrt()
    out = tk_engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, width**0.5)
    torch.testing.assert_close(out.square().mean(1), torch.ones_like(row_scale))
    torch.testing.assert_close(out.square().mean(0), torch.ones_like(col_scale), rtol=1e-3, atol=1e-3)


def test_reference_in_float64_is_the_formula() -> None:
    matrix, row_scale, col_scale = torch.randn(900, 5).double(), torch.rand(900).double(), torch.rand(5).double()
    x = torch.einsum("rd,r,d->rd", matrix, row_scale, col_scale)
    expected = row_scale / (torch.linalg.vector_norm(x, dim=1) + 0.125)
    norm, partial = reference.engram_sinkhorn_step(matrix, row_scale, col_scale, 0.125)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(x, dim=1))
    torch.testing.assert_close(row_scale, expected)
    y = torch.einsum("rd,r,d->rd", matrix, row_scale, col_scale)
    torch.testing.assert_close(partial.sum(0), y.square().sum(0))
    torch.testing.assert_close(partial[7], y[21:24].square().sum(0))


def test_no_rows() -> None:
    norm, partial = tk_engram.engram_sinkhorn_step(torch.empty(0, 3), torch.empty(0), torch.ones(3), 0)
    assert norm.shape == (0,)
    assert partial.tolist() == [[0.0] * 3] * 396


def test_least_bytes_counts_row_scale_twice() -> None:
    inputs = make(10, 8)("cpu")
    outputs = tk_engram.engram_sinkhorn_step(**inputs)
    assert least_bytes(inputs, outputs) == 4 * (10 * 8 + 10 + 8 + 10 + 10 + 396 * 8)


@pytest.mark.parametrize("width", [1, 5, 6, 8, 32, 64, 100, 127, 256, 576, 1000, 2560, 4096, 7168, 8192, 16384])
def test_tile_holds_each_row_once(width: int) -> None:
    tile = RowTile.best(width)
    assert width % tile.vector == 0
    assert tile.threads == tile.num_groups * tile.threads_per_row
    assert width <= tile.columns(width) < width + tile.vector * tile.threads_per_row
    assert tile.columns(width) // tile.threads_per_row <= 32


GOOD: dict[str, Any] = {
    "matrix": torch.ones(3, 8),
    "row_scale": torch.full((3,), 7.0),
    "col_scale": torch.ones(8),
    "eps": 1e-20,
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"matrix": torch.ones(3, 0), "col_scale": torch.ones(0)}, ValueError, "D .*matrix.*1 to 16384"),
        ({"matrix": torch.ones(3, 16385), "col_scale": torch.ones(16385)}, ValueError, "D .*matrix.*1 to 16384"),
        ({"row_scale": torch.ones(4)}, ValueError, "row_scale: .*shape"),
        ({"col_scale": torch.ones(3)}, ValueError, "col_scale: .*shape"),
        ({"eps": -1e-9}, ValueError, "eps: .*at least 0"),
        ({"eps": float("inf")}, ValueError, "eps: .*finite"),
    ],
)


@pytest.mark.gpu(gib=9)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_rows = 2**31 // 256 + 5
    inputs = make(num_rows, 256)("cuda")
    last = {name: inputs[name][-9:].clone() for name in ("matrix", "row_scale")}
    norm, _ = tk_engram.engram_sinkhorn_step(**inputs)
    expected, _ = reference.engram_sinkhorn_step(**{**inputs, **last})
    torch.testing.assert_close((norm[-9:], inputs["row_scale"][-9:]), (expected, last["row_scale"]))
