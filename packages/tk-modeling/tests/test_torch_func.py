"""torch.func's transforms over modules and functions: right gradients, or an error, and never a dropped derivative."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vjp

import tk_modeling
from tk_core.testing import assert_equal
from tk_core.testing.trees import tensors

from .checks import ModuleCase
from .engram import cases as engram
from .fp8 import cases as fp8
from .mhc import cases as mhc
from .mhc import test_ops as ops
from .moe import cases as moe
from .norm import cases as norm

BF16 = torch.bfloat16
CASES = (*mhc.CASES, *engram.CASES, *moe.CASES, *fp8.CASES, *norm.CASES)
FP8_CASES = [case for case in CASES if "fp8" in case.name]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def made(case: ModuleCase, device: str = "cpu") -> tuple[nn.Module, dict[str, Tensor], tuple[Tensor, ...]]:
    """A module, its parameters and inputs."""
    torch.manual_seed(0)
    module = case.make(device).eval()
    if isinstance(module, tk_modeling.HyperConnection):
        module.sublayer = nn.Identity()  # torch.func rounds a linear layer's bfloat16 sums in other places
    return module, {name: x.detach() for name, x in module.named_parameters()}, case.make_inputs((2, 3), device)


def loss_of(outputs: Any) -> Tensor:
    return sum(y.float().square().sum() for y in tensors(outputs) if y.is_floating_point())


@each_case
def test_gradients_are_those_of_backward(case: ModuleCase) -> None:
    module, parameters, (x, *others) = made(case)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(functional_call(module, parameters, (x, *others)))

    leaf = x.clone().requires_grad_()
    loss_of(module(leaf, *others)).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert_equal(grad(loss, argnums=(0, 1))(parameters, x), (expected, leaf.grad))
    # Beyond the transform, which has ended when its function for the backward is called.
    value, backward = vjp(loss, parameters, x)
    assert_equal(backward(torch.ones_like(value)), (expected, leaf.grad))
    # Of one parameter, or of the input, alone.
    name = next(iter(parameters))
    one = grad(lambda parameter: loss({**parameters, name: parameter}, x))(parameters[name])
    assert_equal((one, grad(loss, argnums=1)(parameters, x)), (expected[name], leaf.grad))


@pytest.mark.gpu
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_gradients_of_fp8_on_a_gpu(case: ModuleCase) -> None:
    module, parameters, (x, *others) = made(case, "cuda")
    leaf = x.clone().requires_grad_()
    loss_of(module(leaf, *others)).backward()
    found, d_x = grad(lambda given, x: loss_of(functional_call(module, given, (x, *others))), (0, 1))(parameters, x)
    for name, parameter in module.named_parameters():
        assert engram.relative_error(found[name], parameter.grad) < 0.01, name
    assert engram.relative_error(d_x, leaf.grad) < 0.01


@each_case
def test_a_gradient_of_the_input_alone_leaves_main_grads(case: ModuleCase) -> None:
    module, _, (x, *others) = made(case)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    grad(lambda x: loss_of(module(x, *others)))(x)
    assert not any(parameter.main_grad.any() for parameter in module.parameters())


@each_case
def test_a_gradient_of_a_gradient_is_an_error(case: ModuleCase) -> None:
    module, _, (x, *others) = made(case)
    with pytest.raises(RuntimeError, match=r"differentiable once|does not require grad"):
        grad(lambda x: grad(lambda x: loss_of(module(x, *others)))(x).float().square().sum())(x)


@each_case
def test_forward_mode_is_an_error(case: ModuleCase) -> None:
    module, parameters, (x, *others) = made(case)
    with pytest.raises(NotImplementedError, match=r"^forward mode"):
        jvp(lambda x: module(x, *others), (x,), (x,))
    with forward_ad.dual_level(), torch.no_grad():
        module(x, *others)
        for name, parameter in parameters.items():
            tangent = {**parameters, name: forward_ad.make_dual(parameter, parameter)}
            with pytest.raises(NotImplementedError, match=r"^forward mode"):
                functional_call(module, tangent, (x, *others))


def bf16(*shape: int) -> Tensor:
    return torch.rand(shape).to(BF16)


ENDS = torch.tensor([128], dtype=torch.int32)
POS = torch.tensor([[0, 1]], dtype=torch.int32)
EXPERT = torch.zeros(2, dtype=torch.int32)
IDX = torch.tensor([[0, 1]], dtype=torch.int32)
ANGLES = torch.rand(3, 32)


def single_op(case: ops.Case) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """The function of a case, and its tensors, which come before its numbers."""
    args = case.make((3,))
    given = tuple(x for x in args if isinstance(x, Tensor))
    return lambda *leaves: getattr(tk_modeling, case.name)(*leaves, *args[len(leaves) :]), given


# Each function with its differentiable arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "apply_rotary": (
        lambda query, key: tk_modeling.apply_rotary(query, ANGLES, key),
        (bf16(3, 2, 40), bf16(3, 1, 40)),
    ),
    "qk_norm_rotary": (
        lambda query, weight, key_weight, key: tk_modeling.qk_norm_rotary(
            query, ANGLES, weight, key_weight, 1e-6, key, round_before_weight=True
        ),
        (bf16(3, 2, 40), torch.rand(40), bf16(40), bf16(3, 1, 40)),
    ),
    "rms_norm": (
        lambda x, weight, residual: tk_modeling.rms_norm(x, weight, 1e-6, residual),
        (bf16(3, 72), torch.rand(72), bf16(3, 72)),
    ),
    "aux_loss": (lambda scores: tk_modeling.aux_loss(scores, torch.ones(4)), (torch.rand(3, 4),)),
    "engram_gate": (
        lambda *args: tk_modeling.engram_gate(*args, 1e-6, 1e-6),
        (bf16(3, 2, 64), bf16(3, 2, 64), bf16(3, 64), bf16(2, 64), bf16(2, 64)),
    ),
    "engram_lookup": (lambda table: tk_modeling.engram_lookup(IDX, table), (bf16(5, 32),)),
    "expand_from_embedding": (tk_modeling.expand_from_embedding, (bf16(3, 64),)),
    "expand_to_fused": (lambda x: tk_modeling.expand_to_fused(x, POS, EXPERT), (bf16(1, 64),)),
    "fp8_linear": (tk_modeling.fp8_linear, (bf16(3, 128), bf16(128, 128))),
    "grouped_fp8_linear": (
        lambda rows, weight: tk_modeling.grouped_fp8_linear(rows, weight, ENDS),
        (bf16(128, 128), bf16(1, 128, 128)),
    ),
    "hash_gate": (
        lambda logits: tk_modeling.hash_gate(torch.zeros(3, dtype=torch.int64), IDX, logits, "sigmoid"),
        (torch.rand(3, 4),),
    ),
    "mhc_head": (
        lambda *args: tk_modeling.mhc_head(*args, mhc_mult=2),
        (bf16(3, 2, 64), torch.rand(2, 128), torch.rand(1), torch.rand(2)),
    ),
    "mhc_pre": (
        lambda *args: tk_modeling.mhc_pre(*args, mhc_mult=2)[0],
        (bf16(3, 2, 64), torch.rand(8, 128), torch.rand(3), torch.rand(8)),
    ),
    "normalize_weight": (tk_modeling.normalize_weight, (torch.rand(3, 2),)),
    "reduce_fused": (lambda x, w: tk_modeling.reduce_fused(x, w, POS), (bf16(2, 64), torch.rand(1, 2))),
    "short_conv": (
        lambda *args: tk_modeling.short_conv(*args, dilation=2),
        (bf16(3, 2, 64), bf16(2, 64), bf16(2, 64, 4)),
    ),
    "swiglu": (tk_modeling.swiglu, (bf16(3, 128),)),
    "top2_sum_gate": (
        lambda logits: tk_modeling.top2_sum_gate(logits, torch.zeros(4), 2, 0, 0, False, 0, 1.0, 0, 1, 0, 1, "sigmoid"),
        (torch.rand(3, 4),),
    ),
    **{case.name: single_op(case) for case in ops.CASES},
    "topk_gate_with_weights": (lambda x: tk_modeling.topk_gate_with_weights(x, 2, "sigmoid"), (torch.rand(3, 4),)),
}
# tk_mhc's own ops, a function of layers, and calls of several ranks (moe/test_expert_parallel.py).
OTHERS = {"mhc_multilayer_recompute", "mhc_post_bwd", "mhc_post_fwd", "mhc_pre_big_fuse", "checkpoint_streams"}
OTHERS |= {"ep_combine", "ep_dispatch"}


def test_all_functions_are_tried() -> None:
    public = {name for name in tk_modeling.__all__ if name.islower() and callable(getattr(tk_modeling, name))}
    assert public == FUNCTIONS.keys() | OTHERS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_in_forward_mode_is_an_error(name: str) -> None:
    function, args = FUNCTIONS[name]
    for i in range(len(args)):
        with forward_ad.dual_level(), torch.no_grad(), pytest.raises(NotImplementedError, match=r"^forward mode"):
            function(*args[:i], forward_ad.make_dual(args[i], args[i]), *args[i + 1 :])


def test_forward_mode_under_compile_is_an_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: jvp(tk_modeling.swiglu, (x,), (x,)), backend="eager")
    with pytest.raises(NotImplementedError, match=r"^forward mode"):
        compiled(bf16(3, 128))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vjp_of_a_function_is_its_backward(name: str) -> None:
    function, args = FUNCTIONS[name]
    leaves = [x.clone().requires_grad_() for x in args]
    expected = torch.autograd.grad(loss_of(function(*leaves)), leaves)
    value, backward = vjp(lambda *args: loss_of(function(*args)), *args)
    assert_equal(backward(torch.ones_like(value)), expected)
