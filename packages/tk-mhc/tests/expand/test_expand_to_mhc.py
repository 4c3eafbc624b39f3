"""expand_to_mhc."""

from functools import partial
from typing import Any

import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, empty, tiers

from ..inputs import HIDDEN_SIZES, stream_cases


def make(
    leading: tuple[int, ...], mhc_mult: int, hidden_size: int, *, out: bool = False, first_element: int = 0
) -> Make:
    """Normal values. Tensors start at element `first_element` of their storage; `out` is filled with NaN."""

    def build(device: str) -> dict[str, Any]:
        tensor = partial(empty, dtype=torch.bfloat16, device=device, first_element=first_element)
        return {
            "hidden": tensor(*leading, hidden_size).normal_(),
            "mhc_mult": mhc_mult,
            "out": tensor(*leading, mhc_mult, hidden_size).fill_(torch.nan) if out else None,
        }

    return build


SPEC = OpSpec(
    op=tk_mhc.expand_to_mhc,
    mutates=("out",),
    cases=(
        # Tiles that hidden fills in part; the gpu tier also has full ones.
        *stream_cases(make, "-out", out=True),
        Case("m8-h192-t3", make((3,), 8, 192), small=True, compile=True),
        Case("m2-h256-t17", make((17,), 2, 256), small=True),
        Case("m4-h2112-t1", make((1,), 4, 2112), small=True),
        *(Case(f"m4-h{hidden}-t65", make((65,), 4, hidden, out=True)) for hidden in HIDDEN_SIZES),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand(device: str) -> None:
    hidden = torch.arange(2 * 64, device=device).view(2, 64).bfloat16()
    out = tk_mhc.expand_to_mhc(hidden, 4)
    assert out.shape == (2, 4, 64)
    assert out.is_contiguous()
    assert out[1, :, :3].tolist() == [[64.0, 65.0, 66.0]] * 4
    assert out[0, :, 63].tolist() == [63.0] * 4


def test_every_code_of_bfloat16_is_copied(device: str) -> None:
    hidden = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(8, 8192)
    out = tk_mhc.expand_to_mhc(hidden.view(torch.bfloat16), 2)
    assert torch.equal(out.view(torch.int16), hidden[:, None].expand(8, 2, 8192))


def test_out_is_written_and_returned(device: str) -> None:
    inputs = make((2, 3), 8, 64)(device)
    expected = tk_mhc.expand_to_mhc(**inputs)
    out = torch.full_like(expected, torch.nan)
    assert tk_mhc.expand_to_mhc(**{**inputs, "out": out}) is out
    assert_equal(out, expected)


HIDDEN = torch.ones(3, 64, dtype=torch.bfloat16)
OUT = torch.full((3, 4, 64), 7.0).bfloat16()
GOOD: dict[str, Any] = {"hidden": HIDDEN, "mhc_mult": 4, "out": OUT}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"hidden": HIDDEN[0, 0]}, ValueError, "hidden: .*shape"),
        ({"hidden": HIDDEN[:, :32].contiguous()}, ValueError, "hidden_size.*64 to 8192"),
        ({"hidden": HIDDEN.repeat(1, 129)}, ValueError, "hidden_size.*64 to 8192"),
        ({"hidden": HIDDEN.repeat(1, 2)[:, :96].contiguous()}, ValueError, "hidden_size.*multiple of 64"),
        ({"mhc_mult": 3}, ValueError, "mhc_mult: .*2, 4, 8"),
        ({"mhc_mult": 2}, ValueError, "out: .*shape"),
        ({"out": OUT[:2]}, ValueError, "out: .*shape"),
    ],
)
