"""Named cases of per_block_cast and its relatives with sf only and with precomputed sf."""

from typing import Any

import torch

from tk_core.math import ceil_div
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, OpSpec, assert_equal
from tk_quant import reference
from tk_quant.per_block.per_block_cast import (
    per_block_cast,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
)
from tk_quant.reference.lib.formats import expand_blocks
from tk_quant.testing.per_token.per_token_cast import (
    FLAGS,
    LEAST_AMAX,
    Make,
    MakeInput,
    extremes,
    normal,
    repeated,
    strided,
    tiny,
)

Block = tuple[int, int]

_BF16, _FP32 = torch.bfloat16, torch.float32
_NAMES = {_BF16: "bf16", _FP32: "fp32"}
_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)
# Blocks held by several warps, by one, by some lanes; several blocks in a thread, along tokens and channels.
_BLOCKS = ((128, 128), (32, 32), (1, 128), (128, 1), (1, 1), (2, 128), (64, 2), (16, 4), (8, 8), (1, 16), (4, 64))
_EDGES = ((128, 16), (4, 128), (2, 2), (32, 1), (16, 64), (2, 1), (128, 8), (64, 64))


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except e2m1 data of blocks that contain infinity or NaN, which are unspecified."""
    if isinstance(expected, tuple) and expected[0].dtype is torch.int8:
        (data, sf), want = actual, expected[0]
        num_tokens, hidden = want.shape[0], 2 * want.shape[1]
        num_rows, num_cols = expected[1].shape
        per_word = 4 if expected[1].dtype is torch.int32 else 1
        # Any size that fits the shape of sf will do; packed factors must fill more than one word of a row.
        block_tokens = next(side for side in _SIDES if ceil_div(num_tokens, side) == num_rows)
        block_channels = next(side for side in _SIDES if ceil_div(ceil_div(hidden, side), per_word) == num_cols)
        factors = unpack_scales(expected[1], num_rows, ceil_div(hidden, block_channels))
        counts = expand_blocks(factors, (block_tokens, block_channels), num_tokens, hidden).isfinite()
        nibbles = counts[:, ::2] * torch.tensor(0x0F, dtype=torch.int8, device=want.device)
        nibbles |= counts[:, 1::2] * torch.tensor(-0x10, dtype=torch.int8, device=want.device)
        actual, expected = (data & nibbles, sf), (want & nibbles, expected[1])
    assert_equal(actual, expected)


def ties(block_size: Block, dtype: torch.dtype) -> MakeInput:
    """Every block has amax 6 * u, with 64 different integers u, and multiples of u / 4 up to that.

    Their exact quotients are e2m1 values and midpoints between two of them. As 6 / amax is rounded, the products hit
    them exactly or just miss them.
    """

    def build(device: str) -> torch.Tensor:
        quarters = torch.randint(-24, 25, (8 * block_size[0], 8 * block_size[1]), device=device)
        quarters[:: block_size[0], :: block_size[1]] = 24
        u = torch.arange(1, 65, device=device).view(8, 8)
        u = u.repeat_interleave(block_size[0], 0).repeat_interleave(block_size[1], 1)
        return (quarters * u).to(torch.float32).mul(0.25).to(dtype)

    return build


def every_bfloat16(device: str) -> torch.Tensor:
    """All 2**16 values, (1024, 64)."""
    bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
    return bits.view(torch.bfloat16).view(1024, 64)


def make(x: MakeInput, fmt: str, block_size: Block, flags: str = "row", **more: Any) -> Make:
    """Arguments of per_block_cast or its form with sf only."""
    return lambda device: {"x": x(device), "fmt": fmt, "block_size": block_size, **FLAGS[flags], **more}


def make_precomputed(x: MakeInput, fmt: str, block_size: Block, special: bool = False) -> Make:
    """Arguments of the form with precomputed sf: random, so that some data saturate."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        shape = tuple(map(ceil_div, values.shape, block_size))
        sf = torch.exp2(4 * torch.randn(shape, device=device))
        if special:
            sf[0, 0], sf[1, 0], sf[2, 0], sf[3, 0] = 0.0, torch.inf, torch.nan, -1.0
        return {"x": values, "fmt": fmt, "block_size": block_size, "sf": sf}

    return build


