"""per_token_cast, per_token_cast_to_e5m6, per_token_cast_with_sf_only, per_token_cast_with_precomputed_sf."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.arch import arch_from_name
from tk_core.math import ceil_div
from tk_core.reference.scales import pack_scales, unpack_scales
from tk_core.scales import ScaleLayout, check_scales
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, quant_level_rank, tiers
from tk_quant import reference
from tk_quant.cast.config import TileConfig
from tk_quant.cast.format import FLOAT4_DTYPE
from tk_quant.reference import formats
from tk_quant.reference.formats import expand_blocks

from ..cast.test_formats import e5m6_codes, nibbles

MakeInput = Callable[[str], Any]

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
FLAGS = {
    "row": {},
    "row-round": {"round_sf": True},
    "col": {"use_tma_aligned_col_major_sf": True},
    "col-round": {"use_tma_aligned_col_major_sf": True, "round_sf": True},
    "packed": {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
}
"""Layouts and roundings of sf, by their names in case names."""
BENCH = {"bench": True, "gpu": False}
"""Roles of a case that only serves benchmarks."""
NEIGHBOURS = (
    *((8192, hidden) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
    *((num_tokens, 7168) for num_tokens in (1, 64, 4001, 8001)),
)
"""Benchmark shapes in addition to (8192, 7168)."""
ALL_FLAGS = {
    **FLAGS,
    "swizzled": {"use_swizzled_sf": True, "round_sf": True},
    "packed-row": {"round_sf": True, "use_packed_ue8m0": True},
}
E4M3_FLAGS = {
    "e4m3-sf": {"use_e4m3_sf": True},
    "e4m3-sf-col": {"use_e4m3_sf": True, "use_tma_aligned_col_major_sf": True},
    "e4m3-sf-swizzled": {"use_e4m3_sf": True, "use_swizzled_sf": True},
}


def normal(num_tokens: int, hidden: int, dtype: torch.dtype) -> MakeInput:
    """Normally distributed, each token with a scale of its own."""

    def build(device: str) -> torch.Tensor:
        scale = torch.exp2(torch.randint(-12, 12, (num_tokens, 1), device=device).to(torch.float32))
        return (torch.randn(num_tokens, hidden, device=device) * scale).to(dtype)

    return build


def strided(num_tokens: int, hidden: int, dtype: torch.dtype, extra: int, first: int) -> MakeInput:
    """Rows with a gap of `extra` elements, which start at column `first` of a wider tensor."""
    wide = normal(num_tokens, hidden + extra, dtype)
    return lambda device: wide(device)[:, first : first + hidden]


def repeated(num_tokens: int, hidden: int, dtype: torch.dtype) -> MakeInput:
    """One row, expanded: rows 0 elements apart."""
    one = normal(1, hidden, dtype)
    return lambda device: one(device).expand(num_tokens, hidden)


LEAST_AMAX = {"e4m3": 448 * 2.0**-126, "e2m1": 6 * 2.0**-126, "e5m6": 65024 * 2.0**-126}
"""The least sf_clamp_min, by format."""


def tiny(num_tokens: int, hidden: int, dtype: torch.dtype) -> MakeInput:
    """Values around 1e-9; a row of zeros; channels of zeros, of 2**-118 and of 2**-117, around e4m3's LEAST_AMAX."""
    plain = normal(num_tokens, hidden, dtype)

    def build(device: str) -> torch.Tensor:
        x = plain(device) * 2.0**-30
        x[0] = 0
        x[:, 0], x[:, 1], x[:, 2] = 0, 2.0**-118, 2.0**-117
        return x

    return build


