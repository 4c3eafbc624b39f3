"""mhc_pre_big_fuse."""

from math import log
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tk_core
import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_core.testing.trees import map_tensors, unaligned
from tk_mhc import reference

from ..batches import assert_independent_of_batch
from ..compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error
from ..projection.test_mhc_pre_norm_fn import MODEL_SCALE, draw_fn, draw_norm_weight

MODEL_EPS = 1e-6


def draw_parameters(mhc_mult: int, num_channels: int, scale: float, eps: float, device: str) -> dict[str, Any]:
    """fn, scale, base and the numbers. The sums of num_channels products times mhc_scale are about 1 for any `scale`.

    Cases for tests have an eps of 1e-2, large enough to detect a result that leaves one out.
    """
    num_mixes = mhc_mult * (mhc_mult + 2)
    return {
        "fn": draw_fn(num_mixes, num_channels, scale, device),
        "mhc_scale": (0.5 + torch.rand((3,), device=device)) / (scale * num_channels**0.5),
        "mhc_base": 0.5 * torch.randn((num_mixes,), device=device),
        "rms_eps": eps,
        "mhc_pre_eps": eps,
        "mhc_sinkhorn_eps": eps,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 10,
    }


def draw_options(
    leading: tuple[int, ...],
    mhc_mult: int,
    hidden: int,
    layer_norm: torch.dtype | None,
    shifted: bool,
    pre_mix: bool,
    eps: float,
    device: str,
) -> dict[str, Any]:
    """The keyword arguments for the layer norm and for the shifted form, if wanted."""
    options: dict[str, Any] = {}
    if layer_norm is not None:
        weight = 0.5 + torch.rand((hidden,), device=device)
        options |= {"layer_norm_weight": weight.to(layer_norm), "layer_norm_eps": eps}
    if shifted:
        options |= {
            "shifted": True,
            "pre_mix": torch.rand((*leading, mhc_mult, 1), device=device) if pre_mix else None,
        }
    return options


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
) -> Make:
    """Normal residual and fn; `layer_norm` is the dtype of the layer norm's weight."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        return {
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            **draw_parameters(mhc_mult, num_channels, scale, eps, device),
            "n_splits": n_splits,
            "norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
            **draw_options(leading, mhc_mult, hidden, layer_norm, shifted, pre_mix, eps, device),
        }

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
        else:
            assert_close_mix(name, x, y)


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=tk_mhc.mhc_pre_big_fuse,
    compare=compare,
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True, compile=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True, compile=True),
        Case("m4-h192-t17-no-weight", make(17, 4, 192, norm_weight=False), small=True),
        Case("m2-h576-t3", make(3, 2, 576), small=True),
        Case("m4-h128-t3-layer-norm-bf16", make(3, 4, 128, layer_norm=_BF16), small=True, modes=True),
        Case("m4-h576-t1-layer-norm-float32", make(1, 4, 576, layer_norm=_FLOAT32), small=True),
        Case("m4-h64-t17-shifted", make(17, 4, 64, shifted=True), small=True, modes=True),
        Case("m4-h128-t3-shifted-stream0", make(3, 4, 128, shifted=True, pre_mix=False), small=True, compile=True),
        Case(
            "m4-h192-t3-shifted-layer-norm",
            make(3, 4, 192, layer_norm=_BF16, shifted=True),
            small=True,
            compile=True,
        ),
        Case(
            "m2-h64-t3-shifted-stream0-layer-norm",
            make(3, 2, 64, layer_norm=_FLOAT32, shifted=True, pre_mix=False),
            small=True,
        ),
        Case("m8-h64-t3-shifted-layer-norm", make(3, 8, 64, layer_norm=_FLOAT32, shifted=True), small=True),
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 5, 10_000)
        ),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t2x3-shifted", make((2, 3), 4, 64, shifted=True), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        Case("m4-h64-t2x0-shifted-layer-norm", make((2, 0), 4, 64, layer_norm=_BF16, shifted=True), small=True),
        *(
            Case(f"m4-h{hidden}-t{num_tokens}", make(num_tokens, 4, hidden))
            for hidden in HIDDEN_SIZES
            for num_tokens in ((65, 4096) if hidden != 7168 else TOKEN_COUNTS)
        ),
        *(
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}", make(num_tokens, mhc_mult, hidden))
            for mhc_mult in (2, 8)
            for hidden, num_tokens in ((64, 4096), (576, 65), (7168, 1), (8192, 1000))
        ),
        *(
            Case(f"m{mhc_mult}-h{hidden}-t{num_tokens}-shifted-layer-norm", make(num_tokens, mhc_mult, hidden, **both))
            for mhc_mult, hidden, both in (
                (2, 2560, {"layer_norm": _FLOAT32, "shifted": True}),
                (4, 7168, {"layer_norm": _BF16, "shifted": True}),
                (8, 8192, {"layer_norm": _BF16, "shifted": True}),
            )
            for num_tokens in (17, 1000)
        ),
        *(Case(f"m4-h7168-t{t}-layer-norm", make(t, layer_norm=_BF16)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t{t}-shifted", make(t, shifted=True)) for t in (1, 64, 8192)),
        Case("m4-h7168-t129-shifted-stream0", make(129, shifted=True, pre_mix=False)),
        Case("m4-h7168-t1000-no-weight", make(1000, norm_weight=False)),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 448)),
        *(Case(f"m4-h7168-t{num_tokens}-scale1", make(num_tokens, scale=1.0)) for num_tokens in (64, 8192)),
        *(
            Case(
                f"m4-h7168-t{num_tokens}-bench",
                make(num_tokens, eps=MODEL_EPS),
                bench=True,
                model_shape=True,
                gpu=False,
                compile=True,
            )
            for num_tokens in (64, 8192)
        ),
        *(
            Case(f"m4-h7168-t{num_tokens}-bench", make(num_tokens, eps=MODEL_EPS), bench=True, gpu=False)
            for num_tokens in (1, 128, 1024, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden, eps=MODEL_EPS), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 3072, 4096, 6144)
        ),
        Case("m4-h7168-t8192-scale1-bench", make(8192, scale=1.0, eps=MODEL_EPS), bench=True, gpu=False),
        *(
            Case(f"m4-h7168-t{t}-layer-norm-bench", make(t, eps=MODEL_EPS, layer_norm=_BF16), bench=True, gpu=False)
            for t in (64, 8192)
        ),
        *(
            Case(f"m4-h7168-t{t}-shifted-bench", make(t, eps=MODEL_EPS, shifted=True), bench=True, gpu=False)
            for t in (64, 8192)
        ),
        *(
            Case(f"m{mhc_mult}-h7168-t8192-bench", make(8192, mhc_mult, eps=MODEL_EPS), bench=True, gpu=False)
            for mhc_mult in (2, 8)
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def composed(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
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
    )
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


@pytest.mark.parametrize("device", CPU_AND_GPU)
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


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_shifted_by_hand(device: str) -> None:
    pre_mix = torch.tensor([[2.0], [-1.0]], device=device)
    for mix, expected in ((pre_mix, 1.0), (None, 3.0)):
        results = tk_mhc.mhc_pre_big_fuse(**hand_arguments(device, shifted=True, pre_mix=mix))
        assert len(results) == 4
        torch.testing.assert_close(results[0].cpu(), torch.tensor([[1.5], [1.0]]))
        assert results[2].tolist() == [expected] * 64
        torch.testing.assert_close(results[3].cpu(), torch.tensor([[0.75], [1.0]]))


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_by_hand(weight_dtype: torch.dtype, device: str) -> None:
    weight = torch.linspace(-2, 2, 64, device=device).to(weight_dtype)
    # All of layer_input is 7.25 or, shifted, 3: rsqrt(mean(y²)) is its inverse, and with an eps of 16, rsqrt(9 + 16).
    *_, layer_input = tk_mhc.mhc_pre_big_fuse(**hand_arguments(device, layer_norm_weight=weight, layer_norm_eps=0.0))
    torch.testing.assert_close(layer_input, weight.bfloat16(), rtol=2**-7, atol=0)
    shifted = hand_arguments(device, layer_norm_weight=weight, layer_norm_eps=16.0, shifted=True)
    layer_input = tk_mhc.mhc_pre_big_fuse(**shifted)[2]
    torch.testing.assert_close(layer_input, (0.6 * weight.float()).bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_arguments_have_their_documented_defaults(device: str) -> None:
    inputs = make(3, 4, 64, norm_weight=False)(device)
    # So small that its square is no larger than the layer norm's eps.
    inputs["residual"] = inputs["residual"] * 1e-3
    positional = [value for name, value in inputs.items() if name not in ("n_splits", "norm_weight")]
    assert_equal(
        tk_mhc.mhc_pre_big_fuse(*positional),
        tk_mhc.mhc_pre_big_fuse(**inputs, layer_norm_weight=None, layer_norm_eps=1e-6, shifted=False, pre_mix=None),
    )
    weight = torch.rand(64, device=device)
    assert_equal(
        tk_mhc.mhc_pre_big_fuse(*positional, layer_norm_weight=weight),
        tk_mhc.mhc_pre_big_fuse(*positional, layer_norm_weight=weight, layer_norm_eps=1e-6),
    )


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


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_reference_passes_gradcheck(layer_norm: bool, shifted: bool) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def function(
        residual: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        weight: Tensor,
        layer_norm_weight: Tensor | None,
        pre_mix: Tensor | None,
    ) -> tuple[Tensor, ...]:
        return reference.mhc_pre_big_fuse(
            *(residual, fn, scale, base, 0.1, 0.1, 0.1, 2.0, 2, None, weight),
            layer_norm_weight=layer_norm_weight,
            layer_norm_eps=0.1,
            shifted=shifted,
            pre_mix=pre_mix,
        )

    optional = draw(3) if layer_norm else None, draw(2, 2, 1) if shifted else None
    assert torch.autograd.gradcheck(function, (draw(2, 2, 3), draw(8, 6), draw(3), draw(8), draw(6), *optional))


@pytest.mark.parametrize("options", [{}, {"shifted": True, "layer_norm": torch.bfloat16}])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 0)])
def test_leading_dimensions(leading: tuple[int, ...], options: dict[str, Any]) -> None:
    inputs = make(leading, 2, 64, **options)("cpu")
    results = tk_mhc.mhc_pre_big_fuse(**inputs)
    trailing = ((2, 1), (2, 2), (64,), (2, 1))
    assert [x.shape for x in results] == [(*leading, *shape) for shape, _ in zip(trailing, results)]
    flat = {"residual": inputs["residual"].view(-1, 2, 64)}
    if options:
        flat["pre_mix"] = inputs["pre_mix"].view(-1, 2, 1)
    for x, y, shape in zip(results, tk_mhc.mhc_pre_big_fuse(**{**inputs, **flat}), trailing):
        assert_equal(x.view(-1, *shape), y)


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
    results = reference.mhc_pre_big_fuse(**inputs)
    return dict(zip(names, torch.autograd.grad(results, leaves, [grad.double() for grad in grads])))


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_backward_of_the_shifted_form_by_the_references_in_float64(mhc_mult: int) -> None:
    inputs = in_float64(make(5, mhc_mult, 64, shifted=True)("cpu"))
    grads = tuple(torch.randn_like(x) for x in reference.mhc_pre_big_fuse(**inputs))
    actual = gradients(reference, inputs, grads)
    for name, expected in by_autograd(inputs, grads).items():
        assert_relative_error(actual[name], expected, 1e-9, name)


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
def test_backward_of_the_shifted_form(device: str, mhc_mult: int, hidden: int, num_tokens: int) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, shifted=True)(device)
    grads = tuple(torch.randn_like(x) for x in tk_mhc.mhc_pre_big_fuse(**inputs))
    actual = gradients(tk_mhc, inputs, grads)
    expected = by_autograd(inputs, grads)
    # The residual's is rounded to bfloat16 twice, as it is a sum of two.
    bounds = {"residual": 5e-3, "pre_mix": 1e-4}
    for name, want in expected.items():
        assert_relative_error(actual[name], want, bounds.get(name, 1e-3), name)


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments, some of them exchanged."""
    good = {
        "residual": torch.ones(3, 4, 64, dtype=torch.bfloat16),
        "fn": torch.ones(24, 256),
        "mhc_scale": torch.ones(3),
        "mhc_base": torch.ones(24),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-6,
        "mhc_sinkhorn_eps": 1e-6,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 10,
        "norm_weight": torch.ones(256),
    }
    return {**good, **changes}


