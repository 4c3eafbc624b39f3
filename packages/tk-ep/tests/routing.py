"""Inputs of dispatch for all ranks, and an oracle of what each rank receives, token by token."""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Sizes and expert indices of one dispatch of all ranks."""

    num_experts: int
    num_max_tokens_per_rank: int
    alignment: int
    topk_idx: list[Tensor]

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.topk_idx)

    @property
    def num_topk(self) -> int:
        """K."""
        return self.topk_idx[0].shape[1]


def choose(generator: torch.Generator, num_tokens: int, num_topk: int, num_experts: int, none: float = 0.2) -> Tensor:
    """Different experts for the slots of each token, int64 (num_tokens, num_topk); a share of slots has none."""
    experts = torch.rand((num_tokens, max(num_experts, num_topk)), generator=generator).argsort(1)[:, :num_topk]
    nothing = torch.tensor([-1, -7, -(2**40), num_experts, 2**40])
    nothing = nothing[torch.randint(0, len(nothing), experts.shape, generator=generator)]
    return torch.where(
        (torch.rand(experts.shape, generator=generator) < none) | (experts >= num_experts), nothing, experts
    )


def random_routing(seed: int, num_ranks: int, most: int = 9, sizes: tuple[int, int] | None = None) -> Routing:
    """Random experts of 0 to `most` tokens; random numbers of experts a rank and of slots, unless `sizes` has them."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_local_experts, num_topk = sizes or (number(1, 4), number(1, 5))
    num_experts = num_ranks * num_local_experts
    return Routing(
        num_experts,
        most,
        number(1, 5),
        [choose(generator, number(0, most), num_topk, num_experts) for _ in range(num_ranks)],
    )


def tokens(routing: Routing, hidden: int, seed: int = 0) -> list[Tensor]:
    """bfloat16 (T, hidden) of each rank, of which every element differs in its bits from its neighbours'."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((len(idx), hidden), generator=generator).bfloat16() for idx in routing.topk_idx]


def weights(routing: Routing, seed: int = 1) -> list[Tensor]:
    """float32 (T, K) of each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(idx.shape, generator=generator) for idx in routing.topk_idx]


class Expected(NamedTuple):
    """What a rank receives, as lists of Python numbers."""

    tokens: list[tuple[int, int]]
    """(source rank, token)"""
    local_idx: list[list[int]]
    """Local experts of each received token, -1 for those elsewhere"""
    pairs: list[tuple[int, int, int] | None]
    """(source rank, token, slot) of each row of the experts, None in padding"""
    pos_to_expert: list[int]
    counts: list[int]
    starts: list[int]
    ends: list[int]
    metadata: list[list[int]]
    """recv_src_metadata with do_expand"""
    psum_per_rank: list[int]
    dst_slots: list[list[int]]
    """dst_buffer_slot_idx of the rank as a source"""


def expected(routing: Routing, rank: int) -> Expected:
    """An oracle with loops over tokens, slots and experts."""
    num_local = routing.num_experts // routing.num_ranks
    most, num_topk = routing.num_max_tokens_per_rank, routing.num_topk
    idx = [each.tolist() for each in routing.topk_idx]

    def home(expert: int) -> int | None:
        return expert // num_local if 0 <= expert < routing.num_experts else None

    received = [(s, t) for s in range(routing.num_ranks) for t in range(len(idx[s])) if rank in map(home, idx[s][t])]
    pairs, pos_to_expert, counts, starts, ends = [], [], [], [], []
    for local in range(num_local):
        starts.append(len(pairs))
        rows = [(s, t, k) for s, t in received for k in range(num_topk) if idx[s][t][k] == rank * num_local + local]
        counts.append(len(rows))
        padding = -len(rows) % routing.alignment
        pairs += [*rows, *[None] * padding]
        pos_to_expert += [local] * len(rows) + [-1] * padding
        ends.append(len(pairs))
    row_of = {pair: row for row, pair in enumerate(pairs)}
    metadata = []
    for s, t in received:
        last = max(k for k in range(num_topk) if home(idx[s][t][k]) == rank)
        metadata.append([s * most + t, s * num_topk + last, *(row_of.get((s, t, k), -1) for k in range(num_topk))])
    dst_slots, sent = [], [0] * routing.num_ranks
    for experts in idx[rank]:
        homes = [home(expert) for expert in experts]
        slots = [-1] * num_topk
        for there in {each for each in homes if each is not None}:
            slots[max(k for k in range(num_topk) if homes[k] == there)] = rank * most + sent[there]
            sent[there] += 1
        dst_slots.append(slots)
    local_idx = [[e - rank * num_local if home(e) == rank else -1 for e in idx[s][t]] for s, t in received]
    psum = [sum(s <= each for s, _ in received) for each in range(routing.num_ranks)]
    return Expected(received, local_idx, pairs, pos_to_expert, counts, starts, ends, metadata, psum, dst_slots)
