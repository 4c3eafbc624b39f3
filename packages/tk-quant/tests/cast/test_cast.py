"""cast, and the reference of stochastic rounding."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, quant_level_rank, tiers
from tk_quant.reference import stochastic

from ..layout.test_transpose import random_bits

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
_NAMES = {BF16: "bf16", FP32: "fp32", E4M3: "e4m3"}
_STOCHASTIC = ((FP32, BF16), (FP32, E4M3), (BF16, E4M3))
_LARGEST = {BF16: torch.finfo(BF16).max, E4M3: 448.0}


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Values from 2⁻¹⁶ to 2¹⁶ around zero."""
    scale = torch.exp2(torch.randint(-16, 16, shape, device=device).to(FP32))
    return (torch.randn(shape, device=device) * scale).to(dtype)


def make(
    shape: tuple[int, ...], dtype: torch.dtype, to: torch.dtype, *, bits: bool = False, seed: Any = None, **flags: Any
) -> Make:
    """Arguments of cast. `bits`: random ones, NaN and infinity among them. A seed of "tensor" is one."""

    def build(device: str) -> dict[str, Any]:
        x = random_bits(shape, dtype, device) if bits else values(shape, dtype, device)
        at = torch.randint(-(2**62), 2**62, (1,), device=device) if seed == "tensor" else seed
        return {"x": x, "dtype": to, **({"seed": at} if seed is not None else {}), **flags}

    return build


def _stochastic(shape: tuple[int, ...], dtype: torch.dtype, to: torch.dtype, **options: Any) -> Make:
    return make(shape, dtype, to, stochastic_rounding=True, **options)