def extremes(hidden: int, dtype: torch.dtype) -> MakeInput:
    """Rows of zeros, infinity, NaN, subnormals, the largest values, ties of both formats, and random bits."""

    def build(device: str) -> torch.Tensor:
        info = torch.finfo(torch.bfloat16)
        noise = torch.randn(24, hidden)
        x = noise.clone()
        x[0] = 0.0
        x[1] = -0.0
        x[2, 3], x[3, 5], x[4, -1], x[5, hidden // 2] = torch.inf, -torch.inf, torch.nan, -torch.nan
        x[6, ::7], x[6, 1::7] = torch.inf, torch.nan
        x[7] = noise[7] * 2.0**-140
        x[8] = 2.0**-126
        x[9], x[9, ::2] = info.max, -info.max
        x[10] = noise[10] * 2.0**-60
        x[10, ::64] = info.max
        # With scale 1 (amax is the format's largest) there is every midpoint between two codes.
        x[11] = torch.arange(hidden) % 49 * 0.25 - 6
        x[12] = torch.arange(hidden) % 49 * 0.125 * (1 + 2.0**-7) - 6
        x[12, ::16] = 6.0
        x[13] = torch.arange(hidden) % 897 - 448.0
        x[14] = (torch.arange(hidden) % 64 - 32) * 2.0**-10
        x[14, ::16] = 448.0
        # Quotients at, just below and just above a power of two.
        x[15], x[16], x[17] = 6 * 2.0**5, 448 * 2.0**-5, 448 * 2.0**-5 * (1 + 2.0**-7)
        x[18], x[19], x[20] = 1e-4, 1.5e-4, 0.5e-4
        x[21] = noise[21] * 2.0**100
        x = x.to(dtype)
        bits = torch.randint(-(2**15), 2**15, (2, hidden * dtype.itemsize // 2), dtype=torch.int16)
        x[22:] = bits.view(dtype)
        return x.to(device)

    return build


def pair(
    num_tokens: int,
    hidden: int,
    fmt: str,
    block_size: tuple[int, int],
    layout: ScaleLayout,
    special: bool = False,
    largest_exponent: int = 9,
) -> MakeInput:
    """A pair `(data, sf)` of random codes; `special` adds NaN codes of e4m3, and NaN, infinity and 2**-127 to sf."""

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        rows, cols = ceil_div(num_tokens, block_size[0]), ceil_div(hidden, block_size[1])
        exponents = torch.randint(-largest_exponent, largest_exponent, (rows, cols), device=device)
        sf = torch.exp2(exponents.to(torch.float32))
        if layout not in (ScaleLayout.PACKED_UE8M0, ScaleLayout.PACKED_ROW_MAJOR):
            sf = sf * (1 + torch.rand(rows, cols, device=device))
        if special:
            sf[0, 0], sf[-1, -1], sf[rows // 2, cols // 2] = torch.nan, 2.0**-127, torch.inf
        codes = torch.randint(0, 256, (num_tokens, hidden if fmt == "e4m3" else hidden // 2), device=device)
        if fmt == "e4m3":
            # Bytes 0x7f and 0xff are NaN, of which nearly every random row of 7168 would have one.
            codes = codes if special else torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
            return codes.to(torch.uint8).view(torch.float8_e4m3fn), pack_scales(sf, layout)
        return codes.to(torch.uint8).view(torch.int8), pack_scales(sf, layout)

    return build


def strided_pair(num_tokens: int, hidden: int, fmt: str, extra: int) -> MakeInput:
    """A pair whose data rows have gaps of `extra` bytes; one sf per token."""
    wide = pair(num_tokens, hidden + (extra if fmt == "e4m3" else 2 * extra), fmt, (1, 1 << 20), ScaleLayout.ROW_MAJOR)

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data, sf = wide(device)
        return data[:, extra:], sf

    return build


def make(x: MakeInput, fmt: str, num_per_channels: int, flags: str = "row", **more: Any) -> Make:
    """Arguments of per_token_cast or its form with sf only."""
    kwargs = {"fmt": fmt, "num_per_channels": num_per_channels, **ALL_FLAGS.get(flags, {}), **more}
    kwargs |= E4M3_FLAGS.get(flags, {})
    return lambda device: {"x": x(device), **kwargs}


def make_nvfp4(x: MakeInput, swizzled: bool, times: float = 1.0, shape: tuple[int, ...] = (), **more: Any) -> Make:
    """Arguments for NVFP4. tensor_sf is `times` the least that fits the largest |x|, or of a pair the largest sf."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        plain = values if isinstance(values, torch.Tensor) else values[1]
        magnitude = plain.to(torch.float32).abs().nan_to_num(0.0, 0.0).flatten()
        amax = torch.cat((magnitude, magnitude.new_ones(1))).amax()
        tensor_sf = (amax * (times / (448 * 6))).reshape(shape)
        return {
            "x": values,
            "fmt": "e2m1",
            "num_per_channels": 16,
            "use_swizzled_sf": swizzled,
            "tensor_sf": tensor_sf,
            **more,
        }

    return build


def make_to_e5m6(x: MakeInput, flags: str = "row", **more: Any) -> Make:
    """Arguments of per_token_cast_to_e5m6."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        return {"x": values, "num_per_channels": values.shape[1], **FLAGS[flags], **more}

    return build


def make_precomputed(x: MakeInput, fmt: str, num_per_channels: int, special: bool = False, **more: Any) -> Make:
    """Arguments of the form with precomputed sf: random, so that some data saturate."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        data = values if isinstance(values, torch.Tensor) else values[0]
        hidden = data.shape[1] * (2 if data.dtype is torch.int8 else 1)
        sf = torch.exp2(4 * torch.randn(data.shape[0], ceil_div(hidden, num_per_channels), device=device))
        if special:
            sf[0, 0], sf[1, 0], sf[2, 0], sf[3, 0] = 0.0, torch.inf, torch.nan, -1.0
        return {"x": values, "fmt": fmt, "num_per_channels": num_per_channels, "sf": sf, **more}

    return build


def of_e4m3_sf(arguments: Make) -> Make:
    """Arguments of the form with precomputed sf, with sf as e4m3."""

    def build(device: str) -> dict[str, Any]:
        kwargs = arguments(device)
        return {**kwargs, "sf": kwargs["sf"].clamp(-448, 448).to(torch.float8_e4m3fn), "use_e4m3_sf": True}

    return build


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except e2m1 and e5m6 data of groups that contain infinity or NaN, which are unspecified."""
    if isinstance(expected, tuple) and expected[0].dtype is not torch.float8_e4m3fn:
        want, sf = expected
        num_tokens, num_bytes = want.shape
        hidden, bytes_per_unit, unit = (
            (num_bytes * 2, 1, 2) if want.dtype is torch.int8 else (num_bytes * 2 // 3, 12, 8)
        )
        anything = torch.zeros(num_tokens, hidden, dtype=torch.bool, device=want.device)
        in_words = sf.ndim == 5 or sf.dtype is torch.int32
        for group in (*_GROUPS, hidden):
            num_cols = ceil_div(hidden, group)
            # A packed layout may fit several group sizes; bytes past the last group are 0.
            if sf.shape[1] == (ceil_div(num_cols, 4) if in_words else num_cols):
                factors = unpack_scales(sf, num_tokens, num_cols)
                anything |= ~expand_blocks(factors, (1, group), num_tokens, hidden).isfinite()
        anything = anything[:, ::unit].repeat_interleave(bytes_per_unit, dim=1)
        actual = (actual[0].masked_fill(anything, 0), actual[1])
        expected = (want.masked_fill(anything, 0), sf)
    assert_equal(actual, expected)


_BF16, _FP32 = torch.bfloat16, torch.float32
_GROUPS = (16, 32, 64, 128)
# input format, its blocks, its layout, output format, group, flags
_PAIRS = (
    ("e4m3", (128, 128), "packed", "e4m3", 128, "packed"),
    ("e4m3", (128, 128), "row", "e2m1", 32, "packed"),
    ("e4m3", (32, 32), "col", "e4m3", 32, "row"),
    ("e4m3", (1, 128), "row", "e2m1", 32, "row-round"),
    ("e4m3", (1, 64), "packed", "e4m3", 16, "col"),
    ("e4m3", (1, 32), "swizzled", "e4m3", 128, "swizzled"),
    ("e2m1", (128, 128), "packed", "e4m3", 128, "row"),
    ("e2m1", (32, 32), "col", "e2m1", 128, "packed"),
    ("e2m1", (32, 32), "row", "e4m3", 32, "packed"),
    ("e2m1", (1, 32), "packed", "e4m3", 128, "packed"),
    ("e2m1", (1, 16), "row", "e4m3", 64, "row"),
    ("e2m1", (1, 16), "swizzled", "e2m1", 32, "swizzled"),
    # Blocks narrower than a thread's vector, and odd ones.
    ("e4m3", (2, 4), "packed", "e4m3", 128, "row"),
    ("e4m3", (1, 8), "swizzled", "e4m3", 64, "col-round"),
    ("e2m1", (3, 24), "row", "e4m3", 32, "col"),
)
_LAYOUTS = {
    "row": ScaleLayout.ROW_MAJOR,
    "col": ScaleLayout.COL_MAJOR,
    "packed": ScaleLayout.PACKED_UE8M0,
    "swizzled": ScaleLayout.SWIZZLED,
    "packed-row": ScaleLayout.PACKED_ROW_MAJOR,
}


def _size(num_tokens: int, hidden: int) -> str:
    return f"h{hidden}-t{num_tokens}"


def _plain(
    dtype: torch.dtype, fmt: str, group: int, flags: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    """A case with normally distributed input."""
    name = f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-{_size(num_tokens, hidden)}{suffix}"
    return Case(name, make(normal(num_tokens, hidden, dtype), fmt, group, flags), **roles)


def _pair_case(
    of: tuple[str, tuple[int, int], str, str, int, str],
    num_tokens: int,
    hidden: int,
    suffix: str = "",
    special: bool = False,
    largest_exponent: int = 9,
    **roles: Any,
) -> Case:
    """A case with a pair as input; `of` as in _PAIRS."""
    x_fmt, block, layout, fmt, group, flags = of
    name = f"{x_fmt}-{block[0]}x{block[1]}-{layout}-{fmt}-{group}-{flags}-{_size(num_tokens, hidden)}"
    x = pair(num_tokens, hidden, x_fmt, block, _LAYOUTS[layout], special, largest_exponent)
    return Case(name + "-special" * special + suffix, make(x, fmt, group, flags, x_block_size=block), **roles)


def _nvfp4(dtype: torch.dtype, swizzled: bool, num_tokens: int, hidden: int, suffix: str = "", **roles: Any) -> Case:
    name = f"{_NAMES[dtype]}-nvfp4-{'swizzled' if swizzled else 'row'}-{_size(num_tokens, hidden)}{suffix}"
    return Case(name, make_nvfp4(normal(num_tokens, hidden, dtype), swizzled), **roles)


def e4m3_pair(num_tokens: int, hidden: int, fmt: str, group: int, layout: ScaleLayout) -> MakeInput:
    """A pair whose scale factors are e4m3, all codes of it among them."""
    plain = pair(num_tokens, hidden, fmt, (1, group), ScaleLayout.ROW_MAJOR)

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data, sf = plain(device)
        codes = torch.randint(0, 0x80, sf.shape, device=device).to(torch.uint8).view(torch.float8_e4m3fn)
        return data, pack_scales(codes.float(), layout, torch.float8_e4m3fn)

    return build


def with_seed(arguments: Make, seed: Any) -> Make:
    """Arguments for stochastic rounding; a seed of "tensor" is one."""

    def build(device: str) -> dict[str, Any]:
        at = torch.randint(-(2**62), 2**62, (1,), device=device) if seed == "tensor" else seed
        return {**arguments(device), "stochastic_cast": True, "seed": at}

    return build


# format, group, flags, input dtype, what x is
_WITH_E4M3_SF = (
    ("e4m3", 128, "e4m3-sf", _BF16, "normal"),
    ("e4m3", 32, "e4m3-sf-col", _BF16, "normal"),
    ("e4m3", 64, "e4m3-sf-swizzled", _FP32, "normal"),
    ("e2m1", 16, "e4m3-sf", _BF16, "normal"),
    ("e2m1", 16, "e4m3-sf-swizzled", _BF16, "normal"),
    ("e2m1", 32, "e4m3-sf-col", _FP32, "normal"),
    ("e4m3", 16, "e4m3-sf", _FP32, "extremes"),
    ("e2m1", 32, "e4m3-sf-col", _BF16, "extremes"),
    ("e4m3", 128, "e4m3-sf", _BF16, "tiny"),
)
# format, group, flags, input dtype, seed
_STOCHASTIC = (
    ("e4m3", 128, "row", _BF16, None),
    ("e4m3", 32, "packed", _BF16, 2**40 + 7),
    ("e4m3", 16, "e4m3-sf", _FP32, "tensor"),
    ("e4m3", 576, "col", _BF16, 5),
    ("e2m1", 32, "packed-row", _BF16, None),
    ("e2m1", 16, "e4m3-sf-swizzled", _BF16, "tensor"),
    ("e2m1", 128, "row-round", _FP32, 3),
)


def _e4m3_cases(small: bool) -> list[Case]:
    """Cases with e4m3 scale factors, as results and in pairs."""
    sources = {
        "normal": lambda dtype: normal(5, 576, dtype),
        "extremes": lambda dtype: extremes(192, dtype),
        "tiny": lambda dtype: tiny(5, 128, dtype),
    }
    return [
        Case(
            f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-{kind}",
            make(sources[kind](dtype), fmt, group, flags),
            small=small,
            compile=kind == "normal" and dtype is _BF16,
            modes=(fmt, group, flags) == ("e4m3", 128, "e4m3-sf") and kind == "normal",
        )
        for fmt, group, flags, dtype, kind in _WITH_E4M3_SF
    ]


SPEC = OpSpec(
    op=tk_quant.per_token_cast,
    compare=compare,
    cases=(
        *_e4m3_cases(True),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-stochastic-{'none' if seed is None else seed}",
                with_seed(make(normal(5, 576, dtype), fmt, group, flags), seed),
                small=True,
                compile=seed == "tensor",
                modes=seed == "tensor",
            )
            for fmt, group, flags, dtype, seed in _STOCHASTIC
        ),
        *(
            Case(
                f"{fmt}-stochastic-{name}",
                with_seed(make(x, fmt, 32, flags, **more), 1),
                small=True,
                compile=name == "pair",
            )
            for fmt in ("e4m3", "e2m1")
            for name, x, flags, more in (
                ("tiny", tiny(5, 128, _BF16), "row", {}),
                ("no-tokens", normal(0, 128, _BF16), "row", {}),
                ("odd-rows", strided(7, 192, _FP32, 3, 1), "row-round", {}),
                ("pair", pair(5, 192, "e4m3", (1, 64), ScaleLayout.ROW_MAJOR), "packed", {"x_block_size": (1, 64)}),
            )
        ),
        Case("nvfp4-stochastic", with_seed(make_nvfp4(normal(5, 576, _BF16), True), None), small=True, compile=True),
        *(
            Case(
                f"{x_fmt}-e4m3-sf-{layout.value.replace('_', '-')}-{fmt}-{group}",
                make(e4m3_pair(5, 576, x_fmt, 16, layout), fmt, group, flags, x_block_size=(1, 16)),
                small=True,
                compile=True,
            )
            for x_fmt, layout, fmt, group, flags in (
                ("e2m1", ScaleLayout.ROW_MAJOR, "e4m3", 128, "row"),
                ("e4m3", ScaleLayout.COL_MAJOR, "e4m3", 32, "e4m3-sf"),
                ("e2m1", ScaleLayout.SWIZZLED, "e4m3", 16, "packed-row"),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-packed-row-h576-t{tokens}",
                make(normal(tokens, 576, dtype), fmt, group, "packed-row"),
                small=tokens == 5,
            )
            for dtype, fmt, group in ((_BF16, "e4m3", 128), (_FP32, "e2m1", 16), (_BF16, "e2m1", 32))
            for tokens in (5, 1, 4001)
        ),
        Case(
            "e4m3-1x64-packed-row-e4m3-128-packed-row",
            make(
                pair(5, 576, "e4m3", (1, 64), ScaleLayout.PACKED_ROW_MAJOR),
                "e4m3",
                128,
                "packed-row",
                x_block_size=(1, 64),
            ),
            small=True,
        ),
        *(
            Case(
                f"bf16-{fmt}-{group}-e4m3-sf-h7168-t{tokens}", make(normal(tokens, 7168, _BF16), fmt, group, "e4m3-sf")
            )
            for fmt, group in (("e4m3", 128), ("e2m1", 16))
            for tokens in (1, 8001)
        ),
        *(
            Case(
                f"bf16-{fmt}-{group}-stochastic-h7168-t4001", with_seed(make(normal(4001, 7168, _BF16), fmt, group), 9)
            )
            for fmt, group in (("e4m3", 128), ("e2m1", 32))
        ),
        *(
            bench_case(
                f"bf16-{fmt}-{group}-stochastic-h7168-t8192", with_seed(make(normal(8192, 7168, _BF16), fmt, group), 1)
            )
            for fmt, group in (("e4m3", 128), ("e2m1", 32))
        ),
        bench_case("bf16-e2m1-16-e4m3-sf-h7168-t8192", make(normal(8192, 7168, _BF16), "e2m1", 16, "e4m3-sf")),
        # Every group, rounding and layout. 576 channels leave the last group of 128 and the last word partial.
        *(
            _plain(_BF16, fmt, group, flags, 5, 576, small=True, modes=(fmt, group, flags) == ("e4m3", 128, "row"))
            for fmt, flags, groups in (
                ("e4m3", "row", (16, 64, 128, 576)),
                ("e2m1", "packed", (16, 32, 128)),
                ("e4m3", "packed", (16, 128, 576)),
                ("e2m1", "row", (32, 576)),
                ("e4m3", "swizzled", (32, 576)),
                ("e2m1", "swizzled", (16, 32)),
            )
            for group in groups
        ),
        *(
            _plain(_FP32, fmt, group, flags, 5, 576, small=True)
            for fmt, group, flags in (
                ("e4m3", 16, "col"),
                ("e4m3", 128, "packed"),
                ("e4m3", 128, "swizzled"),
                ("e4m3", 576, "col"),
                ("e2m1", 16, "packed"),
                ("e2m1", 128, "col"),
            )
        ),
        *(
            _plain(_BF16, "e4m3", group, flags, num_tokens, hidden, small=True)
            for group, flags, num_tokens, hidden in (
                (32, "col-round", 7, 192),
                (128, "row-round", 7, 64),
                (64, "packed", 7, 64),
                (64, "swizzled", 7, 64),
                (256, "row", 7, 256),
                (512, "packed", 7, 512),
                (320, "col", 7, 320),
                (128, "packed", 7, 1088),
                (16, "swizzled", 130, 64),
                (128, "packed", 0, 576),
                (32, "swizzled", 0, 576),
            )
        ),
        # Strided rows, down to rows that start at odd elements.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-{_size(9, 192)}-apart{extra}-from{first}",
                make(strided(9, 192, dtype, extra, first), fmt, group),
                small=True,
                compile=(dtype, extra) == (_BF16, 3),
            )
            for dtype, fmt, group, extra, first in (
                (_BF16, "e4m3", 32, 64, 64),
                (_BF16, "e2m1", 32, 8, 4),
                (_BF16, "e4m3", 32, 2, 0),
                (_BF16, "e4m3", 32, 3, 1),
                (_FP32, "e2m1", 32, 2, 2),
                (_FP32, "e4m3", 32, 1, 1),
                (_BF16, "e5m6", 192, 4, 4),
                (_BF16, "e5m6", 192, 3, 1),
                (_FP32, "e5m6", 192, 1, 1),
            )
        ),
        Case("bf16-e4m3-128-h2048-t4001-half", make(strided(4001, 2048, _BF16, 2048, 2048), "e4m3", 128)),
        Case("bf16-e4m3-128-h576-t33-repeated", make(repeated(33, 576, _BF16), "e4m3", 128), small=True),
        # Zeros, infinity, NaN, subnormals, ties.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-h192-extremes",
                make(extremes(192, dtype), fmt, group, flags),
                small=True,
            )
            for dtype, fmt, group, flags in (
                (_BF16, "e4m3", 16, "row"),
                (_BF16, "e4m3", 32, "swizzled"),
                (_BF16, "e4m3", 192, "row-round"),
                (_BF16, "e2m1", 16, "row"),
                (_BF16, "e2m1", 32, "packed"),
                (_BF16, "e2m1", 192, "row-round"),
                (_BF16, "e5m6", 192, "row"),
                (_BF16, "e5m6", 192, "packed"),
                (_FP32, "e4m3", 32, "packed"),
                (_FP32, "e2m1", 16, "row"),
                (_FP32, "e2m1", 192, "row-round"),
                (_FP32, "e5m6", 192, "row"),
                (_FP32, "e5m6", 192, "row-round"),
            )
        ),
        # Another least amax.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-h192-tiny",
                make(tiny(5, 192, dtype), fmt, group, flags, sf_clamp_min=least),
                small=True,
            )
            for dtype, fmt, group, flags, least in (
                (_BF16, "e4m3", 128, "row", LEAST_AMAX["e4m3"]),
                (_FP32, "e4m3", 32, "packed", LEAST_AMAX["e4m3"]),
                (_BF16, "e2m1", 32, "row", 1e-9),
                (_BF16, "e2m1", 16, "swizzled", 1e-9),
                (_BF16, "e5m6", 192, "row", LEAST_AMAX["e5m6"]),
            )
        ),
        # E5M6: part of a warp, whole warps, a tail, several rounds; every layout.
        *(
            _plain(dtype, "e5m6", hidden, flags, num_tokens, hidden, small=True, modes=hidden == 576)
            for dtype, flags, num_tokens, hidden in (
                (_BF16, "packed", 3, 64),
                (_BF16, "row", 3, 256),
                (_BF16, "row", 5, 576),
                (_BF16, "swizzled", 5, 1088),
                (_BF16, "col-round", 2, 2560),
                (_FP32, "col", 3, 320),
                (_FP32, "row-round", 2, 2048),
                (_BF16, "row", 0, 192),
            )
        ),
        # NVFP4: groups with the least sf, saturated ones, one tile of swizzled sf and one row more.
        *(
            _nvfp4(
                dtype, swizzled, num_tokens, hidden, small=True, modes=(dtype, num_tokens, swizzled) == (_BF16, 5, True)
            )
            for dtype, swizzled, num_tokens, hidden in (
                (_BF16, False, 5, 576),
                (_BF16, True, 5, 576),
                (_FP32, True, 129, 64),
                (_FP32, False, 3, 64),
                (_BF16, True, 0, 64),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-nvfp4-{'swizzled' if swizzled else 'row'}-h192-extremes-times{times}",
                make_nvfp4(extremes(192, dtype), swizzled, times, shape=(1,)),
                small=True,
            )
            for dtype, swizzled, times in ((_BF16, True, 1e-30), (_BF16, False, 1.0), (_FP32, False, 1e-37))
        ),
        Case(
            "e4m3-1x128-row-nvfp4-swizzled-h192-t9",
            make_nvfp4(pair(9, 192, "e4m3", (1, 128), ScaleLayout.ROW_MAJOR), True, 448.0, x_block_size=(1, 128)),
            small=True,
        ),
        # Quantized input.
        *(_pair_case(each, 5, 192, small=True) for each in _PAIRS),
        *(_pair_case(each, 140, 192) for each in _PAIRS[::4]),
        _pair_case(("e4m3", (32, 32), "row", "e4m3", 32, "row"), 40, 192, special=True),
        _pair_case(("e2m1", (1, 32), "packed", "e4m3", 64, "packed"), 40, 192, special=True),
        # Every power of two as sf, and values that overflow with it.
        *(
            _pair_case(("e4m3", block, layout, "e2m1", group, flags), 40, 576, special=True, largest_exponent=127)
            for block, layout, group, flags in (
                ((1, 32), "packed", 32, "packed"),
                ((1, 128), "swizzled", 32, "swizzled"),
                ((1, 32), "packed", 16, "row-round"),
                ((2, 64), "packed", 64, "row-round"),
                ((1, 32), "packed", 128, "packed"),
                ((1, 32), "swizzled", 32, "row"),
            )
        ),
        *(
            Case(
                f"{x_fmt}-e4m3-32-h192-t9-apart{extra}",
                make(strided_pair(9, 192, x_fmt, extra), "e4m3", 32, x_block_size=(1, 1 << 20)),
                small=True,
            )
            for x_fmt, extra in (("e4m3", 8), ("e4m3", 1), ("e2m1", 4), ("e2m1", 3))
        ),
        _pair_case(("e4m3", (1, 128), "row", "e4m3", 192, "row"), 9, 192, small=True, compile=True),
        *(
            _pair_case((x_fmt, (128, 128), layout, fmt, group, flags), 8001, 7168, compile=True)
            for x_fmt, layout, fmt, group, flags in (
                ("e4m3", "swizzled", "e2m1", 32, "packed"),
                ("e2m1", "packed", "e4m3", 128, "swizzled"),
            )
        ),
        # Sizes of real models.
        *(
            _plain(dtype, fmt, group or hidden, flags, num_tokens, hidden)
            for dtype, fmt, group, flags, num_tokens, hidden in (
                (_BF16, "e4m3", 128, "row", 1, 576),
                (_BF16, "e4m3", 128, "row", 8001, 7168),
                (_BF16, "e4m3", 128, "packed", 4001, 3072),
                (_BF16, "e4m3", 128, "swizzled", 4001, 6144),
                (_BF16, "e4m3", None, "packed", 4001, 2048),
                (_BF16, "e4m3", None, "row", 17, 20480),
                (_BF16, "e2m1", 32, "packed", 17, 2560),
                (_BF16, "e2m1", 32, "packed", 8001, 7168),
                (_BF16, "e2m1", 32, "swizzled", 4001, 4096),
                (_FP32, "e4m3", 128, "packed", 4001, 3072),
                (_FP32, "e4m3", 128, "row", 8001, 6144),
                (_BF16, "e5m6", None, "row", 8001, 7168),
                (_BF16, "e5m6", None, "packed", 4001, 4096),
                (_BF16, "e5m6", None, "col", 17, 20480),
                (_FP32, "e5m6", None, "row", 4001, 6144),
            )
        ),
        _nvfp4(_BF16, True, 4001, 7168),
        _nvfp4(_BF16, False, 8001, 2048),
        *(
            _plain(dtype, fmt, group, flags, 8192, 7168, "-bench", **BENCH, model_shape=True, compile=True)
            for dtype, fmt, group, flags in (
                (_BF16, "e4m3", 128, "row"),
                (_BF16, "e4m3", 128, "packed"),
                (_FP32, "e4m3", 128, "row"),
                (_BF16, "e2m1", 32, "packed"),
                (_BF16, "e5m6", 7168, "row"),
            )
        ),
        *(
            _plain(dtype, fmt, group, flags, 8192, 7168, "-bench", **BENCH, compile=dtype is _FP32)
            for dtype, fmt, group, flags in (
                (_BF16, "e2m1", 32, "row"),
                (_BF16, "e2m1", 32, "swizzled"),
                (_FP32, "e4m3", 128, "packed"),
                (_BF16, "e4m3", 7168, "row"),
                (_FP32, "e5m6", 7168, "row"),
            )
        ),
        _nvfp4(_BF16, True, 8192, 7168, "-bench", **BENCH, compile=True),
        _nvfp4(_FP32, False, 8192, 7168, "-bench", **BENCH, compile=True),
        *(
            _plain(_BF16, fmt, group or hidden, flags, num_tokens, hidden, "-bench", **BENCH)
            for fmt, group, flags in (("e4m3", 128, "row"), ("e2m1", 32, "packed"), ("e5m6", None, "row"))
            for num_tokens, hidden in NEIGHBOURS
        ),
        _pair_case(("e4m3", (128, 128), "packed", "e2m1", 32, "packed"), 8192, 7168, "-bench", **BENCH),
    ),
)

