"""engram_sinkhorn_step, engram_sinkhorn_step_reduce and engram_sinkhorn_finalize."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.trees import distinct_bytes, tensors
from tk_engram import reference
from tk_engram.lib.scaled_rows import RowTile


def make_step(num_rows: int, width: int, *, first_element: int = 0) -> Make:
    """A normal matrix with a column of 1000-fold values, and scales of 0.5 … 2.

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        shapes = {"matrix": (num_rows, width), "row_scale": (num_rows,), "col_scale": (width,)}
        inputs = {name: empty(*shape, device=device, first_element=first_element) for name, shape in shapes.items()}
        inputs["matrix"].normal_()[:, width // 2] *= 1000
        inputs["row_scale"].uniform_(0.5, 2.0)
        inputs["col_scale"].uniform_(0.5, 2.0)
        return {**inputs, "eps": 1e-20}

    return build


def make_step_reduce(num_partials: int, width: int, *, first_element: int = 0) -> Make:
    """Sums of squares from 0 to 1; the output is filled with NaN."""

    def build(device: str) -> dict[str, Any]:
        return {
            "col_sumsq_partial": empty(num_partials, width, device=device, first_element=first_element).uniform_(),
            "col_sumsq": empty(width, device=device, first_element=first_element).fill_(torch.nan),
        }

    return build


def make_finalize(num_rows: int, width: int, *, out: bool = False, first_element: int = 0) -> Make:
    """Arguments as for the step, alpha √D; `out` is filled with NaN."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_step(num_rows, width, first_element=first_element)(device)
        written = torch.full_like(inputs["matrix"], torch.nan) if out else None
        return {**inputs, "alpha": width**0.5, "out": written}

    return build


def compare(actual: Any, expected: Any) -> None:
    """Within torch.testing's tolerances for float32, and with the same metadata."""
    torch.testing.assert_close(actual, expected)
    for index, (x, y) in enumerate(zip(tensors(actual), tensors(expected), strict=True)):
        assert_same_metadata(x, y, f"tensor {index}")


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and the rows' scales twice: they are read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["row_scale"])


def row_cases(make: Make) -> tuple[Case, ...]:
    """Tiles of all widths, and large tables; the optimizer's shapes."""
    return (
        *(Case(f"r4001-d{width}", make(4001, width)) for width in (32, 127, 512, 576, 1280, 2560, 4096)),
        Case("r1000-d8192", make(1000, 8192)),
        Case("r1000-d16384", make(1000, 16384), compile=make is make_step),
        Case("r100003-d256", make(100003, 256)),
        bench_case("r1048576-d256", make(1048576, 256), model_shape=True, compile=make is make_step),
        *(
            bench_case(f"r{num_rows}-d{width}", make(num_rows, width))
            for num_rows, width in ((65536, 256), (262144, 1024), (65536, 4096))
        ),
    )


STEP = OpSpec(
    op=tk_engram.engram_sinkhorn_step,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("row_scale",),
    cases=(
        # At most one row per range, and several; a shorter last range; columns in vectors of 4, 2 and 1; one column.
        Case("r5-d64", make_step(5, 64), small=True, modes=True),
        Case("r797-d8", make_step(797, 8), small=True, modes=True),
        Case("r40-d100", make_step(40, 100), small=True),
        Case("r9-d262", make_step(9, 262), small=True),
        Case("r9-d67", make_step(9, 67), small=True),
        Case("r400-d1", make_step(400, 1), small=True),
        Case("r0-d64", make_step(0, 64), small=True),
        Case("r3-d640-unaligned", make_step(3, 640, first_element=1), small=True),
        *row_cases(make_step),
    ),
)

STEP_REDUCE = OpSpec(
    op=tk_engram.engram_sinkhorn_step_reduce,
    mutates=("col_sumsq",),
    cases=(
        # Fewer partials than are in flight, and more; columns of one thread block, and some of a second.
        Case("p3-d32", make_step_reduce(3, 32), small=True, modes=True),
        Case("p67-d33", make_step_reduce(67, 33), small=True, modes=True),
        Case("p133-d1", make_step_reduce(133, 1), small=True),
        Case("p0-d40", make_step_reduce(0, 40), small=True),
        Case("p5-d31-unaligned", make_step_reduce(5, 31, first_element=1), small=True),
        Case("p396-d576", make_step_reduce(396, 576)),
        Case("p1001-d8192", make_step_reduce(1001, 8192)),
        Case("p396-d16384", make_step_reduce(396, 16384)),
        bench_case("p396-d256", make_step_reduce(396, 256), model_shape=True, compile=True),
        *(bench_case(f"p396-d{width}", make_step_reduce(396, width)) for width in (1024, 4096)),
    ),
)

FINALIZE = OpSpec(
    op=tk_engram.engram_sinkhorn_finalize,
    compare=compare,
    mutates=("out",),
    cases=(
        # A partial tile of rows, several tiles; columns in vectors of four, two and one; one column.
        Case("r5-d64", make_finalize(5, 64), small=True, modes=True),
        Case("r67-d8-out", make_finalize(67, 8, out=True), small=True, modes=True),
        Case("r40-d100", make_finalize(40, 100), small=True),
        Case("r9-d262-out", make_finalize(9, 262, out=True), small=True, compile=True),
        Case("r9-d67", make_finalize(9, 67), small=True),
        Case("r400-d1", make_finalize(400, 1), small=True),
        Case("r0-d64-out", make_finalize(0, 64, out=True), small=True),
        Case("r3-d640-unaligned", make_finalize(3, 640, first_element=1), small=True),
        *row_cases(make_finalize),
    ),
)

test_step, test_step_reduce, test_finalize = (tiers.tests(spec) for spec in (STEP, STEP_REDUCE, FINALIZE))


def test_step_by_hand(device: str) -> None:
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


def test_iterations_even_out_rows_and_columns(device: str) -> None:
    # What the optimizer does: after some steps, and scales of columns made from the sums, all norms agree.
    num_rows, width = 300, 64
    inputs = make_step(num_rows, width)(device)
    matrix, row_scale, col_scale = (inputs[name] for name in ("matrix", "row_scale", "col_scale"))
    sums = torch.empty_like(col_scale)
    for _ in range(30):
        _, partial = tk_engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
        tk_engram.engram_sinkhorn_step_reduce(partial, sums)
        col_scale /= (sums * width / num_rows).sqrt()
    out = tk_engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, width**0.5)
    torch.testing.assert_close(out.square().mean(1), torch.ones_like(row_scale))
    torch.testing.assert_close(out.square().mean(0), torch.ones_like(col_scale), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [60, 200])
