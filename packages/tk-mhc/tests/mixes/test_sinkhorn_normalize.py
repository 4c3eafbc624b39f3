"""sinkhorn_normalize."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, bench_case, empty, tiers
from tk_mhc import reference

from ..compare import within
from ..inputs import TOKEN_COUNTS


def make_logits(
    leading: tuple[int, ...],
    mhc_mult: int,
    device: str,
    *,
    std: float = 1.0,
    transposed: bool = False,
    first_element: int = 0,
) -> torch.Tensor:
    """Normal matrices, transposed views of them, or views that start at element `first_element` of their storage."""
    x = empty(*leading, mhc_mult, mhc_mult, device=device, first_element=first_element).normal_(std=std)
    return x.transpose(-2, -1) if transposed else x


def make(leading: tuple[int, ...], mhc_mult: int, repeat: int = 10, eps: float = 1e-6, **values: Any) -> Make:
    """Arguments of the op."""
    return lambda device: {"x": make_logits(leading, mhc_mult, device, **values), "repeat": repeat, "eps": eps}


def shared_cases(make: Callable[..., Make]) -> list[Case]:
    """Cases of the op and of its backward."""
    return [
        Case("m4-t17", make((17,), 4), small=True, modes=True, compile=True),
        Case("m2-t67", make((67,), 2), small=True),
        Case("m4-t33-once", make((33,), 4, repeat=1), small=True, compile=True),
        Case("m4-2x3", make((2, 3), 4, repeat=2, eps=1e-3), small=True, modes=True),
        Case("m4-one-token", make((), 4), small=True),
        Case("m4-t1", make((1,), 4), small=True),
        Case("m4-t0", make((0,), 4), small=True),
        Case("m8-0x3", make((0, 3), 8), small=True),
        Case("m4-t33-no-eps", make((33,), 4, eps=0.0), small=True),
        # Rows with one large logit: columns with a sum of nearly 0, and others with that of several rows.
        Case("m4-t67-wide", make((67,), 4, std=20.0), small=True),
        Case("m8-t67-very-wide", make((67,), 8, std=80.0), small=True),
        Case("m4-t67-transposed", make((67,), 4, transposed=True), small=True),
        Case("m4-t67-unaligned", make((67,), 4, first_element=1), small=True),
        *(Case(f"m4-t{num_tokens}", make((num_tokens,), 4, std=3.0)) for num_tokens in TOKEN_COUNTS if num_tokens > 17),
        *(
            Case(f"m{mhc_mult}-t4001-r{repeat}", make((4001,), mhc_mult, repeat=repeat, std=3.0))
            for mhc_mult in (2, 4, 8)
            for repeat in (1, 2, 20)
        ),
        bench_case("m4-t8192", make((8192,), 4), model_shape=True),
        *(bench_case(f"m4-t{n}", make((n,), 4)) for n in (1, 64, 4096)),
        bench_case("m8-t8192", make((8192,), 8)),
    ]


SPEC = OpSpec(
    op=tk_mhc.sinkhorn_normalize,
    compare=within(),
    cases=(
        Case("m8-t33", make((33,), 8), small=True, compile=True),
        Case("m8-t33-r20", make((33,), 8, repeat=20), small=True),
        *shared_cases(make),
    ),
)


test_tiers = tiers.tests(SPEC)

LOG3 = math.log(3.0)


def test_by_hand() -> None:
    # Softmax of rows: (1/4, 3/4) and (1/2, 1/2); columns then have sums of 3/4 and 5/4, or with eps = 1/4 of 3/2 and 2.
    x = torch.tensor([[0.0, LOG3], [1.0, 1.0]])
    once = tk_mhc.sinkhorn_normalize(x, repeat=1, eps=0.0)
    torch.testing.assert_close(once, torch.tensor([[1 / 3, 3 / 5], [2 / 3, 2 / 5]]))
    # Rows have sums of 14/15 and 16/15: (5/14, 9/14), (5/8, 3/8). Columns 55/56 and 57/56.
    twice = tk_mhc.sinkhorn_normalize(x, repeat=2, eps=0.0)
    torch.testing.assert_close(twice, torch.tensor([[20 / 55, 36 / 57], [35 / 55, 21 / 57]]))
    # With eps = 1/4: (1/2, 1), (3/4, 3/4); columns 5/4 + 1/4 and 7/4 + 1/4.
    with_eps = tk_mhc.sinkhorn_normalize(x, repeat=1, eps=0.25)
    torch.testing.assert_close(with_eps, torch.tensor([[1 / 3, 1 / 2], [1 / 2, 3 / 8]]))
    # Rows 5/6 + 1/4 and 7/8 + 1/4: (4/13, 6/13), (4/9, 1/3). Columns 88/117 + 1/4, 31/39 + 1/4.
    columns = (88 / 117 + 0.25, 31 / 39 + 0.25)
    expected = [[4 / 13 / columns[0], 6 / 13 / columns[1]], [4 / 9 / columns[0], 1 / 3 / columns[1]]]
    torch.testing.assert_close(tk_mhc.sinkhorn_normalize(x, repeat=2, eps=0.25), torch.tensor(expected))


def test_defaults_are_ten_iterations_and_1e_6() -> None:
    x = torch.randn(7, 4, 4)
    assert torch.equal(tk_mhc.sinkhorn_normalize(x), tk_mhc.sinkhorn_normalize(x, 10, 1e-6))
    assert not torch.equal(tk_mhc.sinkhorn_normalize(x), tk_mhc.sinkhorn_normalize(x, 9, 1e-6))


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_many_iterations_make_a_matrix_doubly_stochastic(mhc_mult: int, device: str) -> None:
    result = tk_mhc.sinkhorn_normalize(torch.randn(100, mhc_mult, mhc_mult, device=device), repeat=100, eps=0.0)
    ones = torch.ones(100, mhc_mult, device=device)
    torch.testing.assert_close(result.sum(-1), ones, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.sum(-2), ones, rtol=1e-5, atol=1e-5)


def test_not_a_number_and_infinity_reach_what_softmax_lets_them(device: str) -> None:
    x = torch.randn(6, 4, 4, device=device)
    x[1, 2, 3] = math.nan
    x[2, 0, 1] = math.inf
    x[3, 0] = -math.inf
    x[4, 0, :3] = -math.inf
    result = tk_mhc.sinkhorn_normalize(x, repeat=3)
    expected = reference.sinkhorn_normalize(x.cpu(), repeat=3).to(device)
    torch.testing.assert_close(result, expected, equal_nan=True)
    assert result.isnan().all((1, 2)).tolist() == [False, True, True, True, False, False]


def test_reference_in_float32_is_near_float64() -> None:
    x = torch.randn(1000, 8, 8) * 3
    expected = reference.sinkhorn_normalize(x.double(), 20)
    torch.testing.assert_close(tk_mhc.sinkhorn_normalize(x, 20), expected.float())


test_bad_input = tiers.bad_input(
    SPEC,
    make((3,), 4)("cpu"),
    [
        ({"x": torch.ones(4)}, ValueError, "x.*shape"),
        ({"x": torch.ones(3, 2, 4)}, ValueError, "x.*square"),
        ({"x": torch.ones(3, 3, 3)}, ValueError, "mhc_mult.*2, 4, 8"),
        ({"repeat": 0}, ValueError, "repeat.*1 to 1000"),
        ({"repeat": 1001}, ValueError, "repeat.*1 to 1000"),
        ({"eps": -1e-6}, ValueError, "eps.*at least 0"),
        ({"eps": math.nan}, ValueError, "eps.*finite"),
    ],
)


@pytest.mark.gpu
def test_gpu_against_float64() -> None:
    x = torch.cat([torch.randn(2000, 4, 4, device="cuda") * std for std in (0.1, 1, 10, 80)])
    for repeat in (1, 2, 10, 20, 1000):
        expected = reference.sinkhorn_normalize(x.double(), repeat).float()
        torch.testing.assert_close(tk_mhc.sinkhorn_normalize(x, repeat), expected)