SPEC = OpSpec(
    op=tk_quant.cast,
    cases=(
        *(
            Case(
                f"{_NAMES[x]}-{_NAMES[to]}-5x3x77",
                make((5, 3, 77), x, to, bits=True),
                small=True,
                compile=x is FP32,
                modes=(x, to) == (FP32, BF16),
            )
            for x, to in product(_NAMES, _NAMES)
        ),
        *(
            Case(
                f"{_NAMES[x]}-{_NAMES[to]}-stochastic-5x77x4-seed-{seed}".replace("None", "none"),
                _stochastic((5, 77, 4), x, to, bits=seed == 2**40 + 5, seed=seed),
                small=True,
                compile=seed == "tensor",
                modes=seed == "tensor" and x is BF16,
            )
            for (x, to), seed in product(_STOCHASTIC, (None, 2**40 + 5, "tensor"))
        ),
        *(
            Case(name, arguments, small=True)
            for name, arguments in (
                ("fp32-bf16-scalar", make((), FP32, BF16)),
                ("bf16-e4m3-empty", make((3, 0), BF16, E4M3)),
                ("fp32-e4m3-1", make((1,), FP32, E4M3)),
                ("fp32-e4m3-16", make((2, 8), FP32, E4M3, bits=True)),
                ("fp32-bf16-stochastic-4", _stochastic((4,), FP32, BF16)),
                ("fp32-bf16-stochastic-empty", _stochastic((0,), FP32, BF16, seed=-1)),
                ("bf16-e4m3-stochastic-16", _stochastic((1, 1, 1, 16), BF16, E4M3, seed=-1)),
            )
        ),
        *(
            Case(f"{_NAMES[x]}-{_NAMES[to]}-{size}", make((size,), x, to, bits=True))
            for (x, to), size in product(product(_NAMES, _NAMES), (4096, 8191, 1_000_003))
        ),
        *(
            Case(f"{_NAMES[x]}-{_NAMES[to]}-stochastic-{size}", _stochastic((size, 4), x, to, bits=True, seed=size))
            for (x, to), size in product(_STOCHASTIC, (2048, 2047, 333_333))
        ),
        *(
            bench_case(f"{_NAMES[x]}-{_NAMES[to]}-t8192-h7168", make((8192, 7168), x, to), model_shape=True)
            for x, to in (*_STOCHASTIC, (E4M3, BF16))
        ),
        *(
            bench_case(f"{_NAMES[x]}-{_NAMES[to]}-stochastic-t8192-h7168", _stochastic((8192, 7168), x, to, seed=1))
            for x, to in _STOCHASTIC
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_to_nearest_by_hand(device: str) -> None:
    x = torch.tensor([448, 464.1, -1e9, math.inf, -math.inf, 1.0625, 1.1875, 2.0**-10, -0.0, math.nan], device=device)
    codes = tk_quant.cast(x, E4M3)
    assert codes.tolist()[:9] == [448, 448, -448, 448, -448, 1, 1.25, 0, 0]
    assert codes.view(torch.uint8).tolist()[8:] == [0x80, 0x7F]
    found = tk_quant.cast(x, BF16)
    assert torch.equal(found[:-1], x[:-1].to(BF16))
    assert found.view(torch.int16)[-1] == 0x7FFF
    again = tk_quant.cast(codes, FP32)
    assert torch.equal(again[:9], codes.to(FP32)[:9])
    assert again.view(torch.int32)[-1] == 0x7FFFFFFF


def fraction_of(value: float, to: str) -> tuple[Fraction, Fraction, Fraction]:
    """(the neighbour nearer to zero, the one farther, the place between them) of a positive value, by exact sums."""
    least, bits = {"bf16": (-126, 7), "e4m3": (-6, 3), "e2m1": (0, 1)}[to]
    exact = Fraction(value)
    step = Fraction(2) ** (max(math.frexp(value)[1] - 1, least) - bits)
    lower = exact // step * step
    return lower, lower + step, (exact - lower) / step


def reversed_bits(x: int) -> int:
    return int(f"{x:016b}"[::-1], 2)


def random_by_hand(quad: list[float], index: int, to: str, seed: int) -> list[int]:
    """The random bits of a quad's elements, in Python's integers."""
    bits = torch.tensor(quad).view(torch.int32).tolist()

    def mixed(h: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ h >> shift) * factor % 2**32
        return h ^ h >> 16

    factors = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
    h = sum(value % 2**32 * factor for value, factor in zip(bits, factors)) + index
    h = (h + mixed((mixed(seed % 2**32) + (seed >> 32)) % 2**32)) % 2**32
    h = (h ^ h >> 23) * 0x7FEB352D % 2**32
    h ^= h >> 16
    first, second = (h * factor % 2**32 for factor in (0x846CA68B, 0xD35A2D97))
    first, second = first ^ first >> 11, second ^ second >> 11
    if to == "bf16":
        return [first % 2**16, first >> 16, second % 2**16, second >> 16]
    if to == "e2m1":
        b = first.to_bytes(4, "little")
        first = b[0] | b[2] << 8 | b[1] << 16 | b[3] << 24
    return [each for half in (first % 2**16, first >> 16) for each in (half, reversed_bits(half))]


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
@pytest.mark.parametrize("to", ["bf16", "e4m3", "e2m1"])
def test_stochastic_reference_against_exact_fractions(to: str, seed: int) -> None:
    top = {"bf16": 120, "e4m3": 8, "e2m1": 2}[to]
    x = torch.rand(400) * torch.exp2(torch.randint(-12, top, (400,)).float())
    found = stochastic.round_stochastically(x, to, torch.arange(100) + 7, seed)
    for i in range(100):
        quad = x[4 * i : 4 * i + 4].tolist()
        for k, random in enumerate(random_by_hand(quad, i + 7, to, seed)):
            lower, upper, place = fraction_of(quad[k], to)
            expected = upper if place + Fraction(random, 2**16) >= 1 else lower
            assert Fraction(found[4 * i + k].item()) == expected


@pytest.mark.parametrize(("dtype", "to"), _STOCHASTIC)
def test_stochastic_is_near_and_unbiased(dtype: torch.dtype, to: torch.dtype, device: str) -> None:
    x = torch.randn(512, 1024, device=device).to(dtype)
    found = tk_quant.cast(x, to, True)
    assert_equal(tk_quant.cast(x, to, stochastic_rounding=True), found)
    name = {BF16: "bf16", E4M3: "e4m3"}[to]
    ranks = [quant_level_rank(each, name) for each in (found, tk_quant.cast(x, to))]
    assert (ranks[0] - ranks[1]).abs().max() == 1
    error = (found.double() - x.double()).mean().abs()
    bits = {BF16: 7, E4M3: 3}[to]
    assert error <= 10 * 2**-bits * x.double().abs().mean() / math.sqrt(x.numel())
    # What needs no rounding stays, zeros and infinity too.
    for value in (0.0, -0.0, 1.5, -3.0, _LARGEST[to], math.inf, -math.inf):
        whole = torch.full((4,), value, device=device).to(dtype)
        assert torch.equal(
            tk_quant.cast(whole, to, True, seed=3).view(torch.uint8), tk_quant.cast(whole, to).view(torch.uint8)
        )


def test_largest_values_stay_finite(device: str) -> None:
    x = torch.full((64, 4), torch.finfo(FP32).max, device=device)
    for to in (BF16, E4M3):
        assert (tk_quant.cast(x, to, True).float() == _LARGEST[to]).all()
        assert (tk_quant.cast(-x, to, True).float() == -_LARGEST[to]).all()


@pytest.mark.parametrize("to", [BF16, E4M3])
def test_seeds_decide(to: torch.dtype, device: str) -> None:
    # 0.3 of the way from 1 to the next value, over 2¹⁶ seeds.
    step = 2.0 ** -{BF16: 7, E4M3: 3}[to]
    x = torch.full((4,), 1 + 0.3 * step)
    counts = torch.zeros(4)
    for seed in range(2**12):
        index = torch.zeros(1, dtype=torch.int64)
        counts += stochastic.round_stochastically(x, {BF16: "bf16", E4M3: "e4m3"}[to], index, seed) > 1
    assert (counts / 2**12 - 0.3).abs().max() < 0.03
    many = torch.full((4096,), 1 + 0.3 * step, device=device)
    ups = [(tk_quant.cast(many, to, True, seed=seed).float() > 1).double().mean().item() for seed in range(16)]
    assert abs(sum(ups) / 16 - 0.3) < 0.01
    of_int, none = tk_quant.cast(many, to, True, seed=2**50 + 1), tk_quant.cast(many, to, True)
    as_tensor = torch.tensor(2**50 + 1, device=device)
    assert_equal(tk_quant.cast(many, to, True, seed=as_tensor), of_int)
    assert_equal(tk_quant.cast(many, to, True, seed=0), none)
    for other in (of_int, tk_quant.cast(many, to, True, seed=2**32)):
        assert (none.float() != other.float()).any()


X = torch.ones(4, 4)
test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "dtype": BF16},
    [
        ({"dtype": torch.float16}, TypeError, "dtype: expected torch.float32 or torch.bfloat16"),
        ({"x": X[:, ::2]}, ValueError, "x: expected contiguous"),
        ({"seed": 1}, ValueError, "seed: expected None without stochastic_rounding, got 1"),
        ({"x": X[0, :3], "stochastic_rounding": True}, ValueError, "x: expected a multiple of 4 elements, got 3"),
        (
            {"dtype": FP32, "stochastic_rounding": True},
            ValueError,
            "stochastic_rounding: expected False from torch.float32",
        ),
        ({"x": X.bfloat16(), "stochastic_rounding": True}, ValueError, "stochastic_rounding: expected False from"),
        ({"stochastic_rounding": True, "seed": 2**63}, ValueError, "seed: expected an int of 64 bits"),
        (
            {"stochastic_rounding": True, "seed": torch.ones(2, dtype=torch.int64)},
            ValueError,
            r"seed: expected shape \(1\)",
        ),
        ({"stochastic_rounding": True, "seed": torch.ones(1)}, TypeError, "seed: expected dtype torch.int64"),
    ],
)


def test_reference_is_told_apart_by_its_second_argument() -> None:
    x = torch.randn(64, 64)
    data, sf = tk_quant.reference.cast(x, "e4m3", (32, 32))
    assert sf.shape == (2, 2)
    assert torch.equal(data.float(), tk_quant.reference.cast(x, fmt="e4m3")[0].float())
    assert torch.equal(tk_quant.reference.cast(x, BF16), x.bfloat16())
    assert torch.equal(tk_quant.reference.cast(x, dtype=BF16), x.bfloat16())
