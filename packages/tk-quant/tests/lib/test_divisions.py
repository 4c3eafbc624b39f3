"""The device functions of divisions.py."""

from typing import Any

import numpy as np
import pytest
import torch

from tk_core.arch import Arch, arch_from_name, get_arch
from tk_core.kernel import kernel
from tk_quant.lib.divisions import DIVISIONS_SOURCE, NEAR_SF

F32 = np.float32


def test_near_sf() -> None:
    assert F32(448) * F32(NEAR_SF) <= 87
    # d and 1 / d stay normal.
    assert 1 + np.exp(np.float64(87)) < 2.0**126


@kernel
def _divisions_kernel(arch: Arch) -> Any:
    """Counts float32 of which our divisions and IEEE's differ: sigmoid within ±87, sigmoid, sf and s of an amax."""
    import tilelang.language as T

    source = r"""
__device__ __forceinline__ bool tk_differ(float a, float b) {
  return isnan(b) ? !isnan(a) : __float_as_uint(a) != __float_as_uint(b);
}

__device__ __forceinline__ void tk_count_wrong(unsigned bits, int *wrong) {
  const float x = __uint_as_float(bits), d = 1.0f + expf(-x);
  float s, q;
  tk_sigmoid_near(x, &s, &q);
  if ((fabsf(x) <= 87.0f || isnan(x)) && (tk_differ(s, 1.0f / d) || tk_differ(q, x / d))) atomicAdd(wrong, 1);
  tk_sigmoid(x, &s, &q);
  if (tk_differ(s, 1.0f / d) || tk_differ(q, x / d)) atomicAdd(wrong + 1, 1);
  if (x >= 1e-4f || (isnan(x) && bits < 0x80000000u)) {
    unsigned sf, factor;
    tk_scale_of_amax<false>(int(bits), &sf, &factor);
    if (tk_differ(__uint_as_float(sf), x / 448.0f)) atomicAdd(wrong + 2, 1);
    if (tk_differ(__uint_as_float(factor), 448.0f / x)) atomicAdd(wrong + 3, 1);
    tk_scale_of_amax<true>(int(bits), &sf, &factor);
    const float power = __uint_as_float(sf), least = x / 448.0f;
    const bool is_least = isinf(x) ? isinf(power) : power >= least && power * 0.5f < least && (sf & 0x7fffffu) == 0u;
    if (isnan(x) ? !isnan(power) : !is_least) atomicAdd(wrong + 4, 1);
    if (tk_differ(__uint_as_float(factor), 1.0f / power)) atomicAdd(wrong + 5, 1);
  }
}
"""

    @T.prim_func
    def count(wrong: T.Tensor((6,), "int32")) -> None:
        with T.Kernel(2**22, threads=128) as block:
            T.import_source(DIVISIONS_SOURCE + source)
            first = (T.cast(block, "uint32") * T.uint32(128) + T.cast(T.get_thread_binding(), "uint32")) * T.uint32(8)
            for i in T.serial(8):
                T.call_extern("void", "tk_count_wrong", first + T.cast(i, "uint32"), T.address_of(wrong[0]))

    return count


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_divisions_compile(arch: str) -> None:
    assert "tk_count_wrong" in _divisions_kernel.compile(arch_from_name(arch)).source()


@pytest.mark.gpu
def test_divisions_of_every_float32() -> None:
    wrong = torch.zeros(6, dtype=torch.int32, device="cuda")
    _divisions_kernel(get_arch(wrong.device))(wrong)
    assert wrong.tolist() == [0] * 6
