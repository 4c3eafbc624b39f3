"""Tensors of more than 2³¹ elements, and strides of as many: the first and last rows come out as they do alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_quant
from tk_core.testing import assert_equal
from tk_core.testing.trees import tensors

HIDDEN = 8192
SAMPLE = 256
ROWS = 2**31 // HIDDEN + SAMPLE
APART = 2**31 + 2**10
"""Elements from one row to the next where rows are far apart."""

pytestmark = pytest.mark.gpu(gib=12)


def _rows(dtype: torch.dtype, width: int = HIDDEN) -> Tensor:
    """(ROWS, width) on the GPU: zeros, but for the first and last SAMPLE rows."""
    x = torch.zeros(ROWS, width, dtype=dtype, device="cuda")
    for part in (x[:SAMPLE], x[-SAMPLE:]):
        if dtype.is_floating_point and dtype.itemsize > 1:
            part.copy_(torch.randn(SAMPLE, width, device="cuda"))
        else:
            part.view(torch.uint8).random_(0, 120)
    return x


def _pair(dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Codes, and powers of two as their scale factors, one for each `group` channels."""
    codes_a_byte = 2 if dtype is torch.int8 else 1
    codes = _rows(dtype, HIDDEN // codes_a_byte)
    sf = torch.ones(ROWS, HIDDEN // group, device="cuda")
    sf[:SAMPLE], sf[-SAMPLE:] = 2.0**-3, 2.0**5
    return codes, sf


def _part(tree: Any, end: bool) -> Any:
    """The first or last rows of each tensor, alone in their memory."""
    if isinstance(tree, tuple):
        return tuple(_part(x, end) for x in tree)
    return (tree[-SAMPLE:] if end else tree[:SAMPLE]).clone()


def _assert_ends(op: Callable[[Any], Any], x: Any) -> None:
    """Compare what op makes of the first and last rows of x alone with that part of what it makes of x."""
    whole = tensors(op(x))
    for end in (False, True):
        for of_all, alone in zip(whole, tensors(op(_part(x, end)))):
            for dim, (size, least) in enumerate(zip(of_all.shape, alone.shape)):
                of_all = of_all.narrow(dim, size - least if end else 0, least)
            assert_equal(of_all.contiguous(), alone.contiguous())


CASTS = {
    "per_token": lambda x: tk_quant.per_token_cast(x, "e4m3", 128, use_tma_aligned_col_major_sf=True),
    "per_token_e5m6": lambda x: tk_quant.per_token_cast_to_e5m6(x, HIDDEN),
    "per_block": lambda x: tk_quant.per_block_cast(x, "e4m3", (128, 128)),
    "per_channel": lambda x: tk_quant.per_channel_cast(x, "e4m3", 128),
    "per_channel_and_transpose": lambda x: tk_quant.per_channel_cast_and_transpose(x, "e4m3", 128),
    "per_token_and_channel": lambda x: tk_quant.per_token_and_channel_cast(x, "e4m3", 128, 128),
    "swiglu_per_channel": lambda x: tk_quant.swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 128),
    "transpose": tk_quant.transpose,
}


@pytest.mark.parametrize("name", CASTS)
def test_plain(name: str) -> None:
    _assert_ends(CASTS[name], _rows(torch.bfloat16))


def test_e4m3() -> None:
    x = _pair(torch.float8_e4m3fn, 128)
    _assert_ends(lambda x: tk_quant.cast_back(x, "bf16", (1, 128)), x)
    _assert_ends(lambda x: tk_quant.per_token_cast(x, "e4m3", 64, x_block_size=(1, 128)), x)
    _assert_ends(lambda x: tk_quant.per_channel_cast_fused(x, "e4m3", 128, num_per_channels=128), x)


def test_e2m1() -> None:
    x = _pair(torch.int8, 32)
    _assert_ends(lambda x: tk_quant.per_block_cast_lossless(x, "e4m3", (1, 32), (1, 128)), x)
    _assert_ends(tk_quant.unpack_from_e2m1fn_x2, x[0])


@pytest.mark.parametrize("num_rows", [SAMPLE, ROWS])
def test_gather(num_rows: int) -> None:
    """From the end of a large x, and to a large result."""
    codes, sf = _pair(torch.float8_e4m3fn, 128)
    pos = (ROWS - 1 - torch.arange(num_rows, device="cuda") % SAMPLE).int()
    data, data_sf = tk_quant.per_channel_cast_fused((codes, sf), "e4m3", 128, num_per_channels=128, pos_to_token=pos)
    last = codes[-SAMPLE:].view(torch.uint8).flip(0).view(codes.dtype), sf[-SAMPLE:].clone()
    expected, expected_sf = tk_quant.per_channel_cast_fused(last, "e4m3", 128, num_per_channels=128)
    for each in (slice(None, SAMPLE), slice(-SAMPLE, None)):
        assert_equal(data[each].clone(), expected)
        assert_equal(data_sf[each.start and each.start // 128 : each.stop and each.stop // 128].clone(), expected_sf)


def _far_apart(dtype: torch.dtype, shape: tuple[int, ...], stride: int = APART) -> Tensor:
    """A tensor of two rows (or matrices) that lie `stride` elements apart."""
    inner = torch.empty(shape[1:], device="meta").stride()
    storage = torch.empty(stride + 2**16, dtype=dtype, device="cuda")
    x = storage.as_strided(shape, (stride, *inner))
    for row in x:
        if dtype.itemsize > 1:
            row.copy_(torch.randn(shape[1:], device="cuda"))
        else:
            row.view(torch.uint8).random_(0, 120)
    return x


FAR_APART = {
    "per_token": (torch.bfloat16, 256, lambda x: tk_quant.per_token_cast(x, "e4m3", 128)),
    "swiglu": (torch.bfloat16, 256, lambda x: tk_quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128)),
    "cast_back": (
        torch.float8_e4m3fn,
        256,
        lambda x: tk_quant.cast_back((x, torch.ones(2, 2, device="cuda")), "bf16", (1, 128)),
    ),
    "lossless": (
        torch.int8,
        128,
        lambda x: tk_quant.per_block_cast_lossless((x, torch.ones(2, 8, device="cuda")), "e4m3", (1, 32), (1, 128)),
    ),
}


@pytest.mark.parametrize("name", FAR_APART)
def test_rows_far_apart(name: str) -> None:
    dtype, width, op = FAR_APART[name]
    x = _far_apart(dtype, (2, width))
    assert_equal(op(x), op(x.contiguous()))


def test_matrices_far_apart() -> None:
    x = _far_apart(torch.float8_e4m3fn, (2, 64, 128))
    assert_equal(tk_quant.batched_transpose(x), tk_quant.batched_transpose(x.contiguous()))


@pytest.mark.parametrize("stride", [APART, 2**32 + 2**10])
def test_gathered_rows_far_apart(stride: int) -> None:
    """One kernel multiplies by strides of 32 bits; past them another one serves."""
    x = _far_apart(torch.float8_e4m3fn, (2, HIDDEN), stride)
    sf, pos = torch.rand(2, HIDDEN // 128, device="cuda"), (torch.arange(4096, device="cuda") % 3 - 1).int()
    more = {"num_per_channels": 128, "pos_to_token": pos}
    actual = tk_quant.per_channel_cast_fused((x, sf), "e4m3", 128, **more)
    assert_equal(actual, tk_quant.per_channel_cast_fused((x.contiguous(), sf), "e4m3", 128, **more))
