"""swiglu_backward_and_per_token_cast."""

from typing import Any

import numpy as np
import pytest
import torch

import tk_quant
from tk_core import env
from tk_core.arch import arch_from_name
from tk_core.num_sms import num_sms
from tk_core.testing import assert_equal, tiers
from tk_quant import reference
from tk_quant.lib.swiglu_backward_and_per_token_cast_kernel import SwigluBackwardConfig
from tk_quant.reference.lib.swiglu import swiglu_backward, swiglu_forward
from tk_quant.testing.swiglu.swiglu_backward_and_per_token_cast import SPEC, activations, compare, make

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

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
def test_against_autograd(clamp: float | None) -> None:
    kwargs = make((24,), 128, 128, num_real=24, swiglu_clamp_value=clamp)("cpu")
    x = reference.cast_back(kwargs["x"], "fp32", (1, 128)).double().requires_grad_()
    weight = kwargs["weight"].double().requires_grad_()
    gate, value = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, value = gate.clamp(max=clamp), value.clamp(-clamp, clamp)
    out = torch.nn.functional.silu(gate) * value * weight.flatten()[kwargs["pos_to_token_topk"].long()].unsqueeze(-1)
    out.backward(kwargs["grad_out"].double())
    got, pair, x_grad, weight_grad = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    torch.testing.assert_close(got.double(), out.detach(), rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(x_grad.double(), x.grad, rtol=2.0**-8, atol=1e-6)
    torch.testing.assert_close(weight_grad.double(), weight.grad, rtol=1e-4, atol=1e-4)
    # e4m3 has three bits of mantissa; values small beside their group's amax have fewer.
    cast = reference.cast_back(pair, "fp32", (1, 128)).double()
    step = pair[1].double().repeat_interleave(128, dim=1)
    assert bool(((cast - x.grad).abs() <= x.grad.abs() / 16 + step * 2.0**-9).all())


def test_plain_backward_has_the_same_formulas() -> None:
    x, grad_out = torch.randn(5, 256), torch.randn(5, 128)
    weight = torch.rand(5)
    for kwargs in ({}, {"weight": weight}, {"swiglu_clamp_value": 0.7, "weight": weight}):
        out, x_grad, weight_grad = swiglu_backward(x, grad_out, **kwargs)
        assert_equal(out, swiglu_forward(x, **kwargs))
        leaf = x.double().requires_grad_()
        factor = kwargs.get("weight", torch.ones(5)).double().requires_grad_()
        gate, value = leaf.chunk(2, dim=-1)
        if "swiglu_clamp_value" in kwargs:
            gate, value = gate.clamp(max=0.7), value.clamp(-0.7, 0.7)
        (torch.nn.functional.silu(gate) * value * factor[:, None]).backward(grad_out.double())
        torch.testing.assert_close(x_grad.double(), leaf.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weight_grad.double(), factor.grad, rtol=1e-5, atol=1e-5)


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


def test_rows_do_not_mix() -> None:
    kwargs = make((12,), 128, 128, num_real=12)("cpu")
    order = torch.randperm(12)
    moved = {**kwargs, "x": tuple(each[order] for each in kwargs["x"])}
    for name in ("grad_out", "pos_to_token_topk"):
        moved[name] = kwargs[name][order]
    back = torch.where(kwargs["token_topk_to_pos"] < 0, -1, order.argsort()[kwargs["token_topk_to_pos"].long()])
    moved["token_topk_to_pos"] = back.to(torch.int32)
    out, pair, x_grad, weight_grad = tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    expected = (out[order], tuple(each[order] for each in pair), x_grad[order], weight_grad)
    assert_equal(tk_quant.swiglu_backward_and_per_token_cast(**moved), expected)


def test_not_finite() -> None:
    for value, grad, expected in ((448.0, INF, INF), (448.0, NAN, NAN), (0.0, INF, NAN)):
        out, (data, sf), x_grad, _ = tk_quant.swiglu_backward_and_per_token_cast(**rows(1.0, value, grad, 1.0))
        assert out.isfinite().all()
        torch.testing.assert_close(x_grad[0, 0].float(), torch.tensor(expected), equal_nan=True)
        torch.testing.assert_close(sf[0, 0], torch.tensor(expected), equal_nan=True)
        assert data.view(torch.uint8)[0, 0] == 0x7F
    assert x_grad.view(torch.int16)[0, 0] == 0x7FFF


def test_configurations_are_admissible() -> None:
    for hidden in (32, 96, 128, 288, 640, 1024, 1280, 2048, 3584, 7168, 20480):
        for group in (32, 128):
            if hidden % group == 0:
                config = SwigluBackwardConfig.best(hidden, group, arch_from_name("sm_90a"))
                assert 32 <= config.threads <= 1024
                assert config.lanes * config.vec % group == 0
                assert (config.pieces - 1) * config.lanes * config.vec < hidden
                assert config.pieces * config.lanes * config.vec >= hidden
                for turns in (1, config.turns):
                    assert config.num_blocks(1000, turns, 1) * config.rows * turns >= 1000
                    assert config.num_blocks(1, turns, 100000) * config.threads >= 100000
                assert config.turns_of(1, 132) == 1
                assert config.turns_of(10**6, 132) == config.turns
                assert config.rows * config.turns <= config.threads


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


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": DATA}, TypeError, "x: expected a pair"),
        ({"x": (DATA, SF, SF)}, ValueError, "x: expected a pair"),
        ({"x": (DATA.float(), SF)}, TypeError, r"x\[0\]: expected dtype torch.float8_e4m3fn, got torch.float32"),
        ({"x": (DATA[0], SF)}, ValueError, r"x\[0\]: expected shape"),
        ({"x": (DATA[None, None], SF)}, ValueError, r"x\[0\]: expected shape"),
        ({"x": (DATA[:, :192], SF)}, ValueError, r"x\[0\]: expected contiguous"),
        (
            {"x": (DATA[:, :192].clone(), SF)},
            ValueError,
            r"x\[0\]: expected a positive multiple of 256 columns, got 192",
        ),
        ({"x": (DATA[:, :0].clone(), SF)}, ValueError, r"x\[0\]: expected a positive multiple of 256 columns, got 0"),
        ({"x": (DATA, SF.double())}, TypeError, r"x\[1\]: expected dtype torch.float32"),
        ({"x": (DATA, SF[:, :1])}, ValueError, r"x\[1\]: expected shape \(8, 2\), got \(8, 1\)"),
        ({"x": (DATA, SF.t().contiguous().t())}, ValueError, r"x\[1\]: expected contiguous"),
        ({"x": (DATA, SF.to("meta"))}, ValueError, r"x\[1\]: expected device cpu"),
        ({"x": (DATA.view(2, 4, 256), SF)}, ValueError, r"x\[1\]: expected shape \(2, 4, 2\)"),
        ({"grad_out": torch.zeros(8, 128)}, TypeError, "grad_out: expected dtype torch.bfloat16"),
        ({"grad_out": torch.zeros(8, 256, dtype=torch.bfloat16)}, ValueError, r"grad_out: expected shape \(8, 128\)"),
        ({"weight": torch.ones(8, 1).double()}, TypeError, "weight: expected dtype torch.float32"),
        ({"weight": torch.ones(8)}, ValueError, "weight: expected shape"),
        ({"weight": torch.ones(8, 2)[:, ::2]}, ValueError, "weight: expected contiguous"),
        ({"pos_to_token_topk": torch.arange(8)}, TypeError, "pos_to_token_topk: expected dtype torch.int32"),
        (
            {"pos_to_token_topk": torch.zeros(7, dtype=torch.int32)},
            ValueError,
            r"pos_to_token_topk: expected shape \(8\)",
        ),
        ({"token_topk_to_pos": torch.zeros(8, 1)}, TypeError, "token_topk_to_pos: expected dtype torch.int32"),
        (
            {"token_topk_to_pos": torch.zeros(1, 8, dtype=torch.int32)},
            ValueError,
            r"token_topk_to_pos: expected shape \(8, 1\)",
        ),
        ({"num_per_channels": 64}, ValueError, "num_per_channels: expected one of 32, 128, got 64"),
        ({"num_per_channels": 128.0}, TypeError, "num_per_channels: expected an int"),
        ({"round_sf": 1}, TypeError, "round_sf: expected a bool, got 1"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], match: str) -> None:
    kwargs = {
        "x": (DATA, SF),
        "grad_out": torch.zeros(8, 128, dtype=torch.bfloat16),
        "weight": torch.ones(8, 1),
        "pos_to_token_topk": torch.arange(8, dtype=torch.int32),
        "token_topk_to_pos": torch.arange(8, dtype=torch.int32).view(8, 1),
        "num_per_channels": 128,
    }
    tk_quant.swiglu_backward_and_per_token_cast(**kwargs)
    with pytest.raises(error, match=match):
        tk_quant.swiglu_backward_and_per_token_cast(**{**kwargs, **change})
