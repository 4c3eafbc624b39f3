"""engram_sinkhorn_momentum_update."""

from fractions import Fraction
from typing import Any

import pytest
import torch

import tk_engram
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, nearest_float32, tiers
from tk_core.testing.trees import distinct_bytes
from tk_engram import reference

_BF16, _FP32 = torch.bfloat16, torch.float32


def make(
    shape: tuple[int, ...],
    grad_dtype: torch.dtype,
    buffer_dtype: torch.dtype,
    *,
    nesterov: bool = True,
    values: str = "normal",
    first_element: int = 0,
) -> Make:
    """Normal values, or of many magnitudes with infinities (`wide`).

    Tensors start at element `first_element` of their storage.
    """

    def build(device: str) -> dict[str, Any]:
        def tensor(dtype: torch.dtype) -> torch.Tensor:
            x = empty(*shape, dtype=dtype, device=device, first_element=first_element).normal_()
            if values == "wide":
                x.mul_(torch.exp2(torch.randint(-20, 20, x.shape, device=device)))
                x[::17], x[1::19] = torch.inf, -torch.inf
            return x

        return {
            "grad": tensor(grad_dtype),
            "momentum_buffer": tensor(buffer_dtype),
            "beta1": 0.95,
            "nesterov": nesterov,
        }

    return build


def least_bytes(inputs: dict[str, Any], outputs: Any) -> int:
    """Every tensor once, and the buffer twice: it is read and written."""
    return distinct_bytes((inputs, outputs)) + distinct_bytes(inputs["momentum_buffer"])


