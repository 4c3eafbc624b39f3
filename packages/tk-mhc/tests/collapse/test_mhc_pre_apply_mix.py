"""mhc_pre_apply_mix."""

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, empty, nearest_float32, tiers
from tk_mhc import reference

from ..inputs import HIDDEN_SIZES, stream_cases


def make(
    leading: tuple[int, ...],
    mhc_mult: int,
    hidden: int,
    *,
    out: bool = False,
    values: str = "normal",
    first_element: int = 0,
) -> Make:
    """A residual of normal values, or of all magnitudes with infinities and NaN (`wide`), and weights of 0 … 1.

    Tensors start at element `first_element` of their storage. `out` is filled with NaN.
    """

    def build(device: str) -> dict[str, Any]:
        tensor = partial(empty, device=device, first_element=first_element)
        x = tensor(*leading, mhc_mult, hidden, dtype=torch.bfloat16).normal_()
        mix = tensor(*leading, mhc_mult, 1).uniform_()
        if values == "wide":
            x.mul_(torch.exp2(torch.randint(-130, 127, x.shape, device=device)))
            x[..., 5], x[..., 0, 6] = torch.inf, torch.nan
            mix[..., 0, :].neg_()
        written = tensor(*leading, hidden, dtype=torch.bfloat16).fill_(torch.nan) if out else None
        return {"x": x, "mix": mix, "out": written}

    return build


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_apply_mix,
    mutates=("out",),
    cases=(
        # One tile with idle threads and without, two tiles with an idle warp; the gpu tier also has more tiles.
        *stream_cases(make, "-out", out=True),
        Case("m8-h192-t3", make((3,), 8, 192), small=True),
        Case("m2-h256-t17", make((17,), 2, 256), small=True),
        Case("m4-h2112-t1", make((1,), 4, 2112), small=True, compile=True),
        Case("m4-h64-t17-wide", make((17,), 4, 64, values="wide"), small=True),
        *(Case(f"m4-h{hidden}-t65", make((65,), 4, hidden, out=True)) for hidden in HIDDEN_SIZES),
        Case("m4-h7168-t257-wide", make((257,), 4, 7168, values="wide")),
    ),
)


test_tiers = tiers.tests(SPEC)


def collapse(terms: list[tuple[float, float]], device: str) -> float:
    """The sum of (weight, value) pairs, one a stream, as the op adds them up."""
    weights, values = zip(*terms, strict=True)
    x = torch.tensor(values, dtype=torch.float64).bfloat16()
    assert x.tolist() == list(values), "values that bfloat16 holds"
    mix = torch.tensor(weights, dtype=torch.float64).float()
    assert mix.tolist() == list(weights), "weights that float32 holds"
    out = tk_mhc.mhc_pre_apply_mix(x[:, None].repeat(1, 64).to(device), mix[:, None].to(device))
    assert (out == out[0]).all()
    return out[0].item()


def test_by_hand(device: str) -> None:
    assert collapse([(0.5, 3.0), (0.25, -8.0)], device) == -0.5
    assert collapse([(1.0, 2.0), (2.0, 10.0), (3.0, 100.0), (0.0, 5.0)], device) == 322.0
    # 257 and 259 are midway between numbers of 8 bits, and go to the one whose last bit is 0.
    assert collapse([(1.0, 256.0), (1.0, 1.0)], device) == 256.0
    assert collapse([(1.0, 258.0), (1.0, 1.0)], device) == 260.0


def test_streams_ascend(device: str) -> None:
    # From the other end 2⁻²⁴ + 2⁻²⁴ would be counted.
    tiny = 2.0**-24
    assert collapse([(1.0, 1.0), (tiny, 1.0), (tiny, 1.0), (-1.0, 1.0)], device) == 0.0
    assert collapse([(-1.0, 1.0), (tiny, 1.0), (tiny, 1.0), (1.0, 1.0)], device) == 2 * tiny


def test_products_are_not_rounded(device: str) -> None:
    # (1 + 2⁻²³)(1 + 2⁻⁷) = 1 + 2⁻⁷ + 2⁻²³ + 2⁻³⁰: the last term is beyond float32's 24 bits.
    weight, value = 1 + 2.0**-23, 1 + 2.0**-7
    assert collapse([(weight, value), (-1.0, value)], device) == 2.0**-23
    assert collapse([(-1.0, value), (weight, value)], device) == 2.0**-23 + 2.0**-30


