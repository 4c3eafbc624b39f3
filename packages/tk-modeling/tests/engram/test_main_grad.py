"""main_grad of parameters that are used more than once, in all ways of running them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tk_modeling
from tk_modeling.engram.functional import engram_gate_kv

from .cases import parameter, relative_error, streams

NUM_ROWS = 41


def all_three(x: Tensor, kv: Tensor, indices: Tensor, parameters: list[Tensor]) -> Tensor:
    weight_hidden, weight_embed, norm_weight, conv_weight, table = parameters
    gated = engram_gate_kv(x, kv, weight_hidden, weight_embed, 1e-6, 1e-5, add_residual=False)
    out = tk_modeling.short_conv(gated, norm_weight, conv_weight, dilation=2, residual=x)
    return out.sum() + tk_modeling.engram_lookup(indices, table).square().sum()


WAYS = {
    "eager": all_three,
    "compiled": torch.compile(all_three, fullgraph=True, backend="aot_eager"),
    "checkpoint": partial(checkpoint, all_three, use_reentrant=False),
    "reentrant-checkpoint": partial(checkpoint, all_three, use_reentrant=True),
}


@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
def test_main_grad_of_a_parameter_used_twice(run: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    x, kv = (streams((5,), m, 64, "cpu").requires_grad_() for m in (2, 3))
    indices = torch.randint(NUM_ROWS, (5, 3), dtype=torch.int32)

    def new_parameters() -> list[Tensor]:
        torch.manual_seed(3)
        shapes = (2, 64), (2, 64), (2, 64), (2, 64, 4), (NUM_ROWS, 32)
        return [parameter(*shape, dtype=torch.float32 if len(shape) > 2 else torch.bfloat16) for shape in shapes]

    expected, parameters = new_parameters(), new_parameters()
    all_three(x, kv, indices, expected).backward()
    for each in parameters:
        each.main_grad = torch.zeros(each.shape)
    # Both forwards come before both backwards, each of which changes main_grad.
    torch.autograd.backward([run(x, kv, indices, parameters), run(x, kv, indices, parameters)])
    for each, want in zip(parameters, expected):
        assert each.grad is None
        assert relative_error(each.main_grad, 2 * want.grad) < 2**-8