TO_E5M6_SPEC = OpSpec(
    op=tk_quant.per_token_cast_to_e5m6,
    compare=compare,
    cases=(
        *(
            Case(
                f"{_NAMES[dtype]}-{flags}-{_size(5, hidden)}",
                make_to_e5m6(normal(5, hidden, dtype), flags),
                small=True,
                modes=flags == "row",
            )
            for dtype, flags, hidden in ((_BF16, "row", 576), (_BF16, "packed", 192), (_FP32, "col", 320))
        ),
        Case(
            "bf16-row-round-h192-tiny",
            make_to_e5m6(tiny(5, 192, _BF16), "row-round", sf_clamp_min=LEAST_AMAX["e5m6"]),
            small=True,
        ),
        Case("bf16-row-h7168-t4001", make_to_e5m6(normal(4001, 7168, _BF16)), compile=True),
    ),
)

WITH_SF_ONLY_SPEC = OpSpec(
    op=tk_quant.per_token_cast_with_sf_only,
    cases=(
        *(
            _plain(_BF16, fmt, group, flags, 5, 576, small=True, modes=(fmt, group, flags) == ("e4m3", 128, "packed"))
            for fmt in ("e4m3", "e2m1")
            for group, flags in (
                (16, "packed"),
                (32, "col"),
                (32, "swizzled"),
                (128, "row"),
                (128, "packed"),
                (576, "row-round"),
                (32, "packed-row"),
                (16, "e4m3-sf"),
                (64, "e4m3-sf-col"),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-32-packed-h192-extremes",
                make(extremes(192, dtype), fmt, 32, "packed"),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
        ),
        Case("bf16-e4m3-32-h192-t9-apart3", make(strided(9, 192, _BF16, 3, 1), "e4m3", 32), small=True),
        Case(
            "bf16-e4m3-32-row-h192-tiny",
            make(tiny(5, 192, _BF16), "e4m3", 32, sf_clamp_min=LEAST_AMAX["e4m3"]),
            small=True,
        ),
        _nvfp4(_BF16, True, 130, 192, small=True),
        _nvfp4(_FP32, False, 5, 192, small=True),
        *(_pair_case(each, 5, 192, small=True) for each in _PAIRS),
        *(
            _plain(_BF16, "e4m3", 128, flags, num_tokens, hidden)
            for flags, num_tokens, hidden in (
                ("row", 0, 4096),
                ("row", 1, 2560),
                ("row", 8001, 7168),
                ("packed", 4001, 2048),
                ("swizzled", 4001, 3072),
            )
        ),
        *(
            _plain(dtype, "e4m3", 128, flags, 8192, 7168, "-bench", **BENCH, compile=True)
            for dtype, flags in ((_BF16, "row"), (_BF16, "packed"), (_FP32, "row"))
        ),
    ),
)

WITH_PRECOMPUTED_SF_SPEC = OpSpec(
    op=tk_quant.per_token_cast_with_precomputed_sf,
    cases=(
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-e4m3-sf-h576-t5",
                of_e4m3_sf(make_precomputed(normal(5, 576, dtype), fmt, group, special)),
                small=True,
                compile=True,
                modes=fmt == "e2m1",
            )
            for dtype, fmt, group, special in ((_BF16, "e2m1", 16, False), (_FP32, "e4m3", 128, True))
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{group}-h576-t5",
                make_precomputed(normal(5, 576, dtype), fmt, group),
                small=True,
                modes=(dtype, fmt, group) == (_BF16, "e4m3", 128),
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for group in (16, 128, 576)
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-32-h192-extremes",
                make_precomputed(extremes(192, dtype), fmt, 32, special=True),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
        ),
        Case("bf16-e2m1-64-h192-t0", make_precomputed(normal(0, 192, _BF16), "e2m1", 64), small=True),
        Case("bf16-e4m3-32-h192-t9-apart3", make_precomputed(strided(9, 192, _BF16, 3, 1), "e4m3", 32), small=True),
        *(
            Case(
                f"{x_fmt}-32x32-{fmt}-32-h192-t40",
                make_precomputed(pair(40, 192, x_fmt, (32, 32), ScaleLayout.ROW_MAJOR), fmt, 32, x_block_size=(32, 32)),
                small=True,
                compile=True,
            )
            for x_fmt, fmt in (("e4m3", "e2m1"), ("e2m1", "e4m3"))
        ),
        *(
            Case(
                f"bf16-{fmt}-{group}-{_size(num_tokens, hidden)}",
                make_precomputed(normal(num_tokens, hidden, _BF16), fmt, group),
            )
            for fmt, group, num_tokens, hidden in (
                ("e4m3", 128, 1, 2048),
                ("e4m3", 128, 8001, 7168),
                ("e2m1", 32, 4001, 6144),
                ("e4m3", 4096, 4001, 4096),
            )
        ),
        *(
            Case(
                f"bf16-{fmt}-{group}-{_size(8192, 7168)}-bench",
                make_precomputed(normal(8192, 7168, _BF16), fmt, group),
                **BENCH,
                compile=True,
            )
            for fmt, group in (("e4m3", 128), ("e2m1", 32), ("e4m3", 7168))
        ),
    ),
)


