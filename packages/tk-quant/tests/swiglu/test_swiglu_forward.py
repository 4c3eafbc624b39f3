"""swiglu_forward."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata

from ..per_token.test_per_token_cast import MakeInput, extremes
from .activations import ACTIVATIONS, COUNTED, IN_HALVES, width
from .test_swiglu_forward_and_per_token_cast import OPTIONS, activations, by_numpy, every_gate, optional, real_rows, row

FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
NUM_TOPK = 8
_BF16, _FP32 = torch.bfloat16, torch.float32


def make(x: MakeInput, **more: Any) -> Make:
    """Arguments of the op, some of them by the options of `optional`; x is NaN in rows of padding."""
    options = {name: more.pop(name) for name in OPTIONS & more.keys()}

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        kwargs = {"fmt": FORMATS[values.dtype], **more, **optional(values.shape[0], device, **options)}
        is_padding = ~real_rows(kwargs, values.shape[0], values.device).unsqueeze(1)
        return {"x": values.masked_fill(is_padding, torch.nan), **kwargs}

    return build


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except rows that are 0 in the reference: some of them are left unwritten."""
    (got, got_count), (want, count) = actual, expected
    assert_equal(got_count, count, name="clamped_count")
    assert_same_metadata(got, want, "out")
    if not want.is_meta:
        is_zero = (want == 0).all(1, keepdim=True)
        assert_equal(got.masked_fill(is_zero, 0), want.masked_fill(is_zero, 0))


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Real rows of x; maps, weights and the output."""
    x, out = kwargs["x"], outputs[0] if isinstance(outputs, tuple) else outputs
    maps = [kwargs.get(name) for name in ("pos_to_token_topk", "topk_weights", "pos_to_expert")]
    num_real = int(real_rows(kwargs, x.shape[0], x.device).sum())
    once = sum(each.numel() * each.element_size() for each in (out, *maps) if each is not None)
    return once + num_real * x.shape[1] * x.element_size()


def _case(dtype: torch.dtype, num_positions: int, hidden: int, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{'bf16' if dtype is _BF16 else 'fp32'}-h{hidden}-t{num_positions}{suffix}"
    made = make(activations(num_positions, width(hidden, more), dtype), **more)
    return Case(name, made, gpu="bench" not in roles, **dict.fromkeys(roles.split(), True))


def _bench(num_positions: int, hidden: int, roles: str = "bench", suffix: str = "-bench", **more: Any) -> Case:
    rows = {} if "segments" in more else {"padding": (8, 136)}
    return _case(more.pop("dtype", _BF16), num_positions, hidden, suffix, roles, **rows, **more)


SPEC = OpSpec(
    op=tk_quant.swiglu_forward,
    compare=compare,
    least_bytes=least_bytes,
    mutates=("clamped_count",),
    cases=(
        # One tile or several along a row; with and without the optional arguments.
        _case(_BF16, 7, 256, "-plain", "small modes"),
        _case(_BF16, 33, 64, "-weights", "small", padding=(2, 7)),
        _case(_BF16, 33, 320, "-experts", "small", experts=True),
        _case(_BF16, 33, 128, "-all", "small modes", padding=(2, 7), experts=True),
        _case(_BF16, 33, 128, "-beyond", "small", padding=(2, 7), beyond=True),
        _case(_BF16, 9, 2112, "-clamped", "small", padding=(1, 4), swiglu_clamp_value=1.5),
        _case(_BF16, 33, 192, "-counted", "small modes", experts=True, swiglu_clamp_value=0.7, counted=3),
        _case(_BF16, 9, 2112, "-counted", "small", padding=(1, 4), swiglu_clamp_value=2, counted=3),
        _case(_BF16, 9, 192, "-to-fp32", "small", padding=(1, 4), fmt="fp32"),
        _case(_FP32, 9, 192, "-plain", "small"),
        _case(_FP32, 9, 192, "-to-bf16", "small compile", padding=(1, 4), fmt="bf16"),
        _case(_FP32, 33, 640, "-counted", "small", padding=(1, 4), swiglu_clamp_value=0.5, counted=3),
        # Rows of experts by where these end, weights by position.
        _case(_BF16, 41, 256, "-segments", "small modes", segments=8),
        _case(_BF16, 41, 64, "-by-position", "small", by_position=True),
        _case(_BF16, 33, 2112, "-segments-scaled", "small", segments=7, by_position=True, routed_scaling_factor=2.5),
        _case(_FP32, 33, 640, "-segments-counted", "small compile", segments=1, clamp_value=0.7, counted=4),
        _case(
            *(_BF16, 33, 128, "-all-scaled", "small"), padding=(2, 7), experts=True, segments=4, routed_scaling_factor=3
        ),
        _case(_BF16, 0, 128, "-segments", "small", segments=8, by_position=True),
        _case(_BF16, 8001, 2048, "-segments", segments=128, by_position=True),
        # Other activations, interleaved or without values.
        *(
            _case(
                dtype,
                33,
                hidden,
                f"-{name}",
                "small modes compile" if (name, dtype) == ("oai", _BF16) else "small",
                **more,
                **rows,
            )
            for name, more in ACTIVATIONS.items()
            for dtype, hidden, rows in (
                (_BF16, 320, {"padding": (2, 7)}),
                (_FP32, 192, {"segments": 7, "by_position": True}),
            )
        ),
        *(
            _case(dtype, 33, 192, f"-counted-{name}", "small", experts=True, **more)
            for name, more in COUNTED.items()
            for dtype in (_BF16, _FP32)
        ),
        _case(_BF16, 0, 128, "-oai", "small", **ACTIVATIONS["oai"]),
        # Zero rows, one row.
        _case(_BF16, 0, 128, "", "small", padding=(1, 4)),
        _case(_BF16, 0, 128, "-counted", "small", swiglu_clamp_value=1.0, counted=3),
        _case(_BF16, 1, 640, "", "small"),
        # Zeros, infinity, NaN, subnormals, random bits; every possible gate.
        *(
            Case(f"{name}-h256-extremes{'-clamped' * bool(more)}", make(extremes(512, dtype), **more), small=True)
            for name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for more in ({}, {"swiglu_clamp_value": 3.3, "counted": 3})
        ),
        *(
            Case(f"{dtype_name}-h256-extremes-{name}", make(extremes(width(256, more), dtype), **more), small=True)
            for dtype_name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for name, more in ACTIVATIONS.items()
        ),
        Case("bf16-h128-every-gate", make(every_gate)),
        *(Case(f"bf16-h128-every-gate-{name}", make(every_gate, **more)) for name, more in IN_HALVES.items()),
        # Sizes of real models.
        *(
            _case(_BF16, num_positions, hidden, padding=(8, 136))
            for num_positions, hidden in ((4001, 640), (8001, 2048), (17, 3072), (4001, 7168), (3, 40960))
        ),
        _case(_BF16, 8001, 2048, "-counted", padding=(8, 136), experts=True, swiglu_clamp_value=2.0, counted=3),
        _case(_FP32, 4001, 2048, padding=(8, 136)),
        # More than 2**31 elements.
        _case(_BF16, 300001, 4096, "-large", padding=(299000, 300000)),
        # Benchmarks.
        _bench(34816, 2048, "bench model_shape compile"),
        _bench(34816, 2048, suffix="-clamped-counted-bench", swiglu_clamp_value=10.0, counted=3),
        _bench(34816, 2048, "bench compile", "-segments-bench", segments=136, by_position=True),
        _bench(34816, 2048, suffix="-oai-bench", **ACTIVATIONS["oai"]),
        _bench(34816, 2048, suffix="-gelu-bench", activation="gelu_tanh"),
        _bench(34816, 2048, dtype=_FP32),
        *(_bench(34816, hidden) for hidden in (256, 640, 1536, 7168)),
        *(_bench(num_positions, 2048) for num_positions in (64, 4001)),
    ),
)


test_tiers = tiers.tests(SPEC)

INF, NAN = math.inf, math.nan
op = tk_quant.swiglu_forward


def test_by_hand(device: str) -> None:
    # From 16.64 on 1 + exp(-l) rounds to 1; below -88.73 it is infinite.
    left = [100.0, 18.0, -100.0, 0.0, -0.0, 0.0, INF, -INF, NAN, 1.0, -100.0]
    right = [4.5, -1.0, 3.0, 5.0, 5.0, INF, 2.0, 1.0, 1.0, NAN, INF]
    expected = [450.0, -18.0, -0.0, 0.0, -0.0, NAN, INF, NAN, NAN, NAN, NAN]
    out = op(row(left, right).to(device))[0, : len(left)].cpu()
    torch.testing.assert_close(out, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    assert out[2:5].signbit().tolist() == [True, False, True]
    # 257 is midway between numbers of 8 bits, and goes to the one whose last bit is 0.
    assert op(row([257.0], [1.0]).to(device), fmt="bf16")[0, 0] == 256


@pytest.mark.parametrize("clamp", [None, 1.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_numpy(dtype: torch.dtype, clamp: float | None) -> None:
    x = (3 * torch.randn(40, 384)).to(dtype)
    index, weights = torch.randperm(40).to(torch.int32), torch.rand(5, 8)
    out = op(x, clamp, pos_to_token_topk=index, topk_weights=weights)
    expected = by_numpy(x, weights.flatten()[index.long()], clamp)
    # torch's exp on the CPU and that of float64 differ in the last place at times.
    np.testing.assert_allclose(out.numpy(), expected, rtol=4e-7, atol=1e-30)


def test_weight_comes_last_and_result_is_rounded_once() -> None:
    x, weights = torch.randn(64, 256).bfloat16(), torch.rand(8, 8)
    rows = {"pos_to_token_topk": torch.arange(64, dtype=torch.int32), "topk_weights": weights}
    silu = x[:, :128].float() / (1 + torch.exp(-x[:, :128].float()))
    value, weight = x[:, 128:].float(), weights.view(64, 1)
    exact = silu * value * weight
    assert_equal(op(x, **rows), exact)
    assert not torch.equal(exact, silu * (value * weight))
    assert_equal(op(x, fmt="bf16", **rows), exact.bfloat16())
    assert not torch.equal(exact.bfloat16(), ((silu * value).bfloat16() * weight).bfloat16())


def test_clamp_and_count(device: str) -> None:
    left = [3.0, 2.0, 2.5, -9.0, 0.0, 0.0, 0.0, NAN, 1.0, INF]
    right = [1.0, 1.0, 1.0, 1.0, 2.5, -2.5, -2.0, 1.0, NAN, -INF]
    count = torch.tensor([10, 20, 30], device=device)
    x = row(left, right).to(device)
    out = op(x, 2, clamped_count=count)
    assert count.tolist() == [13, 21, 32]
    clamped = row([2.0, 2.0, 2.0, -9.0, 0.0, 0.0, 0.0, NAN, 1.0, 2.0], [*right[:4], 2.0, -2.0, -2.0, 1.0, NAN, -2.0])
    assert_equal(out, op(clamped.to(device)))
    assert_equal(op(x, INF), op(x))


def test_padding_is_zero_whatever_x_holds(device: str) -> None:
    x = torch.full((6, 128), 5.0, device=device)
    x[1:5] = NAN
    index = torch.tensor([0, -1, 15, 16, 2**31 - 1, 7], dtype=torch.int32, device=device)
    expert = torch.tensor([0, 0, -5, 3, 0, 0], dtype=torch.int32, device=device)
    weights, count = torch.arange(16.0, device=device).view(2, 8) + 1, torch.zeros(3, dtype=torch.int64, device=device)
    maps = {"pos_to_token_topk": index, "topk_weights": weights, "pos_to_expert": expert}
    out = op(x, 4.0, clamped_count=count, **maps)
    assert not out[1:5].any()
    assert torch.equal(out[5], 8 * out[0])
    assert out[0].all()
    assert count.tolist() == [128, 128, 0]


def test_index_past_the_weights_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    index = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="pos_to_token_topk: expected indices into topk_weights, below 8, got 8"):
        op(torch.zeros(2, 128), pos_to_token_topk=index, topk_weights=torch.ones(1, 8))


X, INDEX, WEIGHTS = torch.ones(3, 128), torch.zeros(3, dtype=torch.int32), torch.ones(2, 4)


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X},
    [
        ({"x": torch.ones(3, 192)}, ValueError, "x: .*multiple of 128"),
        ({"x": torch.ones(3, 0)}, ValueError, "x: .*positive multiple of 128"),
        ({"topk_weights": WEIGHTS}, ValueError, "pos_to_token_topk: .*tensor beside topk_weights"),
        ({"pos_to_token_topk": INDEX}, TypeError, "topk_weights: .*Tensor"),
        ({"topk_weights": WEIGHTS.view(8)}, ValueError, "topk_weights: .*shape"),
        ({"routed_scaling_factor": 2.0}, ValueError, "topk_weights: .*routed_scaling_factor"),
        ({"psum_num_tokens_per_expert": INDEX[:0]}, ValueError, "psum_num_tokens_per_expert: .*one expert"),
        ({"token_alignment": 65537}, ValueError, "token_alignment: .*65536"),
        ({"clamp_value": 1.0, "swiglu_clamp_value": 1.0}, ValueError, "clamp_value: .*None beside swiglu_clamp_value"),
        ({"pos_to_token_topk": INDEX[:2], "topk_weights": WEIGHTS}, ValueError, "pos_to_token_topk: .*shape"),
        ({"pos_to_expert": INDEX[:2]}, ValueError, "pos_to_expert: .*shape"),
        ({"clamped_count": torch.zeros(3, dtype=torch.int64)}, ValueError, "swiglu_clamp_value: .*clamped_count"),
        ({"x": torch.ones(3, 96), "gated": False}, ValueError, "x: .*positive multiple of 64 columns, got 96"),
    ],
)
