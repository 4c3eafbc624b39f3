"""cast_back."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core.math import ceil_div
from tk_core.reference.scales import convert_scales, pack_scales
from tk_core.scales import ScaleLayout
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_quant.cast.back import _tile
from tk_quant.reference.formats import encode_e5m6

from ..per_token.test_per_token_cast import BENCH, NEIGHBOURS

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
    # float8_e4m3fn alone.
    "e4m3sf": ScaleLayout.ROW_MAJOR,
    "e4m3sf-col": ScaleLayout.COL_MAJOR,
    "e4m3sf-swizzled": ScaleLayout.SWIZZLED,
    "packed-row": ScaleLayout.PACKED_ROW_MAJOR,
}
"""Layouts of sf, by their names in case names."""
BYTES = {"e4m3": (1, 1), "e2m1": (1, 2), "e5m6": (3, 2)}
"""By format: (bytes of data, channels that they hold)."""
SIZES = tuple((tokens, hidden) for hidden in (576, 2048, 4096, 7168) for tokens in (0, 1, 4001, 8001))

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
    if layout.startswith(("nv", "e4m3sf")):
        codes = torch.randint(0, 0x7F, (rows, cols), device=device).to(torch.uint8)
        return pack_scales(codes.view(torch.float8_e4m3fn).to(torch.float32), LAYOUTS[layout], torch.float8_e4m3fn)
    sf = torch.exp2(torch.randint(-20, 20, (rows, cols), device=device).to(torch.float32))
    if layout in ("row", "col"):
        sf = sf * (1 + torch.rand(rows, cols, device=device))
    packed = pack_scales(sf, LAYOUTS[layout])
    if layout.startswith("packed") and cols % 4:
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


def more(fmt: str, layout: str) -> Make:
    """The arguments that a format and a layout need in addition to x."""

    def build(device: str) -> dict[str, Any]:
        special: dict[str, Any] = {"x_special_fmt": "e5m6"} if fmt == "e5m6" else {}
        return {**special, "tensor_sf": make_tensor_sf(device)} if layout.startswith("nv") else special

    return build


def make(x: MakePair, fmt: str, block_size: tuple[int, int], others: Any = None) -> Make:
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
    op=tk_quant.cast_back,
    cases=(
        *(
            _case(
                *(fmt, block_size, layout, out, 5, 576),
                small=True,
                compile=layout != "e4m3sf",
                modes=layout == "e4m3sf-col",
            )
            for fmt, block_size, layout, out in (
                ("e4m3", (1, 128), "e4m3sf", "bf16"),
                ("e4m3", (1, 32), "e4m3sf-col", "fp32"),
                ("e4m3", (32, 32), "e4m3sf-swizzled", "bf16"),
                ("e2m1", (1, 16), "e4m3sf", "fp32"),
                ("e2m1", (1, 64), "e4m3sf-col", "bf16"),
            )
        ),
        *(
            _case(fmt, block_size, "packed-row", out, 5, 576, small=True)
            for fmt, block_size, out in (
                ("e4m3", (1, 32), "bf16"),
                ("e2m1", (1, 16), "fp32"),
                ("e4m3", (128, 1), "fp32"),
            )
        ),
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
                *(fmt, block_size, layout, out, 8192, 7168, "-bench"),
                **BENCH,
                compile=out == "bf16",
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
        *(_case("e4m3", (128, 128), "row", "bf16", tokens, hidden, "-bench", **BENCH) for tokens, hidden in NEIGHBOURS),
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
    op=tk_quant.cast_back_e5m6,
    cases=(
        _e5m6_case((1, 576), "row", "bf16", 5, 576, small=True, modes=True),
        _e5m6_case((128, 128), "packed", "fp32", 131, 192, small=True, modes=True),
        _e5m6_case((32, 32), "col", "bf16", 0, 64, small=True),
        _e5m6_case((32, 32), "swizzled", "fp32", 1, 64, small=True),
        *(_e5m6_case((1, hidden), "row", "fp32", 4001, hidden) for hidden in (576, 4096, 7168)),
        _e5m6_case((128, 128), "packed", "bf16", 8001, 7168),
        *(
            _e5m6_case((1, 7168), "row", out, 8192, 7168, "-bench", **BENCH, compile=True, model_shape=True)
            for out in ("bf16", "fp32")
        ),
        *(
            _e5m6_case((128, 128), "packed", out, 8192, 7168, "-bench", **BENCH, compile=out == "bf16")
            for out in ("bf16", "fp32")
        ),
        *(_e5m6_case((1, hidden), "row", "fp32", tokens, hidden, "-bench", **BENCH) for tokens, hidden in NEIGHBOURS),
    ),
)


test_tiers = tiers.tests(SPEC)
test_tiers_e5m6 = tiers.tests(E5M6_SPEC)

OUT = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAN_BITS = {"fp32": 0x7FFFFFFF, "bf16": 0x7FFF}


def by_ml_dtypes(data: torch.Tensor, sf: np.ndarray, fmt: str, tensor_sf: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Bits of data times sf (float32, one a row) in `fmt`, and where they are NaN; not by any code of ours."""
    codes = data.view(torch.uint8).numpy()
    if data.dtype is torch.float8_e4m3fn:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif data.dtype is torch.uint8:
        # A string of bits, twelve a code, once the words are big endian.
        bits = np.unpackbits(codes.copy().view("<u4").astype(">u4").view(np.uint8), axis=1)
        halves = np.pad(bits.reshape(codes.shape[0], -1, 12), ((0, 0), (0, 0), (0, 4)))
        values = np.packbits(halves, axis=2).view(">f2").astype(np.float32)[..., 0]
    else:
        nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).reshape(codes.shape[0], -1)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    with np.errstate(all="ignore"):
        product = values * sf * np.float32(tensor_sf)
    if fmt == "fp32":
        return product.view(np.int32), np.isnan(product)
    return product.astype(ml_dtypes.bfloat16).view(np.int16), np.isnan(product)