def _name(dtype: torch.dtype, fmt: str, block: Block, flags: str, num_tokens: int, hidden: int) -> str:
    layout = f"-{flags}" if flags else ""
    return f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}{layout}-h{hidden}-t{num_tokens}"


def _plain(
    dtype: torch.dtype, fmt: str, block: Block, flags: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    """A case with normally distributed input, each token with a scale of its own."""
    name = _name(dtype, fmt, block, flags, num_tokens, hidden) + suffix
    return Case(name, make(normal(num_tokens, hidden, dtype), fmt, block, flags), **roles)


def _precomputed(
    dtype: torch.dtype, fmt: str, block: Block, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    name = _name(dtype, fmt, block, "", num_tokens, hidden) + suffix
    return Case(name, make_precomputed(normal(num_tokens, hidden, dtype), fmt, block), **roles)


def _bench(dtype: torch.dtype, fmt: str, block: Block, flags: str, num_tokens: int, hidden: int, **roles: Any) -> Case:
    return _plain(dtype, fmt, block, flags, num_tokens, hidden, "-bench", bench=True, gpu=False, **roles)


_NEIGHBOURS = (
    *((8192, hidden) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
    *((tokens, 7168) for tokens in (1, 64, 4001, 8001)),
)

SPEC = OpSpec(
    op=per_block_cast,
    reference=reference.per_block_cast,
    compare=compare,
    cases=(
        # Blocks of every kind, partial ones at both edges; 128 does not divide 576 channels, 192 leave a partial word.
        *(
            _plain(_BF16, fmt, block, flags, 133, 192, small=True, modes=(fmt, block) == ("e4m3", (128, 128)))
            for block in _BLOCKS
            for fmt, flags in (("e4m3", "packed"), ("e2m1", "row"))
        ),
        *(
            _plain(dtype, fmt, block, flags, 37, 576, small=True)
            for dtype, fmt, block, flags in zip(
                (_BF16, _FP32) * 4, ("e4m3", "e2m1", "e2m1", "e4m3") * 2, _EDGES, ("col", "packed", "row-round") * 3
            )
        ),
        *(
            _plain(_FP32, fmt, block, flags, 133, 192, small=True)
            for fmt, block, flags in (
                ("e4m3", (128, 128), "row"),
                ("e2m1", (32, 32), "packed"),
                ("e4m3", (128, 1), "col-round"),
                ("e2m1", (1, 1), "row"),
                ("e4m3", (1, 128), "packed"),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-e4m3-{side}x{side}-{flags}-h192-tiny",
                make(tiny(133, 192, dtype), "e4m3", (side, side), flags, sf_clamp_min=LEAST_AMAX["e4m3"]),
                small=True,
            )
            for dtype, side, flags in ((_BF16, 128, "row"), (_FP32, 2, "packed"))
        ),
        _plain(_BF16, "e2m1", (32, 32), "packed", 133, 576, small=True, modes=True),
        _plain(_BF16, "e2m1", (8, 8), "col-round", 133, 64, small=True),
        _plain(_BF16, "e2m1", (32, 4), "row-round", 37, 192, small=True),
        *(
            _plain(_BF16, "e4m3", block, "packed", tokens, 576, small=True)
            for block, tokens in (((128, 128), 0), ((128, 128), 1), ((32, 32), 1), ((1, 1), 1))
        ),
        _plain(_BF16, "e2m1", (32, 32), "row", 0, 576, small=True),
        # Strided rows, down to rows that start at odd elements.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}-h192-t40-apart{extra}-from{first}",
                make(strided(40, 192, dtype, extra, first), fmt, block),
                small=True,
                compile=(dtype, extra) == (_BF16, 3),
            )
            for dtype, fmt, block, extra, first in (
                (_BF16, "e4m3", (128, 128), 64, 64),
                (_BF16, "e2m1", (32, 32), 8, 4),
                (_BF16, "e4m3", (32, 32), 2, 0),
                (_BF16, "e4m3", (128, 1), 3, 1),
                (_FP32, "e2m1", (32, 32), 2, 2),
                (_FP32, "e4m3", (128, 128), 1, 1),
            )
        ),
        Case("bf16-e4m3-128x128-h2048-t4001-half", make(strided(4001, 2048, _BF16, 2048, 2048), "e4m3", (128, 128))),
        Case("bf16-e4m3-32x32-h576-t33-repeated", make(repeated(33, 576, _BF16), "e4m3", (32, 32)), small=True),
        # Zeros, infinity, NaN, subnormals, ties, an outlier; each token a row of blocks, or several tokens.
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}-{flags}-h192-extremes",
                make(extremes(192, dtype), fmt, block, flags),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for block, flags in (((1, 32), "packed"), ((1, 64), "row"), ((2, 1), "row"), ((1, 16), "row-round"))
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-e2m1-{block[0]}x{block[1]}-{flags}-ties",
                make(ties(block, dtype), "e2m1", block, flags),
                small=True,
            )
            for dtype, block, flags in (
                (_BF16, (32, 32), "row"),
                (_BF16, (8, 8), "row"),
                (_BF16, (8, 16), "row-round"),
                (_FP32, (4, 32), "row"),
            )
        ),
        Case("bf16-e4m3-1x1-packed-every", make(every_bfloat16, "e4m3", (1, 1), "packed"), small=True),
        Case("bf16-e4m3-1x1-packed-h192-extremes", make(extremes(192, _BF16), "e4m3", (1, 1), "packed"), small=True),
        Case("bf16-e4m3-128x128-row-h192-extremes", make(extremes(192, _BF16), "e4m3", (128, 128)), small=True),
        # Sizes of real models.
        *(
            _plain(dtype, fmt, block, flags, tokens, hidden)
            for dtype, fmt, block, flags, tokens, hidden in (
                (_BF16, "e4m3", (128, 128), "row", 4001, 576),
                (_BF16, "e4m3", (128, 128), "packed", 8001, 2048),
                (_FP32, "e4m3", (128, 128), "col", 4001, 2560),
                (_BF16, "e2m1", (32, 32), "packed", 4001, 3072),
                (_BF16, "e2m1", (32, 32), "row", 8001, 7168),
                (_FP32, "e2m1", (32, 32), "row", 4001, 4096),
                (_BF16, "e4m3", (32, 32), "packed", 17, 6144),
                (_BF16, "e4m3", (128, 128), "row", 8001, 7168),
                (_BF16, "e4m3", (1, 128), "row", 4001, 7168),
                (_BF16, "e4m3", (128, 1), "row", 4001, 7168),
            )
        ),
        *(
            _bench(_BF16, fmt, block, flags, 8192, 7168, model_shape=True, compile=True)
            for fmt, block, flags in (
                ("e4m3", (128, 128), "row"),
                ("e4m3", (128, 128), "packed"),
                ("e2m1", (32, 32), "row"),
                ("e2m1", (32, 32), "packed"),
            )
        ),
        *(
            _bench(dtype, fmt, block, flags, 8192, 7168, compile=True)
            for dtype, fmt, block, flags in (
                (_BF16, "e4m3", (32, 32), "row"),
                (_BF16, "e4m3", (1, 128), "row"),
                (_BF16, "e4m3", (128, 1), "row"),
                (_BF16, "e2m1", (128, 128), "row"),
                (_BF16, "e4m3", (1, 1), "packed"),
                (_BF16, "e4m3", (8, 8), "row"),
                (_BF16, "e2m1", (4, 4), "col"),
                (_FP32, "e4m3", (128, 128), "row"),
                (_FP32, "e2m1", (32, 32), "packed"),
            )
        ),
        *(_bench(_BF16, "e4m3", (128, 128), "row", tokens, hidden) for tokens, hidden in _NEIGHBOURS),
        *(_bench(_BF16, "e2m1", (32, 32), "row", tokens, hidden) for tokens, hidden in _NEIGHBOURS),
    ),
)

