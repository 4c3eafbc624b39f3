"""Named cases of swiglu_forward_and_per_token_cast."""

from collections.abc import Callable
from typing import Any

import torch

from tk_core.math import ceil_div
from tk_core.testing import Case, OpSpec, assert_equal
from tk_core.testing.numeric import assert_same_metadata
from tk_quant import reference
from tk_quant.reference.lib.swiglu import real_positions
from tk_quant.swiglu.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tk_quant.testing.per_token import per_token_cast
from tk_quant.testing.per_token.per_token_cast import MakeInput, extremes, normal, strided

Make = Callable[[str], dict[str, Any]]

FLAGS = {**per_token_cast.FLAGS, "swizzled": {"round_sf": True, "use_swizzled_sf": True}}
"""Layouts and roundings of sf, by their names in case names."""

_BF16, _FP32 = torch.bfloat16, torch.float32
_NUM_TOPK = 8


def activations(num_positions: int, width: int, dtype: torch.dtype) -> MakeInput:
    """Normally distributed with a standard deviation of 2."""
    return lambda device: (2 * torch.randn(num_positions, width, device=device)).to(dtype)


def every_gate(device: str) -> torch.Tensor:
    """(16384, 256): each bfloat16 as the only nonzero gate of its group of 32, with a value of 1."""
    x = torch.zeros(16384, 256, dtype=_BF16, device=device)
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(_BF16)
    x[:, :128:32] = gates.view(16384, 4)
    x[:, 128:] = 1
    return x


def segments(num_positions: int, padding: tuple[int, int]) -> MakeInput:
    """Indices of weights in random order; of every padding[1] positions the last padding[0] are -1."""

    def build(device: str) -> torch.Tensor:
        position = torch.arange(num_positions, device=device)
        index = torch.randperm(num_positions, device=device).to(torch.int32)
        return torch.where(position % padding[1] >= padding[1] - padding[0], -1, index)

    return build


def make(
    x: MakeInput,
    fmt: str,
    num_per_channels: int,
    flags: str = "row",
    padding: tuple[int, int] | None = None,
    beyond: bool = False,
    experts: bool = False,
    counted: bool = False,
    **more: Any,
) -> Make:
    """Arguments of the op. `padding` adds weights, see `segments`; `beyond` puts some indices past the weights' end."""

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        num_positions = values.shape[0]
        kwargs = {"x": values, "fmt": fmt, "num_per_channels": num_per_channels, **FLAGS[flags], **more}
        if padding is not None:
            # More weights than needed, or too few.
            num_tokens = ceil_div(num_positions, 2 * _NUM_TOPK if beyond else _NUM_TOPK)
            kwargs["pos_to_token_topk"] = segments(num_positions, padding)(device)
            kwargs["topk_weights"] = torch.rand(num_tokens, _NUM_TOPK, device=device)
        if experts:
            expert = torch.arange(num_positions, dtype=torch.int32, device=device)
            kwargs["pos_to_expert"] = torch.where(expert % 5 == 3, -1, expert)
        kwargs["clamped_count"] = None
        if counted:
            kwargs["clamped_count"] = torch.tensor([7, 2**40, 0], device=device)
        return kwargs

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
    real = real_positions(x.shape[0], *maps, x.device)
    rows = sum(each.numel() * each.element_size() for each in (x, data, sf))
    once = sum(each.numel() * each.element_size() for each in maps if each is not None)
    return once + (rows * int(real.sum()) // x.shape[0] if x.shape[0] else 0)


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
    return Case(name, make(x(num_positions, 2 * hidden, dtype), fmt, group, flags, **more), **(roles or {}))


_SMALL = {"small": True}
_COMPILE = {"compile": True}
_BENCH = {"bench": True, "gpu": False}

SPEC = OpSpec(
    op=swiglu_forward_and_per_token_cast,
    reference=reference.swiglu_forward_and_per_token_cast,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("clamped_count",),
    cases=(
        # Every format, group and layout; groups of 128 of 640 channels leave the last word of packed sf partial.
        *(
            _case(_BF16, fmt, group, flags, 5, 640, roles=_SMALL, padding=(1, 4))
            for fmt in ("e4m3", "e2m1")
            for group, flags in (
                *((group, flags) for group in (32, 128) for flags in ("row", "col", "packed", "swizzled")),
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
                "-clamped" + "-counted" * counted,
                roles={"small": True, "modes": counted and group == 128 and dtype is _BF16},
                swiglu_clamp_value=clamp,
                counted=counted,
            )
            for dtype, group, counted, clamp in (
                (_BF16, 128, False, 10.0),
                (_BF16, 128, True, 0.7),
                (_BF16, 0, True, 10),
                (_FP32, 32, True, 2.5),
                (_FP32, 0, False, 0.1),
            )
        ),
        _case(
            *(_BF16, "e4m3", 128, "packed", 33, 128, "-clamped-counted-padded"),
            roles=_SMALL,
            padding=(2, 7),
            experts=True,
            counted=True,
            swiglu_clamp_value=1.5,
        ),
        _case(_BF16, "e4m3", 32, "row", 9, 256, "-least", roles=_SMALL, sf_clamp_min=0.5),
        _case(_BF16, "e2m1", 128, "packed", 9, 256, "-least", roles=_SMALL, sf_clamp_min=3),
        _case(
            *(_FP32, "e4m3", 128, "row", 9, 256, "-tiny"),
            x=per_token_cast.tiny,
            roles=_SMALL,
            sf_clamp_min=per_token_cast.LEAST_AMAX["e4m3"],
        ),
        # Zero rows, one row.
        _case(_BF16, "e4m3", 128, "row", 0, 640, roles=_SMALL, padding=(1, 4)),
        _case(_BF16, "e4m3", 128, "swizzled", 0, 640, roles=_SMALL),
        _case(_BF16, "e4m3", 0, "row", 0, 640, roles=_SMALL, swiglu_clamp_value=1.0, counted=True),
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
                (_BF16, "e4m3", 128, "row", {"swiglu_clamp_value": 3.3, "counted": True}),
                (_FP32, "e4m3", 128, "row", {}),
                (_FP32, "e2m1", 256, "row", {}),
                (_FP32, "e4m3", 32, "packed", {"swiglu_clamp_value": 3.3, "counted": True}),
            )
        ),
        *(Case(f"bf16-{fmt}-32-row-every-gate", make(every_gate, fmt, 32)) for fmt in ("e4m3", "e2m1")),
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
                counted=True,
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
            counted=True,
            swiglu_clamp_value=10.0,
            roles=_BENCH,
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
