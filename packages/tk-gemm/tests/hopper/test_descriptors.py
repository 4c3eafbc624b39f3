"""What host code hands to TMA: run with tensors that only say that they are in GPU memory."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.kernel import KernelRequest
from tk_gemm.hopper.fp8 import fp8_product_kernel
from tk_gemm.hopper.tiles import WIDE


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor; device and dtype as they lie in memory."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32)),
        *(("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p)),
        *(("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    ]


_DTYPES = {torch.float8_e4m3fn: (10, 8, 1, 0), torch.float32: (2, 32, 1, 0), torch.bfloat16: (4, 16, 1, 0)}


def _on_gpu(x: torch.Tensor, kept: list[Any]) -> Any:
    """A tensor of this dtype, shape and strides that says it is in GPU memory; `kept` has what must outlive it."""
    import tvm_ffi

    sizes = [(ctypes.c_int64 * x.ndim)(*values) for values in (x.shape, x.stride())]
    managed = _Managed(1 << 40, (2, 0), x.ndim, _DTYPES[x.dtype], *(ctypes.addressof(each) for each in sizes))
    kept += [managed, *sizes]
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.addressof(managed), b"dltensor", None)
    return tvm_ffi.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (2, 0)))


@pytest.mark.compile
def test_a_descriptor_of_a_large_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host code of 73,728 × 36,864 results, up to the first of the descriptors that it makes: that of d."""
    import tvm_ffi

    args = ("dense", WIDE, torch.bfloat16, True, None, arch_from_name("sm_90a"))
    request = KernelRequest(fp8_product_kernel, args)
    function, kept = request.compile().function, []
    m, n, k = 73728, 36864, 128
    e4m3 = torch.float8_e4m3fn
    shapes = (((1, m, k), e4m3), ((1, 1, m), torch.float32), ((1, n, k), e4m3), ((n // 128,), torch.float32))
    operands = [_on_gpu(torch.empty(shape, dtype=dtype, device="meta"), kept) for shape, dtype in shapes]
    d = _on_gpu(torch.empty(1, m, n, dtype=torch.bfloat16, device="meta"), kept)
    found: list[Any] = []

    def create(*args: Any) -> None:
        found.extend(args)
        raise RuntimeError("after one descriptor")

    names = ("__tvm_tensormap_create_tiled", "__tvm_set_device")
    before = [tvm_ffi.get_global_func(name) for name in names]
    try:
        for name, stub in zip(names, (create, lambda *_: None)):
            tvm_ffi.register_global_func(name, stub, override=True)
        with pytest.raises(RuntimeError, match="after one descriptor"):
            function(*operands, None, None, d, 132)
    finally:
        for name, original in zip(names, before):
            tvm_ffi.register_global_func(name, original, override=True)
    rank = found[2]
    assert found[4 : 4 + rank] == [n, m, 1]
    assert found[4 + rank : 4 + 2 * rank] == [2, 2 * n, 2 * m * n]
