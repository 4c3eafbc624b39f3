"""The device functions of division.cuh."""

from typing import Any

import numpy as np
import pytest
import torch

from tk_core.arch import Arch, arch_from_name, get_arch
from tk_core.kernel import kernel
from tk_quant.device.division import NEAR_SF, scale_of_amax, sigmoid

F32 = np.float32


def test_near_sf() -> None:
    assert F32(448) * F32(NEAR_SF) <= 87
    # d and 1 / d stay normal.
    assert 1 + np.exp(np.float64(87)) < 2.0**126


@kernel
def _divisions_kernel(arch: Arch) -> Any:
    """Counts float32 of which our divisions and IEEE's differ: sigmoid within ±87, sigmoid, sf and s of an amax."""
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
    def check_sigmoid(wrong: T.Tensor, index: int, x: T.float32, result: T.Buffer, is_near: bool) -> None:
        sigmoid(x, T.address_of(result[0]), T.address_of(result[1]), is_near)
        d = T.float32(1) + T.exp(-x)
        if differ(bits_of(result[0]), T.float32(1) / d) or differ(bits_of(result[1]), x / d):
            T.atomic_add(wrong[index], 1)

    @T.macro
    def check_scale(wrong: T.Tensor, bits: T.uint32, scale: T.Buffer) -> None:
        amax = T.reinterpret(bits, "float32")
        least = amax / T.float32(448)
        scale_of_amax(T.reinterpret(bits, "int32"), T.address_of(scale[0]), T.address_of(scale[1]), False)
        if differ(scale[0], least):
            T.atomic_add(wrong[2], 1)
        if differ(scale[1], T.float32(448) / amax):
            T.atomic_add(wrong[3], 1)
        scale_of_amax(T.reinterpret(bits, "int32"), T.address_of(scale[0]), T.address_of(scale[1]), True)
        power = T.reinterpret(scale[0], "float32")
        is_power = (scale[0] & T.uint32(0x7FFFFF)) == T.uint32(0)
        is_least = is_power and power >= least and power * T.float32(0.5) < least
        is_right = T.if_then_else(bits == infinity, scale[0] == infinity, is_least)
        if not T.if_then_else(is_nan(bits), is_nan(scale[0]), is_right):
            T.atomic_add(wrong[4], 1)
        if differ(scale[1], T.float32(1) / power):
            T.atomic_add(wrong[5], 1)

    @T.prim_func
    def count(wrong: T.Tensor((6,), "int32")) -> None:
        with T.Kernel(2**22, threads=128) as block:
            first = (T.cast(block, "uint32") * T.uint32(128) + T.cast(T.get_thread_binding(), "uint32")) * T.uint32(8)
            result = T.alloc_local((2,), "float32")
            scale = T.alloc_local((2,), "uint32")
            bits = T.alloc_var("uint32")
            x = T.alloc_var("float32")
            for i in T.serial(8):
                bits = first + T.cast(i, "uint32")
                x = T.reinterpret(bits, "float32")
                if T.abs(x) <= T.float32(87) or is_nan(bits):
                    check_sigmoid(wrong, 0, x, result, True)
                check_sigmoid(wrong, 1, x, result, False)
                if x >= T.float32(1e-4) or (is_nan(bits) and bits < T.uint32(0x80000000)):
                    check_scale(wrong, bits, scale)

    return count


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_divisions_compile(arch: str) -> None:
    assert "tk_scale_of_amax<true>(" in _divisions_kernel.compile(arch_from_name(arch)).source()


@pytest.mark.gpu
def test_divisions_of_every_float32() -> None:
    wrong = torch.zeros(6, dtype=torch.int32, device="cuda")
    _divisions_kernel(get_arch(wrong.device))(wrong)
    assert wrong.tolist() == [0] * 6
