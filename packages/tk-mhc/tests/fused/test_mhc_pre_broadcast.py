"""mhc_pre_broadcast."""

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, tiers
from tk_mhc import reference

from ..compare import assert_relative_error
from ..inputs import bench_cases, size_cases
from ..projection.test_mhc_pre_norm_fn import BENCH_SIZES, MODEL_SCALE
from . import test_mhc_pre_big_fuse as big_fuse
from .test_mhc_pre_big_fuse import MODEL_EPS, assert_close_input, assert_close_mix, draw_parameters


def make(
    leading: int | tuple[int, ...],
    mhc_mult: int = 4,
    hidden: int = 7168,
    *,
    scale: float = MODEL_SCALE,
    eps: float = 1e-2,
    n_splits: int | None = None,
) -> Make:
    """Normal hidden states and fn_folded: sums of mhc_mult normal values are normal too."""
    leading = (leading,) if isinstance(leading, int) else leading

    def build(device: str) -> dict[str, Any]:
        parameters = draw_parameters(mhc_mult, hidden, scale, eps, device)
        return {
            "hidden": torch.randn((*leading, hidden), dtype=torch.bfloat16, device=device),
            "fn_folded": parameters.pop("fn"),
            **parameters,
            "n_splits": n_splits,
        }

    return build


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """The expanded residual bit for bit, the rest as mhc_pre_big_fuse's."""
    residual, post, comb, layer_input = actual
    assert_equal(residual, expected[0], name="residual")
    assert_close_mix("post", post, expected[1])
    assert_close_mix("comb", comb, expected[2])
    # Streams are equal and their weights positive, so nothing cancels.
    assert_close_input(layer_input, expected[3], atol=1e-5)


