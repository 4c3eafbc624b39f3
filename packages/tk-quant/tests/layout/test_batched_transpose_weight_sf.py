"""batched_transpose_weight_sf."""

from typing import Any

import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers

Shape = tuple[int, ...]


def powers_of_two(shape: Shape, device: str) -> torch.Tensor:
    """Powers of two, zero and infinity among them."""
    exponents = torch.randint(0, 256, shape, device=device)
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def make(*shapes: Shape, block_size: int = 128, given: tuple[int, ...] = ()) -> Make:
    """Arguments for scale factors of these shapes; every second sf1 is transposed, and those `given` have outs."""

    def build(device: str) -> dict[str, Any]:
        sf = [powers_of_two(shape, device) for shape in shapes]
        flags = [i % 2 == 1 for i in range(len(sf))]
        outs: list[Any] = [None] * len(sf)
        for i in given:
            *groups, rows, cols = sf[i].shape
            sides = ((rows * block_size, -(-cols // 4)), (cols * block_size, -(-rows // 4)))
            sf0, sf1 = (torch.zeros(*groups, words, side, dtype=torch.int32, device=device) for side, words in sides)
            outs[i] = sf0.transpose(-1, -2), sf1 if flags[i] else sf1.transpose(-1, -2)
        return {"sf": sf, "block_size": block_size, "transpose_sf1s": flags, "outs": outs}

    return build


SPEC = OpSpec(
    op=tk_quant.batched_transpose_weight_sf,
    mutates=("outs",),
    cases=(
        Case("128-one", make((3, 5)), small=True, compile=True, modes=True),
        Case("128-groups", make((3, 2, 7), (1, 4, 4), (2, 5, 1)), small=True, compile=True),
        Case("32-several", make((4, 8), (8, 4), (2, 4, 12), block_size=32), small=True, compile=True, modes=True),
        Case("128-given", make((3, 5), (2, 2), (2, 1, 6), given=(0, 2)), small=True),
        Case("128-no-group", make((0, 3, 5), (2, 2)), small=True),
        Case("128-ten", make(*((1 + i % 3, 1 + i % 5) for i in range(10))), small=True, compile=True),
        Case("128-seventy", make(*((1, 1 + i % 4) for i in range(70))), small=True),
        Case("128-experts", make((64, 56, 16), (64, 16, 56), (56, 32), (32, 56))),
        Case("32-experts", make((8, 224, 64), (8, 64, 224), block_size=32)),
        bench_case("128-experts", make((256, 56, 16), (256, 32, 56)), model_shape=True),
    ),
)


test_tiers = tiers.tests(SPEC)


def bytes_of(word: torch.Tensor) -> list[int]:
    return [int(word) >> 8 * k & 0xFF for k in range(4)]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_by_hand(is_transposed: bool, device: str) -> None:
    sf = torch.exp2(torch.arange(15.0, device=device).view(3, 5))
    ((sf0, sf1),) = tk_quant.batched_transpose_weight_sf([sf], 128, [is_transposed], [None])
    assert sf0.shape == (384, 2)
    assert sf0.stride() == (1, 384)
    assert sf1.shape == ((1, 640) if is_transposed else (640, 1))
    assert sf1.stride() == ((640, 1) if is_transposed else (1, 640))
    assert bytes_of(sf0[130, 0]) == [127 + 5, 127 + 6, 127 + 7, 127 + 8]
    assert bytes_of(sf0[383, 1]) == [127 + 14, 0, 0, 0]
    assert bytes_of((sf1.t() if is_transposed else sf1)[639, 0]) == [127 + 4, 127 + 9, 127 + 14, 0]


def test_is_packing_of_expanded_scales(device: str) -> None:
    sf = torch.exp2(torch.randint(-100, 100, (2, 4, 12), device=device).float())
    ((sf0, sf1),) = tk_quant.batched_transpose_weight_sf([sf], 32, [False], [None])
    for g in range(2):
        assert torch.equal(unpack_scales(sf0[g], 128, 12), sf[g].repeat_interleave(32, 0))
        assert torch.equal(unpack_scales(sf1[g], 384, 4), sf[g].t().repeat_interleave(32, 0))


def test_outs_are_written_again(device: str) -> None:
    arguments = make((3, 5), (2, 2, 3))(device)
    first = tk_quant.batched_transpose_weight_sf(**arguments)
    sf = [powers_of_two(x.shape, device) for x in arguments["sf"]]
    again = tk_quant.batched_transpose_weight_sf(sf, 128, arguments["transpose_sf1s"], first)
    for pair, same in zip(first, again, strict=True):
        assert all(x is y for x, y in zip(pair, same, strict=True))
    assert_equal(again, tk_quant.batched_transpose_weight_sf(sf, 128, arguments["transpose_sf1s"], [None, None]))
    assert tk_quant.batched_transpose_weight_sf([], 128, [], []) == []


def test_debug_mode_finds_what_is_no_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    sf = torch.ones(2, 2)
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_quant.batched_transpose_weight_sf([sf], 128, [False], [None])
    for wrong in (1.5, -1.0):
        sf[1, 0] = wrong
        with pytest.raises(ValueError, match=r"sf\[0\]: expected powers of two, got '1 others'"):
            tk_quant.batched_transpose_weight_sf([sf], 128, [False], [None])


SF = torch.ones(2, 4)
OUT = torch.zeros(1, 256, dtype=torch.int32).t(), torch.zeros(1, 512, dtype=torch.int32).t()
APART = torch.zeros(512, 2, dtype=torch.int32)[:, :1]
TWO = {"transpose_sf1s": [False] * 2, "outs": [None] * 2}
test_bad_input = tiers.bad_input(
    SPEC,
    {"sf": [SF], "block_size": 128, "transpose_sf1s": [False], "outs": [None]},
    [
        ({"sf": SF}, TypeError, "sf: expected a list of tensors"),
        ({"sf": [SF.bfloat16()]}, TypeError, r"sf\[0\]: expected dtype torch.float32"),
        ({"sf": [SF[:, ::2]]}, ValueError, r"sf\[0\]: expected contiguous"),
        ({"sf": [SF[None, None]]}, ValueError, r"sf\[0\]: expected 2 or 3 dimensions, got 4"),
        (
            {"sf": [SF.to("meta"), SF], "transpose_sf1s": [False] * 2, "outs": [None] * 2},
            ValueError,
            r"sf\[1\]: expected device",
        ),
        ({"block_size": 64}, ValueError, "block_size: expected one of 32, 128, got 64"),
        ({"block_size": 32}, ValueError, r"sf\[0\]: expected a multiple of 128, got 64"),
        ({"transpose_sf1s": []}, ValueError, "transpose_sf1s: expected 1 items, got 0"),
        ({"transpose_sf1s": [1]}, TypeError, r"transpose_sf1s\[0\]: expected a bool"),
        ({"outs": [None, None]}, ValueError, "outs: expected 1 items, got 2"),
        ({"outs": [OUT[0]]}, TypeError, r"outs\[0\]: expected a pair"),
        ({"outs": [OUT], "transpose_sf1s": [True]}, ValueError, r"outs\[0\]\[1\]: expected shape \(1, 512\)"),
        ({"outs": [(OUT[0], OUT[1].float())]}, TypeError, r"outs\[0\]\[1\]: expected dtype torch.int32"),
        (
            {"outs": [(OUT[0], torch.zeros(512, 2, dtype=torch.int32)[:, :1])]},
            ValueError,
            r"outs\[0\]\[1\]: expected strides",
        ),
    ],
)
