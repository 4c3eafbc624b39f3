"""expand_to_mhc_bwd."""

from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, empty, tiers
from tk_mhc import reference

from ..inputs import HIDDEN_SIZES, stream_cases


def make(
    leading: tuple[int, ...], mhc_mult: int, hidden: int, *, values: str = "normal", first_element: int = 0
) -> Make:
    """Normal values, or all magnitudes with infinities, NaN and -0 (`wide`).

    They start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        shape = (*leading, mhc_mult, hidden)
        d_o = empty(*shape, dtype=torch.bfloat16, device=device, first_element=first_element).normal_()
        if values == "wide":
            d_o.mul_(torch.exp2(torch.randint(-130, 127, d_o.shape, device=device)))
            d_o[..., 4], d_o[..., 0, 5], d_o[..., 0, 6], d_o[..., 7] = torch.inf, torch.nan, -torch.inf, -0.0
        return {"d_o": d_o}

    return build


SPEC = OpSpec(
    op=tk_mhc.expand_to_mhc_bwd,
    cases=(
        # One tile with idle threads and without, two tiles with an idle warp; the gpu tier also has more tiles.
        *stream_cases(make),
        Case("m8-h192-t3", make((3,), 8, 192), small=True, compile=True),
        Case("m2-h256-t17", make((17,), 2, 256), small=True),
        Case("m4-h2112-t1", make((1,), 4, 2112), small=True),
        Case("m4-h64-t17-wide", make((17,), 4, 64, values="wide"), small=True),
        *(Case(f"m4-h{hidden}-t65", make((65,), 4, hidden)) for hidden in HIDDEN_SIZES),
        Case("m4-h7168-t257-wide", make((257,), 4, 7168, values="wide")),
    ),
)


test_tiers = tiers.tests(SPEC)


def total(values: list[float], device: str) -> float:
    """The sum of values, one a stream, as the op adds them up."""
    d_o = torch.tensor(values, dtype=torch.float64).bfloat16()
    assert d_o.tolist() == values, "values that bfloat16 holds"
    d_hidden = tk_mhc.expand_to_mhc_bwd(d_o[:, None].repeat(1, 64).to(device))
    assert d_hidden.shape == (64,)
    assert (d_hidden == d_hidden[0]).all()
    return d_hidden[0].item()


def test_by_hand(device: str) -> None:
    assert total([1.0, -3.5], device) == -2.5
    assert total([2.0, 20.0, 300.0, 0.0], device) == 322.0
    # In float32 256 + 1 + 1 is 258; rounded to bfloat16 after each sum it would stay 256.
    assert total([256.0, 1.0, 1.0, 0.0], device) == 258.0
    # Streams ascend: 1 is lost beside 2²⁵ unless that has gone before.
    large = 2.0**25
    assert total([large, 1.0, -large, 1.0], device) == 1.0
    assert total([large, -large, 1.0, 1.0], device) == 2.0
    assert total([1.0, 1.0, large, -large], device) == 0.0


def test_sum_of_negative_zeros_is_negative(device: str) -> None:
    d_o = torch.full((2, 64), -0.0).bfloat16().to(device)
    assert tk_mhc.expand_to_mhc_bwd(d_o).signbit().all()


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_against_autograd(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    hidden = torch.randn(*leading, 192, dtype=dtype, requires_grad=True)
    d_o = torch.randn(*leading, 4, 192, dtype=dtype)
    (expected,) = torch.autograd.grad(reference.expand_to_mhc(hidden, 4), hidden, d_o)
    actual = reference.expand_to_mhc_bwd(d_o)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected)


def test_against_float64(device: str) -> None:
    d_o = make((2, 3), 8, 576)(device)["d_o"]
    expected = d_o.double().sum(-2).bfloat16()
    torch.testing.assert_close(tk_mhc.expand_to_mhc_bwd(d_o), expected, rtol=2**-8, atol=1e-5)


X = torch.ones(3, 4, 64, dtype=torch.bfloat16)


test_bad_input = tiers.bad_input(
    SPEC,
    {},
    [
        ({"d_o": X[0, 0]}, ValueError, "d_o: .*shape"),
        ({"d_o": X[:, :3].contiguous()}, ValueError, "mhc_mult .*d_o.*2, 4, 8"),
        ({"d_o": X[..., :32].contiguous()}, ValueError, "hidden .*d_o.*64 to 8192"),
        ({"d_o": X.repeat(1, 1, 129)}, ValueError, "hidden .*d_o.*64 to 8192"),
        ({"d_o": X.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "hidden .*d_o.*multiple of 64"),
    ],
)
