"""mhc_post_pre."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.arch import ARCHS
from tk_core.kernel import capture
from tk_core.testing import Make, OpSpec, assert_equal, tiers
from tk_core.testing.numeric import assert_same_metadata
from tk_mhc import reference

from ..compare import assert_relative_error
from ..inputs import bench_cases
from ..post.test_mhc_post import draw_mixes
from . import test_mhc_pre_big_fuse as big_fuse
from .test_mhc_pre_big_fuse import assert_close_input, assert_close_mix


def make(leading: int | tuple[int, ...], mhc_mult: int = 4, hidden: int = 7168, **options: Any) -> Make:
    """A sublayer's normal output and mixes like those of a model, and what mhc_pre_big_fuse takes."""
    make_others = big_fuse.make(leading, mhc_mult, hidden, **options)

    def build(device: str) -> dict[str, Any]:
        others = make_others(device)
        residual = others.pop("residual")
        post, comb = draw_mixes(tuple(residual.shape[:-2]), mhc_mult, device)
        x = torch.randn((*residual.shape[:-2], hidden), dtype=torch.bfloat16, device=device)
        has_comb = others["mhc_scale"].shape[0] == 3
        mixes = {"post_layer_mix": post, "comb_res_mix": comb if has_comb else None}
        return {"x": x, "residual": residual, **mixes, **others}

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
        elif y is None:
            assert x is None, f"{name}: expected None, got a tensor"
        else:
            assert_close_mix(name, x, y)


# Where it is not fused, the kernels are those of mhc_post and mhc_pre_big_fuse, which compile them.
_COMPILED = ("m4-h192-t3-shifted-layer-norm", "m4-h64-t17-no-comb")

SPEC = OpSpec(
    op=tk_mhc.mhc_post_pre,
    compare=compare,
    cases=(
        *(replace(case, compile=case.name in _COMPILED) for case in big_fuse.shared_cases(make)),
        *bench_cases(
            make,
            (1, 8, 128, 1024, 4001, 8001),
            model_tokens=(64, 8192),
            compiled_tokens=(64,),
            eps=big_fuse.MODEL_EPS,
        ),
    ),
)


test_tiers = tiers.tests(SPEC)

POST_ARGUMENTS = ("x", "residual", "post_layer_mix", "comb_res_mix")


def composed(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """mhc_post, then mhc_pre_big_fuse."""
    new_residual = tk_mhc.mhc_post(*(inputs[name] for name in POST_ARGUMENTS))
    rest = {name: value for name, value in inputs.items() if name not in POST_ARGUMENTS}
    return new_residual, *tk_mhc.mhc_pre_big_fuse(new_residual, **rest)


def test_by_hand(device: str) -> None:
    inputs = big_fuse.hand_arguments(
        device,
        x=torch.ones(64, dtype=torch.bfloat16, device=device),
        residual=torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device)[:, None].repeat(1, 64),
        post_layer_mix=torch.tensor([[2.0], [-1.0]], device=device),
        # new[0] = 2 - 1 · 1 + 1 · 2 = 3, new[1] = -1 + 4 · 1 + 1 · 2 = 5: not symmetric.
        comb_res_mix=torch.tensor([[-1.0, 4.0], [1.0, 1.0]], device=device),
    )
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


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64)("cpu"),
    [
        ({"x": torch.ones(2, 64).bfloat16()}, ValueError, "x: .*shape"),
        ({"residual": torch.ones(3, 3, 64).bfloat16()}, ValueError, "mhc_mult.*residual.*2, 4, 8"),
        ({"comb_res_mix": None}, TypeError, "comb_res_mix: expected a tensor, as fn has rows of comb"),
        (
            {"fn": torch.ones(8, 256), "mhc_scale": torch.ones(2), "mhc_base": torch.ones(8)},
            ValueError,
            "comb_res_mix: expected None, as fn has no rows of comb",
        ),
    ],
)


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
        {"has_comb": False, "post_eps": 0.25},
    ],
    ids=["plain", "no-weight", "layer-norm", "shifted-layer-norm", "shifted-stream0", "no-comb"],
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
