"""sinkhorn_normalize_bwd."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tk_mhc
from tk_core.arch import ARCHS
from tk_core.testing import Case, Make, OpSpec, tiers
from tk_mhc import reference
from tk_mhc.lib.tokens import MAX_REPEAT
from tk_mhc.mixes.sinkhorn_normalize_bwd import tokens_a_block

from ..compare import within
from .test_sinkhorn_normalize import make_logits, shared_cases


def make(
    leading: tuple[int, ...], mhc_mult: int, repeat: int = 10, eps: float = 1e-6, *, std: float = 1.0, **layout: Any
) -> Make:
    """Arguments of the op: normal gradients, of the same layout as x."""

    def build(device: str) -> dict[str, Any]:
        return {
            "d_o": make_logits(leading, mhc_mult, device, **layout),
            "x": make_logits(leading, mhc_mult, device, std=std, **layout),
            "repeat": repeat,
            "eps": eps,
        }

    return build


SPEC = OpSpec(
    op=tk_mhc.sinkhorn_normalize_bwd,
    compare=within(),
    cases=(
        Case("m8-t33-r20", make((33,), 8, repeat=20), small=True),
        # Of so many iterations, sums of 4 tokens at most fit in shared memory.
        Case("m8-t33-r800", make((33,), 8, repeat=800), small=True, compile=True),
        *shared_cases(make),
    ),
)


test_tiers = tiers.tests(SPEC)


def test_by_hand() -> None:
    # Of equal logits, softmax is 1/2 everywhere, and columns have sums of 1: y = x, d_x = d_y less its column's mean.
    # (8, 0; 0, 0) → (4, 0; -4, 0), and through the softmax, 1/2 · (d less its row's mean) → (1, -1; -1, 1).
    # More iterations only take away means that are 0 by then, or that the softmax would.
    d_o = torch.tensor([[8.0, 0.0], [0.0, 0.0]])
    for repeat in (1, 2, 10):
        d_x = tk_mhc.sinkhorn_normalize_bwd(d_o, torch.zeros(2, 2), repeat, 0.0)
        torch.testing.assert_close(d_x, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))


def test_by_hand_of_unequal_logits() -> None:
    # Softmax p = (1/4, 3/4; 1/2, 1/2), sums of columns 3/4 and 5/4, y = (1/3, 3/5; 2/3, 2/5).
    # d = (15, 0; 0, 0): less Σ d · y = 5 of its column, by 3/4: (40/3, 0; -20/3, 0).
    # Row 0: dot 10/3, p · (40/3 - 10/3, -10/3) = (5/2, -5/2); row 1: dot -10/3, 1/2 · (-10/3, 10/3).
    x = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])
    d_x = tk_mhc.sinkhorn_normalize_bwd(torch.tensor([[15.0, 0.0], [0.0, 0.0]]), x, 1, 0.0)
    torch.testing.assert_close(d_x, torch.tensor([[5 / 2, -5 / 2], [-5 / 3, 5 / 3]]))


def autograd(d_o: Tensor, x: Tensor, repeat: int, eps: float) -> Tensor:
    """The gradient of the forward's reference."""
    x = x.detach().clone().requires_grad_()
    (d_x,) = torch.autograd.grad(reference.sinkhorn_normalize(x, repeat, eps), x, d_o)
    return d_x


@pytest.mark.parametrize("repeat", [1, 2, 10, 20])
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.0])
def test_against_autograd(eps: float, mhc_mult: int, repeat: int) -> None:
    inputs = make((50,), mhc_mult, repeat, eps, std=3.0)("cpu")
    d_o, x = inputs["d_o"].double(), inputs["x"].double()
    expected = autograd(d_o, x, repeat, eps)
    torch.testing.assert_close(reference.sinkhorn_normalize_bwd(d_o, x, repeat, eps), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tk_mhc.sinkhorn_normalize_bwd(**inputs), expected.float())


def test_gradient_is_of_no_shift_of_a_row() -> None:
    # The softmax takes away what is added to a row of logits.
    d_x = tk_mhc.sinkhorn_normalize_bwd(**make((100,), 4)("cpu"))
    assert d_x.abs().max() > 0.1
    torch.testing.assert_close(d_x.sum(-1), torch.zeros(100, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS.keys())
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
def test_sums_fit_into_shared_memory(mhc_mult: int, arch: Any) -> None:
    assert tokens_a_block(mhc_mult, 20, arch) == 32
    for repeat in (1, 100, 400, MAX_REPEAT):
        block_tokens = tokens_a_block(mhc_mult, repeat, arch)
        assert block_tokens >= 1
        assert block_tokens * (2 * repeat - 1) * mhc_mult * 4 <= arch.max_shared_memory - 1024


test_bad_input = tiers.bad_input(
    SPEC,
    make((3,), 4)("cpu"),
    [
        ({"d_o": torch.ones(2, 4, 4)}, ValueError, "d_o.*shape"),
        ({"x": torch.ones(3, 4, 8)}, ValueError, "x.*square"),
        ({"x": torch.ones(3, 5, 5)}, ValueError, "mhc_mult.*2, 4, 8"),
        ({"eps": -1.0}, ValueError, "eps.*at least 0"),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("mhc_mult", [2, 4, 8])
@pytest.mark.parametrize("repeat", [1, 2, 10, 20, 100])
def test_gpu_against_autograd_in_float64(repeat: int, mhc_mult: int) -> None:
    x = torch.cat([torch.randn(1000, mhc_mult, mhc_mult, device="cuda") * std for std in (0.1, 1, 10, 80)])
    d_o = torch.randn_like(x)
    expected = autograd(d_o.double(), x.double(), repeat, 1e-6).float()
    torch.testing.assert_close(tk_mhc.sinkhorn_normalize_bwd(d_o, x, repeat, 1e-6), expected)
