"""The instructions of encode_e2m1x8; the tests of the casts cover its values."""

from typing import Any

import pytest

from tk_core.arch import Arch, arch_from_name
from tk_core.device.e2m1 import encode_e2m1x8
from tk_core.kernel import kernel
from tk_core.testing.usage import cuobjdump


@kernel
def _fp4_kernel(arch: Arch) -> Any:
    import tilelang.language as T

    @T.prim_func
    def fp4(x: T.Tensor((32, 8), "float32"), codes: T.Tensor((32,), "uint32")) -> None:
        with T.Kernel(1, threads=32):
            lane = T.get_thread_binding()
            y = T.alloc_local((8,), "float32")
            for i in T.vectorized(8):
                y[i] = x[lane, i]
            codes[lane] = encode_e2m1x8(y[i] for i in range(8))

    return fp4


@pytest.mark.compile
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_casts_are_instructions_where_there_are_any(name: str) -> None:
    arch = arch_from_name(name)
    code = cuobjdump(_fp4_kernel.compile(arch), "--dump-sass")
    assert ("E2M1" in code) is arch.has_fp4_convert
