"""Compares dispatch and combine with the reference, bit for bit, for each rank that a process has."""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tk_core.testing import assert_equal
from tk_core.testing.trees import transfer
from tk_ep import ElasticBuffer, EPHandle, LocalGroup, reference

from .routing import Routing, tokens, weights

HIDDEN = 64
Lists = dict[str, list[Any] | None]


class Calls(Protocol):
    """Calls of all ranks with lists of arguments; results are lists, too, with an item for each of `ranks`."""

    ranks: list[int]
    device: torch.device
    allow_multiple_reduction: bool

    def dispatch(self, lists: Lists, options: dict[str, Any]) -> list[tuple]:
        """(recv_x, recv_topk_idx, recv_topk_weights, handle) of each rank."""
        ...

    def combine(self, lists: Lists) -> list[tuple]:
        """(combined_x, combined_topk_weights) of each rank."""
        ...


class OfBuffer:
    """The calls of this process's rank."""

    def __init__(self, buffer: ElasticBuffer) -> None:
        self._buffer = buffer
        self.ranks = [buffer.rank_idx]
        self.device = buffer._place.device
        self.allow_multiple_reduction = buffer.allow_multiple_reduction

    def _item(self, lists: Lists) -> dict[str, Any]:
        return {name: each and each[self.ranks[0]] for name, each in lists.items()}

    def dispatch(self, lists: Lists, options: dict[str, Any]) -> list[tuple]:
        """See Calls."""
        return [self._buffer.dispatch(**self._item(lists), **options)[:4]]

    def combine(self, lists: Lists) -> list[tuple]:
        """See Calls."""
        return [self._buffer.combine(**self._item(lists))[:2]]


class OfGroup:
    """The calls of all ranks of a LocalGroup."""

    def __init__(self, group: LocalGroup) -> None:
        self._group = group
        self.ranks = list(range(group.num_ranks))
        self.device = group.device
        self.allow_multiple_reduction = group.allow_multiple_reduction

    def _of_ranks(self, results: tuple) -> list[tuple]:
        return [tuple(each and each[rank] for each in results) for rank in self.ranks]

    def dispatch(self, lists: Lists, options: dict[str, Any]) -> list[tuple]:
        """See Calls."""
        return self._of_ranks(self._group.dispatch(**lists, **options))

    def combine(self, lists: Lists) -> list[tuple]:
        """See Calls."""
        return self._of_ranks(self._group.combine(**lists))