test_tiers = tiers.tests(SPEC)
test_to_e5m6_tiers = tiers.tests(TO_E5M6_SPEC)
test_with_sf_only_tiers = tiers.tests(WITH_SF_ONLY_SPEC)
test_with_precomputed_sf_tiers = tiers.tests(WITH_PRECOMPUTED_SF_SPEC)

INF, NAN = math.inf, math.nan


def row_with(values: list[float], largest: float) -> torch.Tensor:
    """One token of 64 channels: `largest` (so that nothing is scaled), the values, zeros."""
    row = torch.zeros(1, 64)
    row[0, 0] = largest
    row[0, 1 : 1 + len(values)] = torch.tensor(values)
    return row


E4M3_TABLE = [
    (1.0, 0x38),
    (-1.0, 0xB8),
    (0.0, 0x00),
    (-0.0, 0x80),
    (448.0, 0x7E),
    (-448.0, 0xFE),
    (440.0, 0x7E),  # 432 lies between 416 and 448
    (432.0, 0x7E),  # tie between 416 (0x7d) and 448 (0x7e)
    (431.9, 0x7D),
    (17.0, 0x58),  # tie between 16 (0x58) and 18 (0x59)
    (19.0, 0x5A),  # tie between 18 (0x59) and 20 (0x5a)
    (1.0625, 0x38),  # tie between 1 and 1.125
    (1.1875, 0x3A),  # tie between 1.125 and 1.25
    (2.0**-6, 0x08),  # least normal
    (2.0**-9, 0x01),  # least subnormal
    (2.0**-10, 0x00),  # tie between 0 and the least subnormal
    (-(2.0**-10), 0x80),
    (1.5 * 2.0**-9, 0x02),  # tie between the first two subnormals
    (7.5 * 2.0**-9, 0x08),  # tie between the largest subnormal and the least normal
    (1.001 * 2.0**-10, 0x01),
]