WITH_SF_ONLY_SPEC = OpSpec(
    op=per_block_cast_with_sf_only,
    reference=reference.per_block_cast_with_sf_only,
    cases=(
        *(
            _plain(_BF16, fmt, block, flags, 133, 192, small=True, modes=(fmt, block) == ("e4m3", (128, 128)))
            for fmt, block, flags in (
                ("e4m3", (128, 128), "packed"),
                ("e2m1", (32, 32), "row"),
                ("e4m3", (32, 32), "col"),
                ("e2m1", (128, 1), "row"),
                ("e4m3", (1, 1), "packed"),
                ("e2m1", (1, 128), "packed"),
                ("e4m3", (16, 4), "row-round"),
            )
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-{block[0]}x{block[1]}-packed-h192-extremes",
                make(extremes(192, dtype), fmt, block, "packed"),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for block in ((1, 32), (1, 1))
        ),
        _plain(_FP32, "e4m3", (128, 128), "row", 133, 192, small=True),
        _plain(_BF16, "e4m3", (128, 128), "row", 0, 192, small=True),
        Case("bf16-e4m3-32x32-h192-t40-apart3", make(strided(40, 192, _BF16, 3, 1), "e4m3", (32, 32)), small=True),
        *(
            _plain(dtype, "e4m3", block, "row", tokens, hidden)
            for dtype, block, tokens, hidden in (
                (_BF16, (128, 128), 8001, 7168),
                (_BF16, (32, 32), 4001, 2560),
                (_FP32, (32, 32), 4001, 576),
                (_BF16, (128, 128), 17, 6144),
            )
        ),
        *(
            _bench(dtype, fmt, block, flags, 8192, 7168, compile=True)
            for dtype, fmt, block, flags in (
                (_BF16, "e4m3", (128, 128), "row"),
                (_BF16, "e2m1", (32, 32), "packed"),
                (_FP32, "e4m3", (128, 128), "row"),
            )
        ),
    ),
)

