"""swiglu_backward."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.testing import Case, Make, OpSpec, assert_equal, nearest_float32, tiers
from tk_core.testing.numeric import assert_same_metadata

from ..per_token.test_per_token_cast import MakeInput, extremes
from .activations import ACTIVATIONS, IN_HALVES, plain, width
from .test_swiglu_backward_and_per_token_cast import maps
from .test_swiglu_forward import FORMATS, NUM_TOPK
from .test_swiglu_forward_and_per_token_cast import activations, every_gate, optional, real_rows

_BF16, _FP32 = torch.bfloat16, torch.float32


def make(
    x: MakeInput,
    *,
    num_real: int | None = None,
    weight_grad: bool = True,
    experts: bool = False,
    grad_dtype: torch.dtype | None = None,
    segments: int | None = None,
    by_position: bool = False,
    **more: Any,
) -> Make:
    """Arguments of the op. `num_real`: with weights, so many of which have a position; `weight_grad`: and a gradient.

    `segments` and `by_position` are those of `optional`. x and grad_out are NaN in rows of padding.
    """

    def build(device: str) -> dict[str, Any]:
        values = x(device)
        num_positions, hidden = values.shape[0], values.shape[1] // width(1, more)
        grad_out = torch.randn(num_positions, hidden, device=device).to(grad_dtype or values.dtype)
        kwargs: dict[str, Any] = {"fmt": FORMATS[values.dtype], **more}
        kwargs.update(optional(num_positions, device, segments=segments, by_position=by_position))
        del kwargs["clamped_count"]
        if num_real is not None:
            # Includes pairs without a position.
            num_tokens = num_positions // NUM_TOPK + 2
            pos_to_token_topk, token_topk_to_pos = maps(num_positions, num_tokens, NUM_TOPK, num_real)(device)
            kwargs["pos_to_token_topk"] = pos_to_token_topk
            kwargs["topk_weights"] = torch.rand(num_tokens, NUM_TOPK, device=device)
            if weight_grad:
                # Positions past the last row count as none.
                is_none = torch.arange(num_tokens * NUM_TOPK, device=device).view(num_tokens, NUM_TOPK) % 3 == 0
                beyond = torch.where(is_none & (token_topk_to_pos < 0), num_positions + 5, token_topk_to_pos)
                kwargs["token_topk_to_pos"] = beyond.int()
        if experts:
            expert = torch.arange(num_positions, dtype=torch.int32, device=device)
            kwargs["pos_to_expert"] = torch.where(expert % 5 == 3, -1, expert)
        is_padding = ~real_rows(kwargs, num_positions, values.device).unsqueeze(1)
        values, grad_out = (each.masked_fill(is_padding, torch.nan) for each in (values, grad_out))
        return {"x": values, "grad_out": grad_out, **kwargs}

    return build


def compare(actual: Any, expected: Any) -> None:
    """Bitwise equal, except weight_grad, which is summed in another order."""
    assert_equal(actual[:2], expected[:2])
    got, want = actual[2], expected[2]
    if want is None:
        assert got is None
        return
    assert_same_metadata(got, want, "weight_grad")
    if not want.is_meta:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def least_bytes(kwargs: dict[str, Any], outputs: Any) -> int:
    """Real rows of x and grad_out; maps, weights and outputs."""
    rows = (kwargs["x"], kwargs["grad_out"])
    names = ("pos_to_token_topk", "topk_weights", "token_topk_to_pos", "pos_to_expert")
    once = [each for each in (*outputs, *map(kwargs.get, names)) if each is not None]
    num_real = int(real_rows(kwargs, rows[0].shape[0], rows[0].device).sum())
    row_bytes = sum(each.shape[1] * each.element_size() for each in rows)
    return num_real * row_bytes + sum(each.numel() * each.element_size() for each in once)


def _case(dtype: torch.dtype, num_positions: int, hidden: int, suffix: str = "", roles: str = "", **more: Any) -> Case:
    name = f"{'bf16' if dtype is _BF16 else 'fp32'}-h{hidden}-t{num_positions}{suffix}"
    made = make(activations(num_positions, width(hidden, more), dtype), **more)
    return Case(name, made, gpu="bench" not in roles, **dict.fromkeys(roles.split(), True))


# Compiled are the programs that differ most: with pairs of 32 and of 64 bits.
_ROLES = {("oai", _BF16): "small modes compile", ("gelu", _FP32): "small compile"}

SPEC = OpSpec(
    op=tk_quant.swiglu_backward,
    compare=compare,
    least_bytes=least_bytes,
    cases=(
        # One tile or several along a row; with and without the optional arguments.
        _case(_BF16, 7, 256, "-plain", "small modes"),
        _case(_BF16, 33, 64, "-weights", "small modes", num_real=25),
        _case(_BF16, 33, 320, "-experts", "small", experts=True),
        _case(_BF16, 33, 128, "-all", "small modes", num_real=30, experts=True, with_out=True),
        _case(_BF16, 33, 128, "-constant-weights", "small", num_real=30, weight_grad=False),
        _case(_BF16, 9, 2112, "-clamped", "small", num_real=7, swiglu_clamp_value=1.5),
        _case(_BF16, 9, 192, "-to-fp32", "small", num_real=7, fmt="fp32", grad_dtype=_FP32, with_out=True),
        _case(_FP32, 9, 192, "-plain", "small"),
        _case(_FP32, 9, 192, "-to-bf16", "small compile", num_real=7, fmt="bf16", grad_dtype=_BF16),
        _case(_FP32, 33, 640, "-clamped", "small", num_real=30, swiglu_clamp_value=2, with_out=True),
        # Rows of experts by where these end, weights by position.
        _case(_BF16, 41, 256, "-segments", "small modes", segments=8),
        _case(_BF16, 41, 64, "-by-position", "small", by_position=True),
        _case(
            *(_BF16, 33, 2112, "-segments-scaled", "small compile"),
            segments=7,
            by_position=True,
            routed_scaling_factor=2.5,
            do_recompute=True,
        ),
        _case(_FP32, 33, 192, "-all-scaled", "small", num_real=30, experts=True, segments=1, routed_scaling_factor=-3),
        _case(_BF16, 0, 128, "-segments", "small", segments=8, by_position=True),
        _case(_BF16, 8001, 2048, "-segments", segments=128, by_position=True, clamp_value=3.0),
        # Other activations, interleaved or without values.
        *(
            _case(dtype, 33, hidden, f"-{name}", _ROLES.get((name, dtype), "small"), **more, **rows)
            for name, more in ACTIVATIONS.items()
            for dtype, hidden, rows in (
                (_BF16, 320, {"num_real": 30, "with_out": True}),
                (_FP32, 192, {"segments": 7, "by_position": True, "grad_dtype": _BF16}),
            )
        ),
        *(
            _case(dtype, 9, 64, f"-{name}-to-{fmt}", "small", fmt=fmt, **ACTIVATIONS[name])
            for name in ("oai", "relu2")
            for dtype, fmt in ((_BF16, "fp32"), (_FP32, "bf16"))
        ),
        _case(_BF16, 0, 128, "-oai", "small", with_out=True, **ACTIVATIONS["oai"]),
        # More pairs than threads; zero rows, one row.
        _case(_BF16, 1, 64, "", "small", num_real=1),
        _case(_BF16, 0, 128, "", "small", num_real=0),
        _case(_BF16, 0, 128, "-plain", "small", with_out=True),
        # Zeros, infinity, NaN, subnormals, random bits; every possible gate.
        *(
            Case(f"{name}-h256-extremes{'-clamped' * bool(more)}", make(extremes(512, dtype), **more), small=True)
            for name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for more in ({}, {"swiglu_clamp_value": 3.3, "with_out": True})
        ),
        *(
            Case(
                f"{dtype_name}-h256-extremes-{name}",
                make(extremes(width(256, more), dtype), with_out=True, **more),
                small=True,
            )
            for dtype_name, dtype in (("bf16", _BF16), ("fp32", _FP32))
            for name, more in ACTIVATIONS.items()
        ),
        Case("bf16-h128-every-gate", make(every_gate)),
        *(Case(f"bf16-h128-every-gate-{name}", make(every_gate, **more)) for name, more in IN_HALVES.items()),
        # Sizes of real models.
        *(
            _case(_BF16, num_positions, hidden, num_real=num_positions * 7 // 8)
            for num_positions, hidden in ((4001, 640), (8001, 2048), (17, 3072), (4001, 7168), (3, 40960))
        ),
        _case(_FP32, 4001, 2048, num_real=3500, with_out=True),
        # More than 2**31 elements.
        _case(_BF16, 300001, 4096, "-large", num_real=1000),
        # Benchmarks.
        _case(_BF16, 34816, 2048, "-bench", "bench model_shape compile", num_real=32768),
        _case(_BF16, 34816, 2048, "-out-bench", "bench", num_real=32768, with_out=True),
        _case(_BF16, 34816, 2048, "-oai-bench", "bench", num_real=32768, **ACTIVATIONS["oai"]),
        _case(_BF16, 34816, 2048, "-gelu-bench", "bench", num_real=32768, activation="gelu_tanh"),
        _case(_FP32, 34816, 2048, "-bench", "bench", num_real=32768),
        *(_case(_BF16, 34816, hidden, "-bench", "bench", num_real=32768) for hidden in (256, 640, 1536, 7168)),
        *(_case(_BF16, n, 2048, "-bench", "bench", num_real=n * 15 // 16) for n in (64, 4001)),
    ),
)


test_tiers = tiers.tests(SPEC)

NAN = math.nan
op = tk_quant.swiglu_backward


def rows(weights: list[float], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Row i has weights[i]."""
    index = torch.arange(len(weights), dtype=torch.int32, device=device)
    return {
        "pos_to_token_topk": index,
        "topk_weights": torch.tensor([weights], device=device),
        "token_topk_to_pos": index.view(1, -1),
    }