def test_partials_ascend(count: int, device: str) -> None:
    # Each 2⁻²⁴ after the 1 is lost, one by one; those before it are not.
    tiny = torch.full((count, 1), 2.0**-24, device=device)
    one = torch.ones(1, 1, device=device)
    sums = torch.empty(1, device=device)
    assert tk_engram.engram_sinkhorn_step_reduce(torch.cat((one, tiny)), sums) is None
    assert sums.item() == 1.0
    tk_engram.engram_sinkhorn_step_reduce(torch.cat((tiny, one)), sums)
    assert sums.item() == 1.0 + count * 2.0**-24


def test_against_a_sum_in_float64(device: str) -> None:
    inputs = make_step_reduce(396, 100)(device)
    tk_engram.engram_sinkhorn_step_reduce(**inputs)
    expected = inputs["col_sumsq_partial"].double().sum(0)
    torch.testing.assert_close(inputs["col_sumsq"].double(), expected, rtol=1e-5, atol=0)


def test_finalize_by_hand(device: str) -> None:
    # x = (3, 4) and (0, 10), norms 5 and 10.
    matrix = torch.tensor([[3.0, 8.0], [0.0, 2.0]], device=device)
    scales = torch.tensor([1.0, 10.0], device=device), torch.tensor([1.0, 0.5], device=device)
    assert tk_engram.engram_sinkhorn_finalize(matrix, *scales, 0, 5).tolist() == [[3.0, 4.0], [0.0, 5.0]]
    out = torch.empty_like(matrix)
    assert tk_engram.engram_sinkhorn_finalize(matrix, *scales, 3.0, 16.0, out) is out
    torch.testing.assert_close(out.cpu(), torch.tensor([[6.0, 8.0], [0.0, 160 / 13]]))