WITH_PRECOMPUTED_SF_SPEC = OpSpec(
    op=per_block_cast_with_precomputed_sf,
    reference=reference.per_block_cast_with_precomputed_sf,
    cases=(
        *(
            _precomputed(
                dtype, fmt, block, 133, 192, small=True, modes=(dtype, fmt, block) == (_BF16, "e4m3", (32, 32))
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
            for block in ((128, 128), (32, 32), (128, 1), (1, 4))
        ),
        *(
            Case(
                f"{_NAMES[dtype]}-{fmt}-1x32-h192-extremes",
                make_precomputed(extremes(192, dtype), fmt, (1, 32), special=True),
                small=True,
            )
            for dtype in (_BF16, _FP32)
            for fmt in ("e4m3", "e2m1")
        ),
        _precomputed(_BF16, "e2m1", (32, 32), 0, 192, small=True),
        _precomputed(_BF16, "e4m3", (128, 128), 1, 576, small=True),
        Case("bf16-e4m3-32x32-h192-t40-apart3", make_precomputed(strided(40, 192, _BF16, 3, 1), "e4m3", (32, 32))),
        *(
            _precomputed(dtype, fmt, block, tokens, hidden)
            for dtype, fmt, block, tokens, hidden in (
                (_BF16, "e4m3", (128, 128), 8001, 7168),
                (_BF16, "e2m1", (32, 32), 4001, 2048),
                (_FP32, "e4m3", (128, 128), 4001, 3072),
            )
        ),
        *(
            _precomputed(_BF16, fmt, block, 8192, 7168, "-bench", bench=True, gpu=False, compile=True)
            for fmt, block in (("e4m3", (128, 128)), ("e2m1", (32, 32)))
        ),
    ),
)