@pytest.mark.parametrize("layout", ["row", "packed"])
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("x_fmt", ["e4m3", "e2m1", "e5m6"])
def test_every_code_against_ml_dtypes(x_fmt: str, fmt: str, layout: str) -> None:
    data, sf = every_code(x_fmt, layout)("cpu")
    hidden = {"e4m3": 256, "e2m1": 512, "e5m6": 4096}[x_fmt]
    if layout == "packed":
        scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32).reshape(-1, 1)
    else:
        scales = np.array(SPECIAL_SF, dtype=np.float32).reshape(-1, 1)
    out = tk_quant.cast_back((data, sf), fmt, (1, hidden), "e5m6" if x_fmt == "e5m6" else None)
    assert out.dtype is OUT[fmt]
    expected, is_nan = by_ml_dtypes(data, scales, fmt)
    got = out.view(torch.int32 if fmt == "fp32" else torch.int16).numpy()
    np.testing.assert_array_equal(got[~is_nan], expected[~is_nan])
    assert is_nan.any()
    assert (got[is_nan] == NAN_BITS[fmt]).all()


@pytest.mark.parametrize("tensor_sf", [1.0, 1 / 3, 1.3 * 2.0**-130, 3e38, -2.0, math.nan, math.inf])
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_nvfp4_against_ml_dtypes(fmt: str, tensor_sf: float) -> None:
    data, sf = every_code("e2m1", "nv")("cpu")
    out = tk_quant.cast_back((data, sf), fmt, (1, 512), tensor_sf=torch.tensor(tensor_sf))
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, 1)
    expected, is_nan = by_ml_dtypes(data, scales, fmt, tensor_sf)
    got = out.view(torch.int32 if fmt == "fp32" else torch.int16).numpy()
    np.testing.assert_array_equal(got[~is_nan], expected[~is_nan])
    assert is_nan[[127, 255]].all()
    assert (got[is_nan] == NAN_BITS[fmt]).all()


def test_nvfp4_by_hand() -> None:
    """Blocks of 16: sf of block b is b + 1, the tensor's 0.125; all codes 7 (6.0)."""
    data = torch.full((2, 32), 0x77, dtype=torch.int8)
    sf = torch.arange(1.0, 9.0).view(2, 4).to(torch.float8_e4m3fn)
    for tensor_sf in (torch.tensor(0.125), torch.tensor([0.125]), torch.tensor([[0.125]])):
        for scales in (sf, convert_scales(sf, 2, 4, ScaleLayout.SWIZZLED)):
            out = tk_quant.cast_back((data, scales), "fp32", (1, 16), tensor_sf=tensor_sf)
            assert out[:, ::16].tolist() == [[0.75 * (b + 1) for b in range(r, r + 4)] for r in (0, 4)]


