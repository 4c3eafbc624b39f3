"""Named cases of per_token_cast and its relatives: to e5m6, with sf only, with precomputed sf."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import ceil_div
from tk_core.reference.scales import pack_scales, unpack_scales
from tk_core.scales import ScaleLayout
from tk_core.testing import Case, OpSpec, assert_equal
from tk_quant import reference
from tk_quant.per_token.per_token_cast import (
    per_token_cast,
    per_token_cast_to_e5m6,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)
from tk_quant.reference.lib.formats import expand_blocks

Make = Callable[[str], dict[str, Any]]
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
ALL_FLAGS = {**FLAGS, "swizzled": {"use_swizzled_sf": True, "round_sf": True}}


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
        if layout is not ScaleLayout.PACKED_UE8M0:
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
    kwargs = {"fmt": fmt, "num_per_channels": num_per_channels, **ALL_FLAGS[flags], **more}
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
}


def _size(num_tokens: int, hidden: int) -> str:
    return f"h{hidden}-t{num_tokens}"


def _plain(
    dtype: torch.dtype, fmt: str, group: int, flags: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    """A case with normally distributed input."""
    name = f"{_NAMES[dtype]}-{fmt}-{group}-{flags}-{_size(num_tokens, hidden)}{suffix}"
    return Case(name, make(normal(num_tokens, hidden, dtype), fmt, group, flags), **roles)


def _pair_cases(num_tokens: int, hidden: int, make_case: Callable[..., Make], **roles: Any) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{x_fmt}-{block[0]}x{block[1]}-{layout}-{fmt}-{group}-{flags}-{_size(num_tokens, hidden)}",
            make_case(pair(num_tokens, hidden, x_fmt, block, _LAYOUTS[layout]), fmt, group, flags, x_block_size=block),
            **roles,
        )
        for x_fmt, block, layout, fmt, group, flags in _PAIRS
    )


def _nvfp4(dtype: torch.dtype, swizzled: bool, num_tokens: int, hidden: int, suffix: str = "", **roles: Any) -> Case:
    name = f"{_NAMES[dtype]}-nvfp4-{'swizzled' if swizzled else 'row'}-{_size(num_tokens, hidden)}{suffix}"
    return Case(name, make_nvfp4(normal(num_tokens, hidden, dtype), swizzled), **roles)


SPEC = OpSpec(
    op=per_token_cast,
    reference=reference.per_token_cast,
    compare=compare,
    cases=(
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
        *_pair_cases(5, 192, make, small=True),
        *_pair_cases(140, 192, make)[::4],
        Case(
            "e4m3-32x32-row-e4m3-32-row-h192-t40-special",
            make(
                pair(40, 192, "e4m3", (32, 32), ScaleLayout.ROW_MAJOR, special=True),
                "e4m3",
                32,
                x_block_size=(32, 32),
            ),
        ),
        Case(
            "e2m1-1x32-packed-e4m3-64-packed-h192-t40-special",
            make(
                pair(40, 192, "e2m1", (1, 32), ScaleLayout.PACKED_UE8M0, special=True),
                "e4m3",
                64,
                "packed",
                x_block_size=(1, 32),
            ),
        ),
        # Every power of two as sf, and values that overflow with it.
        *(
            Case(
                f"e4m3-{block[0]}x{block[1]}-{layout}-e2m1-{group}-{flags}-h576-t40-special",
                make(
                    pair(40, 576, "e4m3", block, _LAYOUTS[layout], special=True, largest_exponent=127),
                    "e2m1",
                    group,
                    flags,
                    x_block_size=block,
                ),
            )
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
        Case(
            "e4m3-1x128-row-e4m3-192-row-h192-t9",
            make(pair(9, 192, "e4m3", (1, 128), ScaleLayout.ROW_MAJOR), "e4m3", 192, x_block_size=(1, 128)),
            small=True,
            compile=True,
        ),
        *(
            Case(
                f"{x_fmt}-128x128-{layout}-{fmt}-{group}-{flags}-{_size(8001, 7168)}",
                make(pair(8001, 7168, x_fmt, (128, 128), _LAYOUTS[layout]), fmt, group, flags, x_block_size=(128, 128)),
                compile=True,
            )
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
            _plain(
                dtype, fmt, group, flags, 8192, 7168, "-bench", bench=True, gpu=False, model_shape=True, compile=True
            )
            for dtype, fmt, group, flags in (
                (_BF16, "e4m3", 128, "row"),
                (_BF16, "e4m3", 128, "packed"),
                (_FP32, "e4m3", 128, "row"),
                (_BF16, "e2m1", 32, "packed"),
                (_BF16, "e5m6", 7168, "row"),
            )
        ),
        *(
            _plain(dtype, fmt, group, flags, 8192, 7168, "-bench", bench=True, gpu=False, compile=True)
            for dtype, fmt, group, flags in (
                (_BF16, "e2m1", 32, "row"),
                (_BF16, "e2m1", 32, "swizzled"),
                (_FP32, "e4m3", 128, "packed"),
                (_BF16, "e4m3", 7168, "row"),
                (_FP32, "e5m6", 7168, "row"),
            )
        ),
        _nvfp4(_BF16, True, 8192, 7168, "-bench", bench=True, gpu=False, compile=True),
        _nvfp4(_FP32, False, 8192, 7168, "-bench", bench=True, gpu=False, compile=True),
        *(
            _plain(_BF16, fmt, group or hidden, flags, num_tokens, hidden, "-bench", bench=True, gpu=False)
            for fmt, group, flags in (("e4m3", 128, "row"), ("e2m1", 32, "packed"), ("e5m6", None, "row"))
            for num_tokens, hidden in (
                *((8192, hidden) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
                *((num_tokens, 7168) for num_tokens in (1, 64, 4001, 8001)),
            )
        ),
        Case(
            "e4m3-128x128-packed-e2m1-32-packed-h7168-t8192-bench",
            make(
                pair(8192, 7168, "e4m3", (128, 128), ScaleLayout.PACKED_UE8M0),
                "e2m1",
                32,
                "packed",
                x_block_size=(128, 128),
            ),
            bench=True,
            gpu=False,
        ),
    ),
)

TO_E5M6_SPEC = OpSpec(
    op=per_token_cast_to_e5m6,
    reference=reference.per_token_cast_to_e5m6,
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
    op=per_token_cast_with_sf_only,
    reference=reference.per_token_cast_with_sf_only,
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
        *_pair_cases(5, 192, make, small=True),
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
            _plain(dtype, "e4m3", 128, flags, 8192, 7168, "-bench", bench=True, gpu=False, compile=True)
            for dtype, flags in ((_BF16, "row"), (_BF16, "packed"), (_FP32, "row"))
        ),
    ),
)

WITH_PRECOMPUTED_SF_SPEC = OpSpec(
    op=per_token_cast_with_precomputed_sf,
    reference=reference.per_token_cast_with_precomputed_sf,
    cases=(
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
                bench=True,
                gpu=False,
                compile=True,
            )
            for fmt, group in (("e4m3", 128), ("e2m1", 32), ("e4m3", 7168))
        ),
    ),
)
