"""mhc_multilayer_recompute."""

from typing import Any

import pytest
import torch

import tk_mhc
from tk_core.testing import Case, Make, OpSpec, assert_equal, bench_case, tiers
from tk_mhc import reference

from ..inputs import HIDDEN_SIZES, TOKEN_COUNTS
from .test_mhc_post import draw_mixes


def make(leading: tuple[int, ...], mhc_mult: int, hidden: int, num_layers: int, num_posts: int) -> Make:
    """Normal values and mixes like those of a model, and output tensors."""

    def build(device: str) -> dict[str, Any]:
        bfloat16 = {"dtype": torch.bfloat16, "device": device}
        mixes = [draw_mixes(leading, mhc_mult, device) for _ in range(num_posts)]
        return {
            "initial_residual": torch.randn((*leading, mhc_mult, hidden), **bfloat16),
            "pre_mix_list": [torch.rand((*leading, mhc_mult, 1), device=device) for _ in range(num_layers)],
            "layer_output_list": [torch.randn((*leading, hidden), **bfloat16) for _ in range(num_posts)],
            "post_mix_list": [post for post, _ in mixes],
            "comb_mix_list": [comb for _, comb in mixes],
            "layer_input_list": [torch.empty((*leading, hidden), **bfloat16) for _ in range(num_layers)],
            "residual_list": [torch.empty((*leading, mhc_mult, hidden), **bfloat16) for _ in range(num_posts)],
        }

    return build


SPEC = OpSpec(
    op=tk_mhc.mhc_multilayer_recompute,
    mutates=("layer_input_list", "residual_list"),
    cases=(
        # With and without a post after the last layer; one layer; partial tiles; all numbers of streams.
        Case("m4-h64-t3-l3-p2", make((3,), 4, 64, 3, 2), small=True, modes=True),
        Case("m4-h64-t3-l2-p2", make((3,), 4, 64, 2, 2), small=True, modes=True),
        Case("m2-h192-t3-l4-p3", make((3,), 2, 192, 4, 3), small=True),
        Case("m8-h128-t3-l2-p1", make((3,), 8, 128, 2, 1), small=True),
        Case("m4-h64-t17-l1-p0", make((17,), 4, 64, 1, 0), small=True),
        Case("m4-h64-t17-l1-p1", make((17,), 4, 64, 1, 1), small=True),
        Case("m4-h576-t1-l2-p1", make((1,), 4, 576, 2, 1), small=True, compile=True),
        Case("m4-h64-t2x3-l2-p2", make((2, 3), 4, 64, 2, 2), small=True),
        Case("m4-h64-no-leading-l2-p1", make((), 4, 64, 2, 1), small=True),
        Case("m4-h64-t0-l2-p2", make((0,), 4, 64, 2, 2), small=True),
        *(Case(f"m4-h{hidden}-t64-l3-p2", make((64,), 4, hidden, 3, 2)) for hidden in HIDDEN_SIZES),
        *(Case(f"m4-h7168-t{tokens}-l3-p3", make((tokens,), 4, 7168, 3, 3)) for tokens in TOKEN_COUNTS),
        Case("m2-h7168-t17-l10-p10", make((17,), 2, 7168, 10, 10)),
        Case("m8-h7168-t17-l10-p9", make((17,), 8, 7168, 10, 9), compile=True),
        # More layers than one round of a thread block's threads can load mixes for.
        Case("m8-h64-t3-l20-p20", make((3,), 8, 64, 20, 20)),
        bench_case("m4-h7168-t8192-l10-p9", make((8192,), 4, 7168, 10, 9), model_shape=True, compile=True),
        *(bench_case(f"m4-h7168-t{tokens}-l10-p9", make((tokens,), 4, 7168, 10, 9)) for tokens in (1, 64, 4001)),
        *(
            bench_case(f"m4-h{hidden}-t8192-l10-p9", make((8192,), 4, hidden, 10, 9))
            for hidden in (576, 2048, 2560, 4096)
        ),
    ),
)


test_tiers = tiers.tests(SPEC)


@pytest.mark.parametrize("function", [tk_mhc.mhc_multilayer_recompute, reference.mhc_multilayer_recompute])
def test_by_hand(function: Any) -> None:
    # Two streams and layers, without a post after the second.
    def channels(*values: float) -> torch.Tensor:
        return torch.tensor(values).bfloat16()[:, None].repeat(1, 64)

    layer_inputs = [torch.empty(64).bfloat16() for _ in range(2)]
    residuals = [torch.empty(2, 64).bfloat16()]
    result = function(
        channels(1, 10),
        [torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [1.0]])],
        [channels(100)[0]],
        [torch.tensor([[1.0], [0.5]])],
        [torch.tensor([[1.0, 2.0], [3.0, 4.0]])],
        layer_inputs,
        residuals,
    )
    assert result is None
    assert layer_inputs[0].tolist() == [1 + 2 * 10] * 64
    assert residuals[0][:, 5].tolist() == [100 + 1 + 3 * 10, 50 + 2 + 4 * 10]
    # 131 and 92 are bfloat16; 65.5 + 92 = 157.5 lies half-way between two, of which 158 is even.
    assert layer_inputs[1].tolist() == [158] * 64