E2M1_TABLE = [
    *zip((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), range(8)),
    # Ties go to the even code.
    *zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 2, 2, 4, 4, 6, 6)),
    *zip((0.251, 0.749, 1.251, 1.749, 2.501, 3.499, 5.001, 1e-40), (1, 1, 3, 3, 5, 5, 7, 0)),
]
E2M1_TABLE += [(-value, code | 8) for value, code in E2M1_TABLE]


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_by_hand(dtype: torch.dtype, round_sf: bool) -> None:
    table = [(value, code) for value, code in E4M3_TABLE if torch.tensor(value, dtype=dtype).item() == value]
    assert len(table) > 10
    x = row_with([value for value, _ in table], 448.0).to(dtype)
    data, sf = tk_quant.per_token_cast(x, "e4m3", 64, round_sf=round_sf)
    assert sf.tolist() == [[1.0]]
    assert data.view(torch.uint8)[0, 1 : 1 + len(table)].tolist() == [code for _, code in table]


@pytest.mark.parametrize("round_sf", [False, True])
def test_e2m1_by_hand(round_sf: bool) -> None:
    x = row_with([value for value, _ in E2M1_TABLE], 6.0)
    data, sf = tk_quant.per_token_cast(x, "e2m1", 64, round_sf=round_sf)
    assert sf.tolist() == [[1.0]]
    assert data.dtype is torch.int8
    assert nibbles(data)[0, 1 : 1 + len(E2M1_TABLE)].tolist() == [code for _, code in E2M1_TABLE]


def test_scaling_against_numpy() -> None:
    x = (torch.randn(64, 192) * torch.exp2(torch.randint(-20, 20, (64, 1)).float())).to(torch.bfloat16)
    values = x.float().numpy()
    for (fmt, largest, oracle), group in product(
        (("e4m3", 448.0, ml_dtypes.float8_e4m3fn), ("e2m1", 6.0, ml_dtypes.float4_e2m1fn)), (16, 32, 64, 128, 192)
    ):
        data, sf = tk_quant.per_token_cast(x, fmt, group)
        for index, start in enumerate(range(0, 192, group)):
            block = values[:, start : start + group]
            amax = np.maximum(np.abs(block).max(axis=1, keepdims=True), np.float32(1e-4 if fmt == "e4m3" else 0))
            np.testing.assert_array_equal(sf[:, index].numpy(), (amax / np.float32(largest))[:, 0])
            expected = (block * (np.float32(largest) / amax)).astype(oracle).view(np.uint8)
            codes = data.view(torch.uint8) if fmt == "e4m3" else nibbles(data)
            np.testing.assert_array_equal(
                codes[:, start : start + group].numpy(), expected & (0xFF if fmt == "e4m3" else 0xF)
            )


@pytest.mark.parametrize(
    ("fmt", "amax", "sf", "rounded"),
    [
        ("e4m3", 0.0, float(np.float32(1e-4) / np.float32(448)), 2.0**-22),
        ("e4m3", 5e-5, float(np.float32(1e-4) / np.float32(448)), 2.0**-22),
        ("e4m3", 448.0, 1.0, 1.0),
        ("e4m3", 3.5, 2.0**-7, 2.0**-7),
        ("e4m3", float(np.nextafter(np.float32(448), np.float32(500))), 1 + 2.0**-23, 2.0),
        ("e4m3", float(np.nextafter(np.float32(448), np.float32(0))), 1 - 2.0**-24, 1.0),
        ("e2m1", 0.0, 2.0**-126, 2.0**-126),
        ("e2m1", 2.0**-149, 2.0**-126, 2.0**-126),
        ("e2m1", 12 * 2.0**-126, 2.0**-125, 2.0**-125),
        ("e2m1", 7.0, float(np.float32(7) / np.float32(6)), 2.0),
        ("e2m1", float(np.finfo(np.float32).max), float(np.finfo(np.float32).max / np.float32(6)), 2.0**126),
    ],
)
def test_sf_by_hand(fmt: str, amax: float, sf: float, rounded: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 17] = -amax
    assert tk_quant.per_token_cast_with_sf_only(x, fmt, 64).item() == sf
    assert tk_quant.per_token_cast_with_sf_only(x, fmt, 64, round_sf=True).item() == rounded


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_layouts_hold_the_same(fmt: str) -> None:
    x = torch.randn(6, 576)
    data, sf = tk_quant.per_token_cast(x, fmt, 64, round_sf=True)
    assert sf.is_contiguous()
    for name, shape in (("col-round", (6, 9)), ("packed", (6, 3)), ("swizzled", (1, 3, 32, 4, 4))):
        other_data, other_sf = tk_quant.per_token_cast(x, fmt, 64, **ALL_FLAGS[name])
        assert torch.equal(other_data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, 6, 9), sf)
        assert other_sf.shape == shape
        assert other_sf.stride() == (1, 8) or name == "swizzled"


