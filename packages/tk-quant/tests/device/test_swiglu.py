"""The device functions of swiglu.cuh."""

import numpy as np
import pytest
import torch

from tk_core.arch import Arch, arch_from_name, get_arch
from tk_core.kernel import kernel
from tk_core.testing import assert_equal
from tk_quant.device.swiglu import NEAR_LIMIT, silu
from tk_quant.reference.lib.swiglu import swiglu_forward

F32, F64 = np.float32, np.float64


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


@kernel
def _silu_kernel(arch: Arch) -> object:
    import tilelang.language as T

    num_gates = T.dynamic("num_gates")

    @T.prim_func
    def silu_of_gates(
        gate: T.Tensor((num_gates,), "float32"),
        out: T.Tensor((num_gates,), "float32"),
        near: T.Tensor((num_gates,), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_gates, 128), threads=128) as block:
            index = block * 128 + T.get_thread_binding()
            if index < num_gates:
                out[index] = silu(gate[index])
                near[index] = silu(gate[index], is_near=True)

    return silu_of_gates


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_silu_compiles(arch: str) -> None:
    source = _silu_kernel.compile(arch_from_name(arch)).source()
    assert "tk_silu_near" in source
    assert "__expf" not in source


@pytest.mark.gpu
def test_silu_of_every_bfloat16() -> None:
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).float()
    out, near = torch.empty_like(gate), torch.empty_like(gate)
    _silu_kernel(get_arch(gate.device))(gate, out, near)
    expected = swiglu_forward(torch.stack((gate, torch.ones_like(gate)), dim=-1)).flatten()
    finite = ~gate.isnan()
    assert_equal(out[finite], expected[finite])
    assert bool(out[~finite].isnan().all())
    assert bool(near[~finite].isnan().all())
    inside = gate.abs() <= 87
    assert_equal(near[inside], expected[inside])