def test_by_hand(device: str) -> None:
    # sigmoid(0) = 1/2 and sigmoid(32) rounds to 1; silu has slopes 1/2 and 1 there.
    x = torch.zeros(2, 128, device=device)
    x[:, :64], x[:, 64:] = torch.tensor([[0.0], [32.0]]), torch.tensor([[6.0], [-3.0]])
    grad_out = torch.full((2, 64), 4.0, device=device)
    out, x_grad, weight_grad = op(x, grad_out, with_out=True, **rows([0.5, 2.0], device))
    assert out[:, 0].tolist() == [0.0, -192.0]
    assert x_grad[:, 0].tolist() == [6.0, -24.0]
    assert x_grad[:, 64].tolist() == [0.0, 256.0]
    assert weight_grad.tolist() == [[0.0, 64 * 4 * -96.0]]
    assert (x_grad[:, :64] == x_grad[:, :1]).all()
    assert (x_grad[:, 64:] == x_grad[:, 64:65]).all()


def test_every_operation_is_rounded_once(device: str) -> None:
    x, grad_out = torch.randn(4, 128, device=device), torch.randn(4, 64, device=device)
    weights = torch.rand(4).tolist()
    out, x_grad, _ = op(x, grad_out, with_out=True, **rows(weights, device))
    divisors = (1 + torch.exp(-x[:, :64])).tolist()
    one = Fraction(1)
    for p in range(4):
        for j in range(64):
            gate, value, grad, weight = map(
                Fraction, (x[p, j].item(), x[p, 64 + j].item(), grad_out[p, j].item(), torch.tensor(weights[p]).item())
            )
            divisor = Fraction(divisors[p][j])
            sigmoid = nearest_float32(one / divisor)
            activated = nearest_float32(nearest_float32(gate / divisor) * value)
            scaled = nearest_float32(nearest_float32(grad * weight) * sigmoid)
            slope = nearest_float32(gate * nearest_float32(one - sigmoid) + 1)
            assert out[p, j].item() == nearest_float32(activated * weight)
            assert x_grad[p, j].item() == nearest_float32(nearest_float32(scaled * value) * slope)
            assert x_grad[p, 64 + j].item() == nearest_float32(scaled * gate)