def test_sums_are_rounded_once(device: str) -> None:
    # 16519105 · 130 = 2³¹ + 2. Added to 1, the product 2⁻²⁴ + 2⁻⁵⁴ is just more than half of float32's step 2⁻²³, but
    # exactly half after a first rounding to float64's 53 bits.
    weight, value = 16519105 * 2.0**-48, 130 * 2.0**-7
    assert Fraction(weight) * Fraction(value) == Fraction(1, 2**24) + Fraction(1, 2**54)
    assert collapse([(1.0, 1.0), (weight, value), (-1.0, 1.0), (0.0, 0.0)], device) == 2.0**-23
    assert collapse([(-1.0, 1.0), (-weight, value), (1.0, 1.0), (0.0, 0.0)], device) == -(2.0**-23)
    # 14221746 · 151 = 2³¹ - 2: just less than half.
    weight, value = 14221746 * 2.0**-48, 151 * 2.0**-7
    assert collapse([(1 + 2.0**-23, 1.0), (weight, value), (-1.0, 1.0), (0.0, 0.0)], device) == 2.0**-23


def test_against_rational_arithmetic(device: str) -> None:
    inputs = make((4,), 4, 64)(device)
    expected = torch.empty(4, 64)
    for token, (x, mix) in enumerate(zip(inputs["x"].tolist(), inputs["mix"].tolist(), strict=True)):
        for i in range(64):
            total = Fraction(0)
            for s in range(4):
                total = nearest_float32(Fraction(mix[s][0]) * Fraction(x[s][i]) + total)
            expected[token, i] = float(total)
    assert_equal(tk_mhc.mhc_pre_apply_mix(**inputs).cpu(), expected.bfloat16())


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
def test_reference_against_einsum(leading: tuple[int, ...]) -> None:
    x, mix = torch.randn(*leading, 2, 5, dtype=torch.float64), torch.randn(*leading, 2, 1, dtype=torch.float64)
    torch.testing.assert_close(reference.mhc_pre_apply_mix(x, mix), torch.einsum("...si,...so->...i", x, mix))


def test_reference_in_float32_is_not_rounded_to_bfloat16() -> None:
    x, mix = torch.randn(3, 4, 64), torch.rand(3, 4, 1)
    out = reference.mhc_pre_apply_mix(x, mix)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), (x.double() * mix.double()).sum(-2), rtol=1e-6, atol=1e-6)


def test_out_is_written_and_returned(device: str) -> None:
    inputs = make((2, 3), 4, 64)(device)
    expected = tk_mhc.mhc_pre_apply_mix(**inputs)
    out = torch.full_like(expected, torch.nan)
    assert tk_mhc.mhc_pre_apply_mix(**{**inputs, "out": out}) is out
    assert_equal(out, expected)
    assert expected.shape == (2, 3, 64)


X = torch.ones(3, 4, 64, dtype=torch.bfloat16)
GOOD: dict[str, Any] = {"x": X, "mix": torch.ones(3, 4, 1), "out": torch.full((3, 64), 7.0).bfloat16()}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"x": X[0, 0]}, ValueError, "x: .*shape"),
        ({"x": X[:, :3].contiguous()}, ValueError, "mhc_mult .*x.*2, 4, 8"),
        ({"x": X[..., :32].contiguous()}, ValueError, "hidden .*x.*64 to 8192"),
        ({"x": X.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "hidden .*x.*multiple of 64"),
        ({"x": X.repeat(1, 1, 129)}, ValueError, "hidden .*x.*64 to 8192"),
        ({"x": X[:2]}, ValueError, "mix: .*shape"),
        ({"mix": torch.ones(3, 2, 1)}, ValueError, "mix: .*shape"),
        ({"mix": torch.ones(4, 3, 1).transpose(0, 1)}, ValueError, "mix: .*contiguous"),
        ({"out": torch.ones(3, 128).bfloat16()}, ValueError, "out: .*shape"),
    ],
)
