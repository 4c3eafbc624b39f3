"""norm_forward_and_per_token_cast."""

from itertools import product
from typing import Any

import pytest
import torch

import tk_quant
from tk_core.math import align, ceil_div
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers

from ..per_token.test_per_token_cast import ALL_FLAGS, BENCH, E4M3_FLAGS
from .test_norm_forward import BF16, EPS, FP32, NAMES, MakeRows, apart, extreme_rows, normal, transposed
from .test_norm_forward import make as make_norm

FLAGS = {**ALL_FLAGS, **E4M3_FLAGS}
"""Layouts, roundings and dtypes of sf, by their names in case names."""
WRITTEN = ("out", "out_bf16", "residual_out", "mega_moe_sf")


def mega_moe_rows(num_tokens: int, block: int) -> int:
    """Rows of a column of mega_moe_sf."""
    return ceil_div(num_tokens, block) * align(block, 128)


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fmt: str,
    group: int,
    layout: str,
    rows: MakeRows = normal,
    weight: torch.dtype | None = FP32,
    tensor_sf: bool = False,
    into: bool = False,
    mega_moe: int = 0,
    **more: Any,
) -> Make:
    """Arguments of the op; group 0 is hidden; `into`: all results go to given tensors; `mega_moe`: rows of a block."""
    of_norm = make_norm(shape, dtype, rows, weight, into="same" if into else "", **more)

    def build(device: str) -> dict[str, Any]:
        kwargs = {**of_norm(device), "fmt": fmt, "num_per_channels": group or shape[-1], **FLAGS[layout]}
        kwargs |= dict.fromkeys(WRITTEN[:2])
        kwargs["mega_moe_sf"] = None
        if tensor_sf:
            kwargs |= {"round_sf": False, "tensor_sf": torch.full((1,), 0.01, device=device)}
        if into:
            plain = {name: kwargs[name] for name in ("x", "weight", "eps", "fmt", "num_per_channels")}
            flags = {**FLAGS[layout], "tensor_sf": kwargs.get("tensor_sf")}
            flags["round_sf"] = kwargs.get("round_sf", False)
            made = tk_quant.norm_forward_and_per_token_cast(**plain, **flags, with_out_bf16=True)
            for each in made[0]:
                (each.view(torch.uint8) if each.itemsize == 1 else each).zero_()
            kwargs["out"] = made[0]
            kwargs["out_bf16"] = torch.zeros_like(made[1])
        if mega_moe:
            columns = torch.full((shape[-1] // 128, mega_moe_rows(shape[0], mega_moe)), 7, device=device)
            kwargs |= {"mega_moe_sf": columns.int().t(), "mega_moe_block_m": mega_moe}
        return kwargs

    return build


def case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fmt: str,
    group: int,
    layout: str,
    suffix: str = "",
    roles: str = "",
    **more: Any,
) -> Case:
    name = f"{NAMES[dtype]}-{'x'.join(map(str, shape))}-{fmt}-{group}-{layout}{suffix}"
    return Case(name, make(shape, dtype, fmt, group, layout, **more), **dict.fromkeys(roles.split(), True))


def bench(
    shape: tuple[int, ...], fmt: str, group: int, layout: str, suffix: str = "", roles: str = "", **more: Any
) -> Case:
    name = f"bf16-{'x'.join(map(str, shape))}-{fmt}-{group}-{layout}{suffix}-bench"
    flags = {**BENCH, **dict.fromkeys(roles.split(), True)}
    return Case(name, make(shape, BF16, fmt, group, layout, weight=BF16, **more), **flags)


SPEC = OpSpec(
    op=tk_quant.norm_forward_and_per_token_cast,
    mutates=WRITTEN,
    cases=(
        # Every layout and width of a group; groups and words of scale factors that end within a row; narrow rows.
        case(
            (9, 576),
            BF16,
            "e4m3",
            128,
            "row",
            "-all",
            "small modes compile",
            residual=True,
            with_rstd=True,
            with_out_bf16=True,
        ),
        case((9, 576), BF16, "e4m3", 128, "packed", "", "small compile"),
        case((9, 576), FP32, "e4m3", 128, "col", "", "small", with_out_bf16=True),
        case((9, 320), BF16, "e4m3", 64, "swizzled", "", "small compile"),
        case((33, 64), BF16, "e4m3", 128, "packed", "", "small"),
        case((33, 64), FP32, "e4m3", 128, "row", "", "small"),
        case((33, 192), BF16, "e4m3", 32, "col-round", "", "small", residual=True),
        case((9, 320), BF16, "e2m1", 32, "packed", "", "small compile", residual=True),
        case((9, 320), BF16, "e2m1", 16, "row", "", "small", with_rstd=True),
        case((9, 320), FP32, "e2m1", 32, "swizzled", "", "small"),
        case((9, 320), BF16, "e2m1", 16, "swizzled", "-nvfp4", "small compile", tensor_sf=True),
        case((9, 320), FP32, "e2m1", 16, "row", "-nvfp4", "small", tensor_sf=True, into=True),
        case((9, 576), BF16, "e4m3", 128, "packed-row", "", "small"),
        case((9, 320), FP32, "e2m1", 64, "packed-row", "", "small compile", residual=True),
        # e4m3 scale factors: more columns than one, one, some that saturate, the least, a least that the caller names.
        case((9, 576), BF16, "e4m3", 128, "e4m3-sf", "", "small modes compile", with_out_bf16=True),
        case((19, 320), FP32, "e4m3", 64, "e4m3-sf-col", "", "small compile", residual=True),
        case((33, 64), BF16, "e4m3", 128, "e4m3-sf-col", "", "small"),
        case((9, 320), FP32, "e4m3", 16, "e4m3-sf-swizzled", "", "small"),
        case((9, 320), BF16, "e2m1", 16, "e4m3-sf-swizzled", "", "small compile"),
        case((19, 320), BF16, "e2m1", 32, "e4m3-sf-col", "", "small", with_rstd=True),
        *(
            case((9, 320), BF16, fmt, 32, "e4m3-sf", f"-{name}", "small", out_scale=out_scale, sf_clamp_min=least)
            for fmt in ("e4m3", "e2m1")
            for name, out_scale, least in (("saturating", 1e6, None), ("least", 1e-6, None), ("clamp", 1.0, 3))
        ),
        # A group of all channels: of a warp and less, of several warps, of several pieces.
        case((33, 192), BF16, "e4m3", 0, "row", "", "small compile"),
        case((5, 1088), BF16, "e4m3", 0, "row", "-wide", "small", with_out_bf16=True),
        case((5, 1088), FP32, "e2m1", 0, "col-round", "-wide", "small compile"),
        case((3, 8256), FP32, "e4m3", 0, "swizzled", "-wide", "small"),
        case((3, 16384), FP32, "e4m3", 128, "row", "-pieces", "small compile", residual=True),
        # Batches have scale factors of their own, in every layout.
        *(case((3, 5, 192), BF16, "e4m3", 32, layout, "", "small") for layout in FLAGS),
        case((3, 131, 64), BF16, "e2m1", 32, "swizzled", "", "small"),
        case((3, 131, 64), BF16, "e2m1", 32, "packed", "", "small modes"),
        case((2, 3, 5, 64), FP32, "e4m3", 64, "packed", "", "small"),
        case((4, 7, 128), BF16, "e4m3", 128, "row", "-transposed", "small", rows=transposed, residual=True),
        case((2, 5, 192), BF16, "e4m3", 32, "swizzled", "-into", "small", into=True, residual=True),
        *(
            case((2, 5, 192), BF16, "e4m3", 32, layout, "-into", "small", into=True)
            for layout in ("packed-row", "e4m3-sf-col")
        ),
        case((5, 3, 256), BF16, "e4m3", 128, "row", "-row-weights", "small", row_weights=True),
        # Options, rows at any address, given results.
        case((33, 128), BF16, "e4m3", 128, "row", "-unaligned", "small", rows=apart(5, 3), residual=True),
        case((9, 320), BF16, "e4m3", 64, "row", "-into", "small modes", into=True, residual=True, with_rstd=True),
        case((9, 320), BF16, "e4m3", 64, "row", "-clamp", "small", sf_clamp_min=3, weight_offset=1.0, out_scale=0.1),
        case((9, 320), BF16, "e4m3", 64, "row", "-rounded", "small", round_before_weight=True),
        case((9, 320), BF16, "e4m3", 64, "row", "-plain", "small", weight=None),
        # A second copy of scale factors: blocks of less, exactly and more than 128 rows.
        *(
            case((300, 256), BF16, "e4m3", 32, "row-round", f"-mega-moe-{block}", "small", mega_moe=block)
            for block in (48, 128, 200)
        ),
        case((70, 128), BF16, "e2m1", 32, "packed", "-mega-moe", "small modes compile", mega_moe=64),
        # No rows, one row.
        *(case((0, 128), BF16, "e4m3", 128, layout, "", "small") for layout in FLAGS),
        *(case((3, 0, 128), BF16, "e4m3", 128, layout, "", "small") for layout in ("col", "e4m3-sf-col")),
        case((1, 576), BF16, "e4m3", 128, "e4m3-sf-col", "", "small"),
        case((1, 7168), BF16, "e4m3", 128, "packed", "", "small"),
        # Zeros, infinity, NaN, subnormals, random bits.
        *(
            case((24, 256), dtype, "e4m3", group, layout, "-extremes", "small", rows=extreme_rows, weight=None, eps=0.0)
            for dtype in (BF16, FP32)
            for group, layout in ((128, "row"), (32, "packed"), (0, "row"), (32, "e4m3-sf"))
        ),
        # Sizes of real models.
        *(
            case((4001, 7168), BF16, fmt, group, layout, residual=True, with_rstd=True)
            for fmt, group, layout in (
                ("e4m3", 128, "packed"),
                ("e4m3", 32, "row"),
                ("e2m1", 32, "packed"),
                ("e4m3", 0, "row"),
                ("e4m3", 128, "packed-row"),
                ("e2m1", 16, "e4m3-sf"),
            )
        ),
        case((1031, 2560), FP32, "e4m3", 128, "col", with_out_bf16=True),
        case((3, 1031, 2048), BF16, "e4m3", 32, "swizzled", with_out_bf16=True),
        case((1031, 16384), BF16, "e4m3", 0, "row", residual=True),
        case((4001, 7168), BF16, "e4m3", 32, "packed", "-mega-moe", mega_moe=192),
        case((300001, 7168), BF16, "e4m3", 128, "packed", "-large", weight=BF16),
        # Benchmarks.
        bench((8192, 7168), "e4m3", 32, "row", "", "model_shape compile"),
        bench((8192, 7168), "e4m3", 128, "packed", "", "model_shape"),
        bench((8192, 7168), "e4m3", 128, "packed", "-residual", "model_shape compile", residual=True),
        bench((8192, 7168), "e2m1", 32, "packed", "", "model_shape"),
        *(bench((8192, hidden), "e4m3", 128, "packed") for hidden in (576, 2048, 2560, 3072, 4096, 6144)),
        *(
            bench((num_tokens, 7168), "e4m3", 128, "packed", "-residual", residual=True)
            for num_tokens in (1, 64, 4001, 8001)
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

op = tk_quant.norm_forward_and_per_token_cast


@pytest.mark.parametrize(
    ("fmt", "group", "layout"),
    [
        *product(("e4m3",), (128, 32), FLAGS),
        *(("e2m1", 16, layout) for layout in FLAGS),
        *(("e2m1", 320, layout) for layout in ALL_FLAGS),
    ],
)
def test_is_the_norm_and_the_cast(device: str, fmt: str, group: int, layout: str) -> None:
    """Each batch as by the two ops, whose references are compared elsewhere."""
    x, residual = (normal(device, (2, 7, 320), BF16) for _ in range(2))
    weight, flags = torch.randn(320, device=device), FLAGS[layout]
    (data, sf), out_bf16, rstd, norm_input = op(
        x, weight, EPS, fmt, group, residual, 0.5, with_out_bf16=True, with_rstd=True, **flags
    )
    out, *others = tk_quant.norm_forward(x, weight, EPS, residual, 0.5, with_rstd=True)
    assert_equal([out_bf16, rstd, norm_input], [out, *others])
    for b in range(2):
        assert_equal((data[b], sf[b]), tk_quant.per_token_cast(out[b], fmt, group, **flags))
    if layout in ("col", "col-round", "packed"):
        assert sf.stride() == (8 * sf.shape[2], 1, 8)
    elif layout == "e4m3-sf-col":
        assert sf.stride() == (16 * sf.shape[2], 1, 16)


def test_mega_moe_rows(device: str) -> None:
    """Tokens of a block of 160: 32 neighbours are 4 rows apart, the block begins at a multiple of 256."""
    x = torch.exp2(torch.arange(200, device=device).float() % 32).view(200, 1).expand(200, 128).contiguous()
    columns = torch.full((1, 512), -1, dtype=torch.int32, device=device)
    # Without eps each row is 1; its residual brings the power of two back.
    sf = op(x, None, 0.0, "e4m3", 32, None, 448.0, round_sf=True, mega_moe_sf=columns.t(), mega_moe_block_m=160)[0][1]
    assert sf.unique().tolist() == [1.0]
    ones = 127 * 0x01010101
    rows = [t // 160 * 256 + t % 160 // 128 * 128 + t % 160 % 32 * 4 + t % 160 % 128 // 32 for t in range(200)]
    assert rows[:3] + rows[32:34] + rows[127:130] + rows[160:162] == [0, 4, 8, 1, 5, 127, 128, 132, 256, 260]
    expected = torch.full((512,), -1, dtype=torch.int32)
    expected[rows] = ones
    assert_equal(columns[0].cpu(), expected)


def test_mega_moe_as_a_view_of_the_tokens(device: str) -> None:
    """A view with as many rows as tokens, whose columns are longer."""
    x, columns = normal(device, (40, 256), BF16), torch.zeros(2, 128, dtype=torch.int32, device=device)
    whole = columns.clone()
    op(x, None, EPS, "e4m3", 32, round_sf=True, mega_moe_sf=columns.t()[:40], mega_moe_block_m=64)
    op(x, None, EPS, "e4m3", 32, round_sf=True, mega_moe_sf=whole.t(), mega_moe_block_m=64)
    assert_equal(columns, whole)
    assert columns.count_nonzero() == 80


X = torch.ones(4, 128)
ROUND = {"round_sf": True, "num_per_channels": 32}
COL = {"use_tma_aligned_col_major_sf": True, "x": torch.ones(3, 4, 128), "num_per_channels": 32}
MEGA = {**ROUND, "mega_moe_sf": torch.zeros(1, 128, dtype=torch.int32).t(), "mega_moe_block_m": 64}


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "weight": None, "eps": EPS, "fmt": "e4m3", "num_per_channels": 128},
    [
        ({"x": torch.ones(3, 72)}, ValueError, "x: .*multiple of 64 channels"),
        ({"fmt": "e5m6"}, ValueError, "fmt: .*'e4m3', 'e2m1'"),
        ({"num_per_channels": 48}, ValueError, "num_per_channels: .*16, 32, 64, 128"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0"),
        ({"use_swizzled_sf": True}, ValueError, "use_swizzled_sf: .*round_sf"),
        ({"sf_clamp_min": 0.0}, ValueError, "sf_clamp_min"),
        ({"use_e4m3_sf": True, "round_sf": True}, ValueError, "round_sf: .*False beside use_e4m3_sf"),
        (
            {"use_e4m3_sf": True, "x": torch.ones(4, 192), "num_per_channels": 192},
            *(ValueError, "num_per_channels: expected one of 16, 32, 64, 128, got 192"),
        ),
        ({"use_e4m3_sf": True, "sf_clamp_min": 0.8}, ValueError, "sf_clamp_min: .*at least 0.875"),
        ({"use_e4m3_sf": True, "out": (X.to(torch.float8_e4m3fn), torch.ones(4, 1))}, TypeError, r"out\[1\]: .*e4m3fn"),
        ({"out": (X.to(torch.float8_e4m3fn), torch.ones(4, 2))}, ValueError, r"out\[1\]: .*shape"),
        ({"out": (X, torch.ones(4, 1))}, TypeError, r"out\[0\]: .*float8_e4m3fn"),
        (
            {**COL, "out": (torch.ones(3, 4, 128).to(torch.float8_e4m3fn), torch.ones(3, 4, 4))},
            *(ValueError, r"out\[1\]: .*strides"),
        ),
        ({"out_bf16": X}, TypeError, "out_bf16: .*bfloat16"),
        ({"mega_moe_block_m": 64}, ValueError, "mega_moe_block_m: .*0 without mega_moe_sf"),
        ({**MEGA, "mega_moe_block_m": 0}, ValueError, "mega_moe_block_m: .*positive"),
        ({**MEGA, "x": torch.ones(2, 2, 128)}, ValueError, "x: .*two dimensions"),
        ({**MEGA, "x": torch.ones(4, 64)}, ValueError, "x: .*multiple of 128"),
        ({**MEGA, "num_per_channels": 64}, ValueError, "num_per_channels: .*32 with mega_moe_sf"),
        ({**MEGA, "round_sf": False}, ValueError, "round_sf: .*True"),
        ({**MEGA, "mega_moe_block_m": 2, "x": torch.ones(200, 128)}, ValueError, "mega_moe_sf: .*at least 200 rows"),
        ({**MEGA, "mega_moe_block_m": 2}, ValueError, "mega_moe_sf: .*memory of 256"),
        ({**MEGA, "x": torch.ones(4, 256), "mega_moe_sf": torch.zeros(2, 64).int().t()}, ValueError, "at least 128"),
        ({**MEGA, "mega_moe_sf": torch.zeros(1, 255).int()[:, ::2].t()}, ValueError, "mega_moe_sf: .*strides 1"),
    ],
)