def test_in_place(device: str) -> None:
    inputs = make_finalize(40, 100)(device)
    expected = tk_engram.engram_sinkhorn_finalize(**inputs)
    assert tk_engram.engram_sinkhorn_finalize(**{**inputs, "out": inputs["matrix"]}) is inputs["matrix"]
    assert_equal(inputs["matrix"], expected)


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
WRONG = [
    ({"matrix": torch.ones(3, 0), "col_scale": torch.ones(0)}, ValueError, "D .*matrix.*1 to 16384"),
    ({"matrix": torch.ones(3, 16385), "col_scale": torch.ones(16385)}, ValueError, "D .*matrix.*1 to 16384"),
    ({"row_scale": torch.ones(4)}, ValueError, "row_scale: .*shape"),
    ({"col_scale": torch.ones(3)}, ValueError, "col_scale: .*shape"),
    ({"eps": -1e-9}, ValueError, "eps: .*at least 0"),
    ({"eps": float("inf")}, ValueError, "eps: .*finite"),
]

test_bad_input_of_step = tiers.bad_input(STEP, GOOD, WRONG)
test_bad_input_of_step_reduce = tiers.bad_input(
    STEP_REDUCE,
    {"col_sumsq_partial": torch.ones(3, 4), "col_sumsq": torch.full((4,), 7.0)},
    [
        ({"col_sumsq_partial": torch.ones(3, 0)}, ValueError, "D .*col_sumsq_partial.*1 to 16384"),
        ({"col_sumsq": torch.ones(3)}, ValueError, "col_sumsq: .*shape"),
    ],
)
test_bad_input_of_finalize = tiers.bad_input(
    FINALIZE,
    {**GOOD, "alpha": 2.0, "out": torch.full((3, 8), 7.0)},
    [
        *WRONG,
        ({"alpha": float("nan")}, ValueError, "alpha: .*finite"),
        ({"out": torch.ones(4, 8)}, ValueError, "out: .*shape"),
    ],
)


@pytest.mark.gpu
def test_gpu_bits_of_a_row_do_not_depend_on_the_others() -> None:
    inputs = make_finalize(4001, 256)("cuda")
    out = tk_engram.engram_sinkhorn_finalize(**inputs)
    for row in (0, 17, 4000):
        alone = {name: inputs[name][row : row + 1].clone() for name in ("matrix", "row_scale")}
        assert_equal(tk_engram.engram_sinkhorn_finalize(**{**inputs, **alone}), out[row : row + 1].clone())


@pytest.mark.gpu(gib=17)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    inputs = make_finalize(2**31 // 256 + 5, 256)("cuda")
    last = {name: inputs[name][-9:].clone() for name in ("matrix", "row_scale")}
    out = tk_engram.engram_sinkhorn_finalize(**inputs)
    torch.testing.assert_close(out[-9:], reference.engram_sinkhorn_finalize(**{**inputs, **last}))
    del out, inputs["alpha"], inputs["out"]
    norm, _ = tk_engram.engram_sinkhorn_step(**inputs)
    expected, _ = reference.engram_sinkhorn_step(**{**inputs, **last})
    torch.testing.assert_close((norm[-9:], inputs["row_scale"][-9:]), (expected, last["row_scale"]))
