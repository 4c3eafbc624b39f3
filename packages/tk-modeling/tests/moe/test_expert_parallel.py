"""ep_dispatch, ep_combine and MoE with experts on two ranks, each a process of a gloo group, against one process."""

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import tk_modeling.moe.moe as moe_module
from tk_core import env
from tk_core.testing import assert_equal, calc_diff
from tk_ep import ElasticBuffer
from tk_modeling import MoE, ep_combine, ep_dispatch
from tk_modeling.moe.experts import grouped_linear

ranks = import_module("packages.tk-ep.tests.ranks")

HIDDEN, NUM_EXPERTS, NUM_TOPK = 128, 6, 3
COUNTS = ((5, 12), (0, 9), (7, 0))
"""Tokens of both ranks."""


def make_buffer(here: Any, **options: Any) -> ElasticBuffer:
    sizes = {"num_max_tokens_per_rank": 12, "hidden": HIDDEN, "num_topk": NUM_TOPK}
    return ElasticBuffer(here.world, **sizes, num_cpu_timeout_secs=60, **options)


def both_buffers(here: Any) -> tuple[ElasticBuffer, ElasticBuffer]:
    """With sums on each rank, and without, so that bits do not depend on the number of ranks."""
    return make_buffer(here), make_buffer(here, allow_multiple_reduction=False)


def own_tokens(here: Any, counts: tuple[int, int]) -> slice:
    """Which of all tokens this rank has."""
    return slice(0, counts[0]) if here.rank == 0 else slice(counts[0], sum(counts))


def own_experts(here: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's share of the state of a layer with all experts."""
    return {name: x if name.startswith("router") else x.chunk(2)[here.rank] for name, x in state.items()}


def small_integers(*shape: int, seed: int) -> Tensor:
    """-2 to 2, so that all sums here are exact."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def choices(num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each token three slots with different experts, one in five without, and weights of one binary digit."""
    generator = torch.Generator().manual_seed(num_tokens)
    topk_idx = torch.rand((num_tokens, NUM_EXPERTS), generator=generator).topk(NUM_TOPK).indices
    is_none = torch.rand(topk_idx.shape, generator=generator) < 0.2
    weights = torch.randint(1, 5, topk_idx.shape, generator=generator) / 2
    return topk_idx.masked_fill(is_none, -1), weights


def scaled(buffer: ElasticBuffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, **options: Any) -> Tensor:
    """A layer whose expert e multiplies by e + 1, and by the weight."""
    rows, row_weights, handle = ep_dispatch(buffer, x, topk_idx, topk_weights, NUM_EXPERTS, **options)
    scale = handle.pos_to_expert + 1 + buffer.rank_idx * NUM_EXPERTS // 2
    return ep_combine(buffer, (rows * (row_weights * scale).unsqueeze(1)).bfloat16(), handle)


def functions_and_their_gradients(here: Any) -> None:
    """Exactly those of a plain sum over slots: of both inputs, and of one where the other is frozen."""
    options = ({}, {"expert_alignment": 16}, {"expert_alignment": 16, "do_cpu_sync": False})
    for buffer, counts, chosen in product(both_buffers(here), COUNTS, options):
        own, total = own_tokens(here, counts), sum(counts)
        topk_idx, topk_weights = (each[own] for each in choices(total))
        x, d_y = (small_integers(total, HIDDEN, seed=seed)[own].bfloat16() for seed in (1, 2))
        leaves = x.requires_grad_(), topk_weights.requires_grad_()
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        y = exact[0] * (exact[1] * (topk_idx + 1)).sum(1, keepdim=True)
        # Sums begin with +0.
        expected = [each + 0.0 for each in torch.autograd.grad(y, exact, d_y.double())]

        found = scaled(buffer, x, topk_idx, topk_weights, **chosen)
        assert_equal(found, (y + 0.0).bfloat16(), name="y")
        for leaf, got, want in zip(leaves, torch.autograd.grad(found, leaves, d_y), expected, strict=True):
            assert_equal(got, want.to(leaf.dtype))
        found = scaled(buffer, x, topk_idx, topk_weights.detach(), **chosen)
        assert_equal(torch.autograd.grad(found, x, d_y)[0], expected[0].bfloat16())
        found = scaled(buffer, x.detach(), topk_idx, topk_weights, **chosen)
        assert_equal(torch.autograd.grad(found, topk_weights, d_y)[0], expected[1].float())
        with torch.no_grad():
            assert not scaled(buffer, x, topk_idx, topk_weights, **chosen).requires_grad


def functions_in_other_ways(here: Any) -> None:
    """Rows without gradients, no weights, torch.func, forward mode, and a handle with a row for a token and a rank."""
    buffer = make_buffer(here)
    topk_idx, topk_weights = choices(10)
    x = small_integers(10, HIDDEN, seed=here.rank).bfloat16()
    leaf, weights = x.clone().requires_grad_(), topk_weights.clone().requires_grad_()

    _, row_weights, handle = ep_dispatch(buffer, leaf, topk_idx, weights, NUM_EXPERTS)
    row_weights.backward(handle.pos_to_expert.float())
    assert leaf.grad is None
    assert_equal(weights.grad, torch.where(topk_idx < 0, 0, topk_idx % 3).float())

    rows, none, handle = ep_dispatch(buffer, leaf, topk_idx, None, NUM_EXPERTS)
    assert none is None
    ep_combine(buffer, rows, handle).backward(x)
    times = (topk_idx >= 0).sum(1, keepdim=True)
    assert_equal(leaf.grad, (x * times + 0.0).bfloat16())

    loss = lambda x, weights: (scaled(buffer, x, topk_idx, weights) * x.detach()).float().sum()  # noqa: E731
    expected = torch.autograd.grad(loss(leaf, weights), (leaf, weights))
    assert_equal(grad(loss, argnums=(0, 1))(x, topk_weights), expected)

    with forward_ad.dual_level():
        with ranks.raises(NotImplementedError, "forward mode"):
            ep_dispatch(buffer, forward_ad.make_dual(x, x), topk_idx, topk_weights, NUM_EXPERTS)
        with ranks.raises(NotImplementedError, "forward mode"):
            ep_combine(buffer, forward_ad.make_dual(rows.detach(), rows.detach()), handle)

    received, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=NUM_EXPERTS)
    received.requires_grad_()
    ep_combine(buffer, received, handle).backward(x)
    count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    assert_equal(received.grad[:count], received.detach()[:count])