def quantized(x: Tensor, kind: str) -> Tensor | tuple[Tensor, Tensor]:
    """Tokens as they are dispatched: bfloat16, e4m3 with float32 factors, or FP4 with packed ones of other strides."""
    if kind == "bf16":
        return x
    sf = x[:, :3].float()
    if kind == "e4m3":
        return x.to(torch.float8_e4m3fn), sf.t().contiguous().t()
    codes = x[:, : x.shape[1] // 2].contiguous().view(torch.int8)
    return codes, sf.repeat(1, 2)[:, ::2].view(torch.int32)


def wide(generator: torch.Generator, count: int, hidden: int = HIDDEN) -> Tensor:
    """bfloat16 (count, hidden) of three magnitudes 30 binades apart, and zeros of both signs.

    Large values often cancel, and what they have swallowed before is lost: in another order, a sum has other bits.
    """
    shape = count, hidden
    magnitudes = torch.tensor([2.0**-15, 1.25 * 2.0**-15, 1.0, 2.0**15, 2.0**15, 0.0])
    values = magnitudes[torch.randint(0, len(magnitudes), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 0.5, -values, values).bfloat16()


def on_cpu(results: tuple) -> tuple:
    """What dispatch returned, with all tensors on the CPU."""
    *tensors, handle = results
    fields = {name: transfer(value, "cpu") for name, value in vars(handle).items() if name != "place"}
    return (*transfer(tensors, "cpu"), replace(handle, **fields))


def check_dispatch(got: tuple, want: tuple, zero_padding: bool) -> None:
    """Compare all that is specified of (recv_x, recv_topk_idx, recv_topk_weights, handle)."""
    got = on_cpu(got)
    handle: EPHandle = want[3]
    for name in vars(handle):
        if name != "place":
            assert_equal(getattr(got[3], name), getattr(handle, name), name=name)
    assert_equal(got[1], want[1], name="recv_topk_idx")
    count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    if not handle.do_expand:
        rows = torch.arange(handle.num_recv_tokens) < count
    elif zero_padding:
        alignment = handle.expert_alignment
        end = (-(-handle.num_unaligned_recv_tokens_per_expert // alignment) * alignment).sum()
        rows = torch.arange(handle.num_expanded_tokens) < end
    else:
        rows = handle.pos_to_expert >= 0
    for name, mine, theirs in (
        *zip(("recv_x", "recv_sf"), *(x if isinstance(x, tuple) else (x,) for x in (got[0], want[0]))),
        *((("weights", got[2], want[2]),) if want[2] is not None else ()),
    ):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), name
        some = torch.ones_like(rows) if name == "weights" and handle.do_expand else rows
        mine, theirs = (each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in (mine, theirs))
        assert_equal(mine[some], theirs[some], name=name)


def compare(
    calls: Calls, routing: Routing, seed: int, kind: str = "bf16", hidden: int = HIDDEN, **options: Any
) -> None:
    """Dispatch, dispatch with the handle, and combine, each as the reference does it."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "num_experts": routing.num_experts,
        "num_max_tokens_per_rank": routing.num_max_tokens_per_rank,
        "expert_alignment": routing.alignment,
    }
    num_local = routing.num_experts // routing.num_ranks
    lists = {
        "x": [quantized(each, kind) for each in tokens(routing, hidden, seed)],
        "topk_idx": routing.topk_idx,
        "topk_weights": weights(routing, seed),
        "cumulative_local_expert_recv_stats": [torch.arange(num_local, dtype=torch.int32) for _ in routing.topk_idx],
    }
    zero_padding = options.get("do_zero_padding", False)
    want = reference.dispatch(**transfer(lists), **sizes, **options)
    handles = want[3]
    moved = transfer(lists, calls.device)
    at = {}
    for rank, results in zip(calls.ranks, calls.dispatch(moved, sizes | options)):
        check_dispatch(results, tuple(each and each[rank] for each in want), zero_padding)
        at[rank] = results[3]
        name = "cumulative_local_expert_recv_stats"
        added = moved[name][rank].cpu() - lists[name][rank]
        assert_equal(added, handles[rank].num_unaligned_recv_tokens_per_expert, name=name)

    again = {name: value for name, value in options.items() if name != "do_cpu_sync"}
    lists = {
        "x": [quantized(each, kind) for each in tokens(routing, hidden, seed + 1)],
        "topk_weights": weights(routing, seed + 1) if seed % 2 else None,
    }
    want = reference.dispatch(**lists, handle=handles, **again)
    moved = transfer(lists, calls.device) | {"handle": [at.get(rank) for rank in range(routing.num_ranks)]}
    for rank, results in zip(calls.ranks, calls.dispatch(moved, again)):
        assert results[3] is at[rank]
        check_dispatch(results, tuple(each and each[rank] for each in want), zero_padding)

    do_expand = options.get("do_expand", False)
    many = [each.num_expanded_tokens if do_expand else each.num_recv_tokens for each in handles]
    biases = [tuple(wide(generator, len(idx), hidden) for _ in range(seed % 3)) for idx in routing.topk_idx]
    lists = {
        "x": [wide(generator, count, hidden) for count in many],
        "topk_weights": [
            torch.rand((count,) if do_expand else (count, routing.num_topk), generator=generator) for count in many
        ],
        "bias": [each[0] if len(each) == 1 else each for each in biases],
    }
    want = reference.combine(**lists, handle=handles, allow_multiple_reduction=calls.allow_multiple_reduction)
    got = calls.combine(transfer(lists, calls.device) | {"handle": moved["handle"]})
    for rank, results in zip(calls.ranks, got):
        assert_equal(transfer(results, "cpu"), tuple(each[rank] for each in want), name="combined")
