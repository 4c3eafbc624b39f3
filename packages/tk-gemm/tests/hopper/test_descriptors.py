"""What host code hands to TMA: run with tensors that only say that they are in GPU memory."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_core.arch import arch_from_name
from tk_core.kernel import KernelRequest
from tk_gemm.blackwell.fp8 import fp8_product_blackwell_kernel
from tk_gemm.group_maps import group_maps_kernel
from tk_gemm.hopper.fp8 import fp8_product_kernel
from tk_gemm.hopper.tiles import BY_K, WIDE


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor; device and dtype as they lie in memory."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32)),
        *(("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p)),
        *(("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)),
    ]


_DTYPES = {torch.float8_e4m3fn: (10, 8, 1, 0), torch.float32: (2, 32, 1, 0), torch.bfloat16: (4, 16, 1, 0)}
_DTYPES |= {torch.int32: (0, 32, 1, 0), torch.int64: (0, 64, 1, 0)}


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


def _descriptors(function: Callable[..., None], count: int, *args: Any) -> list[list[Any]]:
    """What a kernel's host code makes its first `count` descriptors of."""
    import tvm_ffi

    found: list[list[Any]] = []

    def create(*args: Any) -> None:
        found.append(list(args[1:]))
        if len(found) == count:
            raise RuntimeError("enough descriptors")

    names = ("__tvm_tensormap_create_tiled", "__tvm_set_device")
    before = [tvm_ffi.get_global_func(name) for name in names]
    try:
        for name, stub in zip(names, (create, lambda *_: None)):
            tvm_ffi.register_global_func(name, stub, override=True)
        with pytest.raises(RuntimeError, match="enough descriptors"):
            function(*args)
    finally:
        for name, original in zip(names, before):
            tvm_ffi.register_global_func(name, original, override=True)
    return found


@pytest.mark.compile
def test_a_descriptor_of_a_large_result() -> None:
    """The host code of 73,728 × 36,864 results, up to the first of the descriptors that it makes: that of d."""
    args = ("dense", WIDE, torch.bfloat16, True, None, arch_from_name("sm_90a"))
    function, kept = KernelRequest(fp8_product_kernel, args).compile().function, []
    m, n, k = 73728, 36864, 128
    e4m3 = torch.float8_e4m3fn
    shapes = (((1, m, k), e4m3), ((1, 1, m), torch.float32), ((1, n, k), e4m3), ((n // 128,), torch.float32))
    operands = [_on_gpu(torch.empty(shape, dtype=dtype, device="meta"), kept) for shape, dtype in shapes]
    d = _on_gpu(torch.empty(1, m, n, dtype=torch.bfloat16, device="meta"), kept)
    ((_, rank, _, *found),) = _descriptors(function, 1, *operands, None, None, d, 132)
    assert found[:rank] == [n, m, 1]
    assert found[rank : 2 * rank] == [2, 2 * n, 2 * m * n]


@pytest.mark.compile
@pytest.mark.parametrize("is_hopper", [True, False], ids=["hopper", "blackwell"])
def test_maps_of_groups_load_as_descriptors_do(is_hopper: bool) -> None:
    """Boxes, swizzle, promotion and filling are those of TileLang's descriptors of A and B as matrices."""
    arch, kept = arch_from_name("sm_90a" if is_hopper else "sm_100a"), []
    m, n, k, e4m3 = 272, 400, 512, torch.float8_e4m3fn

    def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return _on_gpu(torch.empty(shape, dtype=dtype, device="meta"), kept)

    if is_hopper:
        product, args = fp8_product_kernel, ("k", BY_K, torch.float32, True, None, arch)
    else:
        product, args = fp8_product_blackwell_kernel, ("k", torch.float32, True, False, arch)
    a_sf, b_sf = (on_gpu(1, 4, rows) if is_hopper else on_gpu(1, 1, rows, dtype=torch.int32) for rows in (m, n))
    layout, d, maps = on_gpu(2, dtype=torch.int32), on_gpu(2, m, n), [] if is_hopper else [None, None]
    operands = on_gpu(1, m, k, dtype=e4m3), a_sf, on_gpu(1, n, k, dtype=e4m3), b_sf, layout, *maps, None, d, 1
    found = _descriptors(KernelRequest(product, args).compile().function, 5 if is_hopper else 4, *operands)
    of_matrices = [each for each in found if each[0] == 0]
    function = KernelRequest(group_maps_kernel, (BY_K.block_m, BY_K.block_n, arch)).compile().function
    flat = (on_gpu(rows, k, dtype=e4m3) for rows in (m, n))
    of_maps = _descriptors(function, 2, *flat, layout, *(on_gpu(2, 16, dtype=torch.int64) for _ in "ab"))
    assert len(of_matrices) == len(of_maps) == 2
    for (_, rank, _, *matrix), (dtype, map_rank, _, *like) in zip(of_matrices, of_maps):
        assert (rank, dtype, map_rank) == (3, 0, 2)
        for part in range(4):  # Sizes, strides, box, strides of the box.
            assert like[part * 2 : part * 2 + 2] == matrix[part * 3 : part * 3 + 2]
        assert like[8:] == matrix[12:]