def layers(here: Any, buffer: ElasticBuffer, fp8: bool) -> tuple[MoE, MoE]:
    """A layer with all experts, and this rank's part. Logits are exact, so that none depends on the other tokens."""
    torch.manual_seed(5)
    sizes = (HIDDEN, 128, NUM_EXPERTS, NUM_TOPK)
    whole = MoE(*sizes, fp8=fp8, dtype=torch.bfloat16)
    whole.router.weight.data.mul_(64).round_().div_(64)
    part = MoE(*sizes, fp8=fp8, dtype=torch.bfloat16, ep=buffer)
    part.load_state_dict(own_experts(here, whole.state_dict()))
    return whole, part


def layer(here: Any) -> None:
    """Outputs and gradients of one process that has all tokens; where sums are rounded once, with its bits.

    Also where no token has an expert of rank 1.
    """
    for buffer, fp8, (round_number, counts) in product(both_buffers(here), (False, True), enumerate(COUNTS)):
        whole, part = layers(here, buffer, fp8)
        if round_number == 2:
            for each in (whole, part):
                each.router.bias[NUM_EXPERTS // 2 :] = -100.0
        own = own_tokens(here, counts)
        x, d_y = (small_integers(sum(counts), HIDDEN, seed=seed).bfloat16() for seed in (3, 4))
        all_x, own_x = x.requires_grad_(), x.detach()[own].requires_grad_()
        y, _ = whole(all_x)
        y.backward(d_y)
        found, aux = part(own_x)
        found.backward(d_y[own])

        compare = assert_equal if not buffer.allow_multiple_reduction else assert_close
        compare(found, y[own])
        assert_equal(aux, part.router(own_x)[2])
        assert_close(own_x.grad, all_x.grad[own])
        assert_equal(part.gate_up.grad, whole.gate_up.grad.chunk(2)[here.rank])
        assert_equal(part.down.grad, whole.down.grad.chunk(2)[here.rank])
        dist.all_reduce(part.router.weight.grad)
        assert_close(part.router.weight.grad, whole.router.weight.grad)

        part.router.load //= 2  # counted twice, for aux
        assert_equal(part.router.load.sum(), torch.tensor(NUM_TOPK * counts[here.rank]))
        for each in (whole, part):
            each.router.update_bias()
        assert_equal(part.router.bias, whole.router.bias)
        assert not part.router.load.any()


def segments(here: Any) -> None:
    """torch's grouped products get those of one process: multiples of 16 rows."""
    found: list[Tensor] = []

    def noted(rows: Tensor, weight: Tensor, ends: Tensor, **more: str) -> Tensor:
        found.append(ends)
        return grouped_linear(rows, weight, ends, **more)

    whole, part = layers(here, make_buffer(here), fp8=False)
    x = small_integers(sum(COUNTS[0]), HIDDEN, seed=3).bfloat16()
    with patch.object(moe_module, "grouped_linear", noted):
        whole(x)
        part(x[own_tokens(here, COUNTS[0])])
    expected = found[0].diff(prepend=found[0].new_zeros(1)).chunk(2)[here.rank].cumsum(0).int()
    for ends in found[2:]:
        assert_equal(ends, expected)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert calc_diff(found, expected) < 1e-5


def initial_values(here: Any) -> None:
    """They are one process's with the same seed, and so is what is drawn afterwards; of a layer made on meta, too."""
    sizes, buffer = (64, 64, NUM_EXPERTS, NUM_TOPK), make_buffer(here)
    with torch.device("meta"):
        on_meta = MoE(*sizes, ep=buffer)
    whole, part = MoE(*sizes), on_meta.to_empty(device="cpu")
    makers = (
        (lambda: MoE(*sizes, dtype=torch.bfloat16), lambda: MoE(*sizes, ep=buffer, dtype=torch.bfloat16)),
        (lambda: whole.reset_parameters() or whole, lambda: part.reset_parameters() or part),
    )
    for pair in makers:
        states = []
        for make in pair:
            torch.manual_seed(0)
            states.append(dict(make().state_dict()) | {"router.drawn afterwards": torch.rand(3)})
        assert_equal(states[1], own_experts(here, states[0]))
    assert repr(part).count(f"ep=rank {here.rank} of 2") == 1
    assert copy.deepcopy(part).ep is buffer
    with ranks.raises(TypeError, "ElasticBuffer: cannot be pickled", "state_dict"):
        pickle.dumps(part)


def checkpointed(here: Any) -> None:
    """The same bits."""
    _, part = layers(here, make_buffer(here), fp8=False)
    x = small_integers(9, HIDDEN, seed=here.rank).bfloat16()

    def gradients(call: Callable[[Tensor], Any]) -> list[Tensor]:
        part.zero_grad()
        leaf = x.clone().requires_grad_()
        y, aux = call(leaf)
        (y.float().square().sum() + aux).backward()
        return [each.grad.clone() for each in (leaf, *part.parameters())]

    expected = gradients(part)
    for use_reentrant in (False, True):
        assert_equal(gradients(lambda leaf: checkpoint(part, leaf, use_reentrant=use_reentrant)), expected)  # noqa: B023


def compiled(here: Any) -> None:
    """torch.compile breaks its graph at the calls, forward and backward."""
    buffer = make_buffer(here)
    topk_idx, topk_weights = choices(10)
    leaves = small_integers(10, HIDDEN, seed=here.rank).bfloat16().requires_grad_(), topk_weights.requires_grad_()
    expected, found = (
        torch.autograd.grad(call(buffer, leaves[0], topk_idx, leaves[1]).float().square().sum(), leaves)
        for call in (scaled, torch.compile(scaled, backend="eager"))
    )
    assert_equal(found, expected)


@contextmanager
def debug_mode() -> Iterator[None]:
    """TK_DEBUG=1."""
    os.environ["TK_DEBUG"] = "1"
    env.debug.cache_clear()
    try:
        yield
    finally:
        del os.environ["TK_DEBUG"]
        env.debug.cache_clear()


def bad_arguments(here: Any) -> None:
    """They are named before anything is sent; what is right passes the checks of debug mode."""
    buffer = make_buffer(here)
    x, (topk_idx, topk_weights) = torch.zeros(10, HIDDEN).bfloat16(), choices(10)
    with ranks.raises(ValueError, "num_experts: expected a multiple of 2, got 5"):
        MoE(64, 64, 5, 2, ep=buffer)
    with ranks.raises(TypeError, "x: expected a torch.Tensor, got "):
        ep_dispatch(buffer, (x, x), topk_idx, topk_weights, NUM_EXPERTS)
    with ranks.raises(TypeError, "x: expected dtype torch.bfloat16"):
        ep_dispatch(buffer, x.float(), topk_idx, topk_weights, NUM_EXPERTS)
    with ranks.raises(ValueError, "topk_weights: expected shape"):
        ep_dispatch(buffer, x, topk_idx, topk_weights[1:], NUM_EXPERTS)
    with ranks.raises(TypeError, "buffer: expected a tk_ep.ElasticBuffer, got "):
        ep_dispatch(here.world, x, topk_idx, topk_weights, NUM_EXPERTS)
    rows, _, handle = ep_dispatch(buffer, x, topk_idx, topk_weights, NUM_EXPERTS)
    with ranks.raises(TypeError, "buffer: expected a tk_ep.ElasticBuffer, got "):
        ep_combine(None, rows, handle)
    with ranks.raises(TypeError, "handle: expected an EPHandle"):
        ep_combine(buffer, rows, None)
    with debug_mode():
        for fp8 in (False, True):
            y, _ = layers(here, buffer, fp8)[1](x.requires_grad_())
            y.sum().backward()


CASES = (
    functions_and_their_gradients,
    functions_in_other_ways,
    layer,
    segments,
    initial_values,
    checkpointed,
    compiled,
    bad_arguments,
)


def test_two_ranks(tmp_path: Path) -> None:
    ranks.run(CASES, 2, tmp_path, limit=120)
