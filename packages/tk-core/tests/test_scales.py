import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

from tk_core.reference.scales import convert_scales, decode_ue8m0, pack_scales, unpack_scales
from tk_core.scales import ScaleLayout, check_scales, empty_scales, scale_layout
from tk_core.testing import assert_equal

CPU = torch.device("cpu")
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
BYTE_DTYPES = (E8M0, E4M3)


def powers_of_two(num_rows: int, num_cols: int) -> torch.Tensor:
    exponents = torch.arange(num_rows * num_cols, dtype=torch.float32).view(num_rows, num_cols) % 200 - 99
    return torch.exp2(exponents)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ((False, False, False), ScaleLayout.ROW_MAJOR),
        ((False, True, False), ScaleLayout.ROW_MAJOR),
        ((True, False, False), ScaleLayout.COL_MAJOR),
        ((True, True, False), ScaleLayout.COL_MAJOR),
        ((True, True, True), ScaleLayout.PACKED_UE8M0),
        ((False, True, False, True), ScaleLayout.SWIZZLED),
        ((True, True, False, True), "use_tma_aligned_col_major_sf: expected False beside use_swizzled_sf"),
        ((False, True, True, True), "use_packed_ue8m0: expected False beside use_swizzled_sf"),
        ((True, False, True), "use_packed_ue8m0: expected round_sf=True"),
        ((False, True, True), ScaleLayout.PACKED_ROW_MAJOR),
        ((False, False, True), "use_packed_ue8m0: expected round_sf=True"),
    ],
)
def test_layout_of_flags(flags: tuple[bool, ...], layout: ScaleLayout | str) -> None:
    if isinstance(layout, ScaleLayout):
        assert scale_layout(*flags) is layout
    else:
        with pytest.raises(ValueError, match=layout):
            scale_layout(*flags)


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "layout", "dtype", "shape", "strides"),
    [
        (5, 3, ScaleLayout.ROW_MAJOR, torch.float32, (5, 3), (3, 1)),
        (5, 3, ScaleLayout.COL_MAJOR, torch.float32, (5, 3), (1, 8)),
        (5, 1, ScaleLayout.COL_MAJOR, torch.float32, (5, 1), (1, 8)),
        (1, 1, ScaleLayout.COL_MAJOR, torch.float32, (1, 1), (1, 4)),
        (8, 2, ScaleLayout.COL_MAJOR, torch.float32, (8, 2), (1, 8)),
        (5, 3, ScaleLayout.PACKED_UE8M0, torch.int32, (5, 1), (1, 8)),
        (9, 9, ScaleLayout.PACKED_UE8M0, torch.int32, (9, 3), (1, 12)),
        (5, 3, ScaleLayout.PACKED_ROW_MAJOR, torch.int32, (5, 1), (1, 1)),
        (9, 9, ScaleLayout.PACKED_ROW_MAJOR, torch.int32, (9, 3), (3, 1)),
        (0, 9, ScaleLayout.ROW_MAJOR, torch.float32, (0, 9), (9, 1)),
        (0, 9, ScaleLayout.COL_MAJOR, torch.float32, (0, 9), (1, 0)),
        (0, 9, ScaleLayout.PACKED_UE8M0, torch.int32, (0, 3), (1, 0)),
        (5, 3, ScaleLayout.SWIZZLED, E8M0, (1, 1, 32, 4, 4), (512, 512, 16, 4, 1)),
        (129, 9, ScaleLayout.SWIZZLED, E8M0, (2, 3, 32, 4, 4), (1536, 512, 16, 4, 1)),
        (0, 9, ScaleLayout.SWIZZLED, E8M0, (0, 3, 32, 4, 4), (1536, 512, 16, 4, 1)),
    ],
)
def test_empty_scales(
    num_rows: int,
    num_cols: int,
    layout: ScaleLayout,
    dtype: torch.dtype,
    shape: tuple[int, int],
    strides: tuple[int, int],
) -> None:
    for device in ("cpu", "meta"):
        sf = empty_scales(torch.empty(0, dtype=torch.bfloat16, device=device), num_rows, num_cols, layout)
        assert (sf.dtype, sf.shape, sf.stride(), sf.device.type) == (dtype, shape, strides, device)


@pytest.mark.parametrize("layout", ScaleLayout)
def test_round_trip(layout: ScaleLayout) -> None:
    for shape in product((0, 1, 3, 4, 5), (0, 1, 2, 3, 4, 5, 9)):
        sf = powers_of_two(*shape)
        packed = pack_scales(sf, layout)
        assert check_scales("sf", packed, *shape, CPU, BYTE_DTYPES) is layout
        unpacked = unpack_scales(packed, *shape)
        assert unpacked.is_contiguous()
        assert unpacked.dtype is torch.float32
        assert torch.equal(unpacked, sf)