def test_swizzled_by_hand() -> None:
    x = torch.zeros(200, 192)
    x[:, 0], x[165, 176] = 1.0, 4.0
    _, sf = tk_quant.per_token_cast(x, "e2m1", 16, round_sf=True, use_swizzled_sf=True)
    assert sf.dtype is torch.float8_e8m0fnu
    assert sf.shape == (2, 3, 32, 4, 4)
    # Row 165 is row 37 of the second tile, group 11 the last column of the third; 4 / 6 rounds up to 1, 1 / 6 to 1 / 4.
    codes = sf.view(torch.uint8)
    assert codes[1, 2, 5, 1, 3] == 127
    assert codes[0, 0, 0, 0, 0] == 125
    assert codes[0, 0, 0, 0, 1] == 1
    # Rows 200 to 255 are not there: 72 = 2 * 32 + 8 of the second tile are.
    assert (codes[1, :, 8:, 2] == 0).all()
    assert (codes[1, :, :, 3] == 0).all()
    assert (codes[1, :, :8, 2] > 0).all()


E5M6_TABLE = [
    (1.0, 0x3C0),
    (-1.0, 0xBC0),
    (0.0, 0x000),
    (-0.0, 0x800),
    (65024.0, 0x7BF),
    (-65024.0, 0xFBF),
    (1 + 2.0**-7, 0x3C0),  # tie between 1 and 1 + 1/64
    (1 + 3 * 2.0**-7, 0x3C2),  # tie between 1 + 1/64 and 1 + 2/64
    (1 + 2.0**-7 + 2.0**-23, 0x3C1),
    (2.0**-14, 0x040),  # least normal
    (2.0**-20, 0x001),  # least subnormal
    (2.0**-21, 0x000),  # tie between 0 and that
    (-(2.0**-21), 0x800),
    (3 * 2.0**-21, 0x002),  # tie between the first two
    (2.0**-21 * (1 + 2.0**-23), 0x001),
    (2.0**-14 - 2.0**-21, 0x040),  # tie between the largest subnormal and the least normal
    (2.0**-30, 0x000),
    (1e-45, 0x000),
]


