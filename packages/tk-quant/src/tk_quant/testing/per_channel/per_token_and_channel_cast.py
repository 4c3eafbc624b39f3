"""Named cases of per_token_and_channel_cast."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.per_channel.per_token_and_channel_cast import per_token_and_channel_cast
from tk_quant.testing.per_token.per_token_cast import LEAST_AMAX, MakeInput, extremes, normal, strided, tiny

Make = Callable[[str], dict[str, Any]]

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_BF16, _FP32 = torch.bfloat16, torch.float32
FLAGS: dict[str, dict[str, bool]] = {
    "row": {},
    "row-round": {"round_sf": True},
    "col": {"use_tma_aligned_col_major_sf": True},
    "packed": {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
}
"""Layouts of the tokens' sf and roundings, by their names in case names."""


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

SPEC = OpSpec(
    op=per_token_and_channel_cast,
    reference=reference.per_token_and_channel_cast,
    cases=(
        *(
            _case(128, hidden, *path, small=True, compile=hidden == 128, modes=hidden == 128 and path == _PATHS[0])
            for hidden in (128, 64, 192)
            for path in _PATHS
        ),
        _case(256, 320, *_MXFP8, small=True, modes=True),
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
                compile=True,
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
            _case(
                8192,
                7168,
                *path,
                "-bench",
                bench=True,
                gpu=False,
                model_shape=path == _PATHS[0],
                compile=path == _PATHS[0],
            )
            for path in (
                _PATHS[0],
                (_BF16, (128, 128), "row", False),
                (_BF16, (128, 128), "packed", True),
                _MXFP8,
                _PATHS[6],
            )
        ),
        *(
            _case(tokens, hidden, *_PATHS[0], "-bench", bench=True, gpu=False)
            for tokens, hidden in (
                *((8192, hidden) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
                *((tokens, 7168) for tokens in (128, 4096, 8064)),
            )
        ),
    ),
)
