"""short_conv_bwd."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
import tk_engram
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, empty, tiers
from tk_engram import reference

from ..compare import assert_calc_diff, assert_within_a_step
from .test_short_conv import GOOD as FORWARD
from .test_short_conv import make_conv

_FP32 = torch.float32


def make(
    num_tokens: int,
    mhc_mult: int,
    hidden: int,
    *,
    has_residual: bool = False,
    first_element: int = 0,
    **options: Any,
) -> Make:
    """Arguments of the op: those of `make_conv`, and a normal gradient."""

    def build(device: str) -> dict[str, Any]:
        shape = (num_tokens, mhc_mult, hidden)
        d_out = empty(*shape, dtype=torch.bfloat16, device=device, first_element=first_element).normal_()
        inputs = make_conv(num_tokens, mhc_mult, hidden, device, first_element=first_element, **options)
        return {"d_out": d_out, **inputs, "has_residual": has_residual}

    return build


def compare(actual: Any, expected: Any) -> None:
    """d_u within a step of bfloat16, the gradients of the weights by calc_diff."""
    assert_within_a_step(actual[0], expected[0], "d_u")
    for name, x, y in zip(("d_norm_weight", "d_conv_weight"), actual[1:], expected[1:], strict=True):
        assert_calc_diff(x, y, 1e-8, name)


SPEC = OpSpec(
    op=tk_engram.short_conv_bwd,
    compare=compare,
    cases=(
        # Sequences shorter and longer than the reach of the taps, and an empty one; empty ranges of tokens.
        Case("m2-h64-t17", make(17, 2, 64), small=True, modes=True),
        Case(
            "m1-h64-t23-packed-residual",
            make(23, 1, 64, lengths=(1, 0, 15, 7), has_residual=True, dilation=2),
            small=True,
            modes=True,
        ),
        Case("m2-h64-t11-float32-norm", make(11, 2, 64, dilation=1, dtypes=(_FP32, torch.bfloat16)), small=True),
        Case(
            "m1-h576-t9-packed-residual-float32",
            make(9, 1, 576, lengths=(4, 5), has_residual=True, dtypes=(_FP32, _FP32)),
            small=True,
            compile=True,
        ),
        Case("m3-h64-t5-far-taps", make(5, 3, 64, dilation=4, has_residual=True), small=True),
        Case("m2-h64-t0", make(0, 2, 64), small=True),
        Case("m1-h64-t1", make(1, 1, 64), small=True),
        Case("m2-h64-t6-unaligned", make(6, 2, 64, has_residual=True, first_element=1), small=True),
        Case("m4-h7168-t17", make(17, 4, 7168)),
        Case("m4-h7168-t4001-packed", make(4001, 4, 7168, lengths=(1000, 1, 3000))),
        Case("m4-h7168-t8001-residual", make(8001, 4, 7168, has_residual=True)),
        Case("m1-h576-t8001", make(8001, 1, 576, lengths=(4000, 2, 3999))),
        Case("m2-h1280-t4001-residual", make(4001, 2, 1280, has_residual=True, dilation=2)),
        Case("m8-h2560-t1001", make(1001, 8, 2560)),
        Case("m2-h4096-t1001-float32", make(1001, 2, 4096, dtypes=(_FP32, _FP32))),
        Case("m1-h5120-t1001-far-taps", make(1001, 1, 5120, dilation=500)),
        Case("m2-h8192-t257-packed", make(257, 2, 8192, lengths=(100, 157), has_residual=True)),
        Case("m1-h16384-t65", make(65, 1, 16384)),
        bench_case("m4-h7168-t8192", make(8192, 4, 7168), model_shape=True, compile=True),
        bench_case(
            "m4-h7168-t8192-packed-residual",
            make(8192, 4, 7168, has_residual=True, lengths=(2048,) * 4),
            model_shape=True,
        ),
        *(bench_case(f"m4-h7168-t{n}", make(n, 4, 7168)) for n in (1, 64, 4001, 8001)),
        *(bench_case(f"m4-h{h}-t8192", make(8192, 4, h)) for h in (2048, 4096)),
    ),
)


test_tiers = tiers.tests(SPEC)


def autograd(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The gradients of the forward's reference, in float64."""
    leaves = [inputs[name].double().requires_grad_() for name in ("u", "norm_weight", "conv_weight")]
    residual = torch.zeros_like(leaves[0]) if inputs["has_residual"] else None
    options = {name: inputs[name] for name in ("dilation", "cu_seqlens")}
    out = reference.short_conv(*leaves, residual=residual, **options)
    return torch.autograd.grad(out, leaves, inputs["d_out"].double())


