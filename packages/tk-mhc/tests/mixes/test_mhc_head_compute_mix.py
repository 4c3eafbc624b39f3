"""mhc_head_compute_mix."""

import math
from typing import Any

import torch

import tk_mhc
from tk_core.testing import Make, OpSpec, assert_equal, empty, tiers

from ..compare import within
from ..inputs import mix_cases


def make_head(
    leading: tuple[int, ...], mhc_mult: int, device: str, *, std: float = 1.0, first_element: int = 0
) -> dict[str, Any]:
    """Normal mixes of standard deviation `std`, scale and bases, from element `first_element` of their storage on."""

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return empty(*shape, device=device, first_element=first_element).normal_(std=std)

    return {"input_mix": draw(*leading, mhc_mult, std=std), "mhc_scale": draw(1), "mhc_base": draw(mhc_mult)}


def make(leading: tuple[int, ...], mhc_mult: int, **values: Any) -> Make:
    """Arguments of the op."""
    return lambda device: {**make_head(leading, mhc_mult, device, **values), "mhc_pre_eps": 1e-2}


SPEC = OpSpec(
    op=tk_mhc.mhc_head_compute_mix,
    compare=within(rtol=1e-4, atol=1e-5),
    cases=mix_cases(make, 100.0, 167),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # sigmoid(log 3) = 3/4, of -log 3 1/4, of 0 1/2.
    log3 = math.log(3.0)
    mix, base = torch.tensor([[log3, 0.0], [-log3, log3]]), torch.tensor([0.0, -log3])
    out = tk_mhc.mhc_head_compute_mix(mix, torch.tensor([1.0]), base, 0.125)
    torch.testing.assert_close(out, torch.tensor([[0.875, 0.375], [0.375, 0.625]]))
    out = tk_mhc.mhc_head_compute_mix(mix, torch.tensor([-1.0]), base, 0.0)
    torch.testing.assert_close(out, torch.tensor([[0.25, 0.25], [0.75, 0.1]]))


def test_it_is_pre_of_the_split_mixes(device: str) -> None:
    mixes, scale, base = (torch.randn(*shape, device=device) for shape in ((1000, 24), (3,), (24,)))
    pre, _, _ = tk_mhc.mhc_pre_split_mixes(mixes, scale, base, 4, 1.0, 1e-2)
    out = tk_mhc.mhc_head_compute_mix(mixes[:, :4].contiguous(), scale[:1], base[:4], 1e-2)
    assert_equal(out, pre.squeeze(-1))


test_bad_input = tiers.bad_input(
    SPEC,
    make((3,), 4)("cpu"),
    [
        ({"input_mix": torch.ones(())}, ValueError, "input_mix.*shape"),
        ({"input_mix": torch.ones(3, 5)}, ValueError, "mhc_mult.*2, 4, 8"),
        ({"mhc_pre_eps": math.nan}, ValueError, "mhc_pre_eps.*finite"),
    ],
)
