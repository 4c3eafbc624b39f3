"""mhc_fold_fn."""

from functools import partial
from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, bench_case, empty, tiers
from tk_mhc import reference

from ..inputs import HIDDEN_SIZES


def make(mhc_mult: int, hidden: int, *, weight: bool = True, first_element: int = 0) -> Make:
    """A projection of normal values, norm weights around 1; both start at element `first_element` of their storage."""

    def build(device: str) -> dict[str, Any]:
        tensor = partial(empty, device=device, first_element=first_element)
        return {
            "fn": tensor(mhc_mult * (mhc_mult + 2), mhc_mult * hidden).normal_(),
            "mhc_mult": mhc_mult,
            "norm_weight": tensor(mhc_mult * hidden).normal_(1.0, 0.2) if weight else None,
        }

    return build


SPEC = OpSpec(
    op=tk_mhc.mhc_fold_fn,
    cases=(
        # One tile with and without idle threads; in the gpu tier several, the last full or partial.
        Case("m2-h64", make(2, 64), small=True, modes=True),
        Case("m2-h192-no-weight", make(2, 192, weight=False), small=True, modes=True, compile=True),
        Case("m4-h64", make(4, 64), small=True),
        Case("m2-h256", make(2, 256), small=True),
        Case("m2-h320", make(2, 320), small=True),
        Case("m4-h64-no-weight", make(4, 64, weight=False), small=True),
        Case("m2-h64-unaligned", make(2, 64, first_element=1), small=True),
        *(Case(f"m{m}-h{hidden}", make(m, hidden)) for m in (2, 4) for hidden in HIDDEN_SIZES),
        *(Case(f"m8-h{hidden}", make(8, hidden)) for hidden in (64, 576, 8192)),
        Case("m8-h7168", make(8, 7168), compile=True),
        Case("m4-h2560-no-weight", make(4, 2560, weight=False)),
        bench_case("m4-h7168", make(4, 7168), model_shape=True, compile=True),
        *(bench_case(f"m4-h{hidden}", make(4, hidden)) for hidden in (576, 2048, 2560, 4096)),
    ),
)


test_tiers = tiers.tests(SPEC)


def fold(streams: list[float], weights: list[float] | None, device: str) -> float:
    """What becomes of a projection that has these values in its streams."""
    mhc_mult = len(streams)
    num_rows = mhc_mult * (mhc_mult + 2)

    def row(values: list[float]) -> torch.Tensor:
        x = torch.tensor(values, dtype=torch.float64)
        assert x.float().tolist() == values, "values that float32 holds"
        return x.float().repeat_interleave(64).to(device)

    out = tk_mhc.mhc_fold_fn(row(streams).repeat(num_rows, 1), mhc_mult, None if weights is None else row(weights))
    assert out.shape == (num_rows, 64)
    assert (out == out[0, 0]).all()
    return out[0, 0].item()


def test_by_hand(device: str) -> None:
    assert fold([1.0, 2.5], None, device) == 3.5
    assert fold([1.0, 2.5], [10.0, -2.0], device) == 5.0
    assert fold([1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, 1000.0], device) == 4321.0
    # Streams ascend: 1 is lost beside 2²⁵ unless that has gone before.
    large = 2.0**25
    assert fold([large, 1.0, -large, 1.0], None, device) == 1.0
    assert fold([large, -large, 1.0, 1.0], None, device) == 2.0
    # Products are rounded: (1 + 2⁻²³)² = 1 + 2⁻²² + 2⁻⁴⁶ loses its last term.
    near = 1 + 2.0**-23
    assert fold([-1.0, near], [1.0, near], device) == 2.0**-22


def test_sum_of_negative_zeros_is_negative(device: str) -> None:
    assert tk_mhc.mhc_fold_fn(torch.full((8, 2 * 64), -0.0, device=device), 2).signbit().all()


def test_places_are_kept(device: str) -> None:
    # Powers of two that no two places share, so each sum tells which were added.
    fn = torch.zeros(8, 2 * 128, device=device)
    fn[3, 5], fn[3, 128 + 5], fn[7, 127], fn[0, 128] = 1.0, 2.0, 4.0, 8.0
    out = tk_mhc.mhc_fold_fn(fn, 2)
    expected = torch.zeros(8, 128, device=device)
    expected[3, 5], expected[7, 127], expected[0, 0] = 3.0, 4.0, 8.0
    assert torch.equal(out, expected)


def test_it_is_the_projection_of_equal_streams(device: str) -> None:
    inputs = make(4, 192)(device)
    hidden = torch.randn(7, 192, dtype=torch.float64, device=device)
    streams = reference.expand_to_mhc(hidden, 4).view(7, 4 * 192)
    expected = streams @ (inputs["fn"] * inputs["norm_weight"]).double().T
    actual = hidden @ tk_mhc.mhc_fold_fn(**inputs).double().T
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight", [False, True])
def test_reference_in_float64(weight: bool) -> None:
    fn = torch.randn(8, 2 * 5, dtype=torch.float64)
    norm_weight = torch.randn(2 * 5, dtype=torch.float64) if weight else None
    weighted = fn * norm_weight if weight else fn
    torch.testing.assert_close(reference.mhc_fold_fn(fn, 2, norm_weight), weighted[:, :5] + weighted[:, 5:])


FN = torch.ones(24, 4 * 64)


test_bad_input = tiers.bad_input(
    SPEC,
    make(4, 64)("cpu"),
    [
        ({"fn": FN[:4]}, ValueError, "fn: .*shape"),
        ({"fn": FN[:, :255].contiguous()}, ValueError, "fn: .*multiple of 4"),
        ({"fn": FN[:, :128].contiguous()}, ValueError, "hidden.*fn.*64 to 8192"),
        ({"fn": FN.repeat(1, 129)}, ValueError, "hidden.*fn.*64 to 8192"),
        ({"fn": FN.repeat(1, 2)[:, : 4 * 96].contiguous()}, ValueError, "hidden.*fn.*multiple of 64"),
        ({"mhc_mult": 3}, ValueError, "mhc_mult: .*2, 4, 8"),
        ({"mhc_mult": 2}, ValueError, "fn: .*shape"),
        ({"norm_weight": torch.ones(64)}, ValueError, "norm_weight: .*shape"),
    ],
)