@pytest.mark.parametrize("round_sf", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e5m6_by_hand(dtype: torch.dtype, round_sf: bool) -> None:
    table = [(value, code) for value, code in E5M6_TABLE if torch.tensor(value, dtype=dtype).item() == value]
    assert len(table) > 10
    x = row_with([value for value, _ in table], 65024.0).to(dtype)
    if dtype is torch.bfloat16:
        assert x[0, 0] == 65024.0
    data, sf = tk_quant.per_token_cast_to_e5m6(x, 64, round_sf=round_sf)
    assert sf.tolist() == [[1.0]]
    assert data.dtype is torch.uint8
    assert data.shape == (1, 96)
    assert e5m6_codes(data)[1 : 1 + len(table)].tolist() == [code for _, code in table]
    same = tk_quant.per_token_cast(x, "e5m6", 64, round_sf=round_sf)
    assert torch.equal(same[0], data)


@pytest.mark.parametrize("times", [1.0, 0.01])
def test_nvfp4_against_numpy(times: float) -> None:
    x = (torch.randn(40, 192) * torch.exp2(torch.arange(40)[:, None] - 36.0)).to(torch.bfloat16)
    tensor_sf = x.abs().max().float() / 2688 * times
    data, sf = tk_quant.per_token_cast(x, "e2m1", 16, tensor_sf=tensor_sf)
    assert sf.dtype is torch.float8_e4m3fn
    assert sf.shape == (40, 12)
    blocks, scale = x.float().numpy().reshape(40, 12, 16), np.float32(tensor_sf.item())
    quotient = np.abs(blocks).max(axis=2) / np.float32(6) / scale
    expected_sf = np.clip(quotient, np.float32(2.0**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(sf.view(torch.uint8).numpy(), expected_sf.view(np.uint8))
    factor = np.float32(1) / (expected_sf.astype(np.float32) * scale)
    expected = (blocks * factor[:, :, None]).astype(ml_dtypes.float4_e2m1fn).reshape(40, 192)
    np.testing.assert_array_equal(nibbles(data).numpy(), expected.view(np.uint8) & 0xF)
    assert sf.float().max() == 448
    assert sf.float().min() == 2.0**-9
    assert torch.equal(tk_quant.per_token_cast_with_sf_only(x, "e2m1", 16, tensor_sf=tensor_sf).float(), sf.float())
    swizzled_data, swizzled = tk_quant.per_token_cast(
        x, "e2m1", 16, use_swizzled_sf=True, tensor_sf=tensor_sf.reshape(1)
    )
    assert torch.equal(swizzled_data, data)
    assert swizzled.shape == (1, 3, 32, 4, 4)
    assert swizzled.dtype is torch.float8_e4m3fn
    assert torch.equal(unpack_scales(swizzled, 40, 12), sf.float())


def test_nvfp4_by_hand() -> None:
    x = torch.zeros(3, 64)
    x[0, :3] = torch.tensor([12.0, -5.0, 1.0])
    x[1, :2] = torch.tensor([1e6, -1.0])
    x[2, 17], x[2, 33] = NAN, -INF
    data, sf = tk_quant.per_token_cast(x, "e2m1", 16, tensor_sf=torch.tensor(0.5))
    codes = sf.view(torch.uint8).tolist()
    # 12 / 6 / 0.5 is 4; 1e6 / 6 / 0.5 saturates at 448; zeros have 2**-9, the least; NaN and infinity have NaN.
    assert codes == [[0x48, 0x01, 0x01, 0x01], [0x7E, 0x01, 0x01, 0x01], [0x01, 0x7F, 0x7F, 0x01]]
    # 12, -5 and 1 over 4 * 0.5; 1e6 and -1 over 448 * 0.5.
    assert nibbles(data)[0, :4].tolist() == [0x7, 0xC, 0x1, 0x0]
    assert nibbles(data)[1, :3].tolist() == [0x7, 0x8, 0x0]


def test_compare_forgives_only_data_of_groups_that_are_not_finite() -> None:
    x = torch.randn(4, 192)
    x[1, 40] = NAN
    for fmt, group, flags in (
        ("e2m1", 32, "row"),
        ("e2m1", 16, "packed"),
        ("e2m1", 16, "swizzled"),
        ("e5m6", 192, "row"),
    ):
        data, sf = tk_quant.per_token_cast(x, fmt, group, **ALL_FLAGS[flags])
        compare((data, sf), (data, sf))
        other = data.clone()
        other[1, (40 // group * group * 12 // 8) if fmt == "e5m6" else 40 // 2] ^= 1
        compare((other, sf), (data, sf))
        other[0, 0] ^= 1
        with pytest.raises(AssertionError):
            compare((other, sf), (data, sf))


def test_not_finite() -> None:
    x = torch.ones(3, 64)
    x[0, 1], x[1, 2], x[2, 3], x[2, 4] = INF, NAN, -INF, NAN
    for flags in ("row", "row-round", "col"):
        data, sf = tk_quant.per_token_cast(x, "e4m3", 32, **FLAGS[flags])
        assert sf[0, 0] == INF
        assert sf[1:, 0].isnan().all()
        assert sf[:, 1].isfinite().all()
        codes = data.view(torch.uint8)
        assert codes[0, :3].tolist() == [0x00, 0x7F, 0x00]
        assert (codes[1:, :32] == 0x7F).all()
    for fmt in ("e4m3", "e2m1"):
        sf = tk_quant.per_token_cast_with_sf_only(x, fmt, 32, **FLAGS["packed"])
        assert (sf & 0xFF == 255).all()
        back = formats.dequantize(tk_quant.per_token_cast(x, fmt, 32, **FLAGS["packed"]), (1, 32))
        assert back[:, :32].isnan().all()
        assert back[:, 32:].isfinite().all()


def test_precomputed_sf_by_hand() -> None:
    # 1 / 3 is rounded before it multiplies; 7 * (1 / 3) and 7 / 3 are both near 2.333, but 1000 / 3 saturates in e2m1.
    x = row_with([7.5, 1000.0, -1000.0, 0.0, INF], 3.0)
    data = tk_quant.per_token_cast_with_precomputed_sf(x, "e2m1", 64, torch.full((1, 1), 3.0))
    assert nibbles(data)[0, :6].tolist() == [0x2, 0x4, 0x7, 0xF, 0x0, 0x7]
    data = tk_quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, torch.zeros(1, 1))
    assert data.view(torch.uint8)[0, :6].tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7E]


@pytest.mark.parametrize("x_fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("block_size", [(128, 128), (32, 32), (1, 32), (1, 192), (3, 24)])
@pytest.mark.parametrize("flags", list(ALL_FLAGS))
def test_requantizing_is_dequantizing_first(x_fmt: str, block_size: tuple[int, int], flags: str) -> None:
    x = torch.randn(40, 192) * torch.exp2(torch.randint(-5, 5, (40, 1)).float())
    pair = reference.cast(x, x_fmt, block_size, **ALL_FLAGS[flags])
    values = formats.decode(pair[0])
    sf = unpack_scales(pair[1], -(-40 // block_size[0]), -(-192 // block_size[1]))
    for row, col in ((0, 0), (39, 191), (20, 100), (33, 31)):
        values[row, col] *= sf[row // block_size[0], col // block_size[1]]
        assert values[row, col] == formats.dequantize(pair, block_size)[row, col]
    whole = formats.dequantize(pair, block_size)
    for fmt in ("e4m3", "e2m1"):
        data, out_sf = tk_quant.per_token_cast(pair, fmt, 32, block_size, round_sf=True)
        expected_data, expected_sf = tk_quant.per_token_cast(whole, fmt, 32, round_sf=True)
        assert torch.equal(data.view(torch.uint8), expected_data.view(torch.uint8))
        assert torch.equal(out_sf, expected_sf)


def test_float4_dtype() -> None:
    if FLOAT4_DTYPE is None:
        pytest.skip("torch has no float4_e2m1fn_x2")
    data = torch.randint(-128, 128, (5, 96), dtype=torch.int8)
    sf = torch.rand(5, 6)
    expected = tk_quant.per_token_cast((data, sf), "e4m3", 64, (1, 32))
    found = tk_quant.per_token_cast((data.view(FLOAT4_DTYPE), sf), "e4m3", 64, (1, 32))
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])


ARCH = arch_from_name("sm_90a")


@pytest.mark.parametrize("x_bits", [4, 8, 16, 32])
def test_tiles_cover_a_row_in_whole_warps(x_bits: int) -> None:
    widths = (*range(64, 4096, 64), *range(4096, 20544, 576))
    for hidden, fmt, in_bytes, group in product(widths, ("e4m3", "e2m1"), (False, True), (16, 32, 64, 128, 0)):
        group = group or hidden
        config = TileConfig.best(hidden, (1, group), x_bits, fmt, True, in_bytes, ARCH)
        lanes = config.block_channels // config.vec
        assert lanes & (lanes - 1) == 0
        assert lanes <= 32
        assert config.threads % 32 == 0
        assert config.threads <= 1024
        assert config.tokens * config.channels % (config.threads * config.vec) == 0
        covers_row = config.channels >= hidden
        if group == hidden:
            assert covers_row
            assert config.block_channels >= hidden or config.tokens == 1
        else:
            assert config.block_channels == group
            assert covers_row or not in_bytes or config.blocks_across % 4 == 0


X = torch.zeros(8, 192)
PAIR = (torch.zeros(8, 192, dtype=torch.float8_e4m3fn), torch.ones(1, 2))


GOOD = {"x": X, "fmt": "e4m3", "num_per_channels": 32}
BAD = [
    ({"x": [[1.0]]}, ValueError, "x: expected a pair"),
    ({"x": X[:, :100]}, ValueError, "x: expected a positive multiple of 64 channels, got 100"),
    ({"x": X[:, :0]}, ValueError, "x: expected a positive multiple of 64 channels"),
    ({"num_per_channels": 48}, ValueError, "num_per_channels: expected one of 16, 32, 64, 128, 192, got 48"),
    ({"num_per_channels": 0}, ValueError, "num_per_channels"),
    ({"x_block_size": (1, 32)}, ValueError, "x_block_size: expected None"),
    ({"x": PAIR}, ValueError, "x_block_size: expected the block size"),
    ({"x": PAIR, "x_block_size": (128,)}, ValueError, "x_block_size: expected two"),
    ({"x": PAIR, "x_block_size": (128, 0)}, ValueError, "x_block_size: expected two positive"),
    ({"x": PAIR, "x_block_size": (128, 64)}, ValueError, r"x\[1\]: expected shape \(1, 3\)"),
    ({"x": (X, PAIR[1]), "x_block_size": (128, 128)}, TypeError, r"x\[0\]: expected dtype"),
    ({"x": (PAIR[0], PAIR[1].half()), "x_block_size": (128, 128)}, TypeError, r"x\[1\]: expected dtype"),
    ({"x": (PAIR[0], PAIR[1].to("meta")), "x_block_size": (128, 128)}, ValueError, r"x\[1\]: expected device"),
    ({"x": (PAIR[0], torch.ones(8, 12)[:, ::2]), "x_block_size": (1, 32)}, ValueError, r"x\[1\]: expected strides"),
    ({"x": (PAIR[0], PAIR[1], 0), "x_block_size": (128, 128)}, ValueError, "x: expected a pair"),
    ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0"),
]


@pytest.mark.parametrize("op", [tk_quant.per_token_cast, tk_quant.per_token_cast_with_sf_only])
def test_debug_mode_finds_a_tensor_sf_that_scales_nothing(monkeypatch: pytest.MonkeyPatch, op: Callable) -> None:
    x = torch.ones(2, 64)
    monkeypatch.setattr(env, "debug", lambda: True)
    op(x, "e2m1", 16, tensor_sf=torch.tensor(0.5))
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="tensor_sf: expected a number above 0"):
            op(x, "e2m1", 16, tensor_sf=torch.tensor(wrong))


def test_what_tilekernels_lacks_has_no_position() -> None:
    x = torch.ones(2, 64)
    with pytest.raises(TypeError, match="positional"):
        tk_quant.per_token_cast(x, "e4m3", 64, None, False, True, False, False, False, None, True)
    # The arguments that 2.1.0 has in places 8 to 10, and the flags that it has one place earlier.
    data, sf = torch.empty(2, 64, dtype=torch.float8_e4m3fn), torch.empty(2, 1, dtype=torch.float8_e4m3fn)
    assert tk_quant.per_token_cast(x, "e4m3", 64, None, False, False, False, True, True, (data, sf))[1] is sf
    out_sf = torch.empty_like(sf)
    assert tk_quant.per_token_cast_with_sf_only(x, "e4m3", 64, False, False, False, True, out_sf) is out_sf
    assert tk_quant.per_token_cast_with_sf_only(x, "e4m3", 64, None, False, False, False, True, out_sf) is out_sf
    assert torch.equal(out_sf.float(), sf.float())
    again = torch.empty_like(data)
    assert tk_quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, sf, False, False, False, True, again) is again


NVFP4 = {"fmt": "e2m1", "num_per_channels": 16, "tensor_sf": torch.ones(())}


BAD_LAYOUTS = [
    ({"use_swizzled_sf": True}, ValueError, "use_swizzled_sf: expected round_sf=True, use_e4m3_sf or a tensor_sf"),
    (
        {"use_swizzled_sf": True, "round_sf": True, "use_tma_aligned_col_major_sf": True},
        ValueError,
        "use_tma_aligned_col_major_sf: expected False beside use_swizzled_sf",
    ),
    ({**NVFP4, "fmt": "e4m3"}, ValueError, "fmt: expected 'e2m1' with tensor_sf, got 'e4m3'"),
    ({**NVFP4, "num_per_channels": 32}, ValueError, "num_per_channels: expected 16 with tensor_sf, got 32"),
    ({**NVFP4, "round_sf": True}, ValueError, "round_sf: expected False with tensor_sf"),
    ({**NVFP4, "sf_clamp_min": 1.0}, ValueError, "sf_clamp_min: expected None with tensor_sf"),
    (
        {**NVFP4, "use_tma_aligned_col_major_sf": True},
        ValueError,
        "use_tma_aligned_col_major_sf: expected False with tensor_sf",
    ),
    ({**NVFP4, "tensor_sf": torch.ones(2)}, ValueError, r"tensor_sf: expected shape \(1\), got \(2,\)"),
    ({**NVFP4, "tensor_sf": torch.ones(1, 1)}, ValueError, "tensor_sf: expected shape"),
    ({**NVFP4, "tensor_sf": torch.ones((), device="meta")}, ValueError, "tensor_sf: expected device"),
    ({"use_e4m3_sf": True, "round_sf": True}, ValueError, "round_sf: expected False beside use_e4m3_sf"),
    ({"use_e4m3_sf": True, "num_per_channels": 192}, ValueError, "num_per_channels: expected one of 16, 32, 64, 128"),
    ({"use_e4m3_sf": True, "sf_clamp_min": 0.8}, ValueError, "sf_clamp_min: expected at least 0.875, got 0.8"),
    ({**NVFP4, "use_e4m3_sf": True}, ValueError, "tensor_sf: expected None beside use_e4m3_sf"),
    (
        {"x": (PAIR[0], torch.ones(1, 2, 32, 4, 4).to(torch.float8_e8m0fnu)), "x_block_size": (128, 128)},
        ValueError,
        r"x\[1\]: expected shape",
    ),
]
BAD_SEEDS = [
    ({"seed": 1}, ValueError, "seed: expected None without stochastic_cast, got 1"),
    ({"stochastic_cast": True, "seed": torch.ones(2).long()}, ValueError, r"seed: expected shape \(1\)"),
    ({"stochastic_cast": True, "fmt": "e5m6", "num_per_channels": 192}, ValueError, "stochastic_cast: expected False"),
]
test_bad_input = tiers.bad_input(SPEC, GOOD, [*BAD, *BAD_LAYOUTS, *BAD_SEEDS])
test_with_sf_only_bad_input = tiers.bad_input(WITH_SF_ONLY_SPEC, GOOD, [*BAD, *BAD_LAYOUTS])


def test_bad_e5m6() -> None:
    with pytest.raises(ValueError, match="num_per_channels: expected 192 for fmt 'e5m6', got 64"):
        tk_quant.per_token_cast(X, "e5m6", 64)
    with pytest.raises(ValueError, match="num_per_channels: expected 192 for fmt 'e5m6', got 128"):
        tk_quant.per_token_cast_to_e5m6(X, 128)
    with pytest.raises(ValueError, match="x: expected a plain tensor for fmt 'e5m6'"):
        tk_quant.per_token_cast_to_e5m6(PAIR, 192)
    with pytest.raises(ValueError, match="use_packed_ue8m0: expected round_sf=True"):
        tk_quant.per_token_cast_to_e5m6(X, 192, use_packed_ue8m0=True)
    with pytest.raises(ValueError, match="fmt: expected one of 'e4m3', 'e2m1', got 'e5m6'"):
        tk_quant.per_token_cast_with_sf_only(X, "e5m6", 192)
    with pytest.raises(ValueError, match="fmt: expected one of 'e4m3', 'e2m1', got 'e5m6'"):
        tk_quant.per_token_cast_with_precomputed_sf(X, "e5m6", 192, torch.ones(8, 1))


test_with_precomputed_sf_bad_input = tiers.bad_input(
    WITH_PRECOMPUTED_SF_SPEC,
    {**GOOD, "sf": torch.ones(8, 6)},
    [
        *BAD,
        ({"sf": torch.ones(8, 5)}, ValueError, r"sf: expected shape \(8, 6\)"),
        ({"use_tma_aligned_col_major_sf": True}, ValueError, "use_tma_aligned_col_major_sf: expected False"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected False"),
    ],
)


def test_any_layout_of_an_input_with_one_block() -> None:
    data = torch.full((1, 64), 2.0).to(torch.float8_e4m3fn)
    for layout in ScaleLayout:
        sf = pack_scales(torch.full((1, 1), 4.0), layout)
        assert check_scales("sf", sf, 1, 1, sf.device, (torch.float8_e8m0fnu,)) is layout
        assert tk_quant.per_token_cast((data, sf), "e4m3", 64, (1, 64), round_sf=True)[1].item() == 2.0**-5


def test_e4m3_sf_by_hand(device: str) -> None:
    x = torch.zeros(4, 64, device=device)
    x[0, :3] = torch.tensor([10.0, 1.0, -0.0])
    x[1, 0], x[2, 0], x[3, 0] = 1e6, 1e-3, math.inf
    data, sf = tk_quant.per_token_cast(x, "e4m3", 64, use_e4m3_sf=True)
    # 10 / 448 is nearest to 1.375 · 2⁻⁶; 1e6 / 448 saturates; the least is 2⁻⁹; infinity has NaN.
    assert sf.view(torch.uint8).flatten().tolist() == [0x0B, 0x7E, 0x01, 0x7F]
    # 10 over it saturates, 1 over it is 46.5; 1e-3 · 512 is nearest to 0.5.
    assert data[:3, 0].tolist() == [448, 448, 0.5]
    assert data[0, 1:3].tolist() == [48, 0]


def test_e4m3_sf_of_e2m1_is_nvfp4_with_one(device: str) -> None:
    x = extremes(192, torch.bfloat16)(device)
    for flags in ({}, {"use_swizzled_sf": True}):
        found = tk_quant.per_token_cast(x, "e2m1", 16, use_e4m3_sf=True, **flags)
        compare(found, tk_quant.per_token_cast(x, "e2m1", 16, tensor_sf=torch.ones(1, device=device), **flags))
        back = tk_quant.per_token_cast_back(found, "fp32", 16)
        assert_equal(back, tk_quant.per_token_cast_back(found, "fp32", 16, tensor_sf=torch.ones(1, device=device)))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_e4m3_sf_is_the_same_in_all_layouts(fmt: str, device: str) -> None:
    x = normal(130, 192, torch.bfloat16)(device)
    data, sf = tk_quant.per_token_cast(x, fmt, 32, use_e4m3_sf=True)
    assert torch.equal(tk_quant.per_token_cast_with_precomputed_sf(x, fmt, 32, sf, use_e4m3_sf=True), data)
    for flags in list(E4M3_FLAGS.values())[1:]:
        other, other_sf = tk_quant.per_token_cast(x, fmt, 32, **flags)
        assert torch.equal(other.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, 130, 6), sf.float())
        for out in ("bf16", "fp32"):
            back = tk_quant.per_token_cast_back((other, other_sf), out, 32)
            assert_equal(back, tk_quant.per_token_cast_back((data, sf), out, 32))
    assert other_sf.shape == (2, 2, 32, 4, 4)
    clamped = tk_quant.per_token_cast_with_sf_only(x * 0, fmt, 32, use_e4m3_sf=True, sf_clamp_min=6 * 448.0)
    assert (clamped.float() == (6 if fmt == "e4m3" else 448)).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_data_are_next_to_those_to_nearest(fmt: str, device: str) -> None:
    x = torch.randn(256, 512, device=device)
    nearest, sf = tk_quant.per_token_cast(x, fmt, 32)
    data, same_sf = tk_quant.per_token_cast(x, fmt, 32, stochastic_cast=True)
    assert torch.equal(sf, same_sf)
    assert (quant_level_rank(data, fmt) - quant_level_rank(nearest, fmt)).abs().max() == 1
    error = (tk_quant.per_token_cast_back((data, sf), "fp32", 32).double() - x.double()).mean().abs()
    bits = {"e4m3": 3, "e2m1": 1}[fmt]
    assert error <= 10 * 2**-bits * x.double().abs().mean() / math.sqrt(x.numel())
    # Without a seed equal rows are rounded alike, with one they are not.
    rows = x[:1].expand(4, -1)
    alike = tk_quant.per_token_cast(rows, fmt, 32, stochastic_cast=True)[0].view(torch.uint8)
    assert (alike == alike[0]).all()
    apart = tk_quant.per_token_cast(rows, fmt, 32, stochastic_cast=True, seed=0)[0].view(torch.uint8)
    assert torch.equal(apart[0], alike[0])
    assert not torch.equal(apart[1], alike[1])
    at = torch.tensor([2**40], device=device)
    of_tensor = tk_quant.per_token_cast(rows, fmt, 32, stochastic_cast=True, seed=at)[0]
    assert_equal(of_tensor, tk_quant.per_token_cast(rows, fmt, 32, stochastic_cast=True, seed=2**40)[0])