PRE_MIX = torch.ones(3, 4, 1)


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (ValueError, "residual", {"residual": torch.ones(64, dtype=torch.bfloat16)}),
        (ValueError, "residual", {"residual": torch.ones(3, 3, 64, dtype=torch.bfloat16)}),
        (ValueError, "residual", {"residual": torch.ones(3, 4, 96, dtype=torch.bfloat16)}),
        (ValueError, "rms_eps", {"rms_eps": -1.0}),
        (ValueError, "sinkhorn_repeat", {"sinkhorn_repeat": 0}),
        (ValueError, "sinkhorn_repeat", {"sinkhorn_repeat": 1001}),
        (ValueError, "n_splits", {"n_splits": 0}),
        (ValueError, "layer_norm_weight", {"layer_norm_weight": torch.ones(256)}),
        (ValueError, "pre_mix", {"shifted": True, "pre_mix": PRE_MIX[:2]}),
        (ValueError, "pre_mix", {"shifted": True, "pre_mix": PRE_MIX.squeeze(-1)}),
        (ValueError, "pre_mix", {"shifted": True, "pre_mix": torch.ones(3, 4, 2)[..., :1]}),
        # It would have no effect.
        (ValueError, "pre_mix", {"shifted": False, "pre_mix": PRE_MIX}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=rf"\b{name}\b"):
        tk_mhc.mhc_pre_big_fuse(**arguments(**changes))


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("shifted", [False, True])
def test_unaligned_inputs_change_nothing(device: str, shifted: bool) -> None:
    inputs = make(17, 4, 192, norm_weight=True, layer_norm=torch.bfloat16, shifted=shifted)(device)
    moved = map_tensors(unaligned, inputs)
    assert moved["residual"].data_ptr() % 16
    assert_equal(tk_mhc.mhc_pre_big_fuse(**moved), tk_mhc.mhc_pre_big_fuse(**inputs))


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
@pytest.mark.parametrize("norm_weight", [False, True])
def test_equals_the_separate_ops(device: str, mhc_mult: int, hidden: int, num_tokens: int, norm_weight: bool) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, norm_weight=norm_weight)(device)
    for n_splits in (None, 1, 2, 7, 10_000):
        inputs["n_splits"] = n_splits
        assert_equal(tk_mhc.mhc_pre_big_fuse(**inputs), composed(inputs)[:3], name=f"n_splits {n_splits}")


