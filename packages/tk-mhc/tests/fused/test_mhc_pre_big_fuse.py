"""mhc_pre_big_fuse."""

from collections.abc import Callable
from math import log
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference

from ..compare import assert_relative_error
from ..inputs import bench_cases, size_cases
from ..projection.test_mhc_pre_norm_fn import BENCH_SIZES, MODEL_SCALE, draw_fn, draw_norm_weight, rows_of_fn

MODEL_EPS = 1e-6


def draw_parameters(
    mhc_mult: int, num_channels: int, scale: float, eps: float, device: str, has_comb: bool = True
) -> dict[str, Any]:
    """fn, scale, base and the numbers. The sums of num_channels products times mhc_scale are about 1 for any `scale`.

    Cases for tests have an eps of 1e-2, large enough to detect a result that leaves one out.
    """
    num_mixes = rows_of_fn(mhc_mult, False, has_comb)
    return {
        "fn": draw_fn(num_mixes, num_channels, scale, device),
        "mhc_scale": (0.5 + torch.rand((3 if has_comb else 2,), device=device)) / (scale * num_channels**0.5),
        "mhc_base": 0.5 * torch.randn((num_mixes,), device=device),
        "rms_eps": eps,
        "mhc_pre_eps": eps,
        "mhc_sinkhorn_eps": eps,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 10,
    }


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    norm_weight: bool = True,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    n_splits: int | None = None,
    layer_norm: torch.dtype | None = None,
    shifted: bool = False,
    pre_mix: bool = True,
    has_comb: bool = True,
    post_eps: float = 0.0,
) -> Make:
    """Normal residual and fn; `layer_norm` is the dtype of the layer norm's weight."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        inputs = {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            **draw_parameters(mhc_mult, num_channels, scale, eps, device, has_comb),
            "n_splits": n_splits,
            "norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
        }
        if post_eps:
            inputs["mhc_post_eps"] = post_eps
        if layer_norm is not None:
            weight = 0.5 + torch.rand((hidden,), device=device)
            inputs |= {"layer_norm_weight": weight.to(layer_norm), "layer_norm_eps": eps}
        if shifted:
            mix = torch.rand((*leading, mhc_mult, 1), device=device) if pre_mix else None
            inputs |= {"shifted": True, "pre_mix": mix}
        return inputs

    return build


def assert_close_mix(name: str, actual: Tensor, expected: Tensor) -> None:
    """post, comb or next_pre_mix within rtol = atol = 1e-3.

    Mixes may have a relative error of 5e-4. Then z, which is about 1, has this error, and twice that in its tail. A
    sigmoid passes on at most a quarter of it, times post_mult_value = 2; for a softmax it is a relative error.
    """
    assert_same_metadata(actual, expected, name)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, msg=lambda message: f"{name}: {message}")


def assert_close_input(actual: Tensor, expected: Tensor, atol: float = 4e-3) -> None:
    """layer_input: each element within the tolerance of bfloat16 plus `atol`, and as a whole within 5e-3.

    Weights of streams may be off by 2.5e-4, in their tail by twice that, as in `assert_close_mix`; times Σ|residual|,
    8 in its tail, that is 4e-3, however small the sum. As a whole, layer_input has the error of such weights, and of
    the elements that therefore round to the next bfloat16.
    """
    assert_same_metadata(actual, expected, "layer_input")
    torch.testing.assert_close(actual, expected, rtol=1.6e-2, atol=atol, msg=lambda message: f"layer_input: {message}")
    assert_relative_error(actual, expected, 5e-3, "layer_input")


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """(post, comb, layer_input) and next_pre_mix, if there is one."""
    assert len(actual) == len(expected), f"expected {len(expected)} results, got {len(actual)}"
    names = ("post", "comb", "layer_input", "next_pre_mix")
    for name, x, y in zip(names, actual, expected):
        if name == "layer_input":
            assert_close_input(x, y)
        elif y is None:
            assert x is None, f"{name}: expected None, got a tensor"
        else:
            assert_close_mix(name, x, y)


_BF16, _FLOAT32 = torch.bfloat16, torch.float32


def shared_cases(make: Callable[..., Make]) -> tuple[Case, ...]:
    """Cases of the ops that begin with a projection of all streams."""
    both = {"layer_norm": _BF16, "shifted": True}
    no_comb = {"has_comb": False, "post_eps": 0.25}
    return (
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True, compile=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True, compile=True),
        Case("m4-h192-t17-no-weight", make(17, 4, 192, norm_weight=False), small=True),
        Case("m2-h576-t3", make(3, 2, 576), small=True),
        Case("m4-h128-t3-layer-norm-bf16", make(3, 4, 128, layer_norm=_BF16), small=True, modes=True),
        Case("m4-h576-t1-layer-norm-float32", make(1, 4, 576, layer_norm=_FLOAT32), small=True),
        Case("m4-h64-t17-shifted", make(17, 4, 64, shifted=True), small=True, modes=True),
        Case("m4-h128-t3-shifted-stream0", make(3, 4, 128, shifted=True, pre_mix=False), small=True, compile=True),
        Case("m4-h192-t3-shifted-layer-norm", make(3, 4, 192, **both), small=True, compile=True),
        *(Case(f"m4-h192-t3-splits{n}", make(3, 4, 192, n_splits=n), small=True) for n in (1, 5, 10_000)),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t2x3-shifted", make((2, 3), 4, 64, shifted=True), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        Case("m4-h64-t2x0-shifted-layer-norm", make((2, 0), 4, 64, **both), small=True),
        Case("m4-h64-t17-no-comb", make(17, 4, 64, **no_comb), small=True, modes=True, compile=True),
        Case("m2-h576-t3-no-comb-layer-norm", make(3, 2, 576, layer_norm=_FLOAT32, **no_comb), small=True),
        Case("m8-h64-t2x3-no-comb-shifted", make((2, 3), 8, 64, shifted=True, **no_comb), small=True),
        Case("m4-h192-t3-no-comb-splits5", make(3, 4, 192, n_splits=5, has_comb=False), small=True),
        Case("m4-h64-t0-no-comb", make(0, 4, 64, **no_comb), small=True),
        Case("m4-h128-t3-post-eps", make(3, 4, 128, post_eps=0.25), small=True),
        *(Case(f"m4-h7168-t{t}-no-comb", make(t, **no_comb)) for t in (1, 64, 129, 4096)),
        Case("m8-h8192-t1000-no-comb-shifted-layer-norm", make(1000, 8, 8192, **both, **no_comb)),
        *(bench_case(f"m4-h7168-t{t}-no-comb", make(t, eps=MODEL_EPS, **no_comb)) for t in (64, 8192)),
        *size_cases(make),
        *(
            Case(f"m{m}-h{hidden}-t{t}-shifted-layer-norm", make(t, m, hidden, layer_norm=weight_dtype, shifted=True))
            for m, hidden, weight_dtype in ((2, 2560, _FLOAT32), (4, 7168, _BF16), (8, 8192, _BF16))
            for t in (17, 1000)
        ),
        *(Case(f"m4-h7168-t{t}-layer-norm", make(t, layer_norm=_BF16)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t{t}-shifted", make(t, shifted=True)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 448)),
        Case("m4-h7168-t64-scale1", make(64, scale=1.0)),
        *(
            bench_case(f"m4-h7168-t{t}-{name}", make(t, eps=MODEL_EPS, **options))
            for t in (64, 8192)
            for name, options in (("layer-norm", {"layer_norm": _BF16}), ("shifted", {"shifted": True}))
        ),
    )


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_big_fuse,
    compare=compare,
    cases=(
        *shared_cases(make),
        Case(
            "m2-h64-t3-shifted-stream0-layer-norm",
            make(3, 2, 64, layer_norm=_FLOAT32, shifted=True, pre_mix=False),
            small=True,
        ),
        Case("m8-h64-t3-shifted-layer-norm", make(3, 8, 64, layer_norm=_FLOAT32, shifted=True), small=True),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        Case("m4-h7168-t129-shifted-stream0", make(129, shifted=True, pre_mix=False)),
        Case("m4-h7168-t1000-no-weight", make(1000, norm_weight=False)),
        Case("m4-h7168-t8192-scale1", make(8192, scale=1.0)),
        *bench_cases(make, *BENCH_SIZES, mhc_mults=(2, 8), model_tokens=(64, 8192), eps=MODEL_EPS),
        bench_case("m4-h7168-t8192-scale1", make(8192, scale=1.0, eps=MODEL_EPS)),
    ),
)


test_tiers = tiers.tests(SPEC)


def composed(inputs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """(post, comb, layer_input, pre) by the separate ops, layer_input by pre_mix in the shifted form. No layer norm."""
    residual = inputs["residual"]
    mixes = tk_mhc.mhc_pre_norm_fn(
        residual, inputs["fn"], inputs["norm_weight"], inputs["rms_eps"], n_splits=inputs["n_splits"]
    )
    pre, post, comb = tk_mhc.mhc_pre_split_mixes(
        mixes,
        inputs["mhc_scale"],
        inputs["mhc_base"],
        residual.shape[-2],
        inputs["mhc_post_mult_value"],
        inputs["mhc_pre_eps"],
        mhc_post_eps=inputs.get("mhc_post_eps", 0.0),
    )
    if comb is not None:
        comb = tk_mhc.sinkhorn_normalize(comb, inputs["sinkhorn_repeat"], inputs["mhc_sinkhorn_eps"])
    if not inputs.get("shifted"):
        return post, comb, tk_mhc.mhc_pre_apply_mix(residual, pre), pre
    if inputs["pre_mix"] is None:
        return post, comb, residual[..., 0, :].clone(memory_format=torch.contiguous_format), pre
    return post, comb, tk_mhc.mhc_pre_apply_mix(residual, inputs["pre_mix"]), pre


def hand_arguments(device: str = "cpu", **changes: Any) -> dict[str, Any]:
    """One token of two streams, all 3 and all 5. fn is 0, so the mixes are 0 and z is mhc_base."""
    good = {
        "residual": torch.tensor([3.0, 5.0], dtype=torch.bfloat16, device=device)[:, None].repeat(1, 64),
        "fn": torch.zeros(8, 128, device=device),
        "mhc_scale": torch.ones(3, device=device),
        # sigmoid(log(3)) = 3/4; softmax of (0, log(3)) = (1/4, 3/4).
        "mhc_base": torch.tensor([0.0, log(3), log(3), 0.0, 0.0, log(3), 0.0, log(3)], device=device),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 0.25,
        "mhc_sinkhorn_eps": 0.0,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 1,
    }
    return {**good, **changes}


def test_by_hand(device: str) -> None:
    post, comb, layer_input = tk_mhc.mhc_pre_big_fuse(**hand_arguments(device))
    torch.testing.assert_close(post.cpu(), torch.tensor([[1.5], [1.0]]))
    # Rows (1/4, 3/4) twice; columns divided by their sums 1/2 and 3/2.
    torch.testing.assert_close(comb.cpu(), torch.full((2, 2), 0.5))
    # pre = (1/2, 3/4) + 1/4: 3/4 · 3 + 5 = 7.25.
    assert layer_input.tolist() == [7.25] * 64

    # Mixes of 2 and -2 by one channel of stream 0: rstd = rsqrt(mean) = 1/√17, and x · rstd · √17 · 2/3 = 2.
    fn = torch.zeros(8, 128, device=device)
    fn[0, 7], fn[3, 7] = 2 / 3 * 17**0.5, -2 / 3 * 17**0.5
    scale = torch.tensor([0.5 * log(3), log(3), 1.0], device=device)
    post, _, layer_input = tk_mhc.mhc_pre_big_fuse(**hand_arguments(device, fn=fn, mhc_scale=scale, rms_eps=0.0))
    # z of pre becomes (log(3), log(3)), z of post (log(3), -2·log(3)): 2 · 3/4 and 2 · 1/10.
    torch.testing.assert_close(post.cpu(), torch.tensor([[1.5], [0.2]]), rtol=1e-3, atol=0)
    torch.testing.assert_close(layer_input.cpu().float(), torch.full((64,), 8.0), rtol=1e-2, atol=0)


def test_without_comb_by_hand(device: str) -> None:
    with_comb = hand_arguments(device)
    first = {"fn": with_comb["fn"][:4], "mhc_scale": with_comb["mhc_scale"][:2], "mhc_base": with_comb["mhc_base"][:4]}
    post, comb, layer_input = tk_mhc.mhc_pre_big_fuse(**with_comb | first, mhc_post_eps=0.125)
    torch.testing.assert_close(post.cpu(), torch.tensor([[1.625], [1.125]]))
    assert comb is None
    assert layer_input.tolist() == [7.25] * 64
    post, comb, _, next_pre_mix = tk_mhc.mhc_pre_big_fuse(**with_comb | first, shifted=True)
    torch.testing.assert_close(
        (post.cpu(), next_pre_mix.cpu()), (torch.tensor([[1.5], [1.0]]), torch.tensor([[0.75], [1.0]]))
    )
    assert comb is None


def test_shifted_by_hand(device: str) -> None:
    pre_mix = torch.tensor([[2.0], [-1.0]], device=device)
    for mix, expected in ((pre_mix, 1.0), (None, 3.0)):
        results = tk_mhc.mhc_pre_big_fuse(**hand_arguments(device, shifted=True, pre_mix=mix))
        assert len(results) == 4
        torch.testing.assert_close(results[0].cpu(), torch.tensor([[1.5], [1.0]]))
        assert results[2].tolist() == [expected] * 64
        torch.testing.assert_close(results[3].cpu(), torch.tensor([[0.75], [1.0]]))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_by_hand(weight_dtype: torch.dtype, device: str) -> None:
    weight = torch.linspace(-2, 2, 64, device=device).to(weight_dtype)
    # All of layer_input is 7.25 or, shifted, 3: rsqrt(mean(y²)) is its inverse, and with an eps of 16, rsqrt(9 + 16).
    *_, layer_input = tk_mhc.mhc_pre_big_fuse(**hand_arguments(device, layer_norm_weight=weight, layer_norm_eps=0.0))
    torch.testing.assert_close(layer_input, weight.bfloat16(), rtol=2**-7, atol=0)
    shifted = hand_arguments(device, layer_norm_weight=weight, layer_norm_eps=16.0, shifted=True)
    layer_input = tk_mhc.mhc_pre_big_fuse(**shifted)[2]
    torch.testing.assert_close(layer_input, (0.6 * weight.float()).bfloat16(), rtol=2**-7, atol=0)


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in inputs.items()}


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_reference_against_formulas(mhc_mult: int) -> None:
    """By PyTorch's own functions, in float64."""
    inputs = in_float64(make(5, mhc_mult, 64, layer_norm=torch.float32)("cpu"))
    post, comb, layer_input = reference.mhc_pre_big_fuse(**inputs)
    residual, eps, layer_norm_weight = inputs["residual"], inputs["rms_eps"], inputs["layer_norm_weight"]
    normed = F.rms_norm(residual.flatten(1), (mhc_mult * 64,), inputs["norm_weight"], eps)
    sizes = torch.tensor([mhc_mult, mhc_mult, mhc_mult**2])
    z = F.linear(normed, inputs["fn"]) * inputs["mhc_scale"].repeat_interleave(sizes) + inputs["mhc_base"]
    z_pre, z_post, z_comb = z.split(sizes.tolist(), dim=1)
    torch.testing.assert_close(post, 2 * z_post.sigmoid().unsqueeze(-1))
    collapsed = torch.einsum("ts,tsi->ti", z_pre.sigmoid() + inputs["mhc_pre_eps"], residual)
    expected = F.rms_norm(collapsed, (64,), layer_norm_weight, inputs["layer_norm_eps"])
    torch.testing.assert_close(layer_input, expected)
    rows = z_comb.unflatten(1, (mhc_mult, mhc_mult)).softmax(-1) + inputs["mhc_sinkhorn_eps"]
    for _ in range(9):
        rows = rows / (rows.sum(-2, keepdim=True) + inputs["mhc_sinkhorn_eps"])
        rows = rows / (rows.sum(-1, keepdim=True) + inputs["mhc_sinkhorn_eps"])
    torch.testing.assert_close(comb, rows / (rows.sum(-2, keepdim=True) + inputs["mhc_sinkhorn_eps"]))


