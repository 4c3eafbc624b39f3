"""mhc_pre_split_mixes."""

import math
from typing import Any

import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, bench_case, empty, tiers

from ..compare import within
from ..inputs import mix_cases


def make_mixes(
    leading: tuple[int, ...],
    mhc_mult: int,
    device: str,
    *,
    std: float = 1.0,
    first_element: int = 0,
    has_comb: bool = True,
) -> dict[str, Any]:
    """Normal mixes of standard deviation `std`, scales and bases, from element `first_element` of their storage on."""
    num_columns = mhc_mult * (mhc_mult + 2 if has_comb else 2)

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return empty(*shape, device=device, first_element=first_element).normal_(std=std)

    return {
        "input_mixes": draw(*leading, num_columns, std=std),
        "mhc_scale": draw(3 if has_comb else 2),
        "mhc_base": draw(num_columns),
        "mhc_mult": mhc_mult,
    }


def make(leading: tuple[int, ...], mhc_mult: int, *, post_eps: float = 0.0, **values: Any) -> Make:
    """Arguments of the op."""

    def build(device: str) -> dict[str, Any]:
        mixes = make_mixes(leading, mhc_mult, device, **values)
        return {**mixes, "mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2, "mhc_post_eps": post_eps}

    return build


def cases_without_comb(make: Any, **options: Any) -> tuple[Case, ...]:
    """Cases of make(leading, mhc_mult, has_comb=False, **options)."""
    options["has_comb"] = False
    return (
        Case("m4-t17-no-comb", make((17,), 4, **options), small=True, modes=True, compile=True),
        Case("m2-t67-no-comb", make((67,), 2, **options), small=True),
        Case("m8-2x3-no-comb-unaligned", make((2, 3), 8, first_element=1, **options), small=True),
        Case("m4-t0-no-comb", make((0,), 4, **options), small=True),
        Case("m2-t4001-no-comb", make((4001,), 2, **options)),
        Case("m8-t4001-no-comb", make((4001,), 8, **options)),
        bench_case("m4-t8192-no-comb", make((8192,), 4, **options)),
    )


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_split_mixes,
    compare=within(rtol=1e-5, atol=2e-5),
    cases=(
        *mix_cases(make, 100.0),
        *cases_without_comb(make, post_eps=0.25),
        Case("m4-t17-post-eps", make((17,), 4, post_eps=0.25), small=True, compile=True),
        Case("m2-t17-no-comb-no-eps", make((17,), 2, has_comb=False), small=True),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # sigmoid(log 3) = 3/4; every z of the first two groups is log 3 or -log 3, in three ways.
    log3 = math.log(3.0)
    mixes = torch.tensor([[log3 / 2, -log3, -log3, 1.0, 1.0, 2.0, 3.0, 4.0]])
    scale = torch.tensor([2.0, 1.0, 0.5])
    base = torch.tensor([0.0, log3, 2 * log3, -1.0 - log3, 0.0, 0.0, 0.0, 10.0])
    pre, post, comb = tk_mhc.mhc_pre_split_mixes(mixes, scale, base, 2, 2.0, 0.125)
    torch.testing.assert_close(pre, torch.tensor([[[0.875], [0.375]]]))
    torch.testing.assert_close(post, torch.tensor([[[1.5], [0.5]]]))
    assert comb.tolist() == [[[0.5, 1.0], [1.5, 12.0]]]
    pre, post, comb = tk_mhc.mhc_pre_split_mixes(
        mixes[:, :4].clone(), scale[:2], base[:4], 2, 2.0, 0.125, mhc_post_eps=0.5
    )
    torch.testing.assert_close(pre, torch.tensor([[[0.875], [0.375]]]))
    torch.testing.assert_close(post, torch.tensor([[[2.0], [1.0]]]))
    assert comb is None


def test_against_plain_loops() -> None:
    inputs = make((5,), 4)("cpu")
    pre, post, comb = tk_mhc.mhc_pre_split_mixes(**inputs)
    mixes, scale, base = (inputs[name].tolist() for name in ("input_mixes", "mhc_scale", "mhc_base"))
    for t in range(5):
        for i in range(4):
            z = mixes[t][i] * scale[0] + base[i]
            assert math.isclose(pre[t, i, 0].item(), 1 / (1 + math.exp(-z)) + 1e-2, rel_tol=1e-5)
            z = mixes[t][4 + i] * scale[1] + base[4 + i]
            assert math.isclose(post[t, i, 0].item(), 2 / (1 + math.exp(-z)), rel_tol=1e-5)
            for j in range(4):
                k = 8 + 4 * i + j
                assert math.isclose(comb[t, i, j].item(), mixes[t][k] * scale[2] + base[k], rel_tol=1e-5, abs_tol=1e-6)


def test_integers_are_numbers() -> None:
    inputs = make((3,), 2)("cpu")
    whole = tk_mhc.mhc_pre_split_mixes(**{**inputs, "mhc_post_mult_value": 2, "mhc_pre_eps": 0})
    for result, expected in zip(whole, tk_mhc.mhc_pre_split_mixes(**{**inputs, "mhc_pre_eps": 0.0}), strict=True):
        assert torch.equal(result, expected)


test_bad_input = tiers.bad_input(
    SPEC,
    make((3,), 2)("cpu"),
    [
        (
            {"input_mixes": torch.ones(3, 24)},
            ValueError,
            "columns of input_mixes: expected 8, or 4 without comb, got 24",
        ),
        # A comb's scale and base for mixes without one.
        ({"input_mixes": torch.ones(3, 4)}, ValueError, "mhc_scale.*shape"),
        ({"input_mixes": torch.ones(3, 4), "mhc_scale": torch.ones(2)}, ValueError, "mhc_base.*shape"),
        ({"mhc_post_eps": math.nan}, ValueError, "mhc_post_eps.*finite"),
        ({"mhc_base": torch.ones(24)}, ValueError, "mhc_base.*shape"),
        ({"mhc_mult": 3, "input_mixes": torch.ones(3, 15)}, ValueError, "mhc_mult.*2, 4, 8"),
        ({"mhc_post_mult_value": math.nan}, ValueError, "mhc_post_mult_value.*finite"),
        ({"mhc_pre_eps": math.inf}, ValueError, "mhc_pre_eps.*finite"),
    ],
)
