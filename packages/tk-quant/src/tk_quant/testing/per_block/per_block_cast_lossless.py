"""Named cases of per_block_cast_lossless."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import ceil_div
from tk_core.reference.scales import decode_ue8m0, pack_scales
from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.per_block.per_block_cast_lossless import per_block_cast_lossless
from tk_quant.testing.dequantize.cast_back import LAYOUTS, NEIGHBOURS, Pair, random_codes

Block = tuple[int, int]

# (first exponent, exponent after the last).
EXPONENTS = {"near": (100, 115), "apart": (90, 118), "tiny": (0, 15), "huge": (232, 255), "any": (0, 256)}
"""Ranges of biased exponents: exact for all ratios, rounding for some, at both ends of the range, and with NaN."""
FLAGS = {
    "row": {},
    "col": {"use_tma_aligned_col_major_sf": True},
    "round": {"round_sf": True},
    "packed": {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
}
"""Layouts of the output's sf, by their names in case names."""


def pair(
    num_tokens: int, hidden: int, block_size: Block, layout: str, exponents: str = "near", extra: int = 0
) -> Callable[[str], Pair]:
    """Random codes, a third of the runs of 16 zero; float32 sf with any mantissa. Rows have gaps of `extra` bytes."""

    def build(device: str) -> Pair:
        rows, cols = ceil_div(num_tokens, block_size[0]), ceil_div(hidden, block_size[1])
        data = random_codes(num_tokens, hidden // 2 + extra, "e2m1", device)[:, extra:]
        zero = torch.randint(0, 3, (num_tokens, hidden // 16), device=device).repeat_interleave(8, dim=1) == 0
        # Keeps the signs: -0 has a code of its own.
        data.copy_(torch.where(zero, data & -0x78, data))
        codes = torch.randint(*EXPONENTS[exponents], (rows, cols), device=device)
        sf = decode_ue8m0(codes)
        if layout in ("row", "col"):
            mantissa = torch.randint(0, 1 << 23, (rows, cols), device=device, dtype=torch.int32)
            sf = ((codes.to(torch.int32) << 23) | mantissa).view(torch.float32)
        return data, pack_scales(sf, LAYOUTS[layout])

    return build


def make(x: Callable[[str], Pair], x_block_size: Block, out_block_size: Block, flags: str) -> Callable[[str], Any]:
    """Arguments of per_block_cast_lossless."""
    blocks = {"x_block_size": x_block_size, "out_block_size": out_block_size}
    return lambda device: {"x": x(device), "fmt": "e4m3", **blocks, **FLAGS[flags]}


def _case(
    x_block_size: Block,
    out_block_size: Block,
    layout: str,
    flags: str,
    num_tokens: int,
    hidden: int,
    exponents: str = "near",
    extra: int = 0,
    suffix: str = "",
    **roles: Any,
) -> Case:
    (a, b), (c, d) = x_block_size, out_block_size
    name = f"{a}x{b}-{layout}-{c}x{d}-{flags}-h{hidden}-t{num_tokens}-{exponents}"
    name += f"-apart{extra}" if extra else ""
    x = pair(num_tokens, hidden, x_block_size, layout, exponents, extra)
    return Case(name + suffix, make(x, x_block_size, out_block_size, flags), **roles)


SPEC = OpSpec(
    op=per_block_cast_lossless,
    reference=reference.per_block_cast_lossless,
    cases=(
        # Every combination of input and output blocks, each layout in and out. 576 and 160 channels leave the last
        # block and the last packed word partial.
        *(
            _case(x_block_size, out_block_size, layout, flags, tokens, hidden, exponents, small=True, modes=modes)
            for x_block_size, out_block_size, layout, flags, tokens, hidden, exponents, modes in (
                ((1, 32), (1, 128), "row", "row", 5, 576, "near", False),
                ((1, 32), (1, 128), "packed", "packed", 5, 576, "apart", True),
                ((1, 32), (1, 128), "swizzled", "col", 9, 160, "any", False),
                ((1, 32), (32, 32), "row", "packed", 40, 160, "near", False),
                ((1, 32), (32, 32), "packed", "row", 40, 96, "any", False),
                ((1, 32), (32, 32), "swizzled", "round", 33, 32, "tiny", False),
                ((1, 32), (128, 128), "row", "row", 33, 576, "apart", True),
                ((1, 32), (128, 128), "packed", "packed", 131, 160, "near", False),
                ((1, 32), (128, 128), "swizzled", "packed", 129, 288, "any", False),
                ((1, 32), (128, 128), "col", "col", 1, 64, "tiny", False),
                ((1, 32), (128, 128), "row", "packed", 130, 96, "huge", False),
                # Blocks that are divided differently among threads or within a thread, and other sizes of x.
                ((1, 16), (1, 16), "row", "row", 3, 96, "near", False),
                ((1, 16), (2, 64), "packed", "packed", 11, 96, "any", False),
                ((1, 16), (8, 32), "row", "row", 21, 96, "apart", False),
                ((2, 32), (16, 32), "row", "row", 35, 64, "any", False),
                ((4, 64), (64, 64), "swizzled", "packed", 70, 160, "near", False),
                ((32, 32), (128, 128), "packed", "packed", 131, 160, "apart", False),
                ((128, 128), (128, 128), "row", "row", 131, 160, "any", False),
                ((1, 128), (1, 128), "packed", "packed", 3, 1088, "any", False),
            )
        ),
        *(
            _case((1, 32), out_block_size, "packed", "packed", 0, 96, small=True)
            for out_block_size in ((1, 128), (128, 128))
        ),
        # Rows with gaps, down to rows that are not aligned at all.
        *(
            _case((1, 32), (32, 32), "row", "row", 9, 96, "near", extra, small=True, compile=extra == 3)
            for extra in (16, 8, 4, 2, 3)
        ),
        # Sizes of real models.
        *(
            _case((1, 32), out_block_size, layout, flags, tokens, hidden, exponents)
            for out_block_size, layout, flags, exponents in (
                ((1, 128), "packed", "packed", "near"),
                ((32, 32), "row", "row", "any"),
                ((128, 128), "row", "packed", "near"),
            )
            for tokens, hidden in (
                (0, 2048),
                (1, 7168),
                (17, 3072),
                (4001, 576),
                (4001, 4096),
                (8001, 2560),
                (8001, 6144),
                (8001, 7168),
            )
        ),
        _case((1, 32), (128, 128), "swizzled", "row", 4001, 7168, "apart"),
        _case((1, 32), (1, 128), "swizzled", "row", 4001, 2048, "any"),
        _case((1, 32), (32, 32), "packed", "packed", 4001, 7168, "tiny"),
        *(
            _case((1, 32), out_block_size, layout, flags, 8192, 7168, suffix="-bench", bench=True, gpu=False, **roles)
            for out_block_size, layout, flags, roles in (
                ((128, 128), "row", "row", {"model_shape": True, "compile": True}),
                ((128, 128), "packed", "packed", {"model_shape": True, "compile": True}),
                ((128, 128), "swizzled", "row", {"compile": True}),
                ((32, 32), "row", "row", {"compile": True}),
                ((32, 32), "packed", "packed", {"compile": True}),
                ((1, 128), "row", "row", {"compile": True}),
                ((1, 128), "packed", "packed", {"model_shape": True, "compile": True}),
            )
        ),
        *(
            _case((1, 32), (128, 128), "row", "row", tokens, hidden, suffix="-bench", bench=True, gpu=False)
            for tokens, hidden in NEIGHBOURS
        ),
    ),
)
