"""swiglu_backward_and_per_token_cast."""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.num_sms import num_sms
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_quant import reference
from tk_quant.reference.swiglu import real_positions

from .activations import ACTIVATIONS, plain, width
from .test_swiglu_forward_and_per_token_cast import optional

MakePair = Callable[[str], tuple[torch.Tensor, torch.Tensor]]

_NUM_TOPK = 8
_CODES_WITHOUT_NAN = 0x7F


def activations(leading: tuple[int, ...], width: int, num_per_channels: int) -> MakePair:
    """Normally distributed with a standard deviation of 2, quantized."""

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = 2 * torch.randn(prod(leading), width, device=device)
        data, sf = reference.cast(x, "e4m3", (1, num_per_channels))
        return data.unflatten(0, leading), sf.unflatten(0, leading)

    return build


def codes(leading: tuple[int, ...], width: int, num_per_channels: int) -> MakePair:
    """Random codes without NaN; takes less memory than `activations`."""

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data = torch.randint(0, _CODES_WITHOUT_NAN, (*leading, width), dtype=torch.uint8, device=device)
        data |= torch.randint(0, 2, (*leading, width), dtype=torch.uint8, device=device) << 7
        sf = 0.01 * torch.rand(*leading, width // num_per_channels, device=device)
        return data.view(torch.float8_e4m3fn), sf

    return build


SF_EXTREMES = (1.0, 0.194, 0.2, 87.0 / 448.0, 88.0 / 448.0, 89.0 / 448.0, 2.0, 1e4, -0.1, -1.0, 0.0, -0.0)
SF_EXTREMES += (1e-38, 1e-42, 2.0**-149, 2.0**120, 3.4e38, torch.inf, -torch.inf, torch.nan)
"""Scale factors of gates: near the limits of the fast path and of float32, negative, NaN and infinity."""


def extremes(num_per_channels: int, interleaved: bool = False, gated: bool = True) -> MakePair:
    """(128, 512): all codes in both halves, in many combinations; gates with the scales of SF_EXTREMES.

    Interleaved, values have these scales too; not gated, there is the half of the gates alone.
    """

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        row, col = torch.arange(128, device=device).unsqueeze(1), torch.arange(256, device=device)
        gate, value = col.expand(128, 256), (col * 5 + row * 2 + 1) % 256
        # Every second row without NaN, which would hide everything else.
        data = torch.cat((gate, value), dim=1)
        data = torch.where((row % 2 == 0) & (data % 128 == _CODES_WITHOUT_NAN), 0, data)
        groups = 256 // num_per_channels
        sf = torch.tensor(SF_EXTREMES, device=device)
        of_gates = sf.repeat(128 // len(SF_EXTREMES) + 1)[:128].unsqueeze(1).repeat(1, groups)
        of_values = torch.exp2((torch.arange(128, device=device) % 40 - 20).to(torch.float32))
        pair_sf = torch.cat((of_gates, of_values.unsqueeze(1).repeat(1, groups)), dim=1)
        if interleaved:
            data, pair_sf = data.view(128, 2, 256).transpose(1, 2).reshape(128, 512), of_gates.repeat(1, 2)
        if not gated:
            data, pair_sf = data[:, :256].contiguous(), of_gates
        return data.to(torch.uint8).view(torch.float8_e4m3fn), pair_sf

    return build


def maps(
    num_positions: int, num_tokens: int, num_topk: int, num_real: int, disagree: bool = False
) -> Callable[[str], tuple[torch.Tensor, torch.Tensor]]:
    """`(pos_to_token_topk, token_topk_to_pos)`: num_real random positions and pairs that belong together.

    `disagree`: some indices past the end, and pairs that the other map does not have.
    """
    num_pairs = num_tokens * num_topk

    def build(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.randperm(num_positions, device=device)[:num_real]
        pairs = torch.randperm(num_pairs, device=device)[:num_real]
        pos_to_token_topk = torch.full((num_positions,), -1, dtype=torch.int32, device=device)
        token_topk_to_pos = torch.full((num_pairs,), -1, dtype=torch.int32, device=device)
        pos_to_token_topk[positions] = pairs.to(torch.int32)
        token_topk_to_pos[pairs] = positions.to(torch.int32)
        if disagree:
            pos_to_token_topk[::5] += num_pairs
            token_topk_to_pos[::7] = torch.arange(num_pairs, dtype=torch.int32, device=device)[::7]
            token_topk_to_pos[::11] += num_positions
            pos_to_token_topk[-1], token_topk_to_pos[-1] = 2**31 - 1, 2**31 - 1
        return pos_to_token_topk, token_topk_to_pos.view(num_tokens, num_topk)

    return build


def _shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, `elements` from the start of an allocation."""
    return torch.cat((x.new_zeros(elements), x.flatten()))[elements:].view(x.shape)


def make(
    leading: tuple[int, ...],
    hidden: int,
    num_per_channels: int,
    num_tokens: int | None = None,
    num_real: int | None = None,
    num_topk: int = _NUM_TOPK,
    x: Callable[[tuple[int, ...], int, int], MakePair] = activations,
    disagree: bool = False,
    shift: tuple[int, int] | None = None,
    map_as_x: bool = False,
    grad_scale: float = 1.0,
    grad_dtype: torch.dtype = torch.bfloat16,
    by_pairs: bool = True,
    segments: int | None = None,
    by_position: bool = False,
    **more: Any,
) -> Make:
    """Arguments. By default 7 of 8 positions are real. shift: bytes by which data and grad_out are off alignment.

    `by_pairs`: with weight and maps; `segments` and `by_position` are those of `optional`.
    """
    num_positions = prod(leading)
    if num_tokens is None:
        num_tokens = -(-num_positions // num_topk)
    if num_real is None:
        num_real = min(num_positions - num_positions // 8, num_tokens * num_topk)

    def build(device: str) -> dict[str, Any]:
        data, sf = x(leading, width(hidden, more), num_per_channels)(device)
        grad_out = (grad_scale * torch.randn(*leading, hidden, device=device)).to(grad_dtype)
        if shift is not None:
            data = _shifted(data.view(torch.uint8), shift[0]).view(torch.float8_e4m3fn)
            grad_out = _shifted(grad_out, shift[1] // grad_out.element_size())
        made = maps(num_positions, num_tokens, num_topk, num_real, disagree)
        pos_to_token_topk, token_topk_to_pos = made(device) if by_pairs else (None, None)
        of_rows = optional(num_positions, device, segments=segments, by_position=by_position)
        del of_rows["clamped_count"]
        return {
            "x": (data, sf),
            "grad_out": grad_out,
            "weight": torch.rand(num_tokens, num_topk, device=device) if by_pairs else None,
            "pos_to_token_topk": pos_to_token_topk.view(leading) if map_as_x else pos_to_token_topk,
            "token_topk_to_pos": token_topk_to_pos,
            "num_per_channels": num_per_channels,
            **of_rows,
            **more,
        }

    return build


def make_extremes(num_per_channels: int, **more: Any) -> Make:
    """The extremes of x beside a few of grad_out and weight."""

    def build(device: str) -> dict[str, Any]:
        position = torch.arange(128, dtype=torch.int32, device=device)
        grad_out = torch.exp2(torch.randint(-10, 10, (128, 256), device=device).to(torch.float32)) - 1
        grad_out[3, 7], grad_out[4, 9], grad_out[5, 11] = torch.inf, -torch.inf, torch.nan
        # Padding, which must not be read.
        grad_out[120:] = torch.nan
        weight = torch.rand(16, 8, device=device)
        weight[5, :5] = torch.tensor([0.0, -0.0, -2.0, torch.inf, torch.nan], device=device)
        pos = torch.where(position < 120, position, -1)
        layout = {name: more[name] for name in ("interleaved", "gated") if name in more}
        return {
            "x": extremes(num_per_channels, **layout)(device),
            "grad_out": grad_out.to(torch.bfloat16),
            "weight": weight,
            "pos_to_token_topk": pos,
            "token_topk_to_pos": pos.view(16, 8),
            "num_per_channels": num_per_channels,
            **more,
        }

    return build


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except weight_grad, which is summed in another order."""
    assert_equal(actual[:3], expected[:3])
    got, want = actual[3], expected[3]
    if want is None:
        assert got is None
        return
    assert_same_metadata(got, want, "weight_grad")
    if not want.is_meta:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Inputs of real rows; all outputs; weights and maps."""
    out, pair, x_grad, weight_grad = outputs
    written = (out, *pair, x_grad, weight_grad)
    rows = (*kwargs["x"], kwargs["grad_out"])
    weight, pos = (kwargs[name] for name in ("weight", "pos_to_token_topk"))
    rest = (weight, pos, kwargs["token_topk_to_pos"], kwargs.get("topk_weights"))
    num_positions = kwargs["x"][0].shape[:-1].numel()
    segments = kwargs.get("psum_num_tokens_per_expert"), kwargs.get("token_alignment", 128)
    pos = None if pos is None else pos.flatten()
    num_real = int(real_positions(num_positions, pos, weight, None, kwargs["grad_out"].device, *segments).sum())
    row_bytes = sum(x.numel() * x.element_size() for x in rows) * num_real // max(num_positions, 1)
    return row_bytes + sum(x.numel() * x.element_size() for x in (*written, *rest) if x is not None)


def _case(
    leading: int | tuple[int, int],
    hidden: int,
    num_per_channels: int,
    suffix: str = "",
    roles: dict[str, bool] | None = None,
    **more: Any,
) -> Case:
    leading = leading if isinstance(leading, tuple) else (leading,)
    rounded = "-round" if more.get("round_sf") else ""
    clamped = "-clamped" if "swiglu_clamp_value" in more else ""
    name = f"{num_per_channels}{rounded}{clamped}-h{hidden}-t{'x'.join(map(str, leading))}{suffix}"
    return Case(name, make(leading, hidden, num_per_channels, **more), **(roles or {}))


_SMALL = {"small": True}
_COMPILE = {"compile": True}
_BENCH = {"bench": True, "gpu": False}
_ALONE = {"by_pairs": False}
_PACKED = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}

SPEC = OpSpec(
    op=tk_quant.swiglu_backward_and_per_token_cast,
    compare=compare,
    least_bytes=least_bytes,
    cases=(
        # Groups, roundings, clamps.
        *(
            _case(
                *(9, hidden, group),
                roles={"small": True, "modes": group == 128 and rounded and clamp is not None},
                **({"round_sf": True} if rounded else {}),
                **({} if clamp is None else {"swiglu_clamp_value": clamp}),
            )
            for group, hidden in ((32, 96), (128, 384))
            for rounded in (False, True)
            for clamp in (None, 1)
        ),
        *(
            _case(9, hidden, group, "-tiny", roles=_SMALL, grad_scale=1e-9, sf_clamp_min=448 * 2.0**-126, **more)
            for group, hidden, more in ((128, 384, {}), (32, 96, {"round_sf": True}))
        ),
        # Positions of experts.
        _case((3, 5), 128, 128, roles={"small": True, "modes": True, "compile": True}),
        _case((2, 7), 64, 32, "-map-as-x", roles=_SMALL, map_as_x=True, swiglu_clamp_value=0.1),
        # Rows of experts by where these end, weights by position or none, layouts of sf, gradients in float32.
        *(
            _case(num_positions, hidden, group, suffix, roles={"small": True, **roles}, **more)
            for num_positions, hidden, group, suffix, roles, more in (
                (41, 128, 128, "-segments", {"modes": True}, {**_ALONE, "segments": 8}),
                (41, 96, 32, "-by-position", {"modes": True}, {**_ALONE, "by_position": True, "do_recompute": False}),
                (33, 384, 128, "-plain-fp32-grad", {}, {**_ALONE, "grad_dtype": torch.float32}),
                (
                    *(33, 640, 128, "-segments-packed", _COMPILE),
                    {**_ALONE, **_PACKED, "segments": 7, "by_position": True, "routed_scaling_factor": 2.5},
                ),
                (
                    *(33, 96, 32, "-segments-packed-fp32-grad", _COMPILE),
                    {**_ALONE, **_PACKED, "segments": 1, "grad_dtype": torch.float32, "clamp_value": 1.5},
                ),
                (
                    *(9, 384, 128, "-col", {}),
                    {**_ALONE, "use_tma_aligned_col_major_sf": True, "by_position": True},
                ),
                (9, 640, 128, "-packed-row", {}, {**_ALONE, "round_sf": True, "use_packed_ue8m0": True}),
                (33, 128, 128, "-pairs-segments-scaled", {}, {"segments": 4, "routed_scaling_factor": 0.3}),
                (0, 128, 128, "-segments", {}, {**_ALONE, **_PACKED, "segments": 8, "by_position": True}),
                ((2, 9), 128, 128, "-segments", {}, {**_ALONE, "segments": 8, "by_position": True}),
                (7, 128, 128, "-shifted-fp32-grad", {}, {**_ALONE, "shift": (4, 4), "grad_dtype": torch.float32}),
            )
        ),
        _case(8001, 2048, 128, "-segments", **_ALONE, segments=128, by_position=True, clamp_value=2.0),
        # Other activations, interleaved or without values.
        *(
            _case(num_positions, hidden, group, f"-{name}", roles=_SMALL, **more, **rest)
            for name, more in ACTIVATIONS.items()
            for num_positions, hidden, group, rest in (
                (9, 96, 32, {"round_sf": True}),
                (33, 384, 128, {**_ALONE, **_PACKED, "segments": 7, "by_position": True}),
                (9, 640, 128, {**_ALONE, "grad_dtype": torch.float32, "do_recompute": False}),
            )
        ),
        *(
            _case(8001, 2048, 128, f"-{name}", roles=_COMPILE, **_ALONE, by_position=True, **ACTIVATIONS[name])
            for name in ("oai", "relu2")
        ),
        _case((3, 5), 128, 128, "-oai", roles={**_SMALL, "modes": True}, **ACTIVATIONS["oai"]),
        _case(0, 128, 128, "-oai", roles=_SMALL, **ACTIVATIONS["oai"]),
        *(
            _case(7, 128, 32, f"-shifted-{name}", roles=_SMALL, shift=(1, 2), **ACTIVATIONS[name])
            for name in ("oai", "relu2")
        ),
        _case(
            9, 384, 128, "-col-relu2", roles=_SMALL, **_ALONE, use_tma_aligned_col_major_sf=True, **ACTIVATIONS["relu2"]
        ),
        # Few or many channels per row, with and without idle lanes.
        _case(70, 32, 32, roles=_SMALL),
        _case(7, 288, 32, roles=_SMALL),
        _case(33, 128, 128, roles=_SMALL),
        _case(3, 4224, 128, roles={**_SMALL, **_COMPILE}),
        # Zero and one of everything; many more pairs than threads.
        _case(0, 128, 128, "-16-tokens", roles=_SMALL, num_tokens=16),
        _case((2, 0), 128, 128, roles=_SMALL, num_tokens=4),
        _case(5, 128, 128, "-no-tokens", roles=_SMALL, num_tokens=0),
        _case(0, 128, 128, "-no-tokens", roles=_SMALL, num_tokens=0),
        _case(1, 128, 128, roles=_SMALL, num_tokens=1, num_topk=1),
        _case(2, 64, 32, "-many-pairs", roles=_SMALL, num_tokens=300),
        _case(17, 128, 128, "-all-padding", roles=_SMALL, num_real=0),
        # Maps with indices past the end of each other, or that are not inverse to each other.
        _case(40, 64, 32, "-disagree", roles=_SMALL, disagree=True),
        _case(40, 384, 128, "-disagree", roles=_SMALL, disagree=True),
        # Unaligned tensors.
        *(
            _case(7, 128, group, f"-shifted-{data}-{grad}", roles={**_SMALL, "compile": data == 1}, shift=(data, grad))
            for group, data, grad in ((128, 8, 8), (32, 4, 4), (128, 2, 2), (32, 1, 2))
        ),
        # Every code with many scales: large gates, NaN and infinity, subnormals.
        *(
            Case(f"{group}-extremes{suffix}", make_extremes(group, **more), small=True)
            for group, suffix, more in (
                (32, "", {}),
                (128, "-round", {"round_sf": True}),
                (32, "-clamped", {"swiglu_clamp_value": 3.3}),
                (128, "-clamped-round", {"swiglu_clamp_value": 448, "round_sf": True}),
                (128, "-clamped-far", {"swiglu_clamp_value": torch.inf}),
            )
        ),
        *(
            Case(f"{group}-extremes-{name}", make_extremes(group, **more), small=True)
            for group, (name, more) in zip((32, 128) * len(ACTIVATIONS), ACTIVATIONS.items())
        ),
        # Sizes of real models.
        *(
            _case(num_positions, hidden, group, roles=_COMPILE if first and more else None, **more)
            for group, more, sizes in (
                (
                    128,
                    {},
                    ((4001, 2048), (17, 1280), (8001, 1024), (4001, 1536), (1, 2048), (8001, 3072), (4001, 3584)),
                ),
                (32, {}, ((8001, 2048), (4001, 288), (17, 3584))),
                (128, {"round_sf": True}, ((4001, 1280), (8001, 2048))),
                (32, {"swiglu_clamp_value": 2.0, "round_sf": True}, ((8001, 1024), (4001, 2048))),
                (128, {"swiglu_clamp_value": 10.0}, ((4001, 3072), (8001, 1536))),
            )
            for first, (num_positions, hidden) in zip((True, *(False for _ in sizes[1:])), sizes)
        ),
        _case(17, 7168, 128),
        _case(17, 20480, 128, roles=_COMPILE),
        _case(4001, 2048, 128, "-all-padding", num_real=0),
        _case((8, 512), 2048, 128),
        _case((8, 500), 1280, 32, "-map-as-x", map_as_x=True),
        # Real rows at both ends of more than 2**31 elements.
        _case(300001, 4096, 128, "-large", x=codes, num_tokens=500, num_real=3000),
        # Benchmarks.
        _case(34560, 2048, 128, "-bench", roles={**_BENCH, "model_shape": True}, num_real=34560),
        _case(34816, 2048, 128, "-padded-bench", roles=_BENCH, num_tokens=4096, num_real=32768),
        _case(34560, 2048, 32, "-bench", roles=_BENCH, num_real=34560),
        *(
            _case(34816, 2048, 128, suffix, roles=_BENCH, **_ALONE, segments=136, by_position=True, **more)
            for suffix, more in (
                ("-segments-bench", {}),
                ("-segments-packed-bench", {**_PACKED, "do_recompute": False}),
                ("-segments-fp32-grad-bench", {"grad_dtype": torch.float32}),
            )
        ),
        *(
            _case(34560, 2048, 128, f"-{name}-bench", roles=_BENCH, num_real=34560, **ACTIVATIONS[name])
            for name in ("oai", "gelu")
        ),
        _case(34560, 2048, 128, "-bench", roles=_BENCH, num_real=34560, round_sf=True),
        _case(34560, 2048, 128, "-bench", roles=_BENCH, num_real=34560, swiglu_clamp_value=10.0),
        *(
            _case(num_positions, hidden, 128, "-bench", roles=_BENCH, num_real=num_positions)
            for num_positions, hidden in (
                *((34560, hidden) for hidden in (384, 1024, 1280, 1536, 3072, 3584)),
                *((num_positions, 2048) for num_positions in (1, 64, 4001, 8001)),
            )
        ),
        _case(34560, 288, 32, "-bench", roles=_BENCH, num_real=34560),
    ),
)


test_tiers = tiers.tests(SPEC)

INF, NAN = torch.inf, torch.nan
ZERO_SF = float(np.float32(1e-4) / np.float32(448))


def rows(gate: float, value: float, grad: float, weight: float, **more: Any) -> dict[str, Any]:
    """One row of 32 channels: the first has these, the others zeros."""
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = gate, value
    grad_out = torch.zeros(1, 32, dtype=torch.bfloat16)
    grad_out[0, 0] = grad
    return {
        "x": (x.to(torch.float8_e4m3fn), torch.ones(1, 2)),
        "grad_out": grad_out,
        "weight": torch.tensor([[weight]]),
        "pos_to_token_topk": torch.zeros(1, dtype=torch.int32),
        "token_topk_to_pos": torch.zeros(1, 1, dtype=torch.int32),
        "num_per_channels": 32,
        **more,
    }


@pytest.mark.parametrize(
    ("gate", "value", "grad", "weight", "clamp", "out", "left", "right", "weight_grad"),
    [
        # s = 1/2: gs = 4 * 0.5 / 2 = 1, dl = 1 * 2 * 1, dr = 1 * 0.
        (0.0, 2.0, 4.0, 0.5, None, 0.0, 2.0, 0.0, 0.0),
        # exp(-l) is lost beside 1, so s = 1 and a = l * r.
        (448.0, 3.0, 2.0, 0.5, None, 672.0, 3.0, 448.0, 2688.0),
        # exp(-l) is infinite, so s = 0 and a = 0.
        (-448.0, 3.0, 2.0, 0.5, None, -0.0, -0.0, -0.0, 0.0),
        # l is clamped to 32, where s is 1 still; dl is zero.
        (448.0, 3.0, 2.0, 0.5, 32.0, 48.0, 0.0, 32.0, 192.0),
        # r is clamped to -1: dr is zero. l is 0, so s = 1/2.
        (0.0, -2.0, 4.0, 0.5, 1.0, -0.0, -1.0, 0.0, 0.0),
        (448.0, 448.0, 1.0, 1.0, 32.0, 1024.0, 0.0, 0.0, 1024.0),
        # On the clamp nothing is clamped.
        (32.0, -32.0, 1.0, 1.0, 32.0, -1024.0, -32.0, 32.0, -1024.0),
    ],
)
def test_by_hand(
    gate: float,
    value: float,
    grad: float,
    weight: float,
    clamp: float | None,
    out: float,
    left: float,
    right: float,
    weight_grad: float,
) -> None:
    got, (data, sf), x_grad, got_weight_grad = tk_quant.swiglu_backward_and_per_token_cast(
        **rows(gate, value, grad, weight, swiglu_clamp_value=clamp)
    )
    expected = torch.zeros(1, 32)
    expected[0, 0] = out
    assert_equal(got, expected.to(torch.bfloat16), name="out")
    assert x_grad[0, [0, 32]].tolist() == [left, right]
    assert (x_grad[0, 1:32] == 0).all()
    assert got_weight_grad.tolist() == [[weight_grad]]
    for half, expected_grad in enumerate((left, right)):
        amax = np.float32(max(abs(expected_grad), 1e-4))
        assert sf[0, half] == float(amax / np.float32(448))
        assert data[0, 32 * half].float() == (np.sign(expected_grad) * 448 if expected_grad else 0)


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize("name", ["silu", "interleaved", *ACTIVATIONS])
def test_against_autograd(name: str, clamp: float | None, device: str) -> None:
    options = {"silu": {}, "interleaved": {"interleaved": True}, **ACTIVATIONS}[name] | {"swiglu_clamp_value": clamp}
    kwargs = make((24,), 128, 128, num_real=24, **options)(device)
    x = reference.cast_back(kwargs["x"], "fp32", (1, 128)).double().requires_grad_()
    weight = kwargs["weight"].double().requires_grad_()
    out = plain(x, **options) * weight.flatten()[kwargs["pos_to_token_topk"].long()].unsqueeze(-1)
    out.backward(kwargs["grad_out"].double())
    got, pair, x_grad, weight_grad = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    torch.testing.assert_close(got.double(), out.detach(), rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(x_grad.double(), x.grad, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(weight_grad.double(), weight.grad, rtol=1e-4, atol=1e-4)
    # e4m3 has three bits of mantissa; values small beside their group's amax have fewer.
    cast = reference.cast_back(pair, "fp32", (1, 128)).double()
    step = pair[1].double().repeat_interleave(128, dim=1)
    assert bool(((cast - x.grad).abs() <= x.grad.abs() / 16 + step * 2.0**-9).all())


@pytest.mark.parametrize("round_sf", [False, True])
def test_padding_is_not_looked_at(round_sf: bool) -> None:
    kwargs = make((20,), 128, 128, num_real=15, round_sf=round_sf)("cpu")
    first = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    padding = kwargs["pos_to_token_topk"] < 0
    assert int(padding.sum()) == 5
    kwargs["x"][0].view(torch.uint8)[padding] = 0x7F
    kwargs["x"][1][padding] = NAN
    kwargs["grad_out"][padding] = INF
    second = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    assert_equal(second, first)
    out, (data, sf), x_grad, _ = second
    assert not out[padding].any()
    assert not x_grad[padding].any()
    assert not data[padding].float().any()
    assert bool((sf[padding] == (2.0**-22 if round_sf else ZERO_SF)).all())


def test_pairs_without_position() -> None:
    kwargs = make((9,), 64, 32, num_tokens=4, num_real=9)("cpu")
    weight_grad = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)[3]
    without = kwargs["token_topk_to_pos"] < 0
    assert int(without.sum()) == 23
    assert not weight_grad[without].any()
    assert bool((weight_grad[~without] != 0).all())


def test_positions_of_experts_are_positions() -> None:
    kwargs = make((3, 6), 128, 32, map_as_x=True, swiglu_clamp_value=1.0)("cpu")
    out, pair, x_grad, weight_grad = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    flat = {**kwargs, "x": tuple(each.flatten(0, 1) for each in kwargs["x"])}
    for name in ("grad_out", "pos_to_token_topk"):
        flat[name] = kwargs[name].flatten(0, 1)
    expected = tk_quant.swiglu_backward_and_per_token_cast(**flat)
    assert_equal(
        (out.flatten(0, 1), tuple(each.flatten(0, 1) for each in pair), x_grad.flatten(0, 1), weight_grad), expected
    )
    again = tk_quant.swiglu_backward_and_per_token_cast(
        **{**kwargs, "pos_to_token_topk": kwargs["pos_to_token_topk"].flatten()}
    )
    assert_equal(again, (out, pair, x_grad, weight_grad))


def test_not_finite() -> None:
    for value, grad, expected in ((448.0, INF, INF), (448.0, NAN, NAN), (0.0, INF, NAN)):
        out, (data, sf), x_grad, _ = tk_quant.swiglu_backward_and_per_token_cast(**rows(1.0, value, grad, 1.0))
        assert out.isfinite().all()
        torch.testing.assert_close(x_grad[0, 0].float(), torch.tensor(expected), equal_nan=True)
        torch.testing.assert_close(sf[0, 0], torch.tensor(expected), equal_nan=True)
        assert data.view(torch.uint8)[0, 0] == 0x7F
    assert x_grad.view(torch.int16)[0, 0] == 0x7FFF


@pytest.mark.gpu
@pytest.mark.parametrize("clamp", [None, 3.0])
@pytest.mark.parametrize(("num_positions", "hidden", "group"), [(131, 288, 32), (131, 2048, 128), (102, 3584, 128)])
def test_blocks_with_several_rows(num_positions: int, hidden: int, group: int, clamp: float | None) -> None:
    kwargs = make((num_positions,), hidden, group, swiglu_clamp_value=clamp)("cuda")
    with num_sms(1):
        actual = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    compare(actual, reference.swiglu_backward_and_per_token_cast(**kwargs))


def test_debug_mode_finds_maps_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = make((9,), 64, 32, num_tokens=2, num_real=9)("cpu")
    monkeypatch.setattr(env, "debug", lambda: True)
    tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    for name, value, match in (
        ("pos_to_token_topk", 16, "pos_to_token_topk: expected indices below 16, got 16"),
        ("token_topk_to_pos", 9, "token_topk_to_pos: expected indices below 9, got 9"),
    ):
        wrong = kwargs[name].clone()
        wrong.view(-1)[3] = value
        with pytest.raises(ValueError, match=match):
            tk_quant.swiglu_backward_and_per_token_cast(**{**kwargs, name: wrong})
    swapped = kwargs["pos_to_token_topk"].flip(0)
    with pytest.raises(ValueError, match=r"pos_to_token_topk: expected \d+ at position \d+, got"):
        tk_quant.swiglu_backward_and_per_token_cast(**{**kwargs, "pos_to_token_topk": swapped})


DATA, SF = activations((8,), 256, 128)("cpu")


test_bad_input = tiers.bad_input(
    SPEC,
    {
        "x": (DATA, SF),
        "grad_out": torch.zeros(8, 128, dtype=torch.bfloat16),
        "weight": torch.ones(8, 1),
        "pos_to_token_topk": torch.arange(8, dtype=torch.int32),
        "token_topk_to_pos": torch.arange(8, dtype=torch.int32).view(8, 1),
        "num_per_channels": 128,
    },
    [
        ({"x": DATA}, TypeError, "x: expected a pair"),
        ({"x": (DATA, SF, SF)}, ValueError, "x: expected a pair"),
        ({"x": (DATA[0], SF)}, ValueError, r"x\[0\]: expected shape"),
        ({"x": (DATA[None, None], SF)}, ValueError, r"x\[0\]: expected shape"),
        (
            {"x": (DATA[:, :192].clone(), SF)},
            ValueError,
            r"x\[0\]: expected a positive multiple of 256 columns, got 192",
        ),
        ({"x": (DATA[:, :0].clone(), SF)}, ValueError, r"x\[0\]: expected a positive multiple of 256 columns, got 0"),
        ({"x": (DATA, SF[:, :1])}, ValueError, r"x\[1\]: expected shape \(8, 2\), got \(8, 1\)"),
        ({"x": (DATA.view(2, 4, 256), SF)}, ValueError, r"x\[1\]: expected shape \(2, 4, 2\)"),
        ({"grad_out": torch.zeros(8, 256, dtype=torch.bfloat16)}, ValueError, r"grad_out: expected shape \(8, 128\)"),
        (
            {"pos_to_token_topk": torch.zeros(7, dtype=torch.int32)},
            ValueError,
            r"pos_to_token_topk: expected shape \(8\)",
        ),
        (
            {"token_topk_to_pos": torch.zeros(1, 8, dtype=torch.int32)},
            ValueError,
            r"token_topk_to_pos: expected shape \(8, 1\)",
        ),
        ({"num_per_channels": 64}, ValueError, "num_per_channels: expected one of 32, 128, got 64"),
        ({"weight": None}, ValueError, "pos_to_token_topk: expected None without weight"),
        ({"topk_weights": torch.ones(8)}, ValueError, "topk_weights: expected None beside weight"),
        ({"use_packed_ue8m0": True}, ValueError, "use_packed_ue8m0: expected round_sf"),
        ({"token_alignment": 0}, ValueError, "token_alignment: expected 1 to 65536, got 0"),
        (
            {**make((9,), 64, 32)("meta"), "weight": torch.empty(2**31, 1, device="meta")},
            ValueError,
            "weight: .*at most",
        ),
    ],
)
