"""per_token_and_channel_cast."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import tk_quant
from tk_core.testing import Case, Make, OpSpec, tiers

from ..per_token.test_per_token_cast import ALL_FLAGS, BENCH, LEAST_AMAX, MakeInput, extremes, normal, strided, tiny
from .test_per_channel_cast import quantize

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_BF16, _FP32 = torch.bfloat16, torch.float32


def extreme_blocks(num_tokens: int, hidden: int, dtype: torch.dtype) -> MakeInput:
    """Rows and columns of zeros, infinity, NaN and so on, with random values in between."""
    rows, columns = extremes(hidden, dtype), extremes(num_tokens, dtype)

    def build(device: str) -> torch.Tensor:
        x = torch.randn(num_tokens, hidden, device=device).to(dtype)
        x[32:56] = rows(device)
        x[64:, 40:64] = columns(device)[:, 64:].t()
        return x

    return build


def make(x: MakeInput, num_per_channels: int, num_per_tokens: int, flags: str, transpose: bool, **more: Any) -> Make:
    """Arguments of the op."""
    kwargs = {
        "fmt": "e4m3",
        "num_per_channels": num_per_channels,
        "num_per_tokens": num_per_tokens,
        "transpose_channel_data": transpose,
        **FLAGS[flags],
        **more,
    }
    return lambda device: {"x": x(device), **kwargs}


def _name(dtype: torch.dtype, groups: tuple[int, int], flags: str, transpose: bool) -> str:
    return f"{_NAMES[dtype]}-{groups[0]}-{groups[1]}-{flags}{'-transpose' if transpose else ''}"


FLAGS = {name: flags for name, flags in ALL_FLAGS.items() if name != "swizzled"}
# dtype, (num_per_channels, num_per_tokens), flags, transposed or not
_PATHS = tuple(
    (dtype, groups, flags, transpose)
    for dtype in (_BF16, _FP32)
    for groups, flags, transpose in (
        ((128, 128), "row", True),
        ((128, 128), "col", False),
        ((128, 32), "packed", True),
        ((32, 128), "col", True),
        ((32, 32), "row-round", False),
        ((32, 32), "packed", True),
    )
)


def _case(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    groups: tuple[int, int],
    flags: str,
    transpose: bool,
    suffix: str = "",
    **roles: Any,
) -> Case:
    return Case(
        f"{_name(dtype, groups, flags, transpose)}-h{hidden}-t{num_tokens}{suffix}",
        make(normal(num_tokens, hidden, dtype), *groups, flags, transpose),
        **roles,
    )


_MXFP8 = (_BF16, (32, 32), "packed", True)
_PACKED_ROWS = (_FP32, (32, 128), "packed-row", False)

SPEC = OpSpec(
    op=tk_quant.per_token_and_channel_cast,
    cases=(
        *(
            _case(
                128, hidden, *path, small=True, compile=hidden == 128 and index < 7, modes=hidden == 128 and index == 0
            )
            for hidden in (128, 64, 192)
            for index, path in enumerate(_PATHS)
        ),
        _case(256, 320, *_MXFP8, small=True, modes=True),
        _case(128, 320, *_PACKED_ROWS, small=True, modes=True),
        *(_case(0, 128, *path, small=True) for path in (_PATHS[0], _MXFP8)),
        *(
            Case(
                f"{_name(*path)}-extremes",
                make(extreme_blocks(128, 192, path[0]), *path[1], *path[2:]),
                small=True,
            )
            for path in _PATHS
        ),
        *(
            Case(
                f"{_name(*path)}-h192-tiny",
                make(tiny(128, 192, path[0]), *path[1], *path[2:], sf_clamp_min=LEAST_AMAX["e4m3"]),
                small=True,
            )
            for path in (_PATHS[0], _PATHS[11])
        ),
        *(
            Case(
                f"{_name(*path)}-apart{extra}-from{first}",
                make(strided(128, 192, path[0], extra, first), *path[1], *path[2:]),
                small=True,
                compile=extra != 64,
            )
            for path, extra, first in (
                (_PATHS[0], 64, 64),
                (_PATHS[0], 4, 4),
                (_PATHS[1], 2, 0),
                (_PATHS[5], 3, 1),
                (_PATHS[6], 2, 2),
                (_PATHS[11], 3, 1),
            )
        ),
        *(
            _case(tokens, hidden, *_PATHS[(7 * row + 5 * column) % len(_PATHS)])
            for row, tokens in enumerate((128, 4096, 8064))
            for column, hidden in enumerate((576, 2048, 2560, 3072, 4096, 6144, 7168))
        ),
        _case(65536, 64, *_MXFP8),
        *(
            _case(8192, 7168, *path, "-bench", **BENCH, model_shape=path == _PATHS[0], compile=path == _PATHS[0])
            for path in (
                _PATHS[0],
                (_BF16, (128, 128), "row", False),
                (_BF16, (128, 128), "packed", True),
                _MXFP8,
                _PATHS[6],
            )
        ),
        *(
            _case(tokens, hidden, *_PATHS[0], "-bench", **BENCH)
            for tokens, hidden in (
                *((8192, hidden) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
                *((tokens, 7168) for tokens in (128, 4096, 8064)),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

INF, NAN = math.inf, math.nan
cast = tk_quant.per_token_and_channel_cast


def test_by_hand() -> None:
    x = torch.zeros(128, 64)
    x[0, :4] = torch.tensor([448.0, 224.0, -1.0, 0.0])
    x[1, :4] = torch.tensor([224.0, 448.0, -448.0, -0.0])
    x[2, :4] = torch.tensor([896.0, 14.0, 0.0, 448.0])
    (token_data, token_sf), (channel_data, channel_sf) = cast(x, "e4m3")
    assert token_sf[:4, 0].tolist() == [1.0, 1.0, 2.0, float(np.float32(1e-4) / np.float32(448))]
    assert channel_sf[0, :4].tolist() == [2.0, 1.0, 1.0, 1.0]
    rows, columns = token_data.view(torch.uint8), channel_data.view(torch.uint8)
    assert rows[0, :4].tolist() == [0x7E, 0x76, 0xB8, 0x00]
    assert rows[1, :4].tolist() == [0x76, 0x7E, 0xFE, 0x80]
    assert rows[2, :4].tolist() == [0x7E, 0x4E, 0x00, 0x76]
    assert columns[:3, 0].tolist() == [0x76, 0x6E, 0x7E]
    assert columns[:3, 1].tolist() == [0x76, 0x7E, 0x56]
    assert columns[:3, 2].tolist() == [0xB8, 0xFE, 0x00]
    assert columns[:3, 3].tolist() == [0x00, 0x80, 0x7E]
    _, (turned, turned_sf) = cast(x, "e4m3", transpose_channel_data=True)
    assert turned.shape == (64, 128)
    assert turned.is_contiguous()
    assert torch.equal(turned.view(torch.uint8), columns.t())
    assert torch.equal(turned_sf, channel_sf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_per_channels", [32, 128])
@pytest.mark.parametrize("num_per_tokens", [32, 128])
def test_against_numpy(dtype: torch.dtype, num_per_channels: int, num_per_tokens: int) -> None:
    x = (torch.randn(256, 384) * torch.exp2(torch.randint(-20, 20, (256, 1)).float())).to(dtype)
    values = x.float().numpy()
    by_token, by_channel = cast(x, "e4m3", num_per_channels, num_per_tokens)
    for (data, sf), axis, size in ((by_token, 1, num_per_channels), (by_channel, 0, num_per_tokens)):
        codes, expected_sf = quantize(values, size, axis=axis)
        np.testing.assert_array_equal(data.view(torch.uint8).numpy(), codes)
        np.testing.assert_array_equal(sf.numpy(), expected_sf)


@pytest.mark.parametrize("flags", list(FLAGS))
@pytest.mark.parametrize("num_per_channels", [32, 128])
def test_tokens_are_those_of_per_token_cast(flags: str, num_per_channels: int) -> None:
    x = extreme_blocks(128, 192, torch.bfloat16)("cpu")
    (data, sf), _ = cast(x, "e4m3", num_per_channels, **FLAGS[flags])
    expected_data, expected_sf = tk_quant.per_token_cast(x, "e4m3", num_per_channels, **FLAGS[flags])
    assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
    assert torch.equal(sf.view(torch.int32), expected_sf.view(torch.int32))
    assert sf.stride() == expected_sf.stride()


@pytest.mark.parametrize("round_sf", [False, True])
def test_not_finite(round_sf: bool) -> None:
    x = torch.ones(128, 128)
    x[5, 40], x[70, 3], x[100, 100] = INF, NAN, -INF
    (data, sf), (channel_data, channel_sf) = cast(x, "e4m3", 32, 32, round_sf)
    expected = torch.zeros(128, 4, dtype=torch.bool)
    expected[5, 1] = expected[70, 0] = expected[100, 3] = True
    assert torch.equal(~sf.isfinite(), expected)
    expected = torch.zeros(4, 128, dtype=torch.bool)
    expected[0, 40] = expected[2, 3] = expected[3, 100] = True
    assert torch.equal(~channel_sf.isfinite(), expected)
    assert sf[5, 1] == INF
    assert channel_sf[3, 100] == INF
    assert data.float()[70, :32].isnan().all()
    assert channel_data.float()[64:96, 3].isnan().all()
    assert data.float()[5, 40].isnan()
    assert (data.float()[5, 32:40] == 0).all()


X = torch.zeros(128, 128)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "e4m3"},
    [
        ({"x": X[:100]}, ValueError, r"x.shape\[0\]: expected a multiple of 128, got 100"),
        ({"x": X[:, :96]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 64, got 96"),
        ({"x": X[:, :0]}, ValueError, r"x.shape\[1\]: expected a positive multiple of 64, got 0"),
        ({"num_per_channels": 64}, ValueError, "num_per_channels: expected one of 32, 128, got 64"),
        ({"num_per_tokens": 16}, ValueError, "num_per_tokens: expected one of 32, 128, got 16"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected round_sf=True"),
    ],
)