@pytest.mark.parametrize(
    ("device", "mhc_mult", "hidden", "num_tokens"),
    [
        ("cpu", 4, 64, 5),
        *(
            pytest.param("cuda", mhc_mult, hidden, num_tokens, marks=pytest.mark.gpu)
            for mhc_mult, hidden in ((2, 576), (4, 64), (4, 7168), (8, 8192))
            for num_tokens in (1, 17, 64, 300, 8192)
            if hidden < 8192 or num_tokens < 8192
        ),
    ],
)
@pytest.mark.parametrize("pre_mix", [False, True])
def test_shifted_equals_the_separate_ops(
    device: str, mhc_mult: int, hidden: int, num_tokens: int, pre_mix: bool
) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, shifted=True, pre_mix=pre_mix)(device)
    for n_splits in (None, 1, 7):
        inputs["n_splits"] = n_splits
        assert_equal(tk_mhc.mhc_pre_big_fuse(**inputs), composed(inputs), name=f"n_splits {n_splits}")


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


@pytest.mark.gpu(gib=6)
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "options"),
    [
        (4, 7168, {}),
        (4, 7168, {"norm_weight": False}),
        (4, 7168, {"n_splits": 7}),
        (4, 7168, {"layer_norm": torch.bfloat16}),
        (4, 7168, {"shifted": True, "layer_norm": torch.float32}),
        (4, 7168, {"shifted": True, "pre_mix": False}),
        (2, 576, {}),
        (2, 64, {"n_splits": 10_000, "layer_norm": torch.bfloat16}),
        (8, 1280, {}),
        (8, 8192, {"n_splits": 16, "shifted": True}),
    ],
)
def test_gpu_bits_do_not_depend_on_the_batch(mhc_mult: int, hidden: int, options: dict[str, Any]) -> None:
    inputs = make(8192, mhc_mult, hidden, **options)("cuda")
    token_dims = {"residual": 0, "pre_mix": 0} if options.get("shifted") else {"residual": 0}
    assert_independent_of_batch(tk_mhc.mhc_pre_big_fuse, inputs, token_dims)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 300, 8192])
def test_gpu_bits_do_not_depend_on_multiprocessors(num_tokens: int) -> None:
    inputs = make(num_tokens, layer_norm=torch.bfloat16)("cuda")
    expected = tk_mhc.mhc_pre_big_fuse(**inputs)
    for num_sms in (1, 7, 100):
        with tk_core.num_sms(num_sms):
            assert_equal(tk_mhc.mhc_pre_big_fuse(**inputs), expected)


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


@pytest.mark.gpu(gib=6)
@pytest.mark.parametrize("options", [{}, {"shifted": True, "layer_norm": torch.bfloat16}])
def test_gpu_more_than_two_to_the_31_elements(options: dict[str, Any]) -> None:
    inputs = make(80_000, **options)("cuda")
    results = tk_mhc.mhc_pre_big_fuse(**inputs)
    last = {name: inputs[name][-100:].clone() for name in ("residual", "pre_mix") if name in inputs}
    assert_equal(tuple(x[-100:].clone() for x in results), tk_mhc.mhc_pre_big_fuse(**{**inputs, **last}))