@pytest.mark.parametrize("clamp", [None, 0.7])
@pytest.mark.parametrize("name", ["silu", "interleaved", *ACTIVATIONS])
def test_against_autograd(name: str, clamp: float | None, device: str) -> None:
    options = {"silu": {}, "interleaved": {"interleaved": True}, **ACTIVATIONS}[name] | {"swiglu_clamp_value": clamp}
    x = torch.randn(5, width(128, options), dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.rand(5, dtype=torch.float64, device=device, requires_grad=True)
    grad_out = torch.randn(5, 128, dtype=torch.float64, device=device)
    expected = plain(x, **options) * weights[:, None]
    expected.backward(grad_out)
    given = rows(weights.tolist(), device)
    out, x_grad, weight_grad = op(x.detach().float(), grad_out.float(), with_out=True, **options, **given)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x_grad.double(), x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight_grad[0].double(), weights.grad, rtol=1e-5, atol=1e-5)


def test_out_is_that_of_the_forward() -> None:
    x = torch.randn(9, 256).bfloat16()
    given = rows(torch.rand(9).tolist())
    out, _, _ = op(x, x[:, :128].contiguous(), 1.5, fmt="bf16", with_out=True, **given)
    del given["token_topk_to_pos"]
    assert_equal(out, tk_quant.swiglu_forward(x, 1.5, fmt="bf16", **given))


