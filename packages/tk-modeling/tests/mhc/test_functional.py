"""mhc_pre, mhc_head and expand_from_embedding against the single ops, and the residual's gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import assert_equal
from tk_core.testing.trees import map_tensors
from tk_modeling import mhc_head, mhc_post, mhc_pre

from .cases import backward, draw_residual, leaves

M, HIDDEN = 4, 64
NUMBERS = {"norm_eps": 1e-3, "post_mult_value": 2.0, "pre_eps": 1e-3, "sinkhorn_eps": 1e-3, "sinkhorn_repeat": 3}


def _parameters(mhc_mult: int = M, rows: int | None = None, has_comb: bool = True) -> dict[str, Tensor]:
    rows, width = rows or mhc_mult * (mhc_mult + 2 if has_comb else 2), mhc_mult * HIDDEN
    return {
        "fn": 0.1 * torch.randn(rows, width),
        "scale": torch.rand(3 if has_comb else 2) + 0.5,
        "base": torch.randn(rows),
        "norm_weight": torch.rand(width) + 0.5,
    }


def _draw(leading: tuple[int, ...] = (3, 5), mhc_mult: int = M, has_comb: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    residual = draw_residual(leading, "cpu", mhc_mult, HIDDEN)
    return {"residual": residual, **_parameters(mhc_mult, has_comb=has_comb)}


def _draw_head(scale: tuple[int, ...] = (1,), rows: int = M) -> dict[str, Tensor]:
    torch.manual_seed(0)
    residual = draw_residual((3, 5), "cpu", M, HIDDEN)
    return {"residual": residual, **_parameters(rows=rows), "scale": torch.full(scale, 0.7), "base": torch.randn(M)}


def _grads(args: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: x.grad for name, x in args.items()}


def _pre_by_ops(
    ops: Any, args: dict[str, Tensor], shifted: bool = False, pre_mix: Tensor | None = None, post_eps: float = 0.0
) -> tuple:
    """mhc_pre by the ops of a module, or by references."""
    mixes = ops.mhc_pre_norm_fn(args["residual"], args["fn"], args["norm_weight"], 1e-3)
    numbers = args["residual"].shape[-2], 2.0, 1e-3
    pre, post, comb = ops.mhc_pre_split_mixes(mixes, args["scale"], args["base"], *numbers, mhc_post_eps=post_eps)
    if comb is not None:
        comb = ops.sinkhorn_normalize(comb, 3, 1e-3)
    if not shifted:
        return ops.mhc_pre_apply_mix(args["residual"], pre), (post, comb)
    if pre_mix is None:
        return args["residual"][..., 0, :], (post, comb), pre
    return ops.mhc_pre_apply_mix(args["residual"], pre_mix), (post, comb), pre


def _head_by_ops(ops: Any, args: dict[str, Tensor]) -> Tensor:
    mixes = ops.mhc_pre_norm_fn(args["residual"], args["fn"][:M], args["norm_weight"], 1e-6)
    pre = ops.mhc_head_compute_mix(mixes.contiguous(), args["scale"].view(1), args["base"], 1e-6)
    return ops.mhc_pre_apply_mix(args["residual"], pre.unsqueeze(-1))


def _assert_near(
    found: dict[str, Tensor | None], exact: dict[str, Tensor], bfloat16: float = 4e-3, float32: float = 1e-4
) -> None:
    for name, want in exact.items():
        error = (found[name].double() - want).norm() / want.norm()
        limit = bfloat16 if found[name].dtype == torch.bfloat16 else float32
        assert error <= limit, f"{name}: relative error {error:.3g}"


@pytest.mark.parametrize("has_comb", [True, False])
@pytest.mark.parametrize("shifted", ["", "first", "later"])
@pytest.mark.parametrize("mhc_mult", [2, 4])
def test_mhc_pre(mhc_mult: int, shifted: str, has_comb: bool) -> None:
    drawn = _draw(mhc_mult=mhc_mult, has_comb=has_comb)
    args, exact = leaves(drawn), leaves(drawn, torch.float64)
    pre_mix = torch.rand(3, 5, mhc_mult, 1) if shifted == "later" else None
    args_mix = {} if pre_mix is None else {"pre_mix": pre_mix.clone().requires_grad_()}
    exact_mix = None if pre_mix is None else pre_mix.double().requires_grad_()
    options = NUMBERS | {"mhc_mult": mhc_mult, "shifted": bool(shifted), "post_eps": 0.25}

    outputs = mhc_pre(**args, **args_mix, **options)
    with torch.no_grad():
        without = mhc_pre(**args, **args_mix, **options)
        by_ops = _pre_by_ops(tk_mhc, args, bool(shifted), pre_mix, 0.25)
    detached = map_tensors(Tensor.detach, outputs)
    assert_equal(without, detached)
    assert_equal(map_tensors(torch.clone, by_ops), map_tensors(torch.clone, detached))

    backward(outputs)
    backward(_pre_by_ops(tk_mhc.reference, exact, bool(shifted), exact_mix, 0.25))
    _assert_near(_grads(args), _grads(exact))
    if pre_mix is not None:
        _assert_near({"pre_mix": args_mix["pre_mix"].grad}, {"pre_mix": exact_mix.grad})


@pytest.mark.parametrize("used", ["layer_input", "post_mix", "comb_mix", "residual", "next_pre_mix"])
def test_mhc_pre_with_one_output_used(used: str) -> None:
    def run(args: dict[str, Tensor], pre: Callable[..., tuple]) -> Tensor:
        layer_input, (post_mix, comb_mix), *last = pre(args)
        names = ("layer_input", "post_mix", "comb_mix", "next_pre_mix", "residual")
        return dict(zip(names, (layer_input, post_mix, comb_mix, *last)))[used]

    uses_pre = used == "next_pre_mix"
    drawn = _draw()
    args, exact = leaves(drawn), leaves(drawn, torch.float64)
    backward(run(args, lambda a: (*mhc_pre(**a, **NUMBERS, shifted=True, return_residual=True),)))
    backward(run(exact, lambda a: (*_pre_by_ops(tk_mhc.reference, a, True), a["residual"])))
    for name, x in args.items():
        want = exact[name].grad
        # Of the arguments, layer_input (stream 0) and residual depend on the residual alone.
        if want is None or not want.any():
            assert x.grad is None or not x.grad.any()
        else:
            _assert_near({name: x.grad}, {name: want})
    assert uses_pre == bool(args["fn"].grad[:M].any())


@pytest.mark.parametrize("rows", [M, M * (M + 2)])
@pytest.mark.parametrize("scale", [(1,), ()])
def test_mhc_head(scale: tuple[int, ...], rows: int) -> None:
    drawn = _draw_head(scale, rows)
    args, exact = leaves(drawn), leaves(drawn, torch.float64)
    y = mhc_head(**args)
    with torch.no_grad():
        assert_equal(mhc_head(**args), y.detach())
        assert_equal(_head_by_ops(tk_mhc, args), y.detach())
    backward(y)
    backward(_head_by_ops(tk_mhc.reference, exact))
    _assert_near(_grads(args), _grads(exact))
    assert args["scale"].grad.shape == scale
    assert not args["fn"].grad[M:].any()


@pytest.mark.parametrize("rows", [M, M * (M + 2)])
@pytest.mark.parametrize("scale", [(1,), ()])
def test_main_grads_of_mhc_head(scale: tuple[int, ...], rows: int) -> None:
    expected, args = leaves(_draw_head(scale, rows)), leaves(_draw_head(scale, rows))
    parameters = ("fn", "scale", "base", "norm_weight")
    for name in parameters:
        args[name].main_grad = torch.zeros_like(args[name])
    backward(mhc_head(**expected))
    backward(mhc_head(**args))
    assert_equal(args["residual"].grad, expected["residual"].grad)
    assert [args[name].grad for name in parameters] == [None] * 4
    assert_equal([args[name].main_grad for name in parameters], [expected[name].grad for name in parameters])


# The residual's gradient: mhc_post makes it, mhc_pre adds to it.


Sublayers = tuple[Callable[[Tensor], Tensor], ...]


def _around(args: dict[str, Tensor], residual: Tensor, sublayers: Sublayers = (torch.sin,)) -> Tensor:
    parameters = {name: x for name, x in args.items() if name != "residual"}
    layer_input, mixes, residual = mhc_pre(residual, **parameters, **NUMBERS, return_residual=True)
    return sum(mhc_post(sublayer(layer_input), residual, *mixes) for sublayer in sublayers)


def _around_in_float64(args: dict[str, Tensor], residual: Tensor, sublayers: Sublayers) -> Tensor:
    layer_input, mixes = _pre_by_ops(tk_mhc.reference, args | {"residual": residual})
    return sum(tk_mhc.reference.mhc_post(sublayer(layer_input), residual, *mixes) for sublayer in sublayers)


def test_the_residuals_gradient_meets_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    post_bwd = tk_mhc.mhc_post_bwd

    def remember(*args: Any) -> tuple[Tensor, ...]:
        grads = post_bwd(*args)
        made.append((grads[1].data_ptr(), grads[1].clone()))
        return grads

    monkeypatch.setattr(tk_mhc, "mhc_post_bwd", remember)
    args = leaves(_draw())
    backward(_around(args, args["residual"]))
    ((pointer, before),) = made
    assert args["residual"].grad.data_ptr() == pointer
    assert not torch.equal(args["residual"].grad, before)


@pytest.mark.parametrize("sublayers", [(torch.sin,), (torch.sin, torch.cos)], ids=len)
@pytest.mark.parametrize(
    "elsewhere",
    [lambda r: [], lambda r: [r.cos()], lambda r: [r[..., 1, :]], lambda r: [r.mT]],
    ids=["none", "cos", "a-stream", "transposed"],
)
def test_the_residuals_gradient_is_right(elsewhere: Callable[[Tensor], list[Tensor]], sublayers: Sublayers) -> None:
    """Where the residual came out of another operation, has other uses, and mhc_post takes it once or twice."""
    args, exact = leaves(_draw()), leaves(_draw(), torch.float64)
    for these, around in ((args, _around), (exact, _around_in_float64)):
        residual = these["residual"] * 2
        backward([around(these, residual, sublayers), *elsewhere(residual)])
    # The sublayers' inputs and outputs are rounded to bfloat16.
    _assert_near(_grads(args), _grads(exact), 0.01, 0.01)


def test_retain_graph_gives_the_same_gradients_again() -> None:
    args = leaves(_draw())
    y = _around(args, args["residual"] * 2)
    grads = [torch.autograd.grad(y, list(args.values()), torch.ones_like(y), retain_graph=True) for _ in range(3)]
    assert_equal(grads[1], grads[0])
    assert_equal(grads[2], grads[0])


def test_hooks_on_the_residual_see_the_whole_gradient() -> None:
    expected, args = leaves(_draw()), leaves(_draw())
    backward(_around(expected, expected["residual"] * 2))
    want = expected["residual"].grad
    seen = []
    residual = args["residual"] * 2
    residual.register_hook(lambda grad: seen.append(grad.clone()))
    residual.register_hook(lambda grad: grad * 2)
    residual.retain_grad()
    y = _around(args, residual)
    backward(y)
    assert_equal(seen[0] * 2, want)
    assert_equal(residual.grad, want)
    assert_equal(args["residual"].grad, want * 2)


def test_the_gradient_given_to_mhc_post_is_left_alone() -> None:
    args = leaves(_draw())
    y = _around(args, args["residual"])
    given = torch.randn_like(y)
    before = given.clone()
    y.backward(given)
    assert_equal(given, before)


def test_without_gradient_of_the_residual_mhc_post_makes_none() -> None:
    args = leaves(_draw())
    args["residual"].requires_grad_(False)
    *_, residual = mhc_pre(**args, return_residual=True)
    assert residual is args["residual"]


PRE_ERRORS = [
    ("residual", torch.zeros(3, 4, 64), TypeError, "residual: expected dtype torch.bfloat16, got torch.float32"),
    ("residual", torch.zeros(3, 2, 64).bfloat16(), ValueError, r"residual: expected shape \(..., 4, hidden\), got"),
    ("residual", torch.zeros(3, 4, 96).bfloat16(), ValueError, r"hidden \(last dimension of residual\): .* 64, got 96"),
    ("residual", torch.zeros(3, 64, 4).bfloat16().mT, ValueError, "residual: expected contiguous"),
    ("fn", torch.zeros(4, 256), ValueError, "rows of fn: expected 24, or 8 without comb, got 4"),
    ("fn", torch.zeros(24, 64), ValueError, r"fn: expected shape \(rows, 256\), got \(24, 64\)"),
    ("post_eps", -1e-6, ValueError, "post_eps: expected at least 0"),
    ("fn", torch.zeros(24, 256).bfloat16(), TypeError, "fn: expected dtype torch.float32"),
    ("scale", torch.zeros(1), ValueError, "scale: expected shape"),
    ("base", torch.zeros(4), ValueError, "base: expected shape"),
    ("norm_weight", torch.zeros(64), ValueError, "norm_weight: expected shape"),
    ("pre_mix", torch.zeros(3, 5, 4, 1), ValueError, "pre_mix: expected None without shifted"),
    ("mhc_mult", 3, ValueError, "mhc_mult: expected one of 2, 4, 8, got 3"),
    ("norm_eps", -1.0, ValueError, "norm_eps: expected at least 0"),
    ("post_mult_value", None, TypeError, "post_mult_value: expected a number"),
    ("pre_eps", -1e-6, ValueError, "pre_eps: expected at least 0"),
    ("sinkhorn_eps", -1e-6, ValueError, "sinkhorn_eps: expected at least 0"),
    ("sinkhorn_repeat", 0, ValueError, "sinkhorn_repeat: expected 1 to 1000"),
    ("shifted", "x", TypeError, "shifted: expected a bool"),
    ("return_residual", "x", TypeError, "return_residual: expected a bool"),
    ("n_splits", 0, ValueError, "n_splits: expected at least 1"),
]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "kind", "message"), PRE_ERRORS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_errors_of_mhc_pre(name: str, value: Any, kind: type, message: str, with_gradients: bool) -> None:
    args: dict[str, Any] = leaves(_draw()) if with_gradients else _draw()
    with pytest.raises(kind, match=message):
        mhc_pre(**args | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("residual", torch.zeros(3, 4, 64), TypeError, "residual: expected dtype torch.bfloat16, got torch.float32"),
        ("fn", torch.zeros(5, 256), ValueError, "rows of fn: expected 4 or 24, got 5"),
        ("fn", torch.zeros(4, 64), ValueError, "fn: expected shape"),
        ("scale", torch.zeros(3), ValueError, "scale: expected shape"),
        ("scale", 1.0, TypeError, "scale: expected a torch.Tensor, got float"),
        ("norm_weight", torch.zeros(256, device="meta"), ValueError, "norm_weight: expected device cpu, got meta"),
        ("norm_eps", "0", TypeError, "norm_eps: expected a number"),
        ("n_splits", 1.5, TypeError, "n_splits: expected an int"),
    ],
)
def test_errors_of_mhc_head(name: str, value: Any, kind: type, message: str) -> None:
    args: dict[str, Any] = leaves(_draw_head())
    with pytest.raises(kind, match=message):
        mhc_head(**args | {name: value})