SPEC = OpSpec(
    op=tk_engram.engram_sinkhorn_momentum_update,
    least_bytes=least_bytes,
    mutates=("momentum_buffer",),
    cases=(
        # Vectors of eight, four and one; two thread blocks; every pair of dtypes.
        Case("bf16-fp32-n1000", make((1000,), _BF16, _FP32), small=True, modes=True),
        Case("fp32-fp32-n4104", make((4104,), _FP32, _FP32), small=True, modes=True),
        Case("bf16-bf16-n1004", make((1004,), _BF16, _BF16, nesterov=False), small=True, compile=True),
        Case("fp32-bf16-n777", make((777,), _FP32, _BF16), small=True),
        Case("fp32-fp32-n1001", make((1001,), _FP32, _FP32, nesterov=False), small=True),
        Case("bf16-fp32-n3x5x8", make((3, 5, 8), _BF16, _FP32), small=True),
        Case("bf16-fp32-n0", make((0,), _BF16, _FP32), small=True),
        Case("fp32-fp32-n1000-wide", make((1000,), _FP32, _FP32, values="wide"), small=True),
        Case("bf16-bf16-n64-unaligned", make((64,), _BF16, _BF16, first_element=1), small=True),
        Case("bf16-fp32-n1024256", make((4001 * 256,), _BF16, _FP32)),
        Case("bf16-bf16-n2304576", make((4001 * 576,), _BF16, _BF16)),
        Case("fp32-fp32-n10241280", make((8001 * 1280,), _FP32, _FP32)),
        Case("fp32-bf16-n508127", make((4001 * 127,), _FP32, _BF16)),
        bench_case("bf16-fp32-n268435456", make((1 << 28,), _BF16, _FP32), model_shape=True, compile=True),
        bench_case("fp32-fp32-n268435456", make((1 << 28,), _FP32, _FP32)),
        bench_case("bf16-bf16-n268435456", make((1 << 28,), _BF16, _BF16)),
        bench_case("bf16-fp32-n1048576", make((1 << 20,), _BF16, _FP32)),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize(("nesterov", "expected"), [(True, [3.25, 1.0]), (False, [2.5, 2.0])])
def test_by_hand(nesterov: bool, expected: list[float], device: str) -> None:
    # β = 1/2: m' = (m + g) / 2, and with nesterov (g + m') / 2, for m 1, 4 and g 4, 0.
    grad, buffer = torch.tensor([4.0, 0.0], device=device), torch.tensor([1.0, 4.0], device=device)
    out = tk_engram.engram_sinkhorn_momentum_update(grad, buffer, 0.5, nesterov)
    assert buffer.tolist() == [2.5, 2.0]
    assert out.tolist() == expected


def test_result_is_made_from_the_average_before_it_is_rounded(device: str) -> None:
    # m' = 257 needs nine bits: the bfloat16 buffer gets 256, the result (2 + 257) / 2.
    grad = torch.tensor([2.0], device=device)
    buffer = torch.tensor([512.0], device=device).bfloat16()
    out = tk_engram.engram_sinkhorn_momentum_update(grad, buffer, 0.5)
    assert buffer.tolist() == [256.0]
    assert out.tolist() == [129.5]


@pytest.mark.parametrize("nesterov", [True, False])
def test_against_rational_arithmetic(nesterov: bool, device: str) -> None:
    inputs = make((256,), torch.float32, torch.float32, nesterov=nesterov)(device)
    beta, rest = (Fraction(torch.tensor(value).item()) for value in (0.95, 1.0 - 0.95))
    averages, results = [], []
    for g, m in zip(inputs["grad"].tolist(), inputs["momentum_buffer"].tolist(), strict=True):
        average = nearest_float32(Fraction(m) * beta + nearest_float32(rest * Fraction(g)))
        averages.append(average)
        results.append(nearest_float32(Fraction(g) * rest + nearest_float32(beta * average)) if nesterov else average)
    out = tk_engram.engram_sinkhorn_momentum_update(**inputs)
    assert out.tolist() == [float(x) for x in results]
    assert inputs["momentum_buffer"].tolist() == [float(x) for x in averages]


def test_sums_are_rounded_once(device: str) -> None:
    # 1 + (2⁻²⁴ + 2⁻⁵⁴ or so) is just above the middle of two float32; rounded to float64 first it would be the middle.
    beta, m = 16519105 * 2.0**-24, 130 * 2.0**-31
    product = Fraction(beta) * Fraction(m)
    assert product == Fraction(1, 2**24) + Fraction(1, 2**54)
    rest = torch.tensor(1.0 - beta, dtype=torch.float32).item()
    # A gradient whose product with 1 - β is rounded to exactly 1.
    g = torch.tensor(1 / rest, dtype=torch.float32)
    g = next(x for x in (g, g.nextafter(g * 2), g.nextafter(g * 0)) if (x * rest).item() == 1.0)
    buffer = torch.tensor([m], device=device)
    tk_engram.engram_sinkhorn_momentum_update(g.to(device)[None], buffer, beta)
    assert buffer.tolist() == [1 + 2.0**-23]


@pytest.mark.parametrize("beta1", [0, 1, 0.0, 1.0])
def test_ends_of_the_range(beta1: float) -> None:
    g, m = torch.randn(8), torch.randn(8)
    before = m.clone()
    out = tk_engram.engram_sinkhorn_momentum_update(g, m, beta1)
    expected = before if beta1 else g
    torch.testing.assert_close((m, out), (expected, expected), rtol=0, atol=0)


GOOD: dict[str, Any] = {"grad": torch.ones(6), "momentum_buffer": torch.full((6,), 7.0), "beta1": 0.5}


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"momentum_buffer": torch.ones(7)}, ValueError, "momentum_buffer: .*shape"),
        ({"beta1": float("nan")}, ValueError, "beta1: .*finite"),
        ({"beta1": -0.1}, ValueError, "beta1: .*at least 0"),
        ({"beta1": 1.1}, ValueError, "beta1: .*at most 1"),
    ],
)


@pytest.mark.gpu(gib=17)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_elements = 2**31 + 8 * 4096 + 8
    grad = torch.ones(num_elements, dtype=torch.bfloat16, device="cuda")
    buffer = torch.zeros_like(grad)
    grad[-9:], buffer[-9:] = 3.0, 5.0
    last = (grad[-9:].clone(), buffer[-9:].clone())
    out = tk_engram.engram_sinkhorn_momentum_update(grad, buffer, 0.75)
    expected = reference.engram_sinkhorn_momentum_update(*last, 0.75)
    assert_equal((out[-9:].clone(), buffer[-9:].clone()), (expected, last[1]))
    assert out[: 2**31 : 2**20].eq(out[0]).all()
