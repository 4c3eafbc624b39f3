"""swiglu_forward_and_per_token_cast."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.math import align, ceil_div
from tk_core.reference.scales import unpack_scales
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_quant import reference
from tk_quant.reference.swiglu import real_positions

from ..per_token import test_per_token_cast as per_token_cast
from ..per_token.test_per_token_cast import MakeInput, extremes, normal, strided
from .activations import ACTIVATIONS, COUNTED, IN_HALVES, width

FLAGS = per_token_cast.ALL_FLAGS
"""Layouts and roundings of sf, by their names in case names."""

_BF16, _FP32 = torch.bfloat16, torch.float32
_NUM_TOPK = 8


def activations(num_positions: int, width: int, dtype: torch.dtype) -> MakeInput:
    """Normally distributed with a standard deviation of 2."""
    return lambda device: (2 * torch.randn(num_positions, width, device=device)).to(dtype)


def far_activations(num_positions: int, width: int, dtype: torch.dtype) -> MakeInput:
    """Normally distributed with a standard deviation of 40: exponents are beyond ±87 in some pieces of a row."""
    return lambda device: (40 * torch.randn(num_positions, width, device=device)).to(dtype)


def every_gate(device: str) -> torch.Tensor:
    """(16384, 256): each bfloat16 as the only nonzero gate of its group of 32, with a value of 1."""
    x = torch.zeros(16384, 256, dtype=_BF16, device=device)
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(_BF16)
    x[:, :128:32] = gates.view(16384, 4)
    x[:, 128:] = 1
    return x


def pairs(num_positions: int, padding: tuple[int, int]) -> MakeInput:
    """Indices of weights in random order; of every padding[1] positions the last padding[0] are -1."""

    def build(device: str) -> torch.Tensor:
        position = torch.arange(num_positions, device=device)
        index = torch.randperm(num_positions, device=device).to(torch.int32)
        return torch.where(position % padding[1] >= padding[1] - padding[0], -1, index)

    return build


def expert_ends(num_positions: int, alignment: int, device: str) -> torch.Tensor:
    """psum_num_tokens_per_expert of experts with some rows or none, the last of whose ends before num_positions."""
    ends = [0]
    for count in itertools.cycle((3, 0, alignment + 1, 1, alignment)):
        if (end := align(ends[-1], alignment) + count) > num_positions:
            break
        ends.append(end)
    return torch.tensor(ends, dtype=torch.int32, device=device)


OPTIONS = {"padding", "beyond", "experts", "counted", "segments", "by_position"}
"""Options of `optional`."""


def optional(
    num_positions: int,
    device: str,
    padding: tuple[int, int] | None = None,
    beyond: bool = False,
    experts: bool = False,
    counted: int = 0,
    segments: int | None = None,
    by_position: bool = False,
) -> dict[str, Any]:
    """Maps and a count of `counted` numbers. `padding` adds weights, see `pairs`; `segments` is an alignment.

    `beyond` puts some indices past the weights' end.
    """
    made: dict[str, Any] = {"clamped_count": None}
    if padding is not None:
        # More weights than needed, or too few.
        num_tokens = ceil_div(num_positions, 2 * _NUM_TOPK if beyond else _NUM_TOPK)
        made["pos_to_token_topk"] = pairs(num_positions, padding)(device)
        made["topk_weights"] = torch.rand(num_tokens, _NUM_TOPK, device=device)
    if experts:
        expert = torch.arange(num_positions, dtype=torch.int32, device=device)
        made["pos_to_expert"] = torch.where(expert % 5 == 3, -1, expert)
    if segments is not None:
        made["psum_num_tokens_per_expert"] = expert_ends(num_positions, segments, device)
        made["token_alignment"] = segments
    if by_position:
        made["topk_weights"] = torch.rand(num_positions, device=device)
    if counted:
        made["clamped_count"] = torch.tensor([7, 2**40, 0, 5][:counted], device=device)
    return made


def make(x: MakeInput, fmt: str, num_per_channels: int, flags: str = "row", **more: Any) -> Make:
    """Arguments of the op, some of them by the options of `optional`."""
    options = {name: more.pop(name) for name in OPTIONS & more.keys()}

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        kwargs = {"fmt": fmt, "num_per_channels": num_per_channels, **FLAGS[flags], **more}
        return {"x": values, **kwargs, **optional(values.shape[0], device, **options)}

    return build


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except padding rows, the only rows whose sf is 0 in the reference.

    Also except e2m1 data of groups that contain infinity or NaN, as in per_token_cast.
    """
    ((data, sf), count), ((expected_data, expected_sf), expected_count) = actual, expected
    assert_equal(count, expected_count, name="clamped_count")
    for name, got, want in (("data", data, expected_data), ("sf", sf, expected_sf)):
        assert_same_metadata(got, want, name)
    if expected_sf.is_meta:
        return
    swizzled = expected_sf.ndim == 5
    real = _rows(expected_sf, data) if swizzled else expected_sf[:, 0] != 0
    if data.dtype is torch.int8:
        padding = ~real[:, None]
        data, expected_data = data.masked_fill(padding, 0), expected_data.masked_fill(padding, 0)
        if not swizzled:
            sf, expected_sf = sf.masked_fill(padding, 0), expected_sf.masked_fill(padding, 0)
        per_token_cast.compare((data, sf), (expected_data, expected_sf))
    elif swizzled:
        assert_equal((data[real], sf), (expected_data[real], expected_sf))
    else:
        assert_equal((data[real], sf[real]), (expected_data[real], expected_sf[real]), name="real rows")


