"""unpack_from_e2m1fn_x2."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers

from ..per_token.test_per_token_cast import BENCH

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def make(
    shape: tuple[int, ...], out_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.int8, first: int = 0
) -> Make:
    """Random bytes, from byte `first` of their storage."""

    def build(device: str) -> dict[str, Any]:
        size = 1
        for extent in shape:
            size *= extent
        codes = torch.randint(0, 256, (first + size,), dtype=torch.uint8, device=device)[first:].view(shape)
        x = codes if dtype is torch.uint8 else codes.view(dtype)
        return {"x": x} if out_dtype is None else {"x": x, "out_dtype": out_dtype}

    return build


def every_code(out_dtype: torch.dtype, dtype: torch.dtype) -> Make:
    """Every byte once."""

    def build(device: str) -> dict[str, Any]:
        codes = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
        return {"x": codes.view(dtype), "out_dtype": out_dtype}

    return build


_DTYPES = {"int8": torch.int8, "uint8": torch.uint8}
if hasattr(torch, "float4_e2m1fn_x2"):
    _DTYPES["float4"] = torch.float4_e2m1fn_x2

SPEC = OpSpec(
    op=tk_quant.unpack_from_e2m1fn_x2,
    cases=(
        *(
            Case(
                f"{name}-{_NAMES[out_dtype]}-every-code",
                every_code(out_dtype, dtype),
                small=name != "float4",
                modes=name == "int8",
            )
            for name, dtype in _DTYPES.items()
            for out_dtype in _NAMES
        ),
        Case("int8-default-3x5x7", make((3, 5, 7)), small=True),
        *(
            Case(f"uint8-{_NAMES[out_dtype]}-{size}", make((size,), out_dtype, torch.uint8), small=True)
            for out_dtype in _NAMES
            for size in (0, 1, 2, 3, 4, 7, 4097)
        ),
        *(
            Case(
                f"int8-{_NAMES[out_dtype]}-4099-from{first}",
                make((4099,), out_dtype, first=first),
                small=True,
                compile=first == 4,
            )
            for out_dtype in _NAMES
            for first in (1, 2, 4)
        ),
        *(
            Case(f"int8-{_NAMES[out_dtype]}-h{hidden}-t{tokens}", make((tokens, hidden // 2), out_dtype))
            for out_dtype in _NAMES
            for hidden in (576, 2048, 4096, 7168)
            for tokens in (0, 1, 4001, 8001)
        ),
        *(
            Case(
                f"int8-{_NAMES[out_dtype]}-h7168-t{tokens}-bench",
                make((tokens, 3584), out_dtype),
                **BENCH,
                model_shape=tokens == 8192,
            )
            for out_dtype in _NAMES
            for tokens in (64, 8192)
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


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


test_bad_input = tiers.bad_input(
    SPEC, {}, [({"x": torch.zeros((), dtype=torch.int8)}, ValueError, "x: expected at least one dimension")]
)
