"""engram_sinkhorn_finalize."""

from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_engram import reference

from .rows import compare, make_rows


def make(num_rows: int, width: int, *, out: bool = False, first_element: int = 0) -> Make:
    """Arguments of the op, alpha √D; `out` is filled with NaN."""

    def build(device: str) -> dict[str, Any]:
        inputs = make_rows(num_rows, width, device, first_element=first_element)
        written = torch.full_like(inputs["matrix"], torch.nan) if out else None
        return {**inputs, "alpha": width**0.5, "out": written}

    return build


SPEC = OpSpec(
    op=tk_engram.engram_sinkhorn_finalize,
    compare=compare,
    mutates=("out",),
    cases=(
        # A partial tile of rows, several tiles; columns in vectors of four, two and one; one column.
        Case("r5-d64", make(5, 64), small=True, modes=True),
        Case("r67-d8-out", make(67, 8, out=True), small=True, modes=True),
        Case("r40-d100", make(40, 100), small=True),
        Case("r9-d262-out", make(9, 262, out=True), small=True, compile=True),
        Case("r9-d67", make(9, 67), small=True),
        Case("r400-d1", make(400, 1), small=True),
        Case("r0-d64-out", make(0, 64, out=True), small=True),
        Case("r3-d640-unaligned", make(3, 640, first_element=1), small=True),
        *(Case(f"r4001-d{width}", make(4001, width)) for width in (32, 127, 512, 576, 1280, 2560, 4096)),
        Case("r1000-d8192", make(1000, 8192)),
        Case("r1000-d16384", make(1000, 16384)),
        Case("r100003-d256", make(100003, 256)),
        Case("r1048576-d256-bench", make(1048576, 256), bench=True, model_shape=True, gpu=False),
        Case("r65536-d256-bench", make(65536, 256), bench=True, gpu=False),
        Case("r262144-d1024-bench", make(262144, 1024), bench=True, gpu=False),
        Case("r65536-d4096-bench", make(65536, 4096), bench=True, gpu=False),
    ),
)


test_tiers = tiers.tests(SPEC)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_by_hand(device: str) -> None:
    # x = (3, 4) and (0, 10), norms 5 and 10.
    matrix = torch.tensor([[3.0, 8.0], [0.0, 2.0]], device=device)
    scales = torch.tensor([1.0, 10.0], device=device), torch.tensor([1.0, 0.5], device=device)
    assert tk_engram.engram_sinkhorn_finalize(matrix, *scales, 0, 5).tolist() == [[3.0, 4.0], [0.0, 5.0]]
    out = torch.empty_like(matrix)
    assert tk_engram.engram_sinkhorn_finalize(matrix, *scales, 3.0, 16.0, out) is out
    torch.testing.assert_close(out.cpu(), torch.tensor([[6.0, 8.0], [0.0, 160 / 13]]))


@pytest.mark.parametrize("device", DEVICES)
def test_in_place(device: str) -> None:
    inputs = make(40, 100)(device)
    expected = tk_engram.engram_sinkhorn_finalize(**inputs)
    assert tk_engram.engram_sinkhorn_finalize(**{**inputs, "out": inputs["matrix"]}) is inputs["matrix"]
    assert_equal(inputs["matrix"], expected)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_have_norm_alpha(device: str) -> None:
    inputs = make(67, 576)(device)
    out = tk_engram.engram_sinkhorn_finalize(**inputs)
    torch.testing.assert_close(out.double().square().mean(1).float(), torch.ones(67, device=device))


def test_reference_passes_gradcheck() -> None:
    matrix, row_scale, col_scale = torch.randn(3, 5).double(), torch.rand(3).double() + 1, torch.rand(5).double() + 1
    leaves = [x.requires_grad_() for x in (matrix, row_scale, col_scale)]
    assert torch.autograd.gradcheck(lambda *x: reference.engram_sinkhorn_finalize(*x, 0.1, 2.0), leaves)


GOOD: dict[str, Any] = {
    "matrix": torch.ones(3, 8),
    "row_scale": torch.ones(3),
    "col_scale": torch.ones(8),
    "eps": 1e-20,
    "alpha": 2.0,
    "out": torch.full((3, 8), 7.0),
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"matrix": torch.ones(3, 0), "col_scale": torch.ones(0)}, ValueError, "D .*matrix.*1 to 16384"),
        ({"row_scale": torch.ones(4)}, ValueError, "row_scale: .*shape"),
        ({"col_scale": torch.ones(3)}, ValueError, "col_scale: .*shape"),
        ({"eps": -1.0}, ValueError, "eps: .*at least 0"),
        ({"alpha": float("nan")}, ValueError, "alpha: .*finite"),
        ({"out": torch.ones(4, 8)}, ValueError, "out: .*shape"),
    ],
)


@pytest.mark.gpu
def test_gpu_bits_of_a_row_do_not_depend_on_the_others() -> None:
    inputs = make(4001, 256)("cuda")
    out = tk_engram.engram_sinkhorn_finalize(**inputs)
    for row in (0, 17, 4000):
        alone = {name: inputs[name][row : row + 1].clone() for name in ("matrix", "row_scale")}
        assert_equal(tk_engram.engram_sinkhorn_finalize(**{**inputs, **alone}), out[row : row + 1].clone())


@pytest.mark.gpu(gib=17)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_rows = 2**31 // 256 + 5
    inputs = make(num_rows, 256)("cuda")
    last = {name: inputs[name][-9:].clone() for name in ("matrix", "row_scale")}
    out = tk_engram.engram_sinkhorn_finalize(**inputs)
    torch.testing.assert_close(out[-9:], reference.engram_sinkhorn_finalize(**{**inputs, **last}))