SPEC = OpSpec(
    op=tk_mhc.mhc_pre_broadcast,
    compare=compare,
    cases=(
        Case("m4-h64-t3", make(3, 4, 64), small=True, modes=True),
        Case("m2-h64-t17", make(17, 2, 64), small=True),
        Case("m8-h64-t3", make(3, 8, 64), small=True, compile=True),
        Case("m4-h192-t17", make(17, 4, 192), small=True),
        Case("m2-h576-t3", make(3, 2, 576), small=True, modes=True),
        *(
            Case(f"m4-h192-t3-splits{n_splits}", make(3, 4, 192, n_splits=n_splits), small=True)
            for n_splits in (1, 2, 10_000)
        ),
        Case("m4-h64-t3-scale1", make(3, 4, 64, scale=1.0), small=True),
        Case("m4-h64-no-leading", make((), 4, 64), small=True),
        Case("m4-h64-t2x3", make((2, 3), 4, 64), small=True),
        Case("m4-h64-t0", make(0, 4, 64), small=True),
        *size_cases(make),
        *(Case(f"m4-h7168-t65-splits{n_splits}", make(65, n_splits=n_splits)) for n_splits in (1, 7, 112)),
        Case("m4-h7168-t64-scale1", make(64, scale=1.0)),
        *bench_cases(make, BENCH_SIZES[0], model_tokens=(64, 8192), eps=MODEL_EPS),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand(device: str) -> None:
    # All channels are 4, so x · rstd is 1 and a mix is the sum of a row of fn_folded.
    fn_folded = torch.zeros(8, 64, device=device)
    fn_folded[0, 9], fn_folded[3, 63] = 2.0, -2.0
    residual, post, comb, layer_input = tk_mhc.mhc_pre_broadcast(
        hidden=torch.full((64,), 4.0, dtype=torch.bfloat16, device=device),
        fn_folded=fn_folded,
        mhc_scale=torch.tensor([0.5 * log(3), log(3), 1.0], device=device),
        mhc_base=torch.tensor([0.0, log(3), log(3), 0.0, 0.0, log(3), 0.0, log(3)], device=device),
        rms_eps=0.0,
        mhc_pre_eps=0.25,
        mhc_sinkhorn_eps=0.0,
        mhc_post_mult_value=2.0,
        sinkhorn_repeat=1,
    )
    assert residual.tolist() == [[4.0] * 64] * 2
    # z of pre: (log(3), log(3)), each sigmoid 3/4; of post: (log(3), -2·log(3)), sigmoids 3/4 and 1/10.
    torch.testing.assert_close(post.cpu(), torch.tensor([[1.5], [0.2]]))
    torch.testing.assert_close(comb.cpu(), torch.full((2, 2), 0.5))
    torch.testing.assert_close(layer_input.cpu(), torch.full((64,), 8.0, dtype=torch.bfloat16))


def unfolded(num_tokens: int, mhc_mult: int, hidden: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of mhc_pre_big_fuse, of which all streams are equal, and of mhc_pre_broadcast all but fn_folded."""
    inputs = big_fuse.make(num_tokens, mhc_mult, hidden)(device)
    x = inputs["residual"][:, 0].clone()
    inputs["residual"] = tk_mhc.expand_to_mhc(x, mhc_mult)
    given = {name: value for name, value in inputs.items() if name not in ("residual", "fn", "norm_weight")}
    return inputs, {"hidden": x, **given}


def in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in inputs.items()}


@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_reference_is_mhc_pre_big_fuse_of_equal_streams(mhc_mult: int) -> None:
    inputs, folded = map(in_float64, unfolded(5, mhc_mult, 192, "cpu"))
    fn_folded = reference.mhc_fold_fn(inputs["fn"], mhc_mult, inputs["norm_weight"])
    residual, *results = reference.mhc_pre_broadcast(fn_folded=fn_folded, **folded)
    assert torch.equal(residual, inputs["residual"])
    torch.testing.assert_close(tuple(results), reference.mhc_pre_big_fuse(**inputs))


test_bad_input = tiers.bad_input(
    SPEC,
    make(3, 4, 64)("cpu"),
    [
        ({"hidden": torch.tensor(1.0).bfloat16()}, ValueError, "hidden: .*shape"),
        ({"hidden": torch.ones(3, 96).bfloat16()}, ValueError, "hidden.*multiple of 64"),
        ({"hidden": torch.ones(3, 8256).bfloat16()}, ValueError, "hidden.*64 to 8192"),
        ({"fn_folded": torch.ones(4, 64)}, ValueError, "rows of fn_folded"),
        ({"fn_folded": torch.ones(15, 64)}, ValueError, "rows of fn_folded"),
    ],
)


@pytest.mark.gpu(gib=3)
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"), [(2, 576, 17), (4, 7168, 1), (4, 7168, 64), (4, 7168, 4096), (8, 8192, 300)]
)
def test_gpu_mixes_are_those_of_the_unfolded_form(mhc_mult: int, hidden: int, num_tokens: int) -> None:
    inputs, folded = unfolded(num_tokens, mhc_mult, hidden, "cuda")
    fn_folded = tk_mhc.mhc_fold_fn(inputs["fn"], mhc_mult, inputs["norm_weight"])
    residual, post, *_ = tk_mhc.mhc_pre_broadcast(fn_folded=fn_folded, **folded)
    assert_equal(residual, inputs["residual"])
    mixes = reference.mhc_pre_norm_fn(
        residual, inputs["fn"].double(), inputs["norm_weight"].double(), inputs["rms_eps"]
    )
    z = mixes[:, mhc_mult : 2 * mhc_mult] * inputs["mhc_scale"][1].double()
    # z from post, the other way; float32 rounding is about 1e-6 of it.
    actual = torch.logit(post.double().squeeze(-1) / 2) - inputs["mhc_base"][mhc_mult : 2 * mhc_mult].double()
    assert_relative_error(actual, z, 5e-4)


@pytest.mark.gpu(gib=5)
@pytest.mark.parametrize("n_splits", [None, 1, 2, 7, 10_000])
@pytest.mark.parametrize(
    ("mhc_mult", "hidden", "num_tokens"),
    [(2, 64, 17), (2, 576, 300), (4, 7168, 1), (4, 7168, 64), (4, 7168, 8192), (8, 8192, 300)],
)
def test_gpu_layer_input_is_the_collapse_of_the_expanded_residual(
    mhc_mult: int, hidden: int, num_tokens: int, n_splits: int | None
) -> None:
    inputs = make(num_tokens, mhc_mult, hidden, n_splits=n_splits)("cuda")
    # The mixes cannot be had alone. If fn of pre is 0, pre is the sigmoid of its base, the same for each token.
    inputs["fn_folded"][:mhc_mult] = 0
    residual, post, comb, layer_input = tk_mhc.mhc_pre_broadcast(**inputs)
    assert_equal(residual, tk_mhc.expand_to_mhc(inputs["hidden"], mhc_mult))
    scale, base, post_mult, pre_eps = (
        inputs[name] for name in ("mhc_scale", "mhc_base", "mhc_post_mult_value", "mhc_pre_eps")
    )
    zeros = torch.zeros((num_tokens, mhc_mult * (mhc_mult + 2)), device="cuda")
    pre, _, _ = tk_mhc.mhc_pre_split_mixes(zeros, scale, base, mhc_mult, post_mult, pre_eps)
    assert_equal(layer_input, tk_mhc.mhc_pre_apply_mix(residual, pre))
    expected = reference.mhc_pre_broadcast(**inputs)
    big_fuse.compare((post, comb, layer_input), expected[1:])
