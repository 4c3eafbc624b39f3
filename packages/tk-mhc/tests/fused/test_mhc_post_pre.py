"""mhc_post_pre."""

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_core
import tk_mhc
from tk_core.arch import ARCHS
from tk_core.kernel import capture
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference

from ..batches import assert_independent_of_batch
from ..compare import HIDDEN_SIZES, TOKEN_COUNTS, assert_relative_error
from ..projection.test_mhc_pre_norm_fn import MODEL_SCALE, draw_norm_weight
from .test_mhc_pre_big_fuse import MODEL_EPS, assert_close_input, assert_close_mix, draw_options, draw_parameters


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
    """A sublayer's output and residual, normal; post from 0 to 2, rows of comb that add up to 1."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        num_channels = mhc_mult * hidden
        return {
            "x": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "residual": torch.randn((*leading, mhc_mult, hidden), dtype=torch.bfloat16, device=device),
            "post_layer_mix": 2 * torch.rand((*leading, mhc_mult, 1), device=device),
            "comb_res_mix": torch.randn((*leading, mhc_mult, mhc_mult), device=device).softmax(-1),
            **draw_parameters(mhc_mult, num_channels, scale, eps, device),
            "n_splits": n_splits,
            "norm_weight": draw_norm_weight(num_channels, device) if norm_weight else None,
            **draw_options(leading, mhc_mult, hidden, layer_norm, shifted, pre_mix, eps, device),
        }

    return build


def compare(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """new_residual as for mhc_post, the rest as for mhc_pre_big_fuse, whose input is new_residual.

    An element of new_residual that lies between two bfloat16 may round to either. Those up to 8 are then 2⁻⁵ apart,
    and so is layer_input, wherever streams cancel. Such elements are few: new_residual as a whole is within 1e-3.
    """
    assert len(actual) == len(expected), f"expected {len(expected)} results, got {len(actual)}"
    assert_same_metadata(actual[0], expected[0], "new_residual")
    torch.testing.assert_close(actual[0], expected[0], msg=lambda message: f"new_residual: {message}")
    assert_relative_error(actual[0], expected[0], 1e-3, "new_residual")
    for name, x, y in zip(("post", "comb", "layer_input", "next_pre_mix"), actual[1:], expected[1:]):
        if name == "layer_input":
            assert_close_input(x, y, atol=4e-2)
        else:
            assert_close_mix(name, x, y)


_BF16, _FLOAT32 = torch.bfloat16, torch.float32

SPEC = OpSpec(
    op=tk_mhc.mhc_post_pre,
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
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 5, 10_000)
        ),
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
            Case(
                f"m{mhc_mult}-h{hidden}-t{num_tokens}-shifted-layer-norm",
                make(num_tokens, mhc_mult, hidden, layer_norm=weight_dtype, shifted=True),
            )
            for mhc_mult, hidden, weight_dtype in ((2, 2560, _FLOAT32), (4, 7168, _BF16), (8, 8192, _BF16))
            for num_tokens in (17, 1000)
        ),
        *(Case(f"m4-h7168-t{t}-layer-norm", make(t, layer_norm=_BF16)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t{t}-shifted", make(t, shifted=True)) for t in (1, 64, 8192)),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 448)),
        Case("m4-h7168-t64-scale1", make(64, scale=1.0)),
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
            for num_tokens in (1, 8, 128, 1024, 4001, 8001)
        ),
        *(
            Case(f"m4-h{hidden}-t8192-bench", make(8192, 4, hidden, eps=MODEL_EPS), bench=True, gpu=False)
            for hidden in (576, 2048, 2560, 4096)
        ),
        *(
            Case(f"m4-h7168-t{t}-{name}-bench", make(t, eps=MODEL_EPS, **options), bench=True, gpu=False)
            for t in (64, 8192)
            for name, options in (("layer-norm", {"layer_norm": _BF16}), ("shifted", {"shifted": True}))
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POST_ARGUMENTS = ("x", "residual", "post_layer_mix", "comb_res_mix")


def composed(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """mhc_post, then mhc_pre_big_fuse."""
    new_residual = tk_mhc.mhc_post(*(inputs[name] for name in POST_ARGUMENTS))
    rest = {name: value for name, value in inputs.items() if name not in POST_ARGUMENTS}
    return new_residual, *tk_mhc.mhc_pre_big_fuse(new_residual, **rest)


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_by_hand(device: str) -> None:
    inputs = {
        "x": torch.ones(64, dtype=torch.bfloat16, device=device),
        "residual": torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device)[:, None].repeat(1, 64),
        "post_layer_mix": torch.tensor([[2.0], [-1.0]], device=device),
        # new[0] = 2 - 1 · 1 + 1 · 2 = 3, new[1] = -1 + 4 · 1 + 1 · 2 = 5: not symmetric.
        "comb_res_mix": torch.tensor([[-1.0, 4.0], [1.0, 1.0]], device=device),
        # Mixes are 0: z is the base.
        "fn": torch.zeros(8, 128, device=device),
        "mhc_scale": torch.ones(3, device=device),
        "mhc_base": torch.tensor([0.0, log(3), log(3), 0.0, 0.0, log(3), 0.0, log(3)], device=device),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 0.25,
        "mhc_sinkhorn_eps": 0.0,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 1,
    }
    new_residual, post, comb, layer_input = tk_mhc.mhc_post_pre(**inputs)
    assert new_residual.tolist() == [[3.0] * 64, [5.0] * 64]
    torch.testing.assert_close(post.cpu(), torch.tensor([[1.5], [1.0]]))
    torch.testing.assert_close(comb.cpu(), torch.full((2, 2), 0.5))
    assert layer_input.tolist() == [7.25] * 64

    # One channel of the new stream 1 makes mixes of 5/√17 · 0.4 · √17 = 2: z of post 0 is 3 · log(3), sigmoid 27/28.
    fn = torch.zeros(8, 128, device=device)
    fn[2, 70] = 0.4 * 17**0.5
    scale = torch.full((3,), log(3), device=device)
    pre_mix = torch.tensor([[2.0], [-1.0]], device=device)
    for mix, expected in ((pre_mix, 1.0), (None, 3.0)):
        results = tk_mhc.mhc_post_pre(
            **{**inputs, "fn": fn, "mhc_scale": scale, "rms_eps": 0.0}, shifted=True, pre_mix=mix
        )
        assert len(results) == 5
        torch.testing.assert_close(results[1].cpu(), torch.tensor([[27 / 14], [1.0]]), rtol=1e-4, atol=0)
        assert results[3].tolist() == [expected] * 64
        torch.testing.assert_close(results[4].cpu(), torch.tensor([[0.75], [1.0]]))


@pytest.mark.parametrize("shifted", [False, True])
def test_reference_passes_gradcheck(shifted: bool) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def function(
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        norm_weight: Tensor,
        layer_norm_weight: Tensor,
        pre_mix: Tensor,
    ) -> tuple[Tensor, ...]:
        return reference.mhc_post_pre(
            *(x, residual, post, comb, fn, scale, base, 0.1, 0.1, 0.1, 2.0, 2, None, norm_weight),
            layer_norm_weight=layer_norm_weight,
            layer_norm_eps=0.1,
            shifted=shifted,
            pre_mix=pre_mix if shifted else None,
        )

    streams = draw(2, 3), draw(2, 2, 3), draw(2, 2, 1), draw(2, 2, 2)
    assert torch.autograd.gradcheck(function, (*streams, draw(8, 6), draw(3), draw(8), draw(6), draw(3), draw(2, 2, 1)))


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_reference_mixes_streams_by_comb_transposed(mhc_mult: int) -> None:
    inputs = {
        name: value.double() if isinstance(value, Tensor) else value
        for name, value in make(5, mhc_mult, 64)("cpu").items()
    }
    new_residual, post, comb, layer_input = reference.mhc_post_pre(**inputs)
    x, residual, post_mix, comb_mix = (inputs.pop(name) for name in POST_ARGUMENTS)
    expected = post_mix * x[:, None] + comb_mix.mT @ residual
    torch.testing.assert_close(new_residual, expected)
    torch.testing.assert_close((post, comb, layer_input), reference.mhc_pre_big_fuse(expected, **inputs))


@pytest.mark.parametrize("options", [{}, {"shifted": True, "layer_norm": torch.bfloat16}])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 0)])
def test_leading_dimensions(leading: tuple[int, ...], options: dict[str, Any]) -> None:
    inputs = make(leading, 2, 64, **options)("cpu")
    results = tk_mhc.mhc_post_pre(**inputs)
    trailing = ((2, 64), (2, 1), (2, 2), (64,), (2, 1))
    assert [x.shape for x in results] == [(*leading, *shape) for shape, _ in zip(trailing, results)]
    shapes = {"x": (64,), "residual": (2, 64), "post_layer_mix": (2, 1), "comb_res_mix": (2, 2)}
    if options:
        shapes["pre_mix"] = (2, 1)
    flat = {name: inputs[name].view(-1, *shape) for name, shape in shapes.items()}
    for x, y, shape in zip(results, tk_mhc.mhc_post_pre(**{**inputs, **flat}), trailing):
        assert_equal(x.view(-1, *shape), y)


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments, some of them exchanged."""
    good = {
        "x": torch.ones(3, 64, dtype=torch.bfloat16),
        "residual": torch.ones(3, 4, 64, dtype=torch.bfloat16),
        "post_layer_mix": torch.ones(3, 4, 1),
        "comb_res_mix": torch.ones(3, 4, 4),
        "fn": torch.ones(24, 256),
        "mhc_scale": torch.ones(3),
        "mhc_base": torch.ones(24),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-6,
        "mhc_sinkhorn_eps": 1e-6,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": 10,
    }
    return {**good, **changes}


