"""Named cases of cast_back; the makers of pairs serve per_token_cast_back too."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import ceil_div
from tk_core.reference.scales import pack_scales
from tk_core.scales import ScaleLayout
from tk_core.testing import Case, OpSpec
from tk_quant import reference
from tk_quant.dequantize.cast_back import cast_back, cast_back_e5m6
from tk_quant.reference.lib.formats import encode_e5m6

Pair = tuple[torch.Tensor, torch.Tensor]
MakePair = Callable[[str], Pair]

LAYOUTS = {
    "row": ScaleLayout.ROW_MAJOR,
    "col": ScaleLayout.COL_MAJOR,
    "packed": ScaleLayout.PACKED_UE8M0,
    "swizzled": ScaleLayout.SWIZZLED,
    # NVFP4: float8_e4m3fn.
    "nv": ScaleLayout.ROW_MAJOR,
    "nvswizzled": ScaleLayout.SWIZZLED,
}
"""Layouts of sf, by their names in case names."""
BYTES = {"e4m3": (1, 1), "e2m1": (1, 2), "e5m6": (3, 2)}
"""By format: (bytes of data, channels that they hold)."""
SIZES = tuple((tokens, hidden) for hidden in (576, 2048, 4096, 7168) for tokens in (0, 1, 4001, 8001))
NEIGHBOURS = (
    *((8192, hidden) for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
    *((tokens, 7168) for tokens in (1, 64, 4001, 8001)),
)
"""Benchmark shapes in addition to (8192, 7168)."""

# Products with these are NaN, infinite, zeros of both signs, subnormal, or rounded at every bit.
SPECIAL_SF = (
    *(torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.5),
    *(2.0**-149, 3 * 2.0**-148, 2.0**-127, 2.0**-126, 1.2345e-38, 2.0**-133, 5e-41),
    *(2.0**127, 3.4e38, 7.5e35, 1.0, 1 / 3, 1 + 2.0**-7, 1 + 2.0**-8, 1 + 2.0**-23),
)
"""Scale factors at the edges of float32 and bfloat16."""


def pack_e5m6(codes: torch.Tensor) -> torch.Tensor:
    """12-bit codes, none of them NaN or infinity, to the bytes of e5m6."""
    return encode_e5m6((codes << 4).to(torch.int16).view(torch.float16).to(torch.float32))


def random_codes(num_tokens: int, num_bytes: int, fmt: str, device: str) -> torch.Tensor:
    """Random bytes, without NaN and infinity of e4m3 and e5m6. num_bytes of e5m6 may be any number."""
    if fmt == "e5m6":
        codes = torch.randint(0, 4096, (num_tokens, (num_bytes + 11) // 12 * 8), device=device)
        codes = torch.where((codes >> 6) & 0x1F == 0x1F, codes - 64, codes)
        return pack_e5m6(codes)[:, :num_bytes].contiguous()
    codes = torch.randint(0, 256, (num_tokens, num_bytes), device=device)
    if fmt == "e2m1":
        return codes.to(torch.uint8).view(torch.int8)
    return torch.where(codes & 0x7F == 0x7F, codes - 1, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def random_sf(rows: int, cols: int, layout: str, device: str) -> torch.Tensor:
    """Scale factors around 1 in a layout, with the unspecified bytes of packed words set to ones."""
    if layout in ("nv", "nvswizzled"):
        codes = torch.randint(0, 0x7F, (rows, cols), device=device).to(torch.uint8)
        return pack_scales(codes.view(torch.float8_e4m3fn).to(torch.float32), LAYOUTS[layout], torch.float8_e4m3fn)
    sf = torch.exp2(torch.randint(-20, 20, (rows, cols), device=device).to(torch.float32))
    if layout in ("row", "col"):
        sf = sf * (1 + torch.rand(rows, cols, device=device))
    packed = pack_scales(sf, LAYOUTS[layout])
    if layout == "packed" and cols % 4:
        packed[:, -1] |= -1 << 8 * (cols % 4)
    return packed


def pair(
    num_tokens: int,
    hidden: int,
    fmt: str,
    block_size: tuple[int, int],
    layout: str,
    extra: int = 0,
    first: int = 0,
) -> MakePair:
    """Random data and sf. Data rows have gaps of `extra` bytes and start at byte `first`."""

    def build(device: str) -> Pair:
        num_bytes = hidden * BYTES[fmt][0] // BYTES[fmt][1]
        data = random_codes(num_tokens, num_bytes + extra, fmt, device)[:, first : first + num_bytes]
        rows, cols = ceil_div(num_tokens, block_size[0]), ceil_div(hidden, block_size[1])
        return data, random_sf(rows, cols, layout, device)

    return build


def every_code(fmt: str, layout: str, as_float4: bool = False) -> MakePair:
    """Each token has every byte (for e5m6 every code) once, and one sf: of SPECIAL_SF, or all UE8M0 or e4m3 bytes."""

    def build(device: str) -> Pair:
        if layout == "packed":
            sf = torch.arange(256, dtype=torch.int32, device=device).view(256, 1)
        elif layout == "nv":
            sf = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8).view(256, 1)
            sf = sf.view(torch.float8_e4m3fn)
        else:
            sf = pack_scales(torch.tensor(SPECIAL_SF, device=device).view(-1, 1), LAYOUTS[layout])
        if fmt == "e5m6":
            c = torch.arange(4096, dtype=torch.int32, device=device).view(-1, 8).unbind(1)
            words = (
                c[0] << 20 | c[1] << 8 | c[2] >> 4,
                c[2] << 28 | c[3] << 16 | c[4] << 4 | c[5] >> 8,
                c[5] << 24 | c[6] << 12 | c[7],
            )
            return torch.stack(words, dim=1).view(1, -1).repeat(sf.shape[0], 1).view(torch.uint8), sf
        codes = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8).repeat(sf.shape[0], 1)
        dtype = torch.float8_e4m3fn if fmt == "e4m3" else torch.float4_e2m1fn_x2 if as_float4 else torch.int8
        return codes.view(dtype), sf

    return build


def repeated(num_tokens: int, hidden: int, fmt: str, block_size: tuple[int, int], layout: str) -> MakePair:
    """One row of data, expanded: rows 0 bytes apart."""
    one = pair(1, hidden, fmt, (1, hidden), "row")
    many = pair(num_tokens, hidden, fmt, block_size, layout)
    return lambda device: (one(device)[0].expand(num_tokens, -1), many(device)[1])


def make_tensor_sf(device: str) -> torch.Tensor:
    """A scale factor for a whole tensor, around 1."""
    return torch.rand(1, device=device) + 0.5


def more(fmt: str, layout: str) -> Callable[[str], dict[str, Any]]:
    """The arguments that a format and a layout need in addition to x."""

    def build(device: str) -> dict[str, Any]:
        special: dict[str, Any] = {"x_special_fmt": "e5m6"} if fmt == "e5m6" else {}
        return {**special, "tensor_sf": make_tensor_sf(device)} if layout.startswith("nv") else special

    return build


def make(x: MakePair, fmt: str, block_size: tuple[int, int], others: Any = None) -> Callable[[str], dict[str, Any]]:
    """Arguments of cast_back; `others(device)` gives more of them."""
    return lambda device: {
        "x": x(device),
        "fmt": fmt,
        "x_block_size": block_size,
        **(others(device) if others is not None else {}),
    }


def _case(
    fmt: str,
    block_size: tuple[int, int],
    layout: str,
    out: str,
    num_tokens: int,
    hidden: int,
    suffix: str = "",
    extra: int = 0,
    first: int = 0,
    **roles: Any,
) -> Case:
    apart = f"-apart{extra}-from{first}" if extra else ""
    return Case(
        f"{fmt}-{block_size[0]}x{block_size[1]}-{layout}-{out}-h{hidden}-t{num_tokens}{apart}{suffix}",
        make(pair(num_tokens, hidden, fmt, block_size, layout, extra, first), out, block_size, more(fmt, layout)),
        **roles,
    )


SPEC = OpSpec(
    op=cast_back,
    reference=reference.cast_back,
    cases=(
        # 576 channels leave the last block of 128 and the last packed word partial.
        *(
            _case(
                fmt,
                block_size,
                layout,
                out,
                5,
                576,
                small=True,
                modes=(fmt, block_size, out) in (("e4m3", (128, 128), "bf16"), ("e2m1", (32, 32), "fp32")),
            )
            for fmt in ("e4m3", "e2m1")
            for out in ("bf16", "fp32")
            for block_size, layout in (
                ((1, 16), "col"),
                ((1, 32), "packed"),
                ((1, 128), "row"),
                ((1, 576), "packed"),
                ((128, 1), "row"),
                ((32, 32), "col"),
                ((128, 128), "packed"),
            )
        ),
        *(
            _case(
                fmt,
                block_size,
                layout,
                out,
                5,
                576,
                small=True,
                modes=(layout, out) == ("nv", "bf16"),
            )
            for out in ("bf16", "fp32")
            for fmt, block_size, layout in (
                ("e5m6", (1, 576), "row"),
                ("e5m6", (1, 32), "packed"),
                ("e5m6", (128, 128), "swizzled"),
                ("e5m6", (128, 1), "col"),
                ("e2m1", (1, 32), "swizzled"),
                ("e4m3", (1, 128), "swizzled"),
                ("e2m1", (1, 16), "nv"),
                ("e2m1", (1, 16), "nvswizzled"),
            )
        ),
        # Tokens and channels past one block and past one tile; narrow and odd blocks.
        *(
            _case(fmt, block_size, layout, out, 131, 64, small=True)
            for fmt, block_size, layout, out in (
                ("e4m3", (128, 128), "row", "fp32"),
                ("e2m1", (128, 1), "col", "bf16"),
                ("e4m3", (128, 1), "packed", "fp32"),
                ("e2m1", (32, 32), "packed", "bf16"),
                ("e4m3", (2, 4), "packed", "bf16"),
                ("e2m1", (8, 2), "row", "fp32"),
                ("e4m3", (1, 24), "row", "bf16"),
                ("e2m1", (1, 1), "packed", "fp32"),
                ("e4m3", (1, 1000), "col", "bf16"),
                ("e5m6", (128, 128), "row", "fp32"),
                ("e5m6", (2, 4), "packed", "bf16"),
                ("e4m3", (1, 2), "swizzled", "fp32"),
                ("e2m1", (1, 1), "nv", "bf16"),
                ("e2m1", (32, 32), "nvswizzled", "fp32"),
            )
        ),
        *(
            _case("e4m3", (128, 128), "packed", "bf16", tokens, hidden, small=tokens <= 2)
            for tokens, hidden in ((0, 576), (1, 64), (2, 960), (3, 1088), (4, 2368), (33, 20480), (300, 192))
        ),
        # Rows of data with gaps, down to rows that are not aligned at all.
        *(
            _case(
                fmt,
                (1, 32),
                "row",
                out,
                9,
                192,
                extra=extra,
                first=first,
                small=True,
                compile=(out, extra) == ("bf16", 3),
            )
            for fmt in ("e4m3", "e2m1", "e5m6")
            for out in ("bf16", "fp32")
            for extra, first in ((16, 16), (8, 4), (4, 2), (2, 0), (3, 1))
            if fmt != "e5m6" or extra != 2
        ),
        Case(
            "e4m3-128x128-row-bf16-h192-t33-repeated",
            make(repeated(33, 192, "e4m3", (128, 128), "row"), "bf16", (128, 128)),
            small=True,
        ),
        # NaN, infinity, zeros, subnormals, every scale byte.
        *(
            Case(
                f"{fmt}-1x{hidden}-{layout}-{out}-every-code",
                make(every_code(fmt, layout), out, (1, hidden)),
                small=layout == "row",
            )
            for fmt, hidden in (("e4m3", 256), ("e2m1", 512))
            for layout in ("row", "col", "packed")
            for out in ("bf16", "fp32")
        ),
        *(
            Case(
                f"e5m6-1x4096-{layout}-{out}-every-code",
                make(every_code("e5m6", layout), out, (1, 4096), more("e5m6", layout)),
            )
            for layout, out in (("row", "bf16"), ("packed", "fp32"))
        ),
        *(
            Case(
                f"e2m1-1x512-nv-{out}-every-code-{name}",
                make(
                    every_code("e2m1", "nv"),
                    out,
                    (1, 512),
                    lambda device, value=value, shape=shape: {"tensor_sf": torch.full(shape, value, device=device)},
                ),
                small=True,
            )
            for out, name, value, shape in (
                ("bf16", "third", 1 / 3, (1,)),
                ("fp32", "tiny", 1.3 * 2.0**-130, ()),
                ("fp32", "huge", 3e38, (1, 1)),
                ("bf16", "nan", torch.nan, ()),
            )
        ),
        *(
            (Case("float4-1x512-row-bf16-every-code", make(every_code("e2m1", "row", True), "bf16", (1, 512))),)
            if hasattr(torch, "float4_e2m1fn_x2")
            else ()
        ),
        # Sizes of real models.
        *(
            _case(fmt, block_size, layout, out, tokens, hidden)
            for fmt, block_size, layout, out in (
                ("e4m3", (128, 128), "row", "bf16"),
                ("e2m1", (32, 32), "packed", "fp32"),
                ("e4m3", (128, 1), "row", "bf16"),
            )
            for tokens, hidden in SIZES
        ),
        *(
            _case(fmt, block_size, layout, out, tokens, hidden)
            for fmt, block_size, layout, out, tokens, hidden in (
                ("e2m1", (1, 16), "nv", "bf16", 8001, 7168),
                ("e2m1", (1, 16), "nvswizzled", "fp32", 4001, 2560),
                ("e2m1", (1, 32), "swizzled", "bf16", 8001, 6144),
                ("e4m3", (1, 128), "swizzled", "fp32", 4001, 3072),
                ("e2m1", (1, 16), "nv", "bf16", 0, 2048),
                ("e2m1", (1, 16), "nvswizzled", "bf16", 0, 2048),
            )
        ),
        *(
            _case("e4m3", (128, 128), layout, "bf16", 4001, hidden)
            for layout, hidden in (("packed", 2560), ("col", 3072), ("packed", 6144))
        ),
        *(
            _case(
                fmt,
                block_size,
                layout,
                out,
                8192,
                7168,
                "-bench",
                bench=True,
                gpu=False,
                compile=True,
                model_shape=model_shape,
            )
            for fmt, block_size, layout, out, model_shape in (
                ("e4m3", (128, 128), "row", "bf16", True),
                ("e4m3", (128, 128), "packed", "fp32", False),
                ("e4m3", (128, 1), "row", "bf16", False),
                ("e4m3", (128, 1), "row", "fp32", False),
                ("e2m1", (32, 32), "packed", "bf16", True),
                ("e2m1", (32, 32), "row", "fp32", False),
                ("e2m1", (1, 16), "nv", "bf16", True),
                ("e2m1", (1, 16), "nv", "fp32", False),
                ("e2m1", (1, 16), "nvswizzled", "bf16", False),
                ("e2m1", (1, 32), "swizzled", "bf16", False),
                ("e4m3", (1, 32), "swizzled", "fp32", False),
            )
        ),
        *(
            _case("e4m3", (128, 128), "row", "bf16", tokens, hidden, "-bench", bench=True, gpu=False)
            for tokens, hidden in NEIGHBOURS
        ),
    ),
)


def _e5m6_case(
    block_size: tuple[int, int], layout: str, out: str, num_tokens: int, hidden: int, suffix: str = "", **roles: Any
) -> Case:
    return Case(
        f"{block_size[0]}x{block_size[1]}-{layout}-{out}-h{hidden}-t{num_tokens}{suffix}",
        make(pair(num_tokens, hidden, "e5m6", block_size, layout), out, block_size),
        **roles,
    )


E5M6_SPEC = OpSpec(
    op=cast_back_e5m6,
    reference=reference.cast_back_e5m6,
    cases=(
        _e5m6_case((1, 576), "row", "bf16", 5, 576, small=True, modes=True),
        _e5m6_case((128, 128), "packed", "fp32", 131, 192, small=True, modes=True),
        _e5m6_case((32, 32), "col", "bf16", 0, 64, small=True),
        _e5m6_case((32, 32), "swizzled", "fp32", 1, 64, small=True),
        *(_e5m6_case((1, hidden), "row", "fp32", tokens, hidden) for tokens, hidden in SIZES if tokens != 0),
        *(_e5m6_case((1, hidden), "row", "bf16", 4001, hidden) for hidden in (2560, 3072, 6144)),
        _e5m6_case((128, 128), "packed", "bf16", 8001, 7168),
        *(
            _e5m6_case(
                (1, 7168), "row", out, 8192, 7168, "-bench", bench=True, gpu=False, compile=True, model_shape=True
            )
            for out in ("bf16", "fp32")
        ),
        *(
            _e5m6_case((128, 128), "packed", out, 8192, 7168, "-bench", bench=True, gpu=False, compile=True)
            for out in ("bf16", "fp32")
        ),
        *(
            _e5m6_case((1, hidden), "row", "fp32", tokens, hidden, "-bench", bench=True, gpu=False)
            for tokens, hidden in NEIGHBOURS
        ),
    ),
)
