"""Differentiable gates, expand, reduce and SwiGLU against autograd through plain PyTorch in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_modeling
import tk_moe
import tk_quant
from tk_core.testing import assert_equal
from tk_modeling import reference
from tk_moe import ScoringFunc


def weighted_gradient(function: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    """Gradients by the leaves of a fixed weighted sum of what the function returns."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(9)
    loss = sum((y.double() * torch.randn(y.shape, dtype=torch.float64)).sum() for y in outputs)
    return list(torch.autograd.grad(loss, leaves))


def assert_near(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-5) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got.double() - want).norm() <= rtol * want.norm() + 1e-12
        assert want.norm() > 0


def scores_of(logits: Tensor, scoring_func: ScoringFunc) -> Tensor:
    match str(scoring_func):
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return torch.nn.functional.softplus(logits).sqrt()
        case "softmax":
            return logits.softmax(dim=1)
    return logits


def weights_of(logits: Tensor, experts: Tensor, scoring_func: ScoringFunc, renormalize: bool, factor: float) -> Tensor:
    """Weights of given experts, 0 where the expert is negative."""
    chosen = scores_of(logits, scoring_func).gather(1, experts.clamp(min=0)) * (experts >= 0)
    return chosen / (chosen.sum(1, keepdim=True).clamp(min=1e-20) if renormalize else 1) * factor


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring_func", list(ScoringFunc))
def test_topk_gate_with_weights(scoring_func: ScoringFunc, dtype: torch.dtype, renormalize: bool) -> None:
    logits, bias = torch.rand(9, 13).to(dtype) + 0.1, torch.randn(13) * 0.1
    mask = torch.arange(9) != 4
    options = (bias, renormalize, 2.5, mask)
    idx, weights = tk_moe.topk_gate_with_weights(logits, 3, scoring_func, *options)
    leaf = logits.clone().requires_grad_()
    found_idx, found = tk_modeling.topk_gate_with_weights(leaf, 3, str(scoring_func), *options)
    assert_equal((found_idx, found.detach()), (idx, weights))
    assert not found_idx.requires_grad
    gradient = weighted_gradient(
        lambda x: tk_modeling.topk_gate_with_weights(x, 3, scoring_func, *options)[1][mask], logits
    )
    expected = weighted_gradient(lambda x: weights_of(x, idx, scoring_func, renormalize, 2.5)[mask], logits.double())
    assert_near(gradient, expected, 1e-5 if dtype == torch.float32 else 2.0**-8)
    assert gradient[0].dtype == dtype
    assert not gradient[0][4].any()


@pytest.mark.parametrize("scoring_func", ["sqrtsoftplus", "SoftMax"])
def test_hash_gate(scoring_func: str) -> None:
    token_ids = torch.tensor([0, 2, 1, 7, 2])
    table = torch.tensor([[0, 3], [4, 4], [-1, 2]], dtype=torch.int32)
    logits = torch.randn(5, 6)
    enum = ScoringFunc.from_str(scoring_func)
    idx, weights = tk_moe.hash_gate(token_ids, table, logits, enum)
    assert_equal(tk_modeling.hash_gate(token_ids, table, logits, scoring_func), (idx, weights))
    rows = torch.tensor([0, 1, 2, 4])  # 7 is no row of the table
    found = weighted_gradient(lambda x: tk_modeling.hash_gate(token_ids, table, x, scoring_func)[1][rows], logits)
    expected = weighted_gradient(lambda x: weights_of(x, idx, enum, True, 1.0)[rows], logits.double())
    assert_near(found, expected)
    assert not found[0][3].any()


def gate_by_groups(logits: Tensor, ranks: tuple[int, ...] = (0, 1, 0, 1), **kwargs: Any) -> tuple[Tensor, Tensor]:
    """4 of 12 experts, of the best 2 of 3 groups."""
    bias = torch.linspace(-0.1, 0.1, 12)
    return tk_modeling.top2_sum_gate(logits, bias, 4, 2, 3, False, 0, 2.5, *ranks, "sigmoid", **kwargs)


def assert_gradient_of(
    gate: Callable[[Tensor], Tensor], logits: Tensor, experts: Tensor, rows: Tensor | slice = slice(None)
) -> None:
    """The gradient of the gate's weights is that of the weights of these experts."""
    found = weighted_gradient(lambda x: gate(x)[rows], logits)
    expected = weighted_gradient(
        lambda x: weights_of(x, experts, ScoringFunc.SIGMOID, True, 2.5)[rows], logits.double()
    )
    assert_near(found, expected)
    others = torch.ones(len(logits), dtype=torch.bool)
    others[rows] = False
    assert not found[0][others].any()