def test_packed_bytes_by_hand() -> None:
    sf = torch.tensor([[1.0, 2.0, 0.5, 2.0**-127, 2.0**127], [2.0**-126, 4.0, math.inf, math.nan, 8.0]])
    packed = pack_scales(sf, ScaleLayout.PACKED_UE8M0)
    assert packed.tolist() == [
        [127 | 128 << 8 | 126 << 16 | 0 << 24, 254],
        [(1 | 129 << 8 | 255 << 16 | 255 << 24) - (1 << 32), 130],
    ]
    # Memory order: the first column of words, padded to four rows, then the second.
    flat = packed.as_strided((6,), (1,))
    assert flat[:2].tolist() == packed[:, 0].tolist()
    assert flat[4:].tolist() == packed[:, 1].tolist()


def test_swizzled_bytes_by_hand() -> None:
    """Where cuBLAS's documentation puts them: tiles of 512 bytes, byte (r % 32) * 16 + (r // 32) * 4 + c of a tile."""
    num_rows, num_cols = 200, 7
    sf = torch.exp2((torch.arange(num_rows)[:, None] * 3 + torch.arange(num_cols) * 5).float() % 250 - 126)
    flat = pack_scales(sf, ScaleLayout.SWIZZLED).view(-1).view(torch.uint8)
    assert len(flat) == 2 * 2 * 512
    written = set()
    for row, col in product(range(num_rows), range(num_cols)):
        tile = row // 128 * 2 + col // 4
        offset = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + col % 4
        assert 2.0 ** (flat[offset].item() - 127) == sf[row, col].item()
        written.add(offset)
    assert all(flat[offset].item() == 0 for offset in range(len(flat)) if offset not in written)


@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 1), (4, 4), (130, 5), (128, 4), (0, 3)])
def test_layouts_convert_into_each_other(num_rows: int, num_cols: int) -> None:
    given = {layout: pack_scales(powers_of_two(num_rows, num_cols), layout) for layout in ScaleLayout}
    for sf, (layout, expected) in product(given.values(), given.items()):
        assert_equal(convert_scales(sf, num_rows, num_cols, layout), expected)


def test_e4m3_scales_stay_e4m3() -> None:
    codes = torch.arange(256 * 5, dtype=torch.int32).remainder(127).to(torch.uint8).view(256, 5)
    sf = codes.view(E4M3)
    swizzled = convert_scales(sf, 256, 5, ScaleLayout.SWIZZLED)
    assert (swizzled.dtype, swizzled.shape) == (E4M3, (2, 2, 32, 4, 4))
    assert swizzled.view(torch.uint8)[1, 1, 7, 2, 0] == codes[128 + 64 + 7, 4]
    assert check_scales("sf", swizzled, 256, 5, CPU, BYTE_DTYPES) is ScaleLayout.SWIZZLED
    assert check_scales("sf", sf, 256, 5, CPU, BYTE_DTYPES) is ScaleLayout.ROW_MAJOR
    back = convert_scales(swizzled, 256, 5, ScaleLayout.ROW_MAJOR)
    assert torch.equal(back.view(torch.uint8), codes)
    assert torch.equal(unpack_scales(swizzled, 256, 5), sf.float())
    # A whole number of tiles has the same bytes in both layouts, and still can't be mistaken.
    assert check_scales("sf", sf[:128, :4].contiguous(), 128, 4, CPU, BYTE_DTYPES) is ScaleLayout.ROW_MAJOR
    for layout in (ScaleLayout.PACKED_ROW_MAJOR, ScaleLayout.PACKED_UE8M0):
        with pytest.raises(ValueError, match="layout: expected one that is not packed for float8_e4m3fn, got"):
            convert_scales(sf, 256, 5, layout)


