"""engram_lookup_bwd."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_engram
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_engram import reference


def make(
    num_tokens: int,
    num_columns: int,
    dim: int,
    num_rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sparse: bool = False,
    given: bool = False,
    negatives: bool = True,
    hot: float = 0.0,
    first_element: int = 0,
) -> Make:
    """Random indices, with `negatives` a third of them negative, and a share of `hot` all for one row.

    A gradient may be given; it and d_o start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def normal(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return empty(*shape, dtype=dtype, device=device, first_element=first_element).normal_()

        shape = (num_tokens, num_columns)
        least = -(num_rows // 2) - 1 if negatives else 0
        indices = torch.randint(least, num_rows, shape, dtype=torch.int32, device=device)
        if hot:
            is_hot = torch.rand(shape, device=device) < hot
            indices = torch.where(is_hot, num_rows // 3, indices)
        return {
            "d_o": normal((*shape, dim), dtype),
            "indices": indices,
            "num_rows": num_rows,
            "grad": normal((num_rows, dim), torch.float32) if given else None,
            "sparse": sparse,
        }

    return build


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """d_o, the indices, and the written part of the gradient: all of a new one, otherwise the rows that are touched.

    Rows are counted as if no two pairs had the same one; those of a given gradient are read as well.
    """
    d_o, indices, grad = kwargs["d_o"], kwargs["indices"], kwargs["grad"]
    num_bytes = d_o.numel() * d_o.itemsize + indices.numel() * 4
    if kwargs["sparse"]:
        return num_bytes + 4 * (d_o.numel() + indices.numel())
    return num_bytes + (8 * d_o.numel() if grad is not None else 4 * kwargs["num_rows"] * d_o.shape[-1])


def _bench(name: str, *args: Any, model_shape: bool = False, compile: bool = False, **kwargs: Any) -> Case:
    return bench_case(name, make(*args, negatives=False, **kwargs), model_shape=model_shape, compile=compile)


_FLOAT32 = torch.float32

SPEC = OpSpec(
    op=tk_engram.engram_lookup_bwd,
    mutates=("grad",),
    least_bytes=least_bytes,
    cases=(
        Case("d64-t5", make(5, 3, 64, 11), small=True, modes=True),
        Case("d32-t17-sparse", make(17, 3, 32, 9, sparse=True), small=True, modes=True),
        Case("d32-t70-given", make(70, 1, 32, 7, given=True), small=True, modes=True),
        Case("d96-t5-float32-given", make(5, 3, 96, 11, dtype=_FLOAT32, given=True), small=True, compile=True),
        Case("d288-t3-float32-sparse", make(3, 3, 288, 5, dtype=_FLOAT32, sparse=True), small=True),
        Case("d32-t67-one-row", make(67, 3, 32, 1, negatives=False), small=True),
        Case("d32-t67-one-row-sparse", make(67, 2, 32, 1, negatives=False, sparse=True), small=True),
        Case("d32-t64-hot-given", make(64, 5, 32, 40, hot=0.7, given=True), small=True),
        Case("d32-t9-unaligned", make(9, 3, 32, 5, given=True, first_element=1), small=True),
        Case("d64-t0", make(0, 3, 64, 5), small=True),
        Case("d64-t0-sparse", make(0, 3, 64, 5, sparse=True), small=True),
        Case("d64-c0-given", make(3, 0, 64, 5, given=True), small=True),
        *(Case(f"d256-t{t}", make(t, 16, 256, 30_011)) for t in (0, 1, 17, 4001)),
        *(Case(f"d256-t{t}-given", make(t, 16, 256, 30_011, given=True)) for t in (1, 8001)),
        *(Case(f"d256-t{t}-sparse", make(t, 16, 256, 30_011, sparse=True)) for t in (1, 17, 8001)),
        *(Case(f"d{dim}-t1001", make(1001, 8, dim, 1009)) for dim in (64, 160, 576, 1280)),
        Case("d352-t1001-float32-sparse", make(1001, 8, 352, 1009, dtype=_FLOAT32, sparse=True)),
        Case("d128-t1001-hot-given", make(1001, 8, 128, 1009, hot=0.5, given=True)),
        Case("d256-t1001-hot-sparse", make(1001, 8, 256, 1009, hot=0.5, sparse=True)),
        Case("d64-t1001-two-rows", make(1001, 3, 64, 2)),
        _bench("d256-t8192-sparse", 8192, 16, 256, 1 << 24, sparse=True, model_shape=True, compile=True),
        _bench("d256-t8192-given", 8192, 16, 256, 1 << 22, given=True, model_shape=True),
        _bench("d256-t8192-new", 8192, 16, 256, 1 << 18, model_shape=True, compile=True),
        _bench("d256-t8192-hot-sparse", 8192, 16, 256, 1 << 24, sparse=True, hot=0.0625),
        _bench("d64-t8192-sparse", 8192, 16, 64, 1 << 24, sparse=True),
        *(_bench(f"d256-t{t}-sparse", t, 16, 256, 1 << 22, sparse=True) for t in (1, 64, 4001, 8001)),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand(device: str) -> None:
    indices = torch.tensor([[3, 1], [-1, 3], [1, 3]], dtype=torch.int32, device=device)
    d_o = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], device=device).bfloat16()
    d_o = d_o.view(3, 2, 1).repeat(1, 1, 32)
    d_o[0, 0, 31] = -1.0
    grad = tk_engram.engram_lookup_bwd(d_o, indices, 5)
    assert grad.dtype == torch.float32
    assert grad[:, 0].tolist() == [0.0, 18.0, 0.0, 41.0, 0.0]
    assert grad[:, 31].tolist() == [0.0, 18.0, 0.0, 39.0, 0.0]

    assert tk_engram.engram_lookup_bwd(d_o, indices, 5, grad=grad) is grad
    assert grad[:, 31].tolist() == [0.0, 36.0, 0.0, 78.0, 0.0]

    rows, values, count = tk_engram.engram_lookup_bwd(d_o, indices, 5, sparse=True)
    assert rows.tolist() == [1, 3, -1, -1, -1, -1]
    assert values[:, 0].tolist() == [18.0, 41.0, 0.0, 0.0, 0.0, 0.0]
    assert values[:, 31].tolist() == [18.0, 39.0, 0.0, 0.0, 0.0, 0.0]
    assert (rows.dtype, values.dtype, count.dtype) == (torch.int32, torch.float32, torch.int32)
    assert count.tolist() == [2]


def sum_of(terms: list[float], device: str, before: float = 0.0) -> float:
    """The gradient of one row among others whose pairs lie between."""
    indices = torch.full((len(terms), 3), -1, dtype=torch.int32)
    indices[:, 1], indices[:, 2] = 1, 2
    d_o = torch.full((len(terms), 3, 32), 1000.0)
    d_o[:, 1] = torch.tensor(terms)[:, None]
    grad = torch.full((4, 32), before)
    out = tk_engram.engram_lookup_bwd(d_o.to(device), indices.to(device), 4, grad=grad.to(device))
    assert (out[1] == out[1, 0]).all()
    return out[1, 0].item()


def test_pairs_ascend(device: str) -> None:
    tiny = 2.0**-24
    assert sum_of([1.0, tiny, tiny, -1.0], device) == 0.0
    assert sum_of([tiny, tiny, 1.0, -1.0], device) == 2 * tiny
    # Over several blocks of pairs, too: each is lost on its own.
    assert sum_of([1.0] + 300 * [tiny] + [-1.0], device) == 0.0
    assert sum_of(300 * [tiny] + [1.0], device) == 1.0 + 300 * tiny


def test_the_sum_is_added_to_the_gradient(device: str) -> None:
    tiny = 2.0**-24
    assert sum_of([tiny, tiny], device, before=1.0) == 1.0 + 2 * tiny
    assert sum_of([1.0, -1.0], device, before=2.0**-30) == 2.0**-30


@pytest.mark.parametrize("dim", [32, 96, 256])
@pytest.mark.parametrize("hot", [0.0, 0.6, 1.0])
def test_against_one_addition_after_the_other(hot: float, dim: int, device: str) -> None:
    # Segments that end with a block of pairs, within it, and go over several.
    for num_tokens in (63, 64, 65, 150):
        inputs = make(num_tokens, 2, dim, 5, hot=hot)("cpu")
        expected = torch.zeros(5, dim)
        pairs = inputs["d_o"].flatten(0, 1).float()
        for row, pair in zip(inputs["indices"].flatten().tolist(), pairs, strict=True):
            if row >= 0:
                expected[row] += pair
        on_device = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        assert_equal(tk_engram.engram_lookup_bwd(**on_device).cpu(), expected)


def test_sparse_is_the_dense_gradient(device: str) -> None:
    inputs = make(150, 3, 64, 40, hot=0.3)(device)
    dense = tk_engram.engram_lookup_bwd(**inputs)
    rows, values, count = tk_engram.engram_lookup_bwd(**{**inputs, "sparse": True})
    num_rows = int(count)
    wanted = inputs["indices"].unique()
    assert_equal(rows[:num_rows], wanted[wanted >= 0])
    assert (rows[num_rows:] == -1).all()
    assert_equal(values[:num_rows], dense[rows[:num_rows].long()])
    assert not values[num_rows:].any()
    assert num_rows < rows.numel()


def test_nothing_but_negative_indices(device: str) -> None:
    d_o = torch.ones(2, 3, 32, device=device)
    indices = torch.full((2, 3), -7, dtype=torch.int32, device=device)
    assert not tk_engram.engram_lookup_bwd(d_o, indices, 4).any()
    rows, values, count = tk_engram.engram_lookup_bwd(d_o, indices, 4, sparse=True)
    assert rows.tolist() == 6 * [-1]
    assert not values.any()
    assert count.item() == 0


@pytest.mark.parametrize("sparse", [False, True])
def test_an_index_beyond_the_table_counts_as_negative(sparse: bool, device: str) -> None:
    inputs = make(70, 3, 32, 9, sparse=sparse)(device)
    expected = tk_engram.engram_lookup_bwd(**inputs)
    rows = inputs["indices"]
    beyond = torch.where(rows < 0, 9 - 1 - rows, rows)
    assert (beyond >= 9).any()
    assert_equal(tk_engram.engram_lookup_bwd(**{**inputs, "indices": beyond}), expected)


INDICES = torch.zeros(3, 2, dtype=torch.int32)
D_O = torch.ones(3, 2, 64).bfloat16()
GRAD = torch.full((4, 64), 7.0)
GOOD: dict[str, Any] = {"d_o": D_O, "indices": INDICES, "num_rows": 4, "grad": GRAD}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"d_o": torch.ones(3, 2, 0)}, ValueError, "D .*d_o.*at least 32"),
        ({"d_o": torch.ones(3, 2, 48)}, ValueError, "D .*d_o.*multiple of 32"),
        ({"indices": INDICES[:2]}, ValueError, "indices: .*shape"),
        ({"num_rows": 0}, ValueError, "num_rows: .*1 to"),
        ({"num_rows": 2**31}, ValueError, "num_rows: .*1 to"),
        ({"grad": GRAD[:3]}, ValueError, "grad: .*shape"),
        ({"sparse": True}, ValueError, "grad: .*None with sparse"),
    ],
)


@pytest.mark.gpu(gib=9)
def test_gpu_rows_beyond_two_to_the_31_elements() -> None:
    num_rows = 2**31 // 64 + 1000
    d_o = torch.randn(33, 7, 64, device="cuda").bfloat16()
    rows = torch.randint(num_rows - 900, num_rows, (33, 7), dtype=torch.int32, device="cuda")
    rows[0, 0] = num_rows - 1
    grad = tk_engram.engram_lookup_bwd(d_o, rows, num_rows)
    first = num_rows - 1000
    assert_equal(grad[first:].clone(), reference.engram_lookup_bwd(d_o, rows - first, 1000))
    assert not grad[:first].any()
    tk_engram.engram_lookup_bwd(d_o, rows, num_rows, grad=grad)
    assert_equal(grad[first:].clone(), 2 * reference.engram_lookup_bwd(d_o, rows - first, 1000))


@pytest.mark.gpu
def test_gpu_does_not_synchronize() -> None:
    for sparse in (False, True):
        inputs = make(17, 3, 64, 9, sparse=sparse)("cuda")
        tk_engram.engram_lookup_bwd(**inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            tk_engram.engram_lookup_bwd(**inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