def test_top2_sum_gate() -> None:
    logits, mask = torch.randn(9, 12), torch.arange(9) != 4
    idx, weights = gate_by_groups(logits, mask=mask)
    found_idx, found = gate_by_groups(logits.clone().requires_grad_(), mask=mask)
    assert_equal((found_idx, found.detach()), (idx, weights))
    assert_gradient_of(lambda x: gate_by_groups(x, mask=mask)[1], logits, idx, mask)


@pytest.mark.parametrize("given", [False, True])
def test_top2_sum_gate_of_a_tensor_parallel_rank(given: bool) -> None:
    """Experts of other ranks become -1 and the others are renumbered; all keep their weights and gradients."""
    logits, ranks = torch.randn(9, 12), (0, 4, 1, 2)
    logical, _ = gate_by_groups(logits)
    # With rows that are strided, as the op allows.
    more = {"unmapped_topk_idx": torch.zeros(9, 6, dtype=torch.int64)[:, :4]} if given else {}
    assert (gate_by_groups(logits, ranks, **more)[0] == -1).any()
    assert_gradient_of(lambda x: gate_by_groups(x, ranks, **more)[1], logits, logical)
    if given:
        assert_equal(more["unmapped_topk_idx"].contiguous(), logical)


def test_top2_sum_gate_with_physical_and_shared_experts() -> None:
    logits, bias = torch.randn(9, 12), torch.zeros(12)
    to_physical_map = torch.randperm(26).int().view(13, 2) % 13
    logical_count = torch.ones(13, dtype=torch.int32)

    def gate(x: Tensor) -> Tensor:
        options = (bias, 4, 0, 0, True, 1, 2.5, 0, 1, 0, 1, "sigmoid")
        return tk_modeling.top2_sum_gate(x, *options, to_physical_map=to_physical_map, logical_count=logical_count)[1]

    assert gate(logits).shape == (9, 5)
    assert (gate(logits)[:, 4] == 1).all()
    logical, _ = tk_moe.topk_gate_with_weights(logits, 4, ScoringFunc.SIGMOID)
    assert_gradient_of(lambda x: gate(x)[:, :4], logits, logical)


def test_top2_sum_gate_with_given_routing() -> None:
    """A negative index is weighed as expert 0, and so it has that expert's gradient."""
    logits = torch.randn(6, 12)
    fixed = torch.tensor([True, False, True, False, False, False])
    unmapped = torch.full((6, 4), -1, dtype=torch.int64)
    unmapped[0], unmapped[2] = torch.tensor([3, 1, 8, 11]), torch.tensor([5, -1, 7, 2])

    def gate(x: Tensor) -> Tensor:
        return gate_by_groups(x, fix_routing_mask=fixed, unmapped_topk_idx=unmapped)[1]

    gate(logits)
    experts = unmapped.clamp(min=0)
    assert experts[2].tolist() == [5, 0, 7, 2]
    assert_gradient_of(gate, logits, experts)


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_normalize_weight(used: tuple[int, ...]) -> None:
    w = torch.rand(7, 5)
    assert_equal(
        tuple(y.detach() for y in tk_modeling.normalize_weight(w.requires_grad_())), tk_moe.normalize_weight(w)
    )

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        total = x.sum(1)
        return total, x / total[:, None]

    found, expected = (
        weighted_gradient(lambda x, f=function: tuple(f(x)[i] for i in used), leaf)
        for function, leaf in ((tk_modeling.normalize_weight, w), (plain, w.double()))
    )
    assert_near(found, expected)


def test_aux_loss() -> None:
    scores, fi = torch.rand(9, 6), torch.rand(6)
    assert_equal(tk_modeling.aux_loss(scores.requires_grad_(), fi, 0.3).detach(), tk_moe.aux_loss(scores, fi, 0.3))
    found = weighted_gradient(lambda x: tk_modeling.aux_loss(x, fi, 0.3), scores)
    expected = weighted_gradient(
        lambda x: 0.3 * (fi.double() * (x / x.sum(1, keepdim=True)).mean(0)).sum(), scores.double()
    )
    assert_near(found, expected)


NUM_TOKENS, HIDDEN = 11, 64