def gradients(ops: ModuleType, inputs: dict[str, Any], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """What the separate backward ops make of the gradients of (post, comb, layer_input, next_pre_mix).

    The gradient of the residual collects in one tensor, as it does between two sublayers.
    """
    d_post, d_comb, d_layer_input, d_next_pre_mix = grads
    residual, fn, norm_weight = inputs["residual"], inputs["fn"], inputs["norm_weight"]
    mhc_mult = residual.shape[-2]
    mixes, rstd = ops.mhc_pre_norm_fn(residual, fn, norm_weight, inputs["rms_eps"], return_rstd=True)
    numbers = (inputs["mhc_scale"], inputs["mhc_base"], mhc_mult, inputs["mhc_post_mult_value"])
    _, _, comb = ops.mhc_pre_split_mixes(mixes, *numbers, inputs["mhc_pre_eps"])
    d_residual, d_pre_mix = ops.mhc_pre_apply_mix_bwd(d_layer_input, residual, inputs["pre_mix"])
    if comb is not None:
        d_comb = ops.sinkhorn_normalize_bwd(d_comb, comb, inputs["sinkhorn_repeat"], inputs["mhc_sinkhorn_eps"])
    d_mixes, d_scale, d_base = ops.mhc_pre_split_mixes_bwd(d_next_pre_mix, d_post, d_comb, mixes, *numbers)
    added, d_fn, d_norm_weight = ops.mhc_pre_norm_fn_bwd(
        d_mixes, residual, fn, norm_weight, mixes, rstd, d_residual=d_residual
    )
    assert added is d_residual
    return {
        "residual": d_residual,
        "fn": d_fn,
        "mhc_scale": d_scale,
        "mhc_base": d_base,
        "norm_weight": d_norm_weight,
        "pre_mix": d_pre_mix,
    }


def by_autograd(inputs: dict[str, Any], grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The same by autograd through the reference, in float64."""
    inputs = in_float64(inputs)
    names = ("residual", "fn", "mhc_scale", "mhc_base", "norm_weight", "pre_mix")
    leaves = [inputs[name].requires_grad_() for name in names]
    results, grads = ([x for x in each if x is not None] for each in (reference.mhc_pre_big_fuse(**inputs), grads))
    return dict(zip(names, torch.autograd.grad(results, leaves, [grad.double() for grad in grads])))


def draw_gradients(results: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """A normal gradient for each result; None where there is none."""
    return tuple(None if x is None else torch.randn_like(x) for x in results)


@pytest.mark.parametrize("has_comb", [True, False])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_backward_of_the_shifted_form_by_the_references_in_float64(mhc_mult: int, has_comb: bool) -> None:
    inputs = in_float64(make(5, mhc_mult, 64, shifted=True, has_comb=has_comb, post_eps=0.25)("cpu"))
    grads = draw_gradients(reference.mhc_pre_big_fuse(**inputs))
    actual = gradients(reference, inputs, grads)
    for name, expected in by_autograd(inputs, grads).items():
        assert_relative_error(actual[name], expected, 1e-9, name)


@pytest.mark.parametrize("has_comb", [True, False])
@pytest.mark.parametrize(
    ("device", "mhc_mult", "hidden", "num_tokens"),
    [
        ("cpu", 2, 128, 9),
        ("cpu", 4, 64, 5),
        *(
            pytest.param("cuda", mhc_mult, hidden, num_tokens, marks=pytest.mark.gpu(gib=3))
            for mhc_mult, hidden in ((2, 576), (4, 7168), (8, 1280))
            for num_tokens in (1, 64, 1000)
        ),
    ],
)
def test_backward_of_the_shifted_form(device: str, mhc_mult: int, hidden: int, num_tokens: int, has_comb: bool) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, shifted=True, has_comb=has_comb)(device)
    grads = draw_gradients(tk_mhc.mhc_pre_big_fuse(**inputs))
    actual = gradients(tk_mhc, inputs, grads)
    expected = by_autograd(inputs, grads)
    # The residual's is rounded to bfloat16 twice, as it is a sum of two.
    bounds = {"residual": 5e-3, "pre_mix": 1e-4}
    for name, want in expected.items():
        assert_relative_error(actual[name], want, bounds.get(name, 1e-3), name)


PRE_MIX = torch.ones(3, 4, 1)

test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64)("cpu"),
    [
        ({"residual": torch.ones(64).bfloat16()}, ValueError, "residual: .*shape"),
        ({"residual": torch.ones(3, 3, 64).bfloat16()}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"residual": torch.ones(3, 4, 96).bfloat16()}, ValueError, "hidden.*residual.*multiple of 64"),
        ({"rms_eps": -1.0}, ValueError, "rms_eps.*at least 0"),
        ({"sinkhorn_repeat": 0}, ValueError, "sinkhorn_repeat.*1 to 1000"),
        ({"sinkhorn_repeat": 1001}, ValueError, "sinkhorn_repeat.*1 to 1000"),
        ({"n_splits": 0}, ValueError, "n_splits.*at least 1"),
        ({"layer_norm_weight": torch.ones(256)}, ValueError, "layer_norm_weight: .*shape"),
        ({"shifted": True, "pre_mix": PRE_MIX[:2]}, ValueError, "pre_mix: .*shape"),
        ({"shifted": True, "pre_mix": PRE_MIX.squeeze(-1)}, ValueError, "pre_mix: .*shape"),
        ({"shifted": True, "pre_mix": torch.ones(3, 4, 2)[..., :1]}, ValueError, "pre_mix: .*contiguous"),
        ({"fn": torch.ones(12, 256)}, ValueError, "rows of fn: expected 24, or 8 without comb, got 12"),
        ({"fn": torch.ones(8, 256)}, ValueError, "mhc_scale.*shape"),
        ({"fn": torch.ones(8, 256), "mhc_scale": torch.ones(2)}, ValueError, "mhc_base.*shape"),
        ({"mhc_post_eps": -1.0}, ValueError, "mhc_post_eps.*at least 0"),
        # It would have no effect.
        ({"shifted": False, "pre_mix": PRE_MIX}, ValueError, "pre_mix: .*shifted"),
    ],
)


@pytest.mark.parametrize(
    ("device", "mhc_mult", "hidden", "num_tokens"),
    [
        ("cpu", 4, 64, 5),
        *(
            pytest.param("cuda", mhc_mult, hidden, num_tokens, marks=pytest.mark.gpu)
            for mhc_mult, hidden in ((2, 64), (2, 576), (4, 192), (4, 1280), (4, 7168), (8, 128), (8, 8192))
            for num_tokens in (1, 64, 300)
        ),
        pytest.param("cuda", 4, 7168, 8192, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_weight": False},
        {"shifted": True},
        {"shifted": True, "pre_mix": False},
        {"has_comb": False},
        {"has_comb": False, "post_eps": 0.25, "shifted": True},
        {"post_eps": 0.25},
    ],
)
def test_equals_the_separate_ops(
    device: str, mhc_mult: int, hidden: int, num_tokens: int, options: dict[str, Any]
) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, **options)(device)
    for n_splits in (None, 1, 2, 7, 10_000):
        inputs["n_splits"] = n_splits
        results = tk_mhc.mhc_pre_big_fuse(**inputs)
        assert_equal(results, composed(inputs)[: len(results)], name=f"n_splits {n_splits}")


@pytest.mark.gpu
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"), [(2, 576, 17), (4, 64, 300), (4, 7168, 1), (4, 7168, 300), (8, 8192, 64)]
)
def test_gpu_layer_norm(mhc_mult: int, hidden: int, num_tokens: int, weight_dtype: torch.dtype, shifted: bool) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, layer_norm=weight_dtype, shifted=shifted)("cuda")
    post, comb, layer_input, *next_pre_mix = tk_mhc.mhc_pre_big_fuse(**inputs)
    expected_post, expected_comb, plain, pre = composed(inputs)
    assert_equal((post, comb, *next_pre_mix), (expected_post, expected_comb, *([pre] if shifted else [])))
    # y is layer_input rounded to bfloat16. In float64 from there: rounding is all that may differ, by one step.
    exact = F.rms_norm(plain.double(), (hidden,), inputs["layer_norm_weight"].double(), inputs["layer_norm_eps"])
    rounded = exact.bfloat16()
    steps = (layer_input.view(torch.int16).int() - rounded.view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1
    # float32 errors of 1e-7 to 1e-6 cross the middle between two bfloat16 for one element in thousands.
    assert float(steps.ne(0).double().mean()) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("num_tokens", [1, 64, 1000])
def test_gpu_mixes_are_accurate_at_any_scale(num_tokens: int, scale: float) -> None:
    inputs = make(num_tokens, scale=scale)("cuda")
    post, *_ = tk_mhc.mhc_pre_big_fuse(**inputs)
    weights = {name: inputs[name].double() for name in ("fn", "mhc_scale", "mhc_base", "norm_weight")}
    mixes = reference.mhc_pre_norm_fn(inputs["residual"], weights["fn"], weights["norm_weight"], inputs["rms_eps"])
    z = mixes[:, 4:8] * weights["mhc_scale"][1]
    # z from post, the other way; float32 rounding is about 1e-6 of it.
    actual = torch.logit(post.double().squeeze(-1) / 2) - weights["mhc_base"][4:8]
    assert_relative_error(actual, z, 5e-4)