def _rows(sf: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Rows of data whose first byte of swizzled sf is not 0."""
    first = sf.view(torch.uint8)[:, 0, :, :, 0].transpose(1, 2).reshape(-1)
    return first[: data.shape[0]] != 0


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Real rows of x, data and sf; maps and weights."""
    x, (data, sf) = kwargs["x"], outputs
    maps = [kwargs.get(name) for name in ("pos_to_token_topk", "topk_weights", "pos_to_expert")]
    real = real_rows(kwargs, x.shape[0], x.device)
    rows = sum(each.numel() * each.element_size() for each in (x, data, sf))
    once = sum(each.numel() * each.element_size() for each in maps if each is not None)
    return once + (rows * int(real.sum()) // x.shape[0] if x.shape[0] else 0)


def real_rows(kwargs: dict[str, Any], num_positions: int, device: torch.device) -> torch.Tensor:
    """bool (num_positions,): rows that are not padding."""
    maps = (kwargs.get(name) for name in ("pos_to_token_topk", "topk_weights", "pos_to_expert"))
    segments = kwargs.get("psum_num_tokens_per_expert"), kwargs.get("token_alignment", 128)
    return real_positions(num_positions, *maps, device, *segments)


def _case(
    dtype: torch.dtype,
    fmt: str,
    group: int,
    flags: str,
    num_positions: int,
    hidden: int,
    suffix: str = "",
    x: Callable[[int, int, torch.dtype], MakeInput] = normal,
    roles: dict[str, bool] | None = None,
    **more: Any,
) -> Case:
    name = f"{'bf16' if dtype is _BF16 else 'fp32'}-{fmt}-{group}-{flags}-h{hidden}-t{num_positions}{suffix}"
    return Case(name, make(x(num_positions, width(hidden, more), dtype), fmt, group, flags, **more), **(roles or {}))


_SMALL = {"small": True}
_COMPILE = {"compile": True}
_BENCH = {"bench": True, "gpu": False}

SPEC = OpSpec(
    op=tk_quant.swiglu_forward_and_per_token_cast,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("clamped_count",),
    cases=(
        # Every format, group and layout; groups of 128 of 640 channels leave the last word of packed sf partial.
        *(
            _case(_BF16, fmt, group, flags, 5, 640, roles=_SMALL, padding=(1, 4))
            for fmt in ("e4m3", "e2m1")
            for group, flags in (
                *(
                    (group, flags)
                    for group in (32, 128)
                    for flags in ("row", "col", "packed", "swizzled", "packed-row")
                ),
                (640, "row"),
                (0, "row-round"),
            )
        ),
        *(
            _case(_FP32, fmt, group, flags, 5, 384, roles=_SMALL, padding=(1, 4))
            for fmt, group, flags in (
                ("e4m3", 32, "packed"),
                ("e4m3", 128, "row"),
                ("e4m3", 384, "row"),
                ("e2m1", 128, "swizzled"),
                ("e2m1", 32, "col-round"),
            )
        ),
        # With and without the optional arguments.
        _case(_BF16, "e4m3", 128, "row", 7, 256, "-plain", roles={"small": True, "modes": True}),
        _case(_BF16, "e4m3", 0, "row", 7, 256, "-one-warp", roles=_SMALL),
        _case(_BF16, "e4m3", 128, "row-round", 33, 128, "-experts", roles=_SMALL, experts=True),
        _case(_BF16, "e4m3", 128, "packed", 33, 128, "-all", roles=_SMALL, padding=(2, 7), experts=True),
        _case(_BF16, "e4m3", 128, "row", 33, 128, "-beyond", roles=_SMALL, padding=(2, 7), beyond=True),
        _case(_BF16, "e4m3", 128, "swizzled", 130, 128, "-beyond", roles=_SMALL, padding=(2, 7), beyond=True),
        *(
            _case(
                dtype,
                "e4m3",
                group,
                "row",
                33,
                384,
                "-clamped" + "-counted" * bool(counted),
                roles={"small": True, "modes": bool(counted) and group == 128 and dtype is _BF16},
                swiglu_clamp_value=clamp,
                counted=counted,
            )
            for dtype, group, counted, clamp in (
                (_BF16, 128, 0, 10.0),
                (_BF16, 128, 3, 0.7),
                (_BF16, 0, 3, 10),
                (_FP32, 32, 3, 2.5),
                (_FP32, 0, 0, 0.1),
            )
        ),
        _case(
            *(_BF16, "e4m3", 128, "packed", 33, 128, "-clamped-counted-padded"),
            roles=_SMALL,
            padding=(2, 7),
            experts=True,
            counted=3,
            swiglu_clamp_value=1.5,
        ),
        # Rows of experts by where these end, weights by position.
        *(
            _case(dtype, fmt, group, flags, num_positions, hidden, suffix, roles={"small": True, **roles}, **more)
            for dtype, fmt, group, flags, num_positions, hidden, suffix, roles, more in (
                (_BF16, "e4m3", 128, "row", 41, 256, "-segments", {"modes": True}, {"segments": 8}),
                (_BF16, "e4m3", 32, "packed", 41, 128, "-by-position", {}, {"by_position": True}),
                (
                    *(_BF16, "e4m3", 128, "swizzled", 140, 640, "-segments-scaled", _COMPILE),
                    {"segments": 7, "by_position": True, "routed_scaling_factor": 2.5},
                ),
                (
                    *(_FP32, "e4m3", 0, "row", 33, 384, "-segments-counted", {"modes": True}),
                    {"segments": 1, "by_position": True, "clamp_value": 0.7, "counted": 4},
                ),
                (
                    *(_BF16, "e2m1", 32, "packed", 33, 128, "-all-scaled", {}),
                    {"padding": (2, 7), "experts": True, "segments": 4, "routed_scaling_factor": 0.3},
                ),
                (_BF16, "e4m3", 128, "row", 0, 256, "-segments", {}, {"segments": 8, "by_position": True}),
                (_BF16, "e4m3", 128, "row", 5, 128, "-one-expert", {}, {"segments": 128}),
            )
        ),
        _case(
            *(_BF16, "e4m3", 128, "row", 8001, 2048, "-segments-clamped-counted"),
            x=activations,
            roles=_COMPILE,
            segments=128,
            by_position=True,
            counted=4,
            clamp_value=2.0,
        ),
        _case(_BF16, "e4m3", 32, "row", 9, 256, "-least", roles=_SMALL, sf_clamp_min=0.5),
        _case(_BF16, "e2m1", 128, "packed", 9, 256, "-least", roles=_SMALL, sf_clamp_min=3),
        _case(
            *(_FP32, "e4m3", 128, "row", 9, 256, "-tiny"),
            x=per_token_cast.tiny,
            roles=_SMALL,
            sf_clamp_min=per_token_cast.LEAST_AMAX["e4m3"],
        ),
        # Other activations, interleaved or without values: with exponents within ±87 and beyond.
        *(
            _case(dtype, fmt, group, flags, 33, 384, f"-{name}", x=x, roles=_SMALL, **more, **rows)
            for name, more in ACTIVATIONS.items()
            for dtype, fmt, group, flags, x, rows in (
                (_BF16, "e4m3", 128, "row", activations, {"padding": (2, 7)}),
                (_BF16, "e2m1", 32, "swizzled", far_activations, {}),
                (_FP32, "e4m3", 32, "packed", activations, {"segments": 7, "by_position": True}),
            )
        ),
        *(
            _case(dtype, "e4m3", group, "row", 33, 384, f"-counted-{name}", roles=_SMALL, experts=True, **more)
            for name, more in COUNTED.items()
            for dtype, group in ((_BF16, 128), (_FP32, 0))
        ),
        *(
            _case(
                *(dtype, "e4m3", 128, "row", 8001, 2048, f"-{name}"), x=activations, roles=_COMPILE, **ACTIVATIONS[name]
            )
            for dtype, name in ((_BF16, "oai"), (_FP32, "relu2"))
        ),
        _case(_BF16, "e4m3", 0, "row", 17, 20480, "-oai", x=activations, **ACTIVATIONS["oai"]),
        _case(_BF16, "e4m3", 128, "row", 0, 640, "-oai", roles={**_SMALL, "modes": True}, **ACTIVATIONS["oai"]),
        # Zero rows, one row.
        _case(_BF16, "e4m3", 128, "row", 0, 640, roles=_SMALL, padding=(1, 4)),
        _case(_BF16, "e4m3", 128, "swizzled", 0, 640, roles=_SMALL),
        _case(_BF16, "e4m3", 0, "row", 0, 640, roles=_SMALL, swiglu_clamp_value=1.0, counted=3),
        _case(_BF16, "e2m1", 128, "packed", 1, 640, roles=_SMALL),
        # Strided rows, down to rows that start at odd elements.
        *(
            Case(
                f"{'bf16' if dtype is _BF16 else 'fp32'}-e4m3-{group}-h256-t9-apart{extra}-from{first}",
                make(strided(9, 512, dtype, extra, first), "e4m3", group, padding=(1, 4)),
                small=True,
                compile=extra == 3,
            )
            for dtype, group, extra, first in (
                (_BF16, 128, 64, 64),
                (_BF16, 32, 4, 4),
                (_BF16, 0, 2, 0),
                (_BF16, 128, 3, 1),
                (_FP32, 128, 2, 2),
                (_FP32, 0, 1, 1),
            )
        ),
        # Zeros, infinity, NaN, subnormals, ties, random bits; every possible gate.
        *(
            Case(
                f"{'bf16' if dtype is _BF16 else 'fp32'}-{fmt}-{group}-{flags}-h256-extremes{'-clamped' * bool(more)}",
                make(extremes(512, dtype), fmt, group, flags, **more),
                small=True,
            )
            for dtype, fmt, group, flags, more in (
                (_BF16, "e4m3", 32, "row", {}),
                (_BF16, "e4m3", 128, "packed", {}),
                (_BF16, "e4m3", 256, "row-round", {}),
                (_BF16, "e2m1", 32, "swizzled", {}),
                (_BF16, "e4m3", 128, "row", {"swiglu_clamp_value": 3.3, "counted": 3}),
                (_FP32, "e4m3", 128, "row", {}),
                (_FP32, "e2m1", 256, "row", {}),
                (_FP32, "e4m3", 32, "packed", {"swiglu_clamp_value": 3.3, "counted": 3}),
            )
        ),
        *(
            Case(
                f"{dtype_name}-e4m3-128-row-h256-extremes-{name}",
                make(extremes(width(256, more), dtype), "e4m3", 128, **more),
                small=True,
            )
            for dtype_name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for name, more in ACTIVATIONS.items()
        ),
        *(Case(f"bf16-{fmt}-32-row-every-gate", make(every_gate, fmt, 32)) for fmt in ("e4m3", "e2m1")),
        *(
            Case(f"bf16-e4m3-32-row-every-gate-{name}", make(every_gate, "e4m3", 32, **more))
            for name, more in IN_HALVES.items()
        ),
        # Sizes of real models.
        *(
            _case(dtype, fmt, group, flags, num_positions, hidden, padding=(8, 136), roles=_COMPILE if first else None)
            for dtype, fmt, group, flags, sizes in (
                (_BF16, "e4m3", 128, "row", ((4001, 640), (8001, 2048), (17, 3072), (4001, 3584))),
                (_BF16, "e4m3", 128, "packed", ((4001, 2560), (8001, 1280))),
                (_BF16, "e4m3", 32, "swizzled", ((4001, 2048), (8001, 1536))),
                (_BF16, "e4m3", 32, "packed", ((4001, 1024),)),
                (_BF16, "e2m1", 32, "packed", ((8001, 3072),)),
                (_BF16, "e4m3", 0, "row", ((4001, 7168), (8001, 640), (17, 20480), (3, 40960))),
                (_FP32, "e4m3", 128, "col", ((4001, 2048),)),
                (_FP32, "e2m1", 128, "packed", ((4001, 768),)),
                (_FP32, "e4m3", 0, "row", ((4001, 3072),)),
            )
            for first, (num_positions, hidden) in zip((True, *(hidden > 16384 for _, hidden in sizes[1:])), sizes)
        ),
        *(
            _case(
                *(_BF16, "e4m3", group, "row", 8001, hidden, "-clamped-counted"),
                x=activations,
                roles=_COMPILE,
                padding=(8, 136),
                experts=True,
                counted=3,
                swiglu_clamp_value=2.0,
            )
            for group, hidden in ((128, 2048), (0, 3072))
        ),
        # More than 2**31 elements.
        _case(_BF16, "e4m3", 128, "row", 300001, 4096, "-large", x=activations, padding=(299000, 300000)),
        # Benchmarks.
        _case(
            *(_BF16, "e4m3", 128, "row", 34816, 2048, "-bench"),
            x=activations,
            padding=(8, 136),
            roles={**_BENCH, **_COMPILE, "model_shape": True},
        ),
        *(
            _case(*(_BF16, fmt, group, flags, 34816, 2048, "-bench"), x=activations, padding=(8, 136), roles=_BENCH)
            for fmt, group, flags in (
                ("e4m3", 128, "packed"),
                ("e4m3", 32, "swizzled"),
                ("e4m3", 0, "row"),
                ("e2m1", 32, "packed"),
            )
        ),
        _case(
            *(_BF16, "e4m3", 128, "row", 34816, 2048, "-clamped-counted-bench"),
            x=activations,
            padding=(8, 136),
            counted=3,
            swiglu_clamp_value=10.0,
            roles=_BENCH,
        ),
        _case(
            *(_BF16, "e4m3", 128, "row", 34816, 2048, "-segments-bench"),
            x=activations,
            segments=136,
            by_position=True,
            roles={**_BENCH, **_COMPILE},
        ),
        *(
            _case(
                *(_BF16, "e4m3", 128, "row", 34816, 2048, f"-{name}-bench"),
                x=activations,
                padding=(8, 136),
                roles=_BENCH,
                **more,
            )
            for name, more in (("oai", ACTIVATIONS["oai"]), ("gelu", IN_HALVES["gelu"]))
        ),
        _case(_FP32, "e4m3", 128, "row", 34816, 2048, "-bench", x=activations, padding=(8, 136), roles=_BENCH),
        *(
            _case(
                *(_BF16, "e4m3", 128, "row", num_positions, hidden, "-bench"),
                x=activations,
                padding=(8, 136),
                roles=_BENCH,
            )
            for num_positions, hidden in (
                *((34816, hidden) for hidden in (640, 1280, 1536, 3072, 3584, 7168)),
                *((num_positions, 2048) for num_positions in (1, 64, 4001, 8001)),
            )
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

INF, NAN = math.inf, math.nan
F32 = np.float32
op = tk_quant.swiglu_forward_and_per_token_cast


def row(left: list[float], right: list[float]) -> torch.Tensor:
    """One position of 128 channels, zeros where nothing is given."""
    x = torch.zeros(1, 256)
    x[0, : len(left)], x[0, 128 : 128 + len(right)] = torch.tensor(left), torch.tensor(right)
    return x


def by_numpy(x: torch.Tensor, weight: torch.Tensor | None, clamp: float | None) -> np.ndarray:
    """The formula in float32, by numpy, with exp from float64."""
    x = x.float().numpy()
    left, right = np.split(x, 2, axis=1)
    if clamp is not None:
        left, right = np.minimum(left, F32(clamp)), np.clip(right, -F32(clamp), F32(clamp))
    with np.errstate(over="ignore"):
        out = left / (F32(1) + np.exp(-left.astype(np.float64)).astype(F32)) * right
    return out if weight is None else out * weight.numpy()[:, None]


def test_by_hand() -> None:
    # From 16.64 on 1 + exp(-l) rounds to 1; below -88.73 it is infinite.
    left = [100.0, 100.0, 18.0, 18.0, -100.0, -100.0, 0.0, -0.0, 0.0, 32.0]
    right = [4.48, -2.24, 1.0, -1.0, 3.0, -3.0, 5.0, 5.0, -5.0, 6.0]
    data, sf = op(row(left, right), "e4m3", 128)
    assert sf.tolist() == [[1.0]]
    # 448, -224, 18, -18, -0, 0, 0, -0, -0, 192
    assert data.view(torch.uint8)[0, :10].tolist() == [0x7E, 0xF6, 0x59, 0xD9, 0x80, 0x00, 0x00, 0x80, 0x80, 0x74]
    assert not data.view(torch.uint8)[0, 10:].any()
    data, sf = op(row(left, right), "e2m1", 32, round_sf=True)
    assert sf.tolist() == [[128.0] + 3 * [2.0**-126]]
    # 3.5 (tie: 4), -1.75 (tie: -2), 0.14, -0.14, -0, 0, 0, -0, -0, 1.5
    assert data.view(torch.uint8)[0, :5].tolist() == [0xC6, 0x80, 0x08, 0x80, 0x38]


def test_not_finite_by_hand() -> None:
    for left, right, expected in (
        (INF, 1.0, INF),
        (-INF, 1.0, NAN),
        (NAN, 1.0, NAN),
        (1.0, NAN, NAN),
        (2.0, -INF, INF),
        (0.0, INF, NAN),
        (-100.0, INF, NAN),
    ):
        data, sf = op(row([left, 1.0], [right, 1.0]), "e4m3", 32)
        assert_equal(sf[0, :1].isnan(), torch.tensor([math.isnan(expected)]))
        assert sf[0, 0].item() == expected or math.isnan(expected)
        assert sf[0, 1:].isfinite().all()
        assert data.view(torch.uint8)[0, 0] == 0x7F
        packed = op(row([left, 1.0], [right, 1.0]), "e4m3", 32, **FLAGS["packed"])[1]
        assert packed[0, 0] & 0xFF == 255


@pytest.mark.parametrize("clamp", [None, 1.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [32, 128, 384])
def test_against_numpy_and_ml_dtypes(group: int, dtype: torch.dtype, clamp: float | None) -> None:
    x = (3 * torch.randn(40, 768)).to(dtype)
    index, weights = torch.randperm(40).to(torch.int32), torch.rand(5, 8)
    data, sf = op(x, "e4m3", group, index, weights, swiglu_clamp_value=clamp)
    out = by_numpy(x, weights.flatten()[index.long()], clamp)
    blocks = out.reshape(40, -1, group)
    amax = np.maximum(np.abs(blocks).max(axis=2), F32(1e-4))
    # torch's exp on the CPU and that of float64 differ in the last place at times.
    np.testing.assert_allclose(sf.numpy(), amax / F32(448), rtol=3e-7)
    scaled = (blocks * (F32(448) / amax)[..., None]).reshape(40, 384)
    expected = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    different = data.view(torch.uint8).numpy() != expected.view(np.uint8)
    assert different.mean() < 1e-3
    np.testing.assert_allclose(data.float().numpy()[different], expected.astype(F32)[different], rtol=0.13)


def test_nothing_is_rounded_before_the_cast() -> None:
    x = torch.randn(64, 256).to(torch.bfloat16)
    _, sf = op(x, "e4m3", 128)
    rounded = tk_quant.per_token_cast(reference.swiglu_forward(x).to(torch.bfloat16), "e4m3", 128)[1]
    exact = tk_quant.per_token_cast(reference.swiglu_forward(x), "e4m3", 128)[1]
    assert torch.equal(sf, exact)
    assert not torch.equal(sf, rounded)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("group", [32, 128])
def test_layouts_hold_the_same(fmt: str, group: int) -> None:
    x = torch.randn(131, 1280)
    data, sf = op(x, fmt, group, round_sf=True)
    num_groups = 640 // group
    for flags in ("col-round", "packed", "swizzled"):
        other_data, other_sf = op(x, fmt, group, **FLAGS[flags])
        assert torch.equal(other_data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(unpack_scales(other_sf, 131, num_groups), sf)
    # Swizzled sf past the last row and column is 0.
    assert int((other_sf.view(torch.uint8) != 0).sum()) == 131 * num_groups


def test_hidden_is_0_too() -> None:
    x = torch.randn(3, 512)
    assert_equal(op(x, "e4m3", 0), op(x, "e4m3", 256))


def test_padding() -> None:
    x = torch.full((6, 256), 5.0)
    index = torch.tensor([0, -1, 15, 16, 2**31 - 1, -(2**31)], dtype=torch.int32)
    expert = torch.tensor([0, 0, -5, 3, 0, 0], dtype=torch.int32)
    weights, count = torch.arange(16.0).view(2, 8) + 1, torch.zeros(3, dtype=torch.int64)
    _, sf = op(x, "e4m3", 128, index, weights, swiglu_clamp_value=1.0, clamped_count=count)
    assert count.tolist() == [256, 256, 0]
    # 1 / (1 + exp(-1)) is 0.7310586.
    assert sf[[0, 2], 0].tolist() == pytest.approx([0.7310586 / 448, 16 * 0.7310586 / 448])
    op(x, "e4m3", 128, index, weights, expert, swiglu_clamp_value=1.0, clamped_count=count)
    assert count.tolist() == [384, 384, 0]
    op(x, "e4m3", 128, pos_to_expert=expert, swiglu_clamp_value=1.0, clamped_count=count)
    assert count.tolist() == [384 + 5 * 128, 384 + 5 * 128, 0]


def test_index_past_the_weights_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.zeros(3, 256), torch.ones(2, 8)
    monkeypatch.setattr(env, "debug", lambda: True)
    op(x, "e4m3", 128, torch.tensor([15, -1, 0], dtype=torch.int32), weights)
    op(x[:0], "e4m3", 128, torch.empty(0, dtype=torch.int32), weights)
    with pytest.raises(ValueError, match="pos_to_token_topk: expected indices into topk_weights, below 16, got 16"):
        op(x, "e4m3", 128, torch.tensor([15, 16, 0], dtype=torch.int32), weights)


def test_compare_looks_at_real_rows_only() -> None:
    expected = op(torch.randn(3, 256), "e4m3", 32, **FLAGS["packed"])
    expected[1][1] = 0
    actual = tuple(each.clone() for each in expected)
    actual = (actual[0], torch.empty_strided((3, 1), (1, 4), dtype=torch.int32).copy_(expected[1]))
    actual[0].view(torch.uint8)[1] = 1
    actual[1][1] = 5
    compare((actual, None), (expected, None))
    actual[1][2] += 1
    with pytest.raises(AssertionError, match="real rows"):
        compare((actual, None), (expected, None))


X = torch.zeros(8, 256)
INDEX, WEIGHTS, COUNT = torch.zeros(8, dtype=torch.int32), torch.ones(2, 4), torch.zeros(3, dtype=torch.int64)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "fmt": "e4m3", "num_per_channels": 128},
    [
        ({"x": X[:, :128]}, ValueError, "x: expected a positive multiple of 256 columns, got 128"),
        ({"x": X[:, :0]}, ValueError, "x: expected a positive multiple of 256 columns, got 0"),
        ({"num_per_channels": 64}, ValueError, "num_per_channels: expected one of 32, 128, 128, 0, got 64"),
        ({"pos_to_token_topk": INDEX}, TypeError, "topk_weights: expected a torch.Tensor"),
        ({"pos_to_token_topk": INDEX, "topk_weights": WEIGHTS.view(8)}, ValueError, "topk_weights: expected shape"),
        ({"topk_weights": WEIGHTS.view(8)[1:]}, ValueError, r"topk_weights: expected shape \(8\)"),
        ({"routed_scaling_factor": 2.0}, ValueError, "topk_weights: expected a tensor beside routed_scaling_factor"),
        ({"psum_num_tokens_per_expert": INDEX[:0]}, ValueError, "psum_num_tokens_per_expert: expected at least one"),
        ({"token_alignment": 0}, ValueError, "token_alignment: expected 1 to 65536, got 0"),
        ({"clamp_value": 1.0, "swiglu_clamp_value": 1.0}, ValueError, "clamp_value: expected None beside swiglu_clamp"),
        ({"topk_weights": WEIGHTS}, ValueError, "pos_to_token_topk: expected a tensor beside topk_weights"),
        ({"pos_to_token_topk": INDEX[1:], "topk_weights": WEIGHTS}, ValueError, "pos_to_token_topk: expected shape"),
        ({"pos_to_expert": INDEX[:5]}, ValueError, "pos_to_expert: expected shape"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected round_sf"),
        ({"use_swizzled_sf": True}, ValueError, "use_swizzled_sf: expected False without round_sf"),
        (
            {"use_swizzled_sf": True, "round_sf": True, "use_tma_aligned_col_major_sf": True},
            ValueError,
            "use_tma_aligned_col_major_sf: expected False beside use_swizzled_sf",
        ),
        (
            {"x": torch.zeros(2, 512), "num_per_channels": 0, "use_tma_aligned_col_major_sf": True},
            ValueError,
            "num_per_channels: expected 32 or 128 for sf in layout COL_MAJOR, got 256",
        ),
        ({"clamped_count": COUNT}, ValueError, "swiglu_clamp_value: expected a number beside clamped_count"),
        (
            {"x": torch.zeros(8, 192), "gated": False},
            ValueError,
            "x: expected a positive multiple of 128 columns, got 192",
        ),
        ({"clamped_count": COUNT[:2], "swiglu_clamp_value": 1.0}, ValueError, "clamped_count: expected 3 or 4 numbers"),
    ],
)