def test_by_hand(device: str) -> None:
    # Rows of ±1, so rstd is 1 and x = u. A filter of 0 makes y 0, where SiLU has slope ½: d_y = d_out / 2.
    u = torch.tensor([1.0, -1.0] * 32, device=device).expand(3, 1, 64).bfloat16().contiguous()
    d_out = torch.tensor([2.0, 4.0, 8.0], device=device)[:, None, None].expand(3, 1, 64).bfloat16().contiguous()
    weights = torch.full((1, 64), 3.0, device=device), torch.zeros(1, 64, 4, device=device)
    d_u, d_norm, d_conv = tk_engram.short_conv_bwd(d_out, u, *weights, dilation=1, eps=1e-12)
    assert (d_u == 0).all()
    assert (d_norm == 0).all()
    # Σ_t d_y[t] · n[t - k], n = ±3: of three tokens, of the last two, of the last, of none.
    expected = torch.tensor([0.0, 4 * 3.0, (2 + 4) * 3.0, (1 + 2 + 4) * 3.0])
    torch.testing.assert_close(d_conv[0, 0].cpu(), expected)
    torch.testing.assert_close(d_conv[0, 1].cpu(), -expected)
    d_u, *_ = tk_engram.short_conv_bwd(d_out, u, *weights, dilation=1, eps=1e-12, has_residual=True)
    assert_equal(d_u, d_out)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [
        (13, {}),
        (13, {"dilation": 1, "lengths": (2, 0, 1, 10)}),
        (13, {"dilation": 5, "lengths": (12, 1)}),
        (2, {"dilation": 7}),
        (0, {}),
    ],
)
def test_reference_against_autograd(num_tokens: int, options: dict[str, Any], has_residual: bool) -> None:
    inputs = make(num_tokens, 2, 64, has_residual=has_residual, **options)("cpu")
    doubles = {name: inputs[name].double() for name in ("d_out", "u", "norm_weight", "conv_weight")}
    actual = reference.short_conv_bwd(**{**inputs, **doubles})
    torch.testing.assert_close(actual, autograd(inputs), rtol=1e-10, atol=1e-10)


def test_a_sequence_does_not_see_another(device: str) -> None:
    inputs = make(23, 2, 128, lengths=(5, 1, 0, 11, 6))(device)
    before, *_ = tk_engram.short_conv_bwd(**inputs)
    # Not even NaN, neither forwards nor backwards.
    inputs["d_out"][5], inputs["u"][5] = torch.nan, torch.nan
    after, *_ = tk_engram.short_conv_bwd(**inputs)
    assert after[5].isnan().all()
    assert_equal(after[:5].clone(), before[:5].clone())
    assert_equal(after[6:].clone(), before[6:].clone())


GOOD = {name: value for name, value in FORWARD.items() if name not in ("residual", "state")} | {"d_out": FORWARD["u"]}
U = FORWARD["u"]


test_bad_input = tiers.bad_input(
    SPEC,
    GOOD,
    [
        ({"d_out": U[:5]}, ValueError, "d_out: .*shape"),
        ({"u": U.repeat(1, 5, 1)[:, :9].contiguous()}, ValueError, "m .*u.*1 to 8"),
        ({"u": U.repeat(1, 1, 2)[..., :96].contiguous()}, ValueError, "H .*u.*multiple of 64"),
        ({"dilation": 0}, ValueError, "dilation: .*1 to 65536"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, ValueError, "cu_seqlens: .*two offsets"),
        ({"eps": -1.0}, ValueError, "eps: .*positive"),
    ],
)


@pytest.mark.gpu
def test_gpu_bits_do_not_depend_on_the_number_of_multiprocessors() -> None:
    inputs = make(4001, 4, 7168, lengths=(1000, 3001))("cuda")
    expected = tk_engram.short_conv_bwd(**inputs)
    for count in (1, 17, 64):
        with tk_core.num_sms(count):
            assert_equal(tk_engram.short_conv_bwd(**inputs), expected)


@pytest.mark.gpu
def test_gpu_gradient_of_a_token_does_not_depend_on_others() -> None:
    inputs = make(4001, 4, 7168)("cuda")
    d_u, *_ = tk_engram.short_conv_bwd(**inputs)
    # Token 2000 depends on three before it, three after it, and three before each of these.
    part = {name: inputs[name][1982:2010].clone() for name in ("d_out", "u")}
    alone, *_ = tk_engram.short_conv_bwd(**{**inputs, **part})
    assert_equal(alone[18:19].clone(), d_u[2000:2001].clone())


@pytest.mark.gpu(gib=13)
def test_gpu_beyond_two_to_the_31_elements() -> None:
    num_tokens = 2**31 // (8 * 8192) + 5
    inputs = make(num_tokens, 8, 8192)("cuda")
    d_u, *_ = tk_engram.short_conv_bwd(**inputs)
    last = {name: inputs[name][-29:].clone() for name in ("d_out", "u")}
    assert_equal(d_u[-11:].clone(), tk_engram.short_conv_bwd(**{**inputs, **last})[0][-11:].clone())