def test_e5m6_by_hand() -> None:
    """Eight ones are twelve bytes that docs/numerics.md spells out; 1 and 1/64 more, the largest, a subnormal, -0."""
    ones = torch.tensor([0x3C, 0xC0, 0x03, 0x3C, 0x03, 0x3C, 0xC0, 0x03, 0xC0, 0x03, 0x3C, 0xC0], dtype=torch.uint8)
    data = ones.repeat(2, 8)
    sf = torch.tensor([[1.0], [3.0]])
    out = tk_quant.cast_back_e5m6((data, sf), "bf16", (1, 64))
    assert torch.equal(out, sf.expand(2, 64).to(torch.bfloat16))
    codes = [0x3C0, 0x3C1, 0x7BF, 0x001, 0x800, 0xFBF, 0x040, 0x03F]
    bits = "".join(f"{code:012b}" for code in codes)
    words = [int(bits[i : i + 32], 2) for i in (0, 32, 64)]
    data[0, :12] = torch.tensor([byte for word in words for byte in word.to_bytes(4, "little")], dtype=torch.uint8)
    out = tk_quant.cast_back((data, sf), "fp32", (1, 64), "e5m6")
    assert out[0, :8].tolist() == [1.0, 1 + 2.0**-6, 65024.0, 2.0**-20, -0.0, -65024.0, 2.0**-14, 63 * 2.0**-20]
    assert out[0, 4].signbit()


def test_default_block_is_32_by_32() -> None:
    x = pair(70, 192, "e4m3", (32, 32), "row")("cpu")
    assert_equal(tk_quant.cast_back(x, "bf16"), tk_quant.cast_back(x, "bf16", (32, 32)))


def test_e4m3_by_hand() -> None:
    data = torch.zeros(1, 64)
    data[0, :6] = torch.tensor([1.0, -1.0, 448.0, -(2.0**-9), 0.0, 1.125])
    data = data.to(torch.float8_e4m3fn)
    out = tk_quant.cast_back((data, torch.tensor([[3.0]])), "fp32", (1, 64))
    assert out[0, :6].tolist() == [3.0, -3.0, 1344.0, -3 * 2.0**-9, 0.0, 3.375]
    # 3.375 * (1 + 2**-8) lies between two bfloat16 that are 2**-6 apart.
    out = tk_quant.cast_back((data, torch.tensor([[3 * (1 + 2.0**-8)]])), "bf16", (1, 64))
    assert out[0, 5].item() == 3.390625


def test_rounds_to_float32_first() -> None:
    # The product is 1 + 2**-8 + 2**-24. Float32 drops the last bit, which leaves a tie of bfloat16, and the even one of
    # its neighbours is 1; rounded at once it would be 1 + 2**-7.
    sf = (1 + 2.0**-8 + 2.0**-24) / 1.5
    assert torch.tensor(sf).item() == sf
    data = torch.full((1, 64), 1.5).to(torch.float8_e4m3fn)
    out = tk_quant.cast_back((data, torch.tensor([[sf]])), "bf16", (1, 64))
    assert out[0, 0].item() == 1.0