def test_every_ue8m0_code() -> None:
    codes = torch.arange(256)
    values = decode_ue8m0(codes)
    assert values.dtype is torch.float32
    expected = [2.0 ** (code - 127) for code in range(255)]
    assert values[:255].tolist() == expected
    assert values[255].isnan()
    oracle = codes.to(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(values.numpy(), oracle)
    # Back to bytes: only NaN comes from 255, and 2**-127 survives.
    packed = pack_scales(values.view(4, 64), ScaleLayout.PACKED_UE8M0)
    little_endian = packed.contiguous().view(torch.uint8)
    assert torch.equal(little_endian, codes.to(torch.uint8).view(4, 64))


def test_unspecified_bytes_are_not_read() -> None:
    packed = pack_scales(powers_of_two(3, 5), ScaleLayout.PACKED_UE8M0)
    packed[:, 1] |= -256
    assert check_scales("sf", packed, 3, 5, CPU) is ScaleLayout.PACKED_UE8M0
    assert torch.equal(unpack_scales(packed, 3, 5), powers_of_two(3, 5))


@pytest.mark.parametrize(
    ("sf", "num_rows", "num_cols", "layout"),
    [
        # One row: the row's own stride addresses nothing, the column stride decides.
        (torch.empty(1, 8), 1, 8, ScaleLayout.ROW_MAJOR),
        (torch.empty_strided((1, 8), (99, 1)), 1, 8, ScaleLayout.ROW_MAJOR),
        (torch.empty_strided((1, 8), (1, 4)), 1, 8, ScaleLayout.COL_MAJOR),
        (torch.empty_strided((1, 8), (99, 4)), 1, 8, ScaleLayout.COL_MAJOR),
        # One column: both fit.
        (torch.empty(5, 1), 5, 1, ScaleLayout.ROW_MAJOR),
        (torch.empty_strided((5, 1), (1, 8)), 5, 1, ScaleLayout.COL_MAJOR),
        (torch.empty_strided((5, 1), (1, 77)), 5, 1, ScaleLayout.ROW_MAJOR),
        (torch.empty(1, 1), 1, 1, ScaleLayout.ROW_MAJOR),
        # Nothing at all.
        (torch.empty(0, 8), 0, 8, ScaleLayout.ROW_MAJOR),
        (torch.empty(0, 2, dtype=torch.int32), 0, 8, ScaleLayout.PACKED_ROW_MAJOR),
        (torch.empty(5, 0), 5, 0, ScaleLayout.ROW_MAJOR),
        # A packed single column or row may be contiguous and column major at once.
        (torch.empty(5, 1, dtype=torch.int32), 5, 4, ScaleLayout.PACKED_ROW_MAJOR),
        (torch.empty_strided((5, 1), (1, 8), dtype=torch.int32), 5, 4, ScaleLayout.PACKED_UE8M0),
        (torch.empty_strided((1, 2), (9, 4), dtype=torch.int32), 1, 8, ScaleLayout.PACKED_UE8M0),
    ],
)
def test_layout_of_small_tensors(sf: torch.Tensor, num_rows: int, num_cols: int, layout: ScaleLayout) -> None:
    assert check_scales("sf", sf, num_rows, num_cols, CPU) is layout


@pytest.mark.parametrize(
    ("sf", "error", "match"),
    [
        ("sf", TypeError, "expected a torch.Tensor, got str"),
        (torch.empty(5, 8, dtype=torch.bfloat16), TypeError, "expected dtype .*got torch.bfloat16"),
        (torch.empty(5, 7), ValueError, r"expected shape \(5, 8\), got \(5, 7\)"),
        (torch.empty(5, 8, 1), ValueError, r"expected shape \(5, 8\), got"),
        (torch.empty(5, 8, dtype=torch.int32), ValueError, r"expected shape \(5, 2\) \(packed"),
        (torch.empty(5, 8, device="meta"), ValueError, "expected device cpu, got meta"),
        (torch.empty(5, 16)[:, ::2], ValueError, r"expected strides \(8, 1\) or \(1, 8\), got \(16, 2\)"),
        (torch.empty(8, 5).t(), ValueError, r"expected strides \(8, 1\) or \(1, 8\), got \(1, 5\)"),
        (torch.empty(5, 4, dtype=torch.int32)[:, ::2], ValueError, r"strides \(2, 1\) or \(1, 8\), got \(4, 2\)"),
        (torch.empty(5, 8).to(E8M0), ValueError, r"expected shape \(1, 2, 32, 4, 4\), got \(5, 8\)"),
        (torch.empty(5, 4).to(E4M3), ValueError, r"expected shape \(1, 2, 32, 4, 4\) or \(5, 8\), got \(5, 4\)"),
        (torch.empty(5, 16).to(E4M3)[:, ::2], ValueError, r"expected strides \(8, 1\) or \(1, 16\), got \(16, 2\)"),
        (torch.empty(5, 8, device="meta").to(E4M3), ValueError, "expected device cpu, got meta"),
    ],
)
def test_errors(sf: torch.Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"x_sf: (expected )?{match}"):
        check_scales("x_sf", sf, 5, 8, CPU, BYTE_DTYPES)


@pytest.mark.parametrize(("dtype", "byte_dtypes"), [(E8M0, ()), (E4M3, (E8M0,))])
def test_bytes_are_refused_unless_they_are_accepted(dtype: torch.dtype, byte_dtypes: tuple[torch.dtype, ...]) -> None:
    with pytest.raises(TypeError, match=r"sf: expected dtype torch\.float32, or torch\.int32"):
        check_scales("sf", torch.empty(1, 1, 32, 4, 4).to(dtype), 5, 3, CPU, byte_dtypes)


@pytest.mark.parametrize("shape", [(5, 3), (16, 1), (17, 8), (0, 4), (1, 1)])
def test_e4m3_scales_by_columns(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 0x7F, shape).to(torch.uint8).view(E4M3).float()
    for layout in (ScaleLayout.ROW_MAJOR, ScaleLayout.COL_MAJOR):
        sf = pack_scales(codes, layout, E4M3)
        assert sf.dtype is E4M3
        assert check_scales("sf", sf, *shape, CPU, BYTE_DTYPES) is layout
        assert torch.equal(unpack_scales(sf, *shape), codes)
        back = convert_scales(sf, *shape, ScaleLayout.COL_MAJOR)
        assert back.stride() == (1, -(-shape[0] // 16) * 16)
        assert torch.equal(back.float(), codes)