def separately(inputs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """layer_input_list and residual_list by an op for each step."""
    residual, layer_inputs, residuals = inputs["initial_residual"], [], []
    for i, pre_mix in enumerate(inputs["pre_mix_list"]):
        layer_inputs.append(tk_mhc.mhc_pre_apply_mix(residual, pre_mix))
        if i < len(inputs["residual_list"]):
            mixes = inputs["post_mix_list"][i], inputs["comb_mix_list"][i]
            residual = tk_mhc.mhc_post(inputs["layer_output_list"][i], residual, *mixes)
            residuals.append(residual)
    return layer_inputs, residuals


@pytest.mark.parametrize(
    ("device", "shape"),
    [
        ("cpu", ((17,), 4, 64, 3, 2)),
        pytest.param("cuda", ((17,), 8, 576, 2, 2), marks=pytest.mark.gpu),
        pytest.param("cuda", ((8192,), 4, 7168, 10, 9), marks=pytest.mark.gpu(gib=13)),
    ],
)
def test_same_bits_as_the_separate_ops(shape: Any, device: str) -> None:
    inputs = make(*shape)(device)
    tk_mhc.mhc_multilayer_recompute(**inputs)
    assert_equal((inputs["layer_input_list"], inputs["residual_list"]), separately(inputs))


def test_tuples_are_taken() -> None:
    inputs = make((3,), 4, 64, 2, 2)("cpu")
    tk_mhc.mhc_multilayer_recompute(*(tuple(x) if isinstance(x, list) else x for x in inputs.values()))
    assert_equal((inputs["layer_input_list"], inputs["residual_list"]), separately(inputs))


def changed(name: str, place: int | None = None, value: Any = None) -> dict[str, Any]:
    """Good arguments, but for one of them or one tensor of a list."""
    inputs = make((5,), 4, 64, 4, 4)("cpu")
    if place is None:
        inputs[name] = value
    else:
        inputs[name][place] = value
    return inputs


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        (changed("initial_residual", value=torch.ones(5, 3, 64).bfloat16()), ValueError, "mhc_mult.*initial_residual"),
        (changed("pre_mix_list", value=torch.ones(4, 5, 4, 1)), TypeError, "pre_mix_list: expected a list"),
        (changed("pre_mix_list", value=[]), ValueError, "pre_mix_list: expected 1"),
        (changed("layer_output_list", value=None), TypeError, "layer_output_list: expected a list"),
        (changed("layer_output_list", value=[]), ValueError, "layer_output_list: expected 3 or 4 tensors, got 0"),
        (changed("post_mix_list", value=[]), ValueError, "post_mix_list: expected 4 tensors, got 0"),
        (changed("comb_mix_list", value=()), ValueError, "comb_mix_list: expected 4 tensors, got 0"),
        (changed("layer_input_list", value=[]), ValueError, "layer_input_list: expected 4 tensors, got 0"),
        (changed("residual_list", value=[]), ValueError, "residual_list: expected 4 tensors, got 0"),
        (changed("pre_mix_list", 1, None), TypeError, r"pre_mix_list\[1\]: .*Tensor"),
        (changed("pre_mix_list", 3, torch.ones(5, 4)), ValueError, r"pre_mix_list\[3\]: .*shape"),
        (changed("layer_output_list", 0, torch.ones(5, 64)), TypeError, r"layer_output_list\[0\]: .*bfloat16"),
        (
            changed("layer_output_list", 2, torch.ones(5, 64, device="meta").bfloat16()),
            ValueError,
            r"layer_output_list\[2\]: .*device",
        ),
        (changed("post_mix_list", 2, torch.ones(5, 4, 1).double()), TypeError, r"post_mix_list\[2\]: .*float32"),
        (changed("comb_mix_list", 3, torch.ones(5, 4, 3)), ValueError, r"comb_mix_list\[3\]: .*shape"),
        (changed("comb_mix_list", 3, torch.ones(5, 4, 4).mT), ValueError, r"comb_mix_list\[3\]: .*contiguous"),
        (changed("layer_input_list", 1, torch.ones(5, 64)), TypeError, r"layer_input_list\[1\]: .*bfloat16"),
        (changed("layer_input_list", 1, torch.ones(6, 64).bfloat16()), ValueError, r"layer_input_list\[1\]: .*shape"),
        (changed("residual_list", 0, torch.ones(5, 4, 64).half()), TypeError, r"residual_list\[0\]: .*bfloat16"),
        (
            changed("residual_list", 3, torch.ones(5, 64, 4).bfloat16().mT),
            ValueError,
            r"residual_list\[3\]: .*contiguous",
        ),
    ],
)
def test_bad_input(inputs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tk_mhc.mhc_multilayer_recompute(**inputs)