def test_padding_is_not_looked_at(device: str) -> None:
    x, grad_out = torch.ones(4, 128, device=device), torch.ones(4, 64, device=device)
    x[1:3], grad_out[1:3] = NAN, NAN
    index = torch.tensor([3, -1, 1, 0], dtype=torch.int32, device=device)
    expert = torch.tensor([0, 0, -1, 2], dtype=torch.int32, device=device)
    pairs = torch.tensor([[3, 2, -1, 0], [-1, 4, -7, 99]], dtype=torch.int32, device=device)
    weights = torch.ones(2, 4, device=device)
    out, x_grad, weight_grad = op(
        *(x, grad_out),
        pos_to_token_topk=index,
        topk_weights=weights,
        token_topk_to_pos=pairs,
        pos_to_expert=expert,
        with_out=True,
    )
    for rows_of in (out, x_grad):
        assert not rows_of[1:3].any()
        assert_equal(rows_of[0], rows_of[3])
        assert rows_of[0].all()
    expected = 64 / (1 + math.exp(-1))
    torch.testing.assert_close(weight_grad.cpu(), torch.tensor([[expected, 0, 0, expected], [0, 0, 0, 0]]))


def test_weights_without_their_gradient() -> None:
    x, grad_out = torch.randn(3, 128), torch.randn(3, 64)
    given = rows([0.5, 1.5, 2.5])
    with_gradient = op(x, grad_out, **given)
    del given["token_topk_to_pos"]
    without = op(x, grad_out, **given)
    assert without[0] is None
    assert without[2] is None
    assert_equal(without[1], with_gradient[1])


def test_debug_mode_finds_maps_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    given = rows([1.0, 1.0, 1.0])
    op(torch.zeros(3, 128), torch.zeros(3, 64), **given)
    given["token_topk_to_pos"] = torch.tensor([[0, 2, -1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="pos_to_token_topk: expected 1 at position 2, got 2"):
        op(torch.zeros(3, 128), torch.zeros(3, 64), **given)


X, GRAD = torch.ones(3, 128), torch.ones(3, 64)
INDEX, WEIGHTS, PAIRS = torch.zeros(3, dtype=torch.int32), torch.ones(2, 4), torch.full((2, 4), -1, dtype=torch.int32)
MAPS = {"pos_to_token_topk": INDEX, "topk_weights": WEIGHTS}


test_bad_input = tiers.bad_input(
    SPEC,
    {"x": X, "grad_out": GRAD},
    [
        ({"x": torch.ones(3, 192)}, ValueError, "x: .*multiple of 128"),
        ({"grad_out": GRAD[:2]}, ValueError, "grad_out: .*shape"),
        ({"token_topk_to_pos": PAIRS}, ValueError, "topk_weights: .*tensor beside token_topk_to_pos"),
        ({**MAPS, "token_topk_to_pos": PAIRS[:1]}, ValueError, "token_topk_to_pos: .*shape"),
        (
            {"topk_weights": torch.ones(3), "token_topk_to_pos": PAIRS},
            ValueError,
            "topk_weights: .*beside token_topk_to_pos, of two dimensions",
        ),
    ],
)
