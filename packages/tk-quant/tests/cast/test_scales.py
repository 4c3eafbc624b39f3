"""Divisions without branches."""

from typing import Any

import numpy as np
import pytest
import torch

from tk_core.arch import Arch, arch_from_name, get_arch
from tk_core.kernel import kernel
from tk_core.testing import assert_equal
from tk_core.testing.usage import lower
from tk_quant.cast.scales import quick_sf_of_amax, quotient, reciprocal
from tk_quant.reference.swiglu import Gating, float32_forward
from tk_quant.swiglu.activation import (
    NEAR_ALPHA,
    NEAR_LIMIT,
    NEAR_LIMIT_OF_GELU,
    NEAR_SF,
    NEAR_SF_OF_GELU,
    near_logistic,
    near_sigmoid,
    near_silu,
)

F32, F64 = np.float32, np.float64


def gelu_exponent(x: np.ndarray) -> np.ndarray:
    """z of gelu_tanh, about."""
    return 1.5957691 * x + 0.07135482 * x**3


def test_near_sf() -> None:
    assert F32(448) * F32(NEAR_SF) <= 87
    assert gelu_exponent(F32(448) * F32(NEAR_SF_OF_GELU)) <= 87


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once: exact product in float64, sum rounded to odd, then to float32."""
    product, c = a.astype(F64) * b.astype(F64), c.astype(F64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits & 1 == 0), bits + step, bits).view(F64).astype(F32)


def offset(x: np.ndarray, steps: int) -> np.ndarray:
    """The float32 `steps` further from 0 than positive x."""
    return (x.view(np.int32) + steps).view(F32)


def near_gates() -> np.ndarray:
    """All bfloat16 within ±87 as float32, both zeros among them."""
    gates = (np.arange(1 << 16, dtype=np.uint32) << 16).view(F32)
    return gates[np.abs(gates) <= 87]


def test_near_limit() -> None:
    assert np.uint32(NEAR_LIMIT << 16).view(F32) == 87
    limit_of_gelu = np.uint32(NEAR_LIMIT_OF_GELU << 16).view(F32)
    assert gelu_exponent(limit_of_gelu) <= 87 < gelu_exponent(limit_of_gelu * (1 + 2.0**-7))
    # d stays normal, and so does 1 / d.
    assert 1 + np.exp(np.float64(87)) < 2.0**126


@pytest.mark.parametrize("exp_error", [-1, 0, 1])
@pytest.mark.parametrize("reciprocal_error", [-1, 0, 1])
def test_quick_division_is_correctly_rounded(exp_error: int, reciprocal_error: int) -> None:
    gate = near_gates()
    assert gate.size == 2 * (NEAR_LIMIT + 1)
    d = F32(1) + offset(np.exp(-gate.astype(F64)).astype(F32), exp_error)
    r = offset((1 / d.astype(F64)).astype(F32), reciprocal_error)
    q = gate * r
    quick = fma(-fma(d, q, -gate), r, q)
    wrong = quick.view(np.int32) != (gate / d).view(np.int32)
    # Where r has to be the nearest.
    assert (d[wrong] == F32(2 - 2.0**-23)).all()
    assert not wrong.any() or reciprocal_error != 0


@pytest.mark.parametrize("exp_error", [-1, 0, 1])
@pytest.mark.parametrize("alpha", [2.0**-20, 0.37, 1.702, NEAR_ALPHA, None])
def test_refined_quotient_is_correctly_rounded(alpha: float | None, exp_error: int) -> None:
    """Of a gate and its divisor, for silu with an alpha and for gelu_tanh, whose alpha is None here."""
    gate = (np.arange(1 << 16, dtype=np.uint32) << 16).view(F32)
    with np.errstate(all="ignore"):
        z = (gelu_exponent(gate.astype(F64)) if alpha is None else F64(alpha) * gate).astype(F32)
    gate, z = gate[np.abs(z) <= 87], z[np.abs(z) <= 87]
    d = F32(1) + offset(np.exp(-z.astype(F64)).astype(F32), exp_error)
    s = (1 / d.astype(F64)).astype(F32)
    once = fma(-fma(d, gate * s, -gate), s, gate * s)
    twice = fma(-fma(d, once, -gate), s, once)
    assert np.array_equal(twice.view(np.int32), (gate / d).view(np.int32))


@kernel
def _divisions_kernel(arch: Arch) -> Any:
    """Counts float32 for which our divisions and IEEE's differ: sigmoid and SiLU within ±87, sf and s of an amax.

    Also x / (1 + exp(-z)) for some multiples z of x.
    """
    import tilelang.language as T

    infinity = T.uint32(0x7F800000)

    def bits_of(x: T.float32) -> T.uint32:
        return T.reinterpret(x, "uint32")

    def is_nan(bits: T.uint32) -> T.bool:
        return (bits & T.uint32(0x7FFFFFFF)) > infinity

    def canonical(bits: T.uint32) -> T.uint32:
        """The bits, the same for every NaN."""
        return T.if_then_else(is_nan(bits), T.uint32(0x7FFFFFFF), bits)

    def differ(bits: T.uint32, expected: T.float32) -> T.bool:
        return canonical(bits) != canonical(bits_of(expected))

    @T.macro
    def check_sigmoid(wrong: T.Tensor, x: T.float32) -> None:
        result, product = near_sigmoid(x)
        d = T.float32(1) + T.exp(-x)
        if differ(bits_of(result), T.float32(1) / d) or differ(bits_of(product), x / d):
            T.atomic_add(wrong[0], 1)

    @T.macro
    def check_silu(wrong: T.Tensor, x: T.float32, exp_error: int) -> None:
        d = T.float32(1) + T.reinterpret(T.reinterpret(T.exp(-x), "int32") + exp_error, "float32")
        if differ(bits_of(quotient(x, d, reciprocal(d))), x / d):
            T.atomic_add(wrong[9], 1)

    @T.macro
    def check_logistic(wrong: T.Tensor, x: T.float32, z: T.float32) -> None:
        if T.abs(z) <= T.float32(87):
            result, product = near_logistic(x, z)
            d = T.float32(1) + T.exp(-z)
            if differ(bits_of(result), T.float32(1) / d) or differ(bits_of(product), x / d):
                T.atomic_add(wrong[10], 1)

    @T.macro
    def check_scale(wrong: T.Tensor, bits: T.uint32, fmt: str, largest: float, first: int) -> None:
        amax = T.reinterpret(bits, "float32")
        least = amax / T.float32(largest)
        scale, factor = quick_sf_of_amax(T.reinterpret(bits, "int32"), fmt, False)
        if differ(bits_of(scale), least):
            T.atomic_add(wrong[first], 1)
        if differ(bits_of(factor), T.float32(largest) / amax):
            T.atomic_add(wrong[first + 1], 1)
        power, inverse = quick_sf_of_amax(T.reinterpret(bits, "int32"), fmt, True)
        is_power = (bits_of(power) & T.uint32(0x7FFFFF)) == T.uint32(0)
        is_least = is_power and power >= least and power * T.float32(0.5) < least
        is_right = T.if_then_else(bits == infinity, bits_of(power) == infinity, is_least)
        if not T.if_then_else(is_nan(bits), is_nan(bits_of(power)), is_right):
            T.atomic_add(wrong[first + 2], 1)
        if differ(bits_of(inverse), T.float32(1) / power):
            T.atomic_add(wrong[first + 3], 1)

    @T.prim_func
    def count(wrong: T.Tensor((11,), "int32")) -> None:
        with T.Kernel(2**22, threads=128) as block:
            first = (T.cast(block, "uint32") * T.uint32(128) + T.cast(T.get_thread_binding(), "uint32")) * T.uint32(8)
            bits = T.alloc_var("uint32")
            x = T.alloc_var("float32")
            for i in T.serial(8):
                bits = first + T.cast(i, "uint32")
                x = T.reinterpret(bits, "float32")
                if T.abs(x) <= T.float32(87) or is_nan(bits):
                    check_sigmoid(wrong, x)
                if T.abs(x) <= T.float32(87):
                    # exp one unit in the last place off.
                    check_silu(wrong, x, -1)
                    check_silu(wrong, x, 1)
                check_logistic(wrong, x, x * T.float32(0.37))
                check_logistic(wrong, x, x * T.float32(1.702))
                check_logistic(wrong, x, x * T.float32(NEAR_ALPHA))
                if x >= T.float32(448 * 2.0**-126) or (is_nan(bits) and bits < T.uint32(0x80000000)):
                    check_scale(wrong, bits, "e4m3", 448.0, 1)
                if x >= T.float32(6 * 2.0**-126) or (is_nan(bits) and bits < T.uint32(0x80000000)):
                    check_scale(wrong, bits, "e2m1", 6.0, 5)

    return count


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_divisions_are_by_reciprocals(arch: str) -> None:
    assert "fast_rcp(" in lower(_divisions_kernel, arch_from_name(arch), simplified=False).kernel_source


@pytest.mark.gpu
def test_divisions_of_every_float32() -> None:
    wrong = torch.zeros(11, dtype=torch.int32, device="cuda")
    _divisions_kernel(get_arch(wrong.device))(wrong)
    assert wrong.tolist() == [0] * 11


@kernel
def _silu_kernel(arch: Arch) -> object:
    import tilelang.language as T

    num_gates = T.dynamic("num_gates")

    @T.prim_func
    def silu_of_gates(gate: T.Tensor((num_gates,), "float32"), near: T.Tensor((num_gates,), "float32")) -> None:
        with T.Kernel(T.ceildiv(num_gates, 128), threads=128) as block:
            index = block * 128 + T.get_thread_binding()
            if index < num_gates:
                near[index] = near_silu(gate[index])

    return silu_of_gates


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_silu_is_by_reciprocals(arch: str) -> None:
    source = lower(_silu_kernel, arch_from_name(arch), simplified=False).kernel_source
    assert "fast_rcp(" in source
    assert "__expf" not in source


@pytest.mark.gpu
def test_silu_of_every_bfloat16() -> None:
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).float()
    near = torch.empty_like(gate)
    _silu_kernel(get_arch(gate.device))(gate, near)
    expected = float32_forward(torch.stack((gate, torch.ones_like(gate)), dim=-1), Gating()).flatten()
    assert bool(near[gate.isnan()].isnan().all())
    inside = gate.abs() <= 87
    assert_equal(near[inside], expected[inside])
