"""unpack_from_e2m1fn_x2."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.testing import assert_equal, tiers
from tk_quant.testing.dequantize.unpack_from_e2m1fn_x2 import SPEC

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)


def test_by_hand() -> None:
    codes = torch.tensor([[0x10, 0x32], [0x54, 0x76], [0x98, 0xBA], [0xDC, 0xFE]], dtype=torch.uint8)
    values = [[0.0, 0.5, 1.0, 1.5], [2.0, 3.0, 4.0, 6.0], [-0.0, -0.5, -1.0, -1.5], [-2.0, -3.0, -4.0, -6.0]]
    assert_equal(tk_quant.unpack_from_e2m1fn_x2(codes), torch.tensor(values))
    assert_equal(
        tk_quant.unpack_from_e2m1fn_x2(codes.view(torch.int8), torch.bfloat16), torch.tensor(values).bfloat16()
    )


def test_every_byte_against_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = np.stack((codes & 0xF, codes >> 4), axis=-1).reshape(-1).view(ml_dtypes.float4_e2m1fn)
    out = tk_quant.unpack_from_e2m1fn_x2(torch.from_numpy(codes))
    assert_equal(out, torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 0), (0, 2), (2, 3, 4), (1, 1, 1, 5)])
def test_shapes(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        out = tk_quant.unpack_from_e2m1fn_x2(torch.zeros(shape, dtype=torch.uint8), dtype)
        assert out.shape == (*shape[:-1], 2 * shape[-1])
        assert out.dtype is dtype
        assert out.is_contiguous()


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no float4_e2m1fn_x2")
def test_float4_dtype() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    expected = tk_quant.unpack_from_e2m1fn_x2(codes)
    assert_equal(tk_quant.unpack_from_e2m1fn_x2(codes.view(torch.float4_e2m1fn_x2)), expected)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (([1, 2],), TypeError, "x: expected a torch.Tensor"),
        ((torch.zeros(4),), TypeError, "x: expected dtype"),
        ((torch.zeros((), dtype=torch.int8),), ValueError, "x: expected at least one dimension"),
        ((torch.zeros(4, 4, dtype=torch.int8).t(),), ValueError, "x: expected contiguous"),
        ((torch.zeros(4, 4, dtype=torch.int8)[:, ::2],), ValueError, "x: expected contiguous"),
        ((torch.zeros(4, dtype=torch.int8), torch.float16), TypeError, "out_dtype: expected torch.float32 or"),
        ((torch.zeros(4, dtype=torch.int8), "bf16"), TypeError, "out_dtype: expected torch.float32 or"),
    ],
)
def test_bad_input(args: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_quant.unpack_from_e2m1fn_x2(*args)
