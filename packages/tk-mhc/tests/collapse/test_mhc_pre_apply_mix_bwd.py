"""mhc_pre_apply_mix_bwd."""

from functools import partial
from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_core.testing.trees import distinct_bytes
from tk_mhc import reference

from ..compare import within
from ..inputs import HIDDEN_SIZES, stream_cases


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, *, given: bool = False, first_element: int = 0) -> Make:
    """Normal values, and weights of 0 … 1. Tensors start at element `first_element` of their storage.

    `given`: with a d_x to be added to.
    """

    def build(device: str) -> dict[str, Any]:
        tensor = partial(empty, dtype=torch.bfloat16, device=device, first_element=first_element)
        return {
            "d_o": tensor(*leading, hidden).normal_(),
            "x": tensor(*leading, mhc_mult, hidden).normal_(),
            "mix": tensor(*leading, mhc_mult, 1, dtype=torch.float32).uniform_(),
            "d_x": tensor(*leading, mhc_mult, hidden).normal_() if given else None,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """d_x bit for bit, as returned and as written; d_mix within 1e-4."""
    ((d_x, d_mix), written), ((expected_d_x, expected_d_mix), expected_written) = actual, expected
    assert_equal((d_x, written), (expected_d_x, expected_written), name="d_x")
    within(rtol=1e-4, atol=1e-4)(d_mix, expected_d_mix)


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and a given d_x twice: it is read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["d_x"])


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_apply_mix_bwd,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("d_x",),
    cases=(
        # One tile; several tiles of one, two and four warps, the last tile full or partial.
        *stream_cases(make, "-given", given=True),
        Case("m8-h192-t3-given", make((3,), 8, 192, given=True), small=True),
        Case("m2-h512-t17", make((17,), 2, 512), small=True),
        Case("m4-h2048-t1", make((1,), 4, 2048), small=True),
        Case("m4-h960-t1-given", make((1,), 4, 960, given=True), small=True, compile=True),
        *(Case(f"m4-h{hidden}-t65-given", make((65,), 4, hidden, given=True)) for hidden in HIDDEN_SIZES),
        Case("m8-h7168-t1001-given", make((1001,), 8, 7168, given=True), compile=True),
        bench_case("m4-h7168-t8192-given", make((8192,), 4, 7168, given=True), model_shape=True),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand(device: str) -> None:
    d_o = torch.tensor([1.0, -2.0] * 32).bfloat16().to(device)
    x = torch.tensor([[3.0] * 64, [0.5, 1.0] * 32]).bfloat16().to(device)
    mix = torch.tensor([[0.5], [-4.0]], device=device)
    d_x, d_mix = tk_mhc.mhc_pre_apply_mix_bwd(d_o, x, mix)
    assert d_x[:, :3].tolist() == [[0.5, -1.0, 0.5], [-4.0, 8.0, -4.0]]
    assert d_mix.tolist() == [[-96.0], [-48.0]]
    given = torch.full_like(x, 10.0)
    d_x, d_mix = tk_mhc.mhc_pre_apply_mix_bwd(d_o, x, mix, d_x=given)
    assert d_x is given
    assert given[:, :3].tolist() == [[10.5, 9.0, 10.5], [6.0, 18.0, 6.0]]
    assert d_mix.tolist() == [[-96.0], [-48.0]]


def test_given_d_x_is_added_before_the_sum_is_rounded(device: str) -> None:
    d_o = torch.full((64,), 1.0).bfloat16().to(device)
    x = torch.zeros(2, 64).bfloat16().to(device)
    mix = torch.tensor([[129.25], [1.0]], device=device)
    given = torch.full_like(x, 128.0)
    # 257.25 goes to 258; were 129.25 rounded before, to 129, then 257 would go to the even 256.
    d_x, _ = tk_mhc.mhc_pre_apply_mix_bwd(d_o, x, mix, d_x=given)
    assert d_x[0].tolist() == [258.0] * 64
    assert d_x[1].tolist() == [129.0] * 64


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_reference_against_autograd(dtype: torch.dtype, tolerance: float, leading: tuple[int, ...]) -> None:
    x = torch.randn(*leading, 4, 192, dtype=dtype, requires_grad=True)
    mix = torch.randn(*leading, 4, 1, dtype=dtype, requires_grad=True)
    d_o = torch.randn(*leading, 192, dtype=dtype)
    expected = torch.autograd.grad(reference.mhc_pre_apply_mix(x, mix), (x, mix), d_o)
    actual = reference.mhc_pre_apply_mix_bwd(d_o, x.detach(), mix.detach())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    given = torch.randn_like(x).detach()
    total = given + expected[0]
    d_x, _ = reference.mhc_pre_apply_mix_bwd(d_o, x.detach(), mix.detach(), d_x=given)
    assert d_x is given
    torch.testing.assert_close(given, total, rtol=tolerance, atol=tolerance)


def test_op_against_autograd_of_a_plain_formula(device: str) -> None:
    inputs = make((17,), 4, 576)(device)
    x, mix = inputs["x"].double().requires_grad_(), inputs["mix"].double().requires_grad_()
    expected = torch.autograd.grad((x * mix).sum(-2), (x, mix), inputs["d_o"].double())
    d_x, d_mix = tk_mhc.mhc_pre_apply_mix_bwd(**inputs)
    torch.testing.assert_close(d_x, expected[0].bfloat16())
    torch.testing.assert_close(d_mix, expected[1].float(), rtol=1e-4, atol=1e-4)


X = torch.ones(3, 4, 64, dtype=torch.bfloat16)
GOOD: dict[str, Any] = {
    "d_o": torch.ones(3, 64).bfloat16(),
    "x": X,
    "mix": torch.ones(3, 4, 1),
    "d_x": torch.full((3, 4, 64), 7.0).bfloat16(),
}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"d_o": X}, ValueError, "d_o: .*shape"),
        ({"x": X[0, 0]}, ValueError, "x: .*shape"),
        ({"x": X[:, :3].contiguous()}, ValueError, "mhc_mult .*x.*2, 4, 8"),
        ({"x": X.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "hidden .*x.*multiple of 64"),
        ({"x": X.repeat(1, 1, 129)}, ValueError, "hidden .*x.*64 to 8192"),
        ({"mix": torch.ones(3, 4)}, ValueError, "mix: .*shape"),
        ({"mix": torch.ones(4, 3, 1).transpose(0, 1)}, ValueError, "mix: .*contiguous"),
        ({"d_x": X[:2]}, ValueError, "d_x: .*shape"),
    ],
)