PRE_MIX = torch.ones(3, 4, 1)


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (ValueError, "x", {"x": torch.ones(2, 64, dtype=torch.bfloat16)}),
        (ValueError, "x", {"x": torch.ones(3, 4, 64, dtype=torch.bfloat16)}),
        (ValueError, "residual", {"residual": torch.ones(3, 3, 64, dtype=torch.bfloat16)}),
        (ValueError, "residual", {"residual": torch.ones(3, 4, 96, dtype=torch.bfloat16)}),
        (ValueError, "post_layer_mix", {"post_layer_mix": torch.ones(3, 4)}),
        (ValueError, "post_layer_mix", {"post_layer_mix": torch.ones(2, 4, 1)}),
        (ValueError, "comb_res_mix", {"comb_res_mix": torch.ones(3, 4, 1)}),
        (ValueError, "comb_res_mix", {"comb_res_mix": torch.ones(2, 4, 4)}),
        (ValueError, "rms_eps", {"rms_eps": -1.0}),
        (ValueError, "sinkhorn_repeat", {"sinkhorn_repeat": 0}),
        (ValueError, "sinkhorn_repeat", {"sinkhorn_repeat": 1001}),
        (ValueError, "n_splits", {"n_splits": 0}),
        (ValueError, "layer_norm_weight", {"layer_norm_weight": torch.ones(256)}),
        (ValueError, "pre_mix", {"shifted": True, "pre_mix": PRE_MIX[:2]}),
        (ValueError, "pre_mix", {"shifted": False, "pre_mix": PRE_MIX}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=rf"\b{name}\b"):
        tk_mhc.mhc_post_pre(**arguments(**changes))


