"""Properties of every quantizer, on inputs that hypothesis generates."""

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_core.math import ceil_div
from tk_core.reference.scales import unpack_scales
from tk_core.scales import ScaleLayout
from tk_quant import reference
from tk_quant.cast.format import LIMITS
from tk_quant.reference.formats import decode, dequantize, expand_blocks
from tk_quant.reference.quantizer import block_amax

# Before the first @given, which takes its settings from here.
settings.register_profile("tk-quant", deadline=None, max_examples=100)
settings.load_profile("tk-quant")

HIDDEN = 64
FLAGS: dict[ScaleLayout, dict[str, bool]] = {
    ScaleLayout.ROW_MAJOR: {},
    ScaleLayout.COL_MAJOR: {"use_tma_aligned_col_major_sf": True},
    ScaleLayout.PACKED_UE8M0: {"use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True},
    ScaleLayout.PACKED_ROW_MAJOR: {"use_packed_ue8m0": True},
    ScaleLayout.SWIZZLED: {"use_swizzled_sf": True},
}
# By format: bits of mantissa, and the exponent of the least normal value, below which steps stay the same.
MANTISSA_BITS = {"e4m3": 3, "e2m1": 1, "e5m6": 6}
LEAST_NORMAL_EXPONENT = {"e4m3": -6, "e2m1": 0, "e5m6": -14}

formats = st.sampled_from(sorted(LIMITS))
blocks = st.sampled_from([(1, 16), (1, 32), (1, HIDDEN), (2, 2), (4, 32), (32, 32), (128, 1), (128, 128)])


@st.composite
def matrices(draw: st.DrawFn, smallest: float = 0.0, largest: float = 2.0**127) -> torch.Tensor:
    """(1 to 6, 64) finite float32, sometimes all of a size, sometimes wildly apart, often with equal elements."""
    magnitude = st.floats(smallest, largest, width=32, allow_subnormal=smallest == 0.0)
    near = draw(magnitude)
    elements = st.one_of(
        st.builds(lambda x, negative: -x if negative else x, magnitude, st.booleans()),
        st.floats(-1.0, 1.0, width=32).map(lambda x: float(np.float32(x * near))),
        st.sampled_from([0.0, -0.0, near, -near]),
    )
    num_tokens = draw(st.integers(1, 6))
    x = draw(hnp.arrays(np.float32, (num_tokens, HIDDEN), elements=elements, fill=st.just(near)))
    return torch.from_numpy(x)


def quantize(x: Any, fmt: str, block: tuple[int, int], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.cast(x, fmt, block, **kwargs)


def special(fmt: str) -> str | None:
    return "e5m6" if fmt == "e5m6" else None


# Values of sf_clamp_min that every format takes, and none.
least_amaxes = st.one_of(st.none(), st.floats(2.0**-110, 2.0**127))


def least_of(fmt: str, sf_clamp_min: float | None) -> np.float32:
    return np.float32(LIMITS[fmt][1] if sf_clamp_min is None else sf_clamp_min)


@given(matrices(), formats, blocks, least_amaxes)
def test_sf_is_the_least_power_of_two_that_fits(
    x: torch.Tensor, fmt: str, block: tuple[int, int], sf_clamp_min: float | None
) -> None:
    sf = quantize(x, fmt, block, round_sf=True, sf_clamp_min=sf_clamp_min)[1].double()
    amax = block_amax(x, block).clamp(min=float(least_of(fmt, sf_clamp_min)))
    quotient = (amax / torch.tensor(LIMITS[fmt][0])).double()
    assert ((sf.view(torch.int64) & ((1 << 52) - 1)) == 0).all()
    assert (sf >= quotient).all()
    assert (sf / 2 < quotient).all()


@given(matrices(), formats, blocks, least_amaxes)
def test_sf_is_amax_over_largest(x: torch.Tensor, fmt: str, block: tuple[int, int], sf_clamp_min: float | None) -> None:
    sf = quantize(x, fmt, block, sf_clamp_min=sf_clamp_min)[1].numpy()
    amax = np.maximum(block_amax(x, block).numpy(), least_of(fmt, sf_clamp_min))
    np.testing.assert_array_equal(sf, amax / np.float32(LIMITS[fmt][0]))


@given(matrices(2.0**-100, 2.0**100), formats, blocks, st.booleans())
def test_error_is_within_half_a_step(x: torch.Tensor, fmt: str, block: tuple[int, int], round_sf: bool) -> None:
    data, sf = quantize(x, fmt, block, round_sf=round_sf)
    scales = expand_blocks(sf, block, *x.shape).double()
    exact = x.double() / scales
    exponent = exact.abs().frexp().exponent - 1
    step = torch.exp2(exponent.clamp(min=LEAST_NORMAL_EXPONENT[fmt]).double() - MANTISSA_BITS[fmt])
    error = (decode(data, special(fmt)).double() - exact).abs()
    # x · s and sf are each rounded to float32: three half-ulps of the product, no more.
    slack = 0.0 if round_sf else 3 * 2.0**-24
    assert (error <= step / 2 + slack * exact.abs()).all()


@given(matrices(), st.sampled_from(["e4m3", "e2m1"]), st.sampled_from([(1, 16), (1, 32), (32, 32)]))
def test_layouts_are_permutations(x: torch.Tensor, fmt: str, block: tuple[int, int]) -> None:
    num_rows, num_cols = ceil_div(x.shape[0], block[0]), ceil_div(HIDDEN, block[1])
    data, sf = quantize(x, fmt, block, round_sf=True)
    for flags in FLAGS.values():
        other_data, other_sf = quantize(x, fmt, block, round_sf=True, **flags)
        assert torch.equal(other_data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, num_rows, num_cols), sf)


@given(matrices(2.0**-100, 2.0**100), formats, blocks)
def test_casting_again_changes_nothing(x: torch.Tensor, fmt: str, block: tuple[int, int]) -> None:
    data, sf = quantize(x, fmt, block)
    value = dequantize((data, sf), block, special(fmt))
    again, sf_again = quantize(value, fmt, block)
    assert torch.equal(decode(again, special(fmt)), decode(data, special(fmt)))
    # amax comes back as largest · sf, rounded, and is divided again.
    torch.testing.assert_close(sf_again, sf, rtol=2.0**-22, atol=0.0)


@given(matrices(2.0**-100, 2.0**100), formats, blocks)
def test_casting_again_to_powers_of_two_keeps_values(x: torch.Tensor, fmt: str, block: tuple[int, int]) -> None:
    # Where amax was rounded down to half of the largest, the second sf is half of the first and the codes twice theirs.
    pair = quantize(x, fmt, block, round_sf=True)
    value = dequantize(pair, block, special(fmt))
    again = quantize(value, fmt, block, round_sf=True)
    assert torch.equal(dequantize(again, block, special(fmt)), value)


@given(matrices(2.0**-10, 2.0**20), formats, blocks, st.booleans(), st.integers(-3, 60))
def test_powers_of_two_go_into_sf(
    x: torch.Tensor, fmt: str, block: tuple[int, int], round_sf: bool, exponent: int
) -> None:
    x[:, 0] = 2.0**20  # Every block of a row's first columns stays above the clamp; others may not be all zero either.
    x = torch.where(x == 0, 2.0**-6, x)
    data, sf = quantize(x, fmt, block, round_sf=round_sf)
    scaled_data, scaled_sf = quantize(x * 2.0**exponent, fmt, block, round_sf=round_sf)
    above = block_amax(x, block) * min(1.0, 2.0**exponent) >= LIMITS[fmt][1]
    assert above.any()
    elements = expand_blocks(above, block, *x.shape)
    assert torch.equal(decode(scaled_data, special(fmt))[elements], decode(data, special(fmt))[elements])
    assert torch.equal(scaled_sf[above], (sf * 2.0**exponent)[above])


@given(matrices(2.0**-60, 2.0**60), st.floats(1.0, 4.0, width=32))
def test_nvfp4_is_within_its_steps(x: torch.Tensor, scale: float) -> None:
    block = (1, 16)
    amax = block_amax(x, block)
    tensor_sf = (amax.max() / (448 * 6)).clamp(min=1e-30) * torch.tensor(scale)
    data, sf = quantize(x, "e2m1", block, tensor_sf=tensor_sf)
    assert sf.dtype is torch.float8_e4m3fn
    # sf is the e4m3 nearest to the quotient: within half a step of it, 2^-10 at least.
    quotient = amax.double() / 6 / tensor_sf.double()
    step = torch.exp2((quotient.frexp().exponent - 1).clamp(min=-6).double() - 3)
    raised = quotient < 2.0**-9
    assert ((sf.double() - quotient).abs() <= step / 2 * (1 + 2.0**-20))[~raised].all()
    assert (sf.double()[raised] == 2.0**-9).all()
    # Elements are within half a step of e2m1, or saturated where sf was rounded down.
    exact = x.double() / (expand_blocks(sf.float(), block, *x.shape).double() * tensor_sf.double())
    step = torch.exp2((exact.abs().frexp().exponent - 1).clamp(min=0).double() - 1)
    error = (decode(data).double() - exact).abs()
    fits = exact.abs() <= 6
    assert (error <= step / 2 + 2.0**-22 * exact.abs())[fits].all()
    assert (decode(data)[~fits].abs() == 6).all()
