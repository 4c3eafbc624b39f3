"""engram_gate."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_engram.reference
import tk_modeling
from tk_core.testing import assert_equal
from tk_modeling.engram.functional import engram_gate_kv

from .cases import check_gradients, in_float64, parameter, relative_error, streams

NUMBERS = (1e-6, 1e-5)
"""clamp_value and eps."""


def gate_inputs(leading: tuple[int, ...] = (3, 7), m: int = 3, hidden: int = 192, device: str = "cpu") -> list[Tensor]:
    """Leaves: streams (..., m, H) and kv (..., m + 1, H)."""
    torch.manual_seed(0)
    x, k = (streams(leading, m, hidden, device) for _ in range(2))
    kv = torch.cat((k, torch.randn_like(k[..., :1, :])), -2)
    return [x.requires_grad_(), kv.requires_grad_()]


def gate_weights(m: int = 3, hidden: int = 192, **options: Any) -> list[Tensor]:
    return [parameter(m, hidden, **options) for _ in range(2)]


@pytest.mark.parametrize("add_residual", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gate_gradients(dtype: torch.dtype, masked: bool, add_residual: bool, device: str) -> None:
    x, kv = gate_inputs(device=device)
    weights = gate_weights(dtype=dtype, device=device)
    mask = torch.rand(3, 7, device=device) < 0.3 if masked else None
    out = tk_modeling.engram_gate(
        x, kv[..., :3, :], kv[..., 3, :], *weights, *NUMBERS, image_token_mask=mask, add_residual=add_residual
    )
    weight = torch.randn_like(out)
    out.backward(weight)

    exact = in_float64([x, kv, *weights])
    flat_x, flat_kv = (each.flatten(0, 1) for each in exact[:2])
    want, *_ = tk_engram.reference.engram_gate_fwd(
        flat_x,
        flat_kv[:, :3],
        flat_kv[:, 3],
        exact[2] * exact[3],
        *NUMBERS[::-1],
        image_token_mask=None if mask is None else mask.flatten(),
        add_residual=add_residual,
    )
    want.backward(weight.double().flatten(0, 1))
    assert out.shape == x.shape
    assert relative_error(out.flatten(0, 1), want) < 2**-8
    check_gradients([x, kv, *weights], exact)


def test_gate_of_one_tensor_has_the_bits_of_two_and_one_dense_gradient() -> None:
    x, kv = gate_inputs()
    weights = gate_weights()
    seen: list[tuple[bool, bool]] = []
    kv.register_hook(
        lambda grad: seen.append((grad.is_contiguous(), grad.untyped_storage().nbytes() == 2 * kv.numel()))
    )
    results = []
    for packed in (False, True):
        if packed:
            out = engram_gate_kv(x, kv, *weights, *NUMBERS)
        else:
            out = tk_modeling.engram_gate(x, kv[..., :3, :], kv[..., 3, :], *weights, *NUMBERS)
        torch.manual_seed(1)
        grads = torch.autograd.grad(out, (x, kv, *weights), torch.randn_like(out))
        results.append((out.detach(), *grads))
    assert_equal(results[1], results[0])
    assert seen[1] == (True, True)


def test_gate_takes_any_strides() -> None:
    x, kv = (each.detach() for each in gate_inputs())
    weights = gate_weights()
    expected = tk_modeling.engram_gate(x, kv[..., :3, :], kv[..., 3, :], *weights, *NUMBERS)
    transposed = [each.transpose(-1, 0).contiguous().transpose(-1, 0) for each in (x, kv[..., :3, :], kv[..., 3, :])]
    assert not any(each.is_contiguous() for each in transposed)
    assert_equal(tk_modeling.engram_gate(*transposed, *weights, *NUMBERS), expected)
    # Without leading dimensions it is one token.
    assert_equal(
        tk_modeling.engram_gate(x[1, 2], kv[1, 2, :3], kv[1, 2, 3], *weights, *NUMBERS), expected[1, 2].clone()
    )


@pytest.mark.parametrize("with_main_grad", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_gate_adds_each_gradient_to_main_grad_on_its_own(with_main_grad: tuple[bool, bool], contiguous: bool) -> None:
    x, kv = gate_inputs()
    weights = gate_weights()
    engram_gate_kv(x, kv, *weights, *NUMBERS).sum().backward()
    expected = [weight.grad for weight in weights]
    for weight, has_main_grad in zip(weights, with_main_grad):
        weight.grad = None
        if has_main_grad:
            weight.main_grad = torch.full(weight.shape[::-1], 3.0).t()
            if contiguous:
                weight.main_grad = weight.main_grad.contiguous()
    buffers = [getattr(weight, "main_grad", None) for weight in weights]
    for _ in range(2):
        engram_gate_kv(x, kv, *weights, *NUMBERS).sum().backward()
    for weight, want, buffer in zip(weights, expected, buffers):
        if buffer is None:
            assert relative_error(weight.grad, 2 * want) < 2**-8
        else:
            assert weight.grad is None
            assert weight.main_grad is buffer
            assert relative_error(buffer - 3, 2 * want) < 2**-8


def test_gate_of_masked_tokens_ignores_what_is_not_finite() -> None:
    x, kv = gate_inputs((5,))
    mask = torch.tensor([False, True, False, False, True])
    kv.data[1], kv.data[4] = torch.nan, torch.inf
    weights = gate_weights()
    out = engram_gate_kv(x, kv, *weights, *NUMBERS, image_token_mask=mask)
    out.backward(torch.ones_like(out))
    assert_equal(out[mask].detach(), x[mask].detach())
    assert_equal(x.grad[mask], torch.ones_like(x.grad[mask]))
    assert not kv.grad[mask].any()
    assert all(torch.isfinite(each.grad).all() for each in (x, kv, *weights))


def test_gate_whose_result_gets_no_gradient_gives_none() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    leaves = [*gate_inputs(), *gate_weights()]
    Nothing.apply(engram_gate_kv(*leaves, *NUMBERS)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"hidden_states": torch.zeros(3, 7, 3, 192)}, TypeError, "hidden_states"),
        ({"hidden_states": torch.zeros(3, 7, 2, 192).bfloat16()}, ValueError, "k"),
        ({"k": torch.zeros(21, 3, 192).bfloat16()}, ValueError, "k"),
        ({"v": torch.zeros(3, 7, 3, 192).bfloat16()}, ValueError, "v"),
        ({"v": torch.zeros(3, 7, 192)}, TypeError, "v"),
        ({"weight_hidden": [1.0]}, TypeError, "weight_hidden"),
        ({"image_token_mask": torch.zeros(21).bool()}, ValueError, "image_token_mask"),
        ({"image_token_mask": torch.zeros(3, 7)}, TypeError, "image_token_mask"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_gate_names_what_is_wrong(change: dict[str, Any], error: type[Exception], name: str, trains: bool) -> None:
    x, kv = (each.detach() for each in gate_inputs())
    weights = [weight.detach().requires_grad_(trains) for weight in gate_weights()]
    values = (x, kv[..., :3, :], kv[..., 3, :], *weights, *NUMBERS)
    names = ("hidden_states", "k", "v", "weight_hidden", "weight_embed", "clamp_value", "eps")
    with pytest.raises(error, match=rf"^{name}\b"):
        tk_modeling.engram_gate(**(dict(zip(names, values)) | change))