@pytest.mark.parametrize(
    ("device", "mhc_mult", "hidden", "num_tokens"),
    [
        ("cpu", 4, 64, 5),
        *(
            pytest.param("cuda", mhc_mult, hidden, num_tokens, marks=pytest.mark.gpu)
            for mhc_mult, hidden in ((2, 576), (4, 192), (4, 7168), (8, 2560))
            for num_tokens in (1, 65)
        ),
        pytest.param("cuda", 4, 7168, 8192, marks=pytest.mark.gpu(gib=2)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_weight": False},
        {"layer_norm": torch.bfloat16},
        {"layer_norm": torch.float32, "shifted": True},
        {"shifted": True, "pre_mix": False},
    ],
    ids=["plain", "no-weight", "layer-norm", "shifted-layer-norm", "shifted-stream0"],
)
def test_equals_mhc_post_then_mhc_pre_big_fuse(
    device: str, mhc_mult: int, hidden: int, num_tokens: int, options: dict[str, Any]
) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, **options)(device)
    for n_splits in (None, 1, 2, 7, 100, 10_000):
        inputs["n_splits"] = n_splits
        assert_equal(tk_mhc.mhc_post_pre(**inputs), composed(inputs), name=f"n_splits {n_splits}")


@pytest.mark.parametrize(("num_tokens", "num_launches"), [(1, 2), (64, 2), (128, 2), (129, 3)])
def test_few_tokens_take_two_launches(num_tokens: int, num_launches: int) -> None:
    with capture(ARCHS["sm_90a"]) as requests:
        tk_mhc.mhc_post_pre(**make(num_tokens)("meta"))
    assert len(requests) == num_launches


@pytest.mark.gpu(gib=14)
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "options"),
    [
        (4, 7168, {}),
        (4, 7168, {"n_splits": 7, "norm_weight": False}),
        (4, 7168, {"layer_norm": torch.bfloat16}),
        (4, 7168, {"shifted": True, "layer_norm": torch.float32}),
        (2, 576, {}),
        (2, 64, {"shifted": True, "pre_mix": False}),
        (8, 1280, {}),
        (8, 8192, {"n_splits": 16}),
    ],
)
def test_gpu_bits_do_not_depend_on_the_batch(mhc_mult: int, hidden: int, options: dict[str, Any]) -> None:
    inputs = make(8192, mhc_mult, hidden, **options)("cuda")
    token_dims = dict.fromkeys((*POST_ARGUMENTS, "pre_mix") if options.get("shifted") else POST_ARGUMENTS, 0)
    assert_independent_of_batch(tk_mhc.mhc_post_pre, inputs, token_dims)


@pytest.mark.gpu(gib=2)
@pytest.mark.parametrize("num_tokens", [1, 64, 300, 8192])
def test_gpu_bits_do_not_depend_on_multiprocessors(num_tokens: int) -> None:
    inputs = make(num_tokens)("cuda")
    expected = tk_mhc.mhc_post_pre(**inputs)
    for num_sms in (1, 7, 100):
        with tk_core.num_sms(num_sms):
            assert_equal(tk_mhc.mhc_post_pre(**inputs), expected)


@pytest.mark.gpu(gib=12)
def test_gpu_more_than_two_to_the_31_elements() -> None:
    inputs = make(80_000)("cuda")
    results = tk_mhc.mhc_post_pre(**inputs)
    last = {name: inputs[name][-100:].clone() for name in POST_ARGUMENTS}
    assert_equal(tuple(x[-100:].clone() for x in results), tk_mhc.mhc_post_pre(**{**inputs, **last}))
