"""reduce_fused_bwd."""

from typing import Any

import pytest
import torch

import tk_moe
from tk_core import env
from tk_core.testing import assert_equal, tiers
from tk_core.testing.trees import unaligned
from tk_moe import reference
from tk_moe.reduce.reduce_fused_bwd import ReduceBwdConfig
from tk_moe.testing.reduce.reduce_fused_bwd import SPEC, make

test_cpu = tiers.cpu_tests(SPEC)
test_compile = tiers.compile_tests(SPEC)
test_gpu = tiers.gpu_tests(SPEC)
test_gpu_modes = tiers.gpu_mode_tests(SPEC)

POS = torch.tensor([[2, 0], [1, -1], [-1, -5], [3, 9]], dtype=torch.int32)
POS_TO_EXPERT = torch.tensor([0, 0, 1, 1, -1], dtype=torch.int32)
X = torch.arange(1.0, 6.0)[:, None].repeat(1, 64)
WEIGHTS = torch.tensor([[0.5, 10.0], [2.0, 7.0], [1.0, 1.0], [-1.0, 0.25]])


def test_by_hand() -> None:
    grad = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None].repeat(1, 64)
    grad_x, grad_weights = tk_moe.reduce_fused_bwd(grad, X, WEIGHTS, POS, POS_TO_EXPERT)
    assert grad_x[:, 5].tolist() == [10.0, 4.0, 0.5, -4.0, 0.0]
    assert grad_weights is not None
    assert grad_weights.tolist() == [[192.0, 64.0], [256.0, 0.0], [0.0, 0.0], [1024.0, 0.0]]
    grad_x, grad_weights = tk_moe.reduce_fused_bwd(grad, None, None, POS, POS_TO_EXPERT)
    assert grad_x[:, 5].tolist() == [1.0, 2.0, 1.0, 4.0, 0.0]
    assert grad_weights is None


def test_without_weights_it_is_expand_to_fused() -> None:
    inputs = make(20, 128, 3, weights=False, num_rows=80, num_experts=4, alignment=4)("cpu")
    grad_x, _ = tk_moe.reduce_fused_bwd(**inputs)
    expected = tk_moe.expand_to_fused(inputs["grad"], inputs["token_topk_to_pos"], inputs["pos_to_expert"])
    assert_equal(grad_x, expected)


def weighted_sum(x: torch.Tensor, topk_weights: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The sum of reduce_fused, in operations that autograd follows in any dtype."""
    rows = torch.where((pos >= 0)[..., None], x[pos.clamp(min=0).long()], 0)
    return (rows * topk_weights[..., None]).sum(1)


def test_forward_formula_passes_gradcheck_and_is_the_references() -> None:
    pos = torch.tensor([[2, 0], [1, -1], [-1, 3]], dtype=torch.int32)
    x = torch.randn(5, 64, dtype=torch.float64, requires_grad=True)
    topk_weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: weighted_sum(x, w, pos), (x, topk_weights))
    expected = reference.reduce_fused(x.detach().float(), topk_weights.detach().float(), pos)
    torch.testing.assert_close(weighted_sum(x, topk_weights, pos).float(), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_against_autograd(device: str) -> None:
    inputs = make(60, 192, 4, torch.float32, num_rows=300, num_experts=8, alignment=8, share_without_position=0.2)(
        device
    )
    x, topk_weights = (inputs[name].double().requires_grad_() for name in ("x", "topk_weights"))
    out = weighted_sum(x, topk_weights, inputs["token_topk_to_pos"])
    expected = torch.autograd.grad(out, (x, topk_weights), inputs["grad"].double())
    for actual, want in zip(tk_moe.reduce_fused_bwd(**inputs), expected, strict=True):
        torch.testing.assert_close(actual, want.float(), rtol=1e-5, atol=1e-5)


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments, some of them exchanged."""
    good = {
        "grad": torch.ones(4, 64),
        "x": X,
        "topk_weights": WEIGHTS,
        "token_topk_to_pos": POS,
        "pos_to_expert": POS_TO_EXPERT,
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("error", "name", "changes"),
    [
        (TypeError, "grad", {"grad": None}),
        (TypeError, "grad", {"grad": torch.ones(4, 64).half()}),
        (ValueError, "grad", {"grad": torch.ones(4)}),
        (ValueError, "grad", {"grad": torch.ones(4, 128)[:, :64]}),
        (ValueError, "hidden", {"grad": torch.ones(4, 96)}),
        (TypeError, "x", {"x": None}),
        (TypeError, "x", {"x": X.double()}),
        (ValueError, "x", {"x": X[:4]}),
        (ValueError, "x", {"x": torch.ones(5, 128)}),
        (ValueError, "x", {"x": X.to("meta")}),
        (ValueError, "x", {"topk_weights": None}),
        (TypeError, "topk_weights", {"topk_weights": WEIGHTS.bfloat16()}),
        (ValueError, "topk_weights", {"topk_weights": torch.ones(4, 3)}),
        (ValueError, "topk_weights", {"topk_weights": torch.ones(2, 4).t()}),
        (TypeError, "token_topk_to_pos", {"token_topk_to_pos": POS.long()}),
        (ValueError, "token_topk_to_pos", {"token_topk_to_pos": POS[:3]}),
        (ValueError, "token_topk_to_pos", {"token_topk_to_pos": POS[:, :0]}),
        (ValueError, "token_topk_to_pos", {"token_topk_to_pos": torch.ones(4, 33, dtype=torch.int32)}),
        (TypeError, "pos_to_expert", {"pos_to_expert": POS_TO_EXPERT.long()}),
        (ValueError, "pos_to_expert", {"pos_to_expert": POS}),
        (ValueError, "pos_to_expert", {"pos_to_expert": POS_TO_EXPERT.to("meta")}),
    ],
)
def test_bad_input(error: type[Exception], name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=name):
        tk_moe.reduce_fused_bwd(**arguments(**changes))


def test_debug_mode_finds_maps_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "debug", lambda: True)
    with pytest.raises(ValueError, match="token_topk_to_pos"):
        tk_moe.reduce_fused_bwd(**arguments())
    tk_moe.reduce_fused_bwd(**arguments(token_topk_to_pos=POS.where(POS < 5, -1)))


@pytest.mark.parametrize("num_vectors", [8, 72, 256, 264, 320, 512, 768, 896, 1792, 7168])
def test_config_covers_a_row_with_little_waste(num_vectors: int) -> None:
    config = ReduceBwdConfig.best(num_vectors, 8, None)
    assert config.threads % 32 == 0
    assert 32 <= config.threads <= 224
    assert 0 <= config.threads * config.num_chunks - num_vectors < 32 * config.num_chunks


@pytest.mark.gpu
def test_gpu_bits_do_not_depend_on_alignment_or_other_tokens() -> None:
    inputs = make(300, 576, 8)("cuda")
    _, expected = tk_moe.reduce_fused_bwd(**inputs)
    _, actual = tk_moe.reduce_fused_bwd(**{**inputs, "grad": unaligned(inputs["grad"])})
    assert_equal(actual, expected)
    few = {name: inputs[name][:3].clone() for name in ("grad", "topk_weights", "token_topk_to_pos")}
    _, actual = tk_moe.reduce_fused_bwd(**{**inputs, **few})
    assert actual is not None
    assert expected is not None
    assert_equal(actual, expected[:3].clone())
