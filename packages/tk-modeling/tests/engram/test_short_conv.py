"""short_conv."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tk_engram.reference
import tk_modeling
from tk_core.testing import assert_equal

from .cases import check_gradients, in_float64, parameter, relative_error


def conv_inputs(*leading: int, m: int = 2, hidden: int = 64, device: str = "cpu", **options: Any) -> list[Tensor]:
    """Leaves: u, norm_weight, conv_weight, residual."""
    torch.manual_seed(0)
    u, residual = (torch.randn(*leading, m, hidden, device=device).bfloat16().requires_grad_() for _ in range(2))
    weights = parameter(m, hidden, device=device, **options), parameter(m, hidden, 4, mean=0, device=device, **options)
    return [u, *weights, residual]


@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("leading", "offsets"), [((3, 11), [0, 11, 22, 33]), ((33,), [0, 1, 1, 19, 33]), ((33,), None)]
)
def test_conv_gradients(
    leading: tuple[int, ...], offsets: list[int] | None, dtype: torch.dtype, has_residual: bool, device: str
) -> None:
    leaves = conv_inputs(*leading, dtype=dtype, device=device)[: 4 if has_residual else 3]
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device, dtype=torch.int32)
    options = {"dilation": 3, "eps": 1e-4}
    given = None if len(leading) == 2 else cu_seqlens
    out = tk_modeling.short_conv(*leaves[:3], **options, cu_seqlens=given, residual=leaves[3] if has_residual else None)
    weight = torch.randn_like(out)
    out.backward(weight)

    exact = in_float64(leaves)
    u, residual = exact[0].view(33, 2, 64), exact[3].view(33, 2, 64) if has_residual else None
    want = tk_engram.reference.short_conv(u, *exact[1:3], **options, cu_seqlens=cu_seqlens, residual=residual)
    want.backward(weight.double().view(33, 2, 64))
    assert out.shape == leaves[0].shape
    assert relative_error(out.view(33, 2, 64), want) < 2**-8
    check_gradients(leaves, exact)


def test_conv_of_a_batch_has_the_bits_of_each_sequence_alone() -> None:
    u, *weights, residual = (x.detach() for x in conv_inputs(3, 11))
    out = tk_modeling.short_conv(u, *weights, dilation=2, residual=residual)
    for i in range(3):
        assert_equal(tk_modeling.short_conv(u[i], *weights, dilation=2, residual=residual[i]), out[i].clone())
    strided = u.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal(tk_modeling.short_conv(strided, *weights, dilation=2, residual=residual), out)


@pytest.mark.parametrize("batch", [1, 3])
def test_conv_decodes_with_a_state(batch: int) -> None:
    u, *weights, _ = (x.detach() for x in conv_inputs(batch, 9))
    state = torch.zeros(batch, 3 * 2, 2, 64).bfloat16()
    steps = [tk_modeling.short_conv(u[:, t : t + 1], *weights, dilation=2, state=state) for t in range(9)]
    assert_equal(torch.cat(steps, 1), tk_modeling.short_conv(u, *weights, dilation=2))
    assert torch.equal(state, u[:, -6:])


def test_conv_computes_gradients_of_what_is_not_frozen() -> None:
    leaves = conv_inputs(12)
    tk_modeling.short_conv(*leaves[:3], dilation=3, residual=leaves[3]).sum().backward()
    for i in range(4):
        alone = conv_inputs(12)
        for j, x in enumerate(alone):
            x.requires_grad_(i == j)
        alone[1].main_grad = torch.zeros(2, 64) if i != 1 else None
        tk_modeling.short_conv(*alone[:3], dilation=3, residual=alone[3]).sum().backward()
        assert_equal(alone[i].grad, leaves[i].grad)
        assert all(x.grad is None for j, x in enumerate(alone) if i != j)
        assert i == 1 or not alone[1].main_grad.any()


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"u": torch.zeros(3, 11, 2, 64)}, TypeError, "u"),
        ({"u": torch.zeros(2, 64).bfloat16()}, ValueError, "u"),
        ({"u": torch.zeros(1, 3, 11, 2, 64).bfloat16()}, ValueError, "u"),
        ({"residual": torch.zeros(33, 2, 64).bfloat16()}, ValueError, "residual"),
        ({"cu_seqlens": torch.tensor([0, 33]).int()}, ValueError, "cu_seqlens"),
        ({"state": torch.zeros(3, 9, 2, 64).bfloat16()}, ValueError, "state"),
    ],
)
def test_conv_names_what_is_wrong(change: dict[str, Any], error: type[Exception], name: str) -> None:
    u, norm_weight, conv_weight, _ = conv_inputs(3, 11)
    values = {"u": u, "norm_weight": norm_weight, "conv_weight": conv_weight, "dilation": 3}
    with pytest.raises(error, match=rf"^{name}\b"):
        tk_modeling.short_conv(**(values | change))
