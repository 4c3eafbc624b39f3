"""expand_to_mhc."""

from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import assert_equal, tiers
from tk_mhc import reference
from tk_mhc.testing.expand.expand_to_mhc import SPEC, make

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_by_hand(device: str) -> None:
    hidden = torch.arange(2 * 64, device=device).view(2, 64).bfloat16()
    out = tk_mhc.expand_to_mhc(hidden, 4)
    assert out.shape == (2, 4, 64)
    assert out.is_contiguous()
    assert out[1, :, :3].tolist() == [[64.0, 65.0, 66.0]] * 4
    assert out[0, :, 63].tolist() == [63.0] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_of_bfloat16_is_copied(device: str) -> None:
    hidden = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(8, 8192)
    out = tk_mhc.expand_to_mhc(hidden.view(torch.bfloat16), 2)
    assert torch.equal(out.view(torch.int16), hidden[:, None].expand(8, 2, 8192))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
def test_reference_passes_gradcheck(leading: tuple[int, ...]) -> None:
    hidden = torch.randn(*leading, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference.expand_to_mhc(x, 4), (hidden,))


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_written_and_returned(device: str) -> None:
    inputs = make((2, 3), 8, 64)(device)
    expected = tk_mhc.expand_to_mhc(**inputs)
    out = torch.full_like(expected, torch.nan)
    assert tk_mhc.expand_to_mhc(**{**inputs, "out": out}) is out
    assert_equal(out, expected)


HIDDEN = torch.ones(3, 64, dtype=torch.bfloat16)
OUT = torch.full((3, 4, 64), 7.0).bfloat16()
GOOD: dict[str, Any] = {"hidden": HIDDEN, "mhc_mult": 4, "out": OUT}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"hidden": None}, TypeError, "hidden: .*Tensor"),
        ({"hidden": HIDDEN.half()}, TypeError, "hidden: .*bfloat16"),
        ({"hidden": HIDDEN[0, 0]}, ValueError, "hidden: .*shape"),
        ({"hidden": HIDDEN.repeat(1, 2)[:, :64]}, ValueError, "hidden: .*contiguous"),
        ({"hidden": HIDDEN[:, :32].contiguous()}, ValueError, "hidden_size.*64 to 8192"),
        ({"hidden": HIDDEN.repeat(1, 129)}, ValueError, "hidden_size.*64 to 8192"),
        ({"hidden": HIDDEN.repeat(1, 2)[:, :96].contiguous()}, ValueError, "hidden_size.*multiple of 64"),
        ({"mhc_mult": 4.0}, TypeError, "mhc_mult: .*int"),
        ({"mhc_mult": True}, TypeError, "mhc_mult: .*int"),
        ({"mhc_mult": 3}, ValueError, "mhc_mult: .*2, 4, 8"),
        ({"mhc_mult": 0}, ValueError, "mhc_mult: .*2, 4, 8"),
        ({"mhc_mult": 2}, ValueError, "out: .*shape"),
        ({"out": 1}, TypeError, "out: .*Tensor"),
        ({"out": OUT.float()}, TypeError, "out: .*bfloat16"),
        ({"out": OUT[:2]}, ValueError, "out: .*shape"),
        ({"out": OUT.repeat(1, 1, 2)[..., ::2]}, ValueError, "out: .*contiguous"),
        ({"out": OUT.to("meta")}, ValueError, "out: .*device"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_mhc.expand_to_mhc(**{**GOOD, **change})
    assert (OUT == 7).all()


@pytest.mark.gpu(gib=7)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_tokens = 2**31 // (8 * 8192) + 5
    inputs = make((num_tokens,), 8, 8192)("cuda")
    out = tk_mhc.expand_to_mhc(**inputs)
    assert torch.equal(out, inputs["hidden"][:, None].expand(out.shape))