def mapping() -> dict[str, Tensor]:
    """Maps of 11 tokens to segments of multiples of 4 rows; some pairs have no expert, one expert has no tokens."""
    topk_idx = torch.stack([torch.randperm(6)[:3] for _ in range(NUM_TOKENS)])
    topk_idx[topk_idx == 2] = 3
    topk_idx[4, 1], topk_idx[7] = -1, -1
    pos_to_expert, _, pos_to_token_topk, token_topk_to_pos, *_ = tk_moe.get_fused_mapping(topk_idx, 6, 60, 4)
    assert (pos_to_expert < 0).any()
    return {
        "pos_to_expert": pos_to_expert,
        "pos_to_token_topk": pos_to_token_topk,
        "token_topk_to_pos": token_topk_to_pos,
    }


def rounding(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else 2.0**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expand_to_fused(dtype: torch.dtype) -> None:
    maps = mapping()
    x, token_of_row = torch.randn(NUM_TOKENS, HIDDEN).to(dtype), maps["pos_to_token_topk"].long() // 3
    is_real = (maps["pos_to_expert"] >= 0)[:, None]

    def function(x: Tensor) -> Tensor:
        return tk_modeling.expand_to_fused(x, maps["token_topk_to_pos"], maps["pos_to_expert"])

    assert_equal(function(x.requires_grad_()).detach(), torch.where(is_real, x[token_of_row], 0))
    expected = weighted_gradient(lambda x: torch.where(is_real, x[token_of_row], 0), x.double())
    assert_near(weighted_gradient(function, x), expected, rounding(dtype))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce_fused(weighted: bool, dtype: torch.dtype, given: bool) -> None:
    """With pos_to_expert and without."""
    maps = mapping()
    pos, more = maps["token_topk_to_pos"], {"pos_to_expert": maps["pos_to_expert"]} if given else {}
    x = torch.randn(60, HIDDEN).to(dtype)
    leaves = (x, torch.rand(NUM_TOKENS, 3)) if weighted else (x,)

    def ours(x: Tensor, weights: Tensor | None = None) -> Tensor:
        return tk_modeling.reduce_fused(x, weights, pos, **more)

    def plain(x: Tensor, weights: Tensor | None = None) -> Tensor:
        terms = x[pos.clamp(min=0).long()] * (pos >= 0)[..., None]
        return (terms if weights is None else terms * weights[..., None]).sum(1)

    found = weighted_gradient(ours, *leaves)
    assert_near(found, weighted_gradient(plain, *(leaf.double() for leaf in leaves)), rounding(dtype))
    assert found[0].dtype == dtype
    assert not found[0][maps["pos_to_expert"] < 0].any()
    assert_equal(ours(*(leaf.requires_grad_() for leaf in leaves)).detach(), ours(*(leaf.detach() for leaf in leaves)))


@pytest.mark.parametrize("clamp", [None, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype: torch.dtype, clamp: float | None) -> None:
    maps = mapping()
    pairs, is_real = maps["pos_to_token_topk"].long(), (maps["pos_to_expert"] >= 0)[:, None]
    x, weights = torch.randn(60, 2 * HIDDEN).to(dtype), torch.rand(NUM_TOKENS, 3)
    x[~is_real[:, 0]] = math.nan

    def ours(x: Tensor, weights: Tensor) -> Tensor:
        return tk_modeling.swiglu(x, clamp, topk_weights=weights, **maps)

    def plain(x: Tensor, weights: Tensor) -> Tensor:
        gate, value = torch.where(is_real, x, 0).chunk(2, dim=1)
        if clamp is not None:
            gate, value = gate.clamp(max=clamp), value.clamp(-clamp, clamp)
        return torch.nn.functional.silu(gate) * value * weights.flatten()[pairs][:, None] * is_real

    found = weighted_gradient(ours, x, weights)
    assert_near(found, weighted_gradient(plain, x.double(), weights.double()), max(rounding(dtype), 1e-5))
    assert not found[0][~is_real[:, 0]].any()
    out = ours(x.requires_grad_(), weights)
    assert out.dtype == dtype
    assert_equal(out.detach(), ours(x.detach(), weights))


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "oai": {"activation": "swiglu_oai", "interleaved": True},
    "gelu": {"activation": "gelu_tanh"},
    "relu2": {"activation": "relu2", "gated": False},
    "after": {"alpha": 1.5, "clamp_after": True},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    """As MoE has them in its reference, forward and backward."""
    options: dict[str, Any] = {"swiglu_clamp_value": 0.7, **ACTIVATIONS[name]}
    layer = reference.MoE(HIDDEN, HIDDEN, 2, 1, **options)
    x = torch.randn(9, layer.gate_up.shape[1])
    found = weighted_gradient(lambda x: tk_modeling.swiglu(x, **options), x)
    assert_near(found, weighted_gradient(layer.activated, x.double()), 1e-5)


def test_swiglu_of_plain_rows_and_formats() -> None:
    x = torch.randn(5, 128).bfloat16().requires_grad_()
    assert tk_modeling.swiglu(x).dtype == torch.bfloat16
    out = tk_modeling.swiglu(x, fmt="fp32")
    assert_equal(out.detach(), tk_quant.swiglu_forward(x.detach()))
    out.sum().backward()
    gate, value = x.detach().double().requires_grad_().chunk(2, dim=1)
    expected = torch.autograd.grad((torch.nn.functional.silu(gate) * value).sum(), (gate, value))
    assert_near([x.grad], [torch.cat(expected, dim=1)], 2.0**-8)


def test_frozen_weights_of_swiglu_get_no_gradient() -> None:
    maps = mapping()
    x, weights = torch.randn(60, 2 * HIDDEN, requires_grad=True), torch.rand(NUM_TOKENS, 3)
    maps.pop("token_topk_to_pos")
    tk_modeling.swiglu(x, topk_weights=weights, **maps).sum().backward()
    assert x.grad.any()
    with pytest.raises(ValueError, match="token_topk_to_pos: expected a tensor for topk_weights' gradient"):
        tk_modeling.swiglu(x, topk_weights=weights.requires_grad_(), **maps)


def test_no_graph_without_gradients() -> None:
    maps, x = mapping(), torch.randn(NUM_TOKENS, HIDDEN)
    logits = torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        weights = tk_modeling.topk_gate_with_weights(logits, 2, "sigmoid")[1]
    rows = tk_modeling.expand_to_fused(x, maps["token_topk_to_pos"], maps["pos_to_expert"])
    y = tk_modeling.reduce_fused(rows, None, maps["token_topk_to_pos"])
    assert not any(each.requires_grad for each in (weights, rows, y))
    # Without gradients every argument of the op is allowed, a pair and FP8 for instance.
    quantized = tk_modeling.reduce_fused((rows, torch.ones(60)), None, maps["token_topk_to_pos"], "e4m3")
    assert quantized.dtype == torch.float8_e4m3fn


X, LOGITS = torch.ones(60, 64, requires_grad=True), torch.ones(3, 6, requires_grad=True)
POS, EXPERT = torch.zeros(NUM_TOKENS, 3, dtype=torch.int32), torch.zeros(60, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: tk_modeling.expand_to_fused(X[:11, :32].contiguous(), POS, EXPERT),
            ValueError,
            "hidden .*multiple of 64",
        ),
        (lambda: tk_modeling.expand_to_fused(X.half()[:11], POS, EXPERT), TypeError, "x: .*bfloat16"),
        (lambda: tk_modeling.reduce_fused((X, X[:, 0]), None, POS), ValueError, "x: expected one tensor"),
        (lambda: tk_modeling.reduce_fused(X, None, POS, "e4m3"), ValueError, "fp8_format: expected ''"),
        (lambda: tk_modeling.reduce_fused(X, None, POS, out=X[:11].detach()), ValueError, "out: expected None"),
        (
            lambda: tk_modeling.reduce_fused(X, None, POS, pos_to_expert=EXPERT[:5]),
            ValueError,
            "pos_to_expert: .*shape",
        ),
        (
            lambda: tk_modeling.reduce_fused(X.detach(), None, POS, pos_to_expert=EXPERT.long()),
            TypeError,
            "pos_to_expert: .*int32",
        ),
        (lambda: tk_modeling.reduce_fused(None, None, POS), TypeError, "x: expected a torch.Tensor or a pair"),
        (lambda: tk_modeling.reduce_fused((), None, POS), TypeError, "x: expected a torch.Tensor or a pair"),
        (lambda: tk_modeling.expand_to_fused([1.0], POS, EXPERT), TypeError, "x: expected a torch.Tensor"),
        (lambda: tk_modeling.normalize_weight([1.0]), TypeError, "topk_weights: expected a torch.Tensor"),
        (lambda: tk_modeling.aux_loss([1.0], torch.ones(6)), TypeError, "scores: expected a torch.Tensor"),
        (lambda: tk_modeling.topk_gate_with_weights([1.0], 2, "sigmoid"), TypeError, "logits: expected a torch.Tensor"),
        (lambda: tk_modeling.hash_gate(POS, POS, None, "sigmoid"), TypeError, "logits: expected a torch.Tensor"),
        (lambda: gate_by_groups([1.0]), TypeError, "logits: expected a torch.Tensor"),
        # To find the gradient of a mapped gate, it makes a tensor of experts before the op checks its arguments.
        (lambda: gate_by_groups(LOGITS.sum(), (0, 4, 1, 2)), ValueError, "logits: expected shape"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