@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_blocks_by_hand(layout: ScaleLayout) -> None:
    """sf is 2**(10 * row + col) of its block; 130 tokens and 192 channels leave edge blocks."""
    data = torch.ones(130, 192).to(torch.float8_e4m3fn)
    for block_tokens, block_channels in ((1, 128), (32, 32), (128, 128), (128, 1), (64, 16), (1, 192), (1, 50)):
        rows, cols = -(-130 // block_tokens), -(-192 // block_channels)
        exponents = (torch.arange(rows)[:, None] * 10 + torch.arange(cols)) % 100 - 50
        sf = pack_scales(torch.exp2(exponents.float()), layout)
        out = tk_quant.cast_back((data, sf), "fp32", (block_tokens, block_channels))
        for token, channel in ((0, 0), (1, 1), (31, 31), (32, 32), (127, 127), (128, 128), (129, 191), (129, 0)):
            exponent = (10 * (token // block_tokens) + channel // block_channels) % 100 - 50
            assert out[token, channel].item() == 2.0**exponent, (block_tokens, block_channels, token, channel)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no float4_e2m1fn_x2")
def test_float4_dtype() -> None:
    data, sf = pair(3, 64, "e2m1", (1, 32), "packed")("cpu")
    expected = tk_quant.cast_back((data, sf), "bf16", (1, 32))
    assert_equal(tk_quant.cast_back((data.view(torch.float4_e2m1fn_x2), sf), "bf16", (1, 32)), expected)
    assert_equal(tk_quant.reference.cast_back((data.view(torch.float4_e2m1fn_x2), sf), "bf16", (1, 32)), expected)


@pytest.mark.parametrize("x_bits", [4, 8, 12])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_tiles(x_bits: int, out_dtype: torch.dtype) -> None:
    """Tiles cover the row, in whole warps, with little to spare; 128-token blocks hold whole tiles."""
    vector = 16 // out_dtype.itemsize
    for hidden in range(64, 20481, 64):
        rows, channels, threads = _tile(hidden, x_bits, vector)
        tile = rows * channels
        assert threads % 32 == 0
        assert 32 <= threads <= 1024
        assert tile % (vector * threads) == 0
        assert tile // threads in (2 * vector, 4 * vector)
        assert channels % vector == 0
        assert -(-hidden // channels) * channels <= 1.25 * hidden
        assert 128 % rows == 0


X = (torch.zeros(8, 192, dtype=torch.float8_e4m3fn), torch.ones(1, 2))
FP4 = torch.zeros(8, 96, dtype=torch.int8)
E5M6 = torch.zeros(8, 288, dtype=torch.uint8)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ONE = torch.ones(1)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "bf16", "x_block_size": (128, 128)},
    [
        ({"x": X[0]}, TypeError, "x: expected a pair"),
        ({"x": (*X, X[1])}, ValueError, "x: expected a pair"),
        ({"x": (X[0][:, :100], X[1])}, ValueError, "x: expected a positive multiple of 64 channels, got 100"),
        ({"x": (X[0][:, :0], X[1])}, ValueError, "x: expected a positive multiple of 64 channels, got 0"),
        ({"x": (X[0][:, :16].view(torch.int8), X[1])}, ValueError, "x: expected a positive multiple of 64 channels"),
        ({"x": (X[0], torch.ones(1, 3))}, ValueError, r"x\[1\]: expected shape \(1, 2\)"),
        ({"x": (X[0], torch.ones(1, 2, dtype=torch.int32))}, ValueError, r"x\[1\]: expected shape \(1, 1\)"),
        ({"x_block_size": (128,)}, ValueError, "x_block_size: expected two numbers"),
        ({"x_block_size": (128, 0)}, ValueError, "x_block_size: expected"),
        ({"x_block_size": (1, 0)}, ValueError, "x_block_size: expected"),
        ({"x_block_size": (3, 128)}, ValueError, "x_block_size: expected"),
        ({"x_block_size": (256, 128)}, ValueError, "x_block_size: expected"),
        ({"x_special_fmt": "e5m6"}, TypeError, r"x\[0\]: expected dtype torch.uint8"),
        ({"x": (E5M6[:, :192], X[1]), "x_special_fmt": "e5m6"}, ValueError, r"x\[1\]: expected shape \(1, 1\)"),
        (
            {"x": (E5M6[:, :90], X[1]), "x_special_fmt": "e5m6"},
            ValueError,
            r"x\[0\]: expected a positive multiple of 96",
        ),
        (
            {"x": (E5M6[:, :0], X[1]), "x_special_fmt": "e5m6"},
            ValueError,
            r"x\[0\]: expected a positive multiple of 96",
        ),
        ({"x": (X[0], X[1].to(E8M0))}, ValueError, r"x\[1\]: expected shape \(1, 1, 32, 4, 4\)"),
        ({"x": (X[0], X[1].to(E4M3)), "tensor_sf": ONE}, ValueError, r"x\[0\]: expected e2m1 beside"),
        ({"x": (FP4, X[1]), "tensor_sf": ONE}, ValueError, r"tensor_sf: expected None unless x\[1\] is float8_e4m3fn"),
        ({"x": (FP4, torch.ones(1, 1, 32, 4, 4).to(E8M0)), "tensor_sf": ONE}, ValueError, "tensor_sf: expected None"),
        ({"x": (FP4, X[1].to(E4M3)), "tensor_sf": torch.ones(2)}, ValueError, "tensor_sf: expected one element"),
    ],
)


test_bad_input_e5m6 = tiers.bad_input(
    E5M6_SPEC,
    {"x": (E5M6, X[1]), "fmt": "bf16", "x_block_size": (128, 128)},
    [
        ({"x": E5M6}, TypeError, "x: expected a pair"),
        ({"x": (E5M6, torch.ones(1, 3))}, ValueError, r"x\[1\]: expected shape \(1, 2\)"),
        ({"x_block_size": (3, 128)}, ValueError, "x_block_size: expected"),
    ],
)


def test_generated_e5m6_is_finite() -> None:
    codes = random_codes(7, 96, "e5m6", "cpu")
    assert codes.shape == (7, 96)
    assert tk_quant.reference.cast_back_e5m6((codes, torch.ones(7, 1)), "fp32", (1, 64)).isfinite().all()
