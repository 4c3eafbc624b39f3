"""The references of dispatch and combine against loops over tokens, and against tk-moe's mapping."""

import numpy as np
import pytest
import torch
from torch import Tensor

import tk_moe
from tk_core.math import align
from tk_core.testing import assert_equal, poisoned_allocations
from tk_ep import reference

from .compare import wide
from .routing import Routing, choose, expected, random_routing, tokens, weights

HIDDEN = 64


def dispatched(routing: Routing, **options: object) -> tuple:
    """The reference's dispatch of random tokens and weights."""
    sizes = {"num_experts": routing.num_experts, "num_max_tokens_per_rank": routing.num_max_tokens_per_rank}
    sizes["expert_alignment"] = routing.alignment
    x, w = tokens(routing, HIDDEN), weights(routing)
    with poisoned_allocations():
        return reference.dispatch(x, routing.topk_idx, w, **sizes, **options)


@pytest.mark.parametrize("seed", range(12))
def test_dispatch(seed: int) -> None:
    """Tokens, experts, weights and every field of the handles, with exact sizes."""
    routing = random_routing(seed, num_ranks=seed % 4 + 1)
    x, w = tokens(routing, HIDDEN), weights(routing)
    recv_x, recv_idx, recv_w, handles = dispatched(routing)
    for rank in range(routing.num_ranks):
        want, handle = expected(routing, rank), handles[rank]
        shape = len(want.tokens), routing.num_topk
        assert_equal(recv_x[rank], stack([x[s][t] for s, t in want.tokens], x[0].new_empty((0, HIDDEN))))
        assert_equal(recv_idx[rank], torch.tensor(want.local_idx, dtype=torch.int64).view(shape))
        assert_equal(recv_w[rank], stack([w[s][t] for s, t in want.tokens], w[0].new_empty((0, shape[1]))))
        metadata = int32(want.metadata).view(-1, 2 + routing.num_topk)
        metadata[:, 2:] = -1
        assert_equal(handle.recv_src_metadata, metadata)
        assert_equal(handle.psum_num_recv_tokens_per_expert, int32(want.ends))
        assert handle.pos_to_expert is None
        check_counts(routing, rank, handle)
        assert_equal(handle.topk_idx, routing.topk_idx[rank])
        assert handle.topk_idx.data_ptr() != routing.topk_idx[rank].data_ptr() or not len(handle.topk_idx)


@pytest.mark.parametrize("seed", range(12))
def test_dispatch_with_rows_for_experts(seed: int) -> None:
    """The rows of each expert, which are those of tk-moe's mapping, too."""
    routing = random_routing(seed, num_ranks=seed % 4 + 1)
    x, w = tokens(routing, HIDDEN), weights(routing)
    recv_x, recv_idx, recv_w, handles = dispatched(routing, do_expand=True, do_zero_padding=True)
    assert recv_idx is None
    for rank in range(routing.num_ranks):
        want, handle = expected(routing, rank), handles[rank]
        nothing = torch.zeros(HIDDEN, dtype=torch.bfloat16)
        rows = [nothing if pair is None else x[pair[0]][pair[1]] for pair in want.pairs]
        assert_equal(recv_x[rank], stack(rows, x[0].new_empty((0, HIDDEN))))
        assert_equal(recv_w[rank], torch.tensor([0.0 if pair is None else w[pair[0]][pair[1:]] for pair in want.pairs]))
        assert_equal(handle.recv_src_metadata, int32(want.metadata).view(-1, 2 + routing.num_topk))
        assert_equal(handle.psum_num_recv_tokens_per_expert, int32(want.starts) + int32(want.counts))
        assert_equal(handle.pos_to_expert, int32(want.pos_to_expert))
        check_counts(routing, rank, handle)

        num_local = routing.num_experts // routing.num_ranks
        local = torch.cat(routing.topk_idx) - rank * num_local
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        mapping = tk_moe.get_fused_mapping(local, num_local, 0, routing.alignment, with_psum=True)
        assert_equal(handle.pos_to_expert, mapping[0])
        received = (local >= 0).any(1)
        assert torch.equal(handle.recv_src_metadata[:, 2:], mapping[3][received])
        assert_equal(handle.num_recv_tokens_per_expert_list, mapping[7])
        assert_equal(handle.psum_num_recv_tokens_per_expert, mapping[8])


def check_counts(routing: Routing, rank: int, handle: object) -> None:
    """The fields that are the same with and without do_expand."""
    want = expected(routing, rank)
    assert handle.num_recv_tokens == len(want.tokens)
    assert handle.num_expanded_tokens == len(want.pairs)
    assert handle.num_recv_tokens_per_expert_list == [align(count, routing.alignment) for count in want.counts]
    assert_equal(handle.num_unaligned_recv_tokens_per_expert, int32(want.counts))
    assert_equal(handle.psum_num_recv_tokens_per_scaleup_rank, int32(want.psum_per_rank))
    assert_equal(handle.dst_buffer_slot_idx, int32(want.dst_slots).view(-1, routing.num_topk))


def int32(values: list) -> Tensor:
    """A tensor of Python ints."""
    return torch.tensor(values, dtype=torch.int32)


def stack(rows: list[Tensor], empty: Tensor) -> Tensor:
    """Rows below each other, or `empty` without any."""
    return torch.stack(rows) if rows else empty


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("use_tma_aligned_col_major_sf", [False, True])
def test_scale_factors(use_tma_aligned_col_major_sf: bool, do_expand: bool) -> None:
    """Codes of one byte, and factors of any strides, which take the layout asked for."""
    routing = random_routing(4, num_ranks=2)
    data = [x.view(torch.int8) for x in tokens(routing, HIDDEN)]
    sf = [torch.arange(len(x) * 3, dtype=torch.int32).view(3, -1).t() + 1 for x in data]
    sizes = {"num_experts": routing.num_experts, "expert_alignment": routing.alignment, "do_expand": do_expand}
    layout = {"use_tma_aligned_col_major_sf": use_tma_aligned_col_major_sf, "do_zero_padding": do_expand}
    with poisoned_allocations():
        received, *_ = reference.dispatch(list(zip(data, sf)), routing.topk_idx, **sizes, **layout)
    for rank, (codes, factors) in enumerate(received):
        want = expected(routing, rank)
        pairs = want.pairs if do_expand else [(s, t, 0) for s, t in want.tokens]
        assert len(pairs) > 4
        assert factors.stride() == ((1, align(len(pairs), 4)) if use_tma_aligned_col_major_sf else (3, 1))
        for row, pair in enumerate(pairs):
            assert torch.equal(codes[row], data[pair[0]][pair[1]] if pair else torch.zeros(2 * HIDDEN).char())
            assert torch.equal(factors[row], sf[pair[0]][pair[1]] if pair else torch.zeros(3).int())


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_dispatch_without_counts_on_the_host(seed: int, do_expand: bool) -> None:
    """The largest sizes there can be, and in them what exact sizes give."""
    routing = random_routing(seed, num_ranks=3)
    exact, padded = (dispatched(routing, do_expand=do_expand, do_cpu_sync=sync) for sync in (True, False))
    num_local = routing.num_experts // 3
    most = 3 * routing.num_max_tokens_per_rank
    pairs = most * min(routing.num_topk, num_local) + (routing.alignment - 1) * num_local
    for rank in range(3):
        few, many = exact[3][rank], padded[3][rank]
        assert (many.num_recv_tokens, many.num_expanded_tokens) == (most, align(pairs, routing.alignment))
        assert many.num_recv_tokens_per_expert_list == []
        count = few.num_recv_tokens
        assert many.recv_src_metadata.shape[0] == most
        assert_equal(many.recv_src_metadata[:count], few.recv_src_metadata)
        assert (many.recv_src_metadata[count:] == -1).all()
        for name in (
            "psum_num_recv_tokens_per_scaleup_rank",
            "psum_num_recv_tokens_per_expert",
            "num_unaligned_recv_tokens_per_expert",
            "dst_buffer_slot_idx",
        ):
            assert_equal(getattr(many, name), getattr(few, name))
        if do_expand:
            rows = few.pos_to_expert >= 0
            end = len(rows)
            assert padded[0][rank].shape == (many.num_expanded_tokens, HIDDEN)
            assert_equal(padded[0][rank][:end][rows], exact[0][rank][rows])
            assert_equal(padded[2][rank][:end], exact[2][rank])
            assert (padded[2][rank][end:] == 0).all()
            assert_equal(many.pos_to_expert[:end], few.pos_to_expert)
            assert (many.pos_to_expert[end:] == -1).all()
        else:
            assert padded[0][rank].shape == (most, HIDDEN)
            for index in range(3):
                assert_equal(padded[index][rank][:count], exact[index][rank])
            assert (padded[1][rank][count:] == -1).all()


def test_an_expert_twice_in_a_token() -> None:
    """Each slot has a row, while there are rows: without counts on the host there may be too few."""
    routing = Routing(2, 4, 1, [torch.zeros((4, 3), dtype=torch.int64), torch.ones((0, 3), dtype=torch.int64)])
    _, _, _, handles = dispatched(routing, do_expand=True)
    assert handles[0].recv_src_metadata[:, 2:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    recv_x, _, _, handles = dispatched(routing, do_expand=True, do_cpu_sync=False)
    assert handles[0].num_expanded_tokens == len(recv_x[0]) == 8
    assert handles[0].recv_src_metadata[:4, 2:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, -1], [-1, -1, -1]]
    assert handles[0].psum_num_recv_tokens_per_expert.tolist() == [8]
    (out, _), _ = reference.combine(recv_x, handles)
    x = tokens(routing, HIDDEN)[0].float()
    assert_equal(out, (x * torch.tensor([[3.0], [3.0], [2.0], [0.0]]) + 0.0).bfloat16())


@pytest.mark.parametrize("allow_multiple_reduction", [True, False])
@pytest.mark.parametrize("do_expand", [False, True])
def test_combine(do_expand: bool, allow_multiple_reduction: bool) -> None:
    """Sums in the order that the formula gives, of values over 30 binades, which other orders round differently."""
    generator = torch.Generator().manual_seed(7)
    routing = Routing(12, 40, 4, [choose(generator, count, 6, 12) for count in (40, 0, 33)])
    *_, row_weights, handles = dispatched(routing, do_expand=do_expand)
    many = [handle.num_expanded_tokens if do_expand else handle.num_recv_tokens for handle in handles]
    rows = [wide(generator, count) for count in many]
    biases = [[wide(generator, len(idx)) for _ in range(rank)] for rank, idx in enumerate(routing.topk_idx)]
    out, out_weights = reference.combine(
        rows, handles, row_weights, biases, allow_multiple_reduction=allow_multiple_reduction
    )
    for rank, experts in enumerate(routing.topk_idx):
        want = summed(routing, rank, rows, biases[rank], do_expand, do_expand and not allow_multiple_reduction)
        assert_equal(out[rank], want)
        is_expert = (experts >= 0) & (experts < 12)
        assert_equal(out_weights[rank], torch.where(is_expert, weights(routing)[rank], 0.0))


def summed(
    routing: Routing, source: int, rows: list[Tensor], biases: list[Tensor], do_expand: bool, at_once: bool
) -> Tensor:
    """What combine returns on a rank: token by token, in numpy's float32."""
    oracles = [expected(routing, rank) for rank in range(routing.num_ranks)]
    num_local = routing.num_experts // routing.num_ranks
    out = []
    for token, experts in enumerate(routing.topk_idx[source].tolist()):
        homes = [e // num_local if 0 <= e < routing.num_experts else None for e in experts]
        acc = np.zeros(HIDDEN, np.float32)
        for bias in biases:
            acc = acc + bias[token].float().numpy()
        last = {home: slot for slot, home in enumerate(homes) if home is not None}
        for rank in sorted(last, key=last.get):
            slots = [slot for slot, home in enumerate(homes) if home == rank]
            if not do_expand:
                acc = acc + rows[rank][oracles[rank].tokens.index((source, token))].float().numpy()
            elif not at_once:
                part = np.zeros(HIDDEN, np.float32)
                for slot in slots:
                    part = part + rows[rank][oracles[rank].pairs.index((source, token, slot))].float().numpy()
                acc = acc + torch.from_numpy(part).bfloat16().float().numpy()
        for slot, home in enumerate(homes if at_once else []):
            if home is not None:
                acc = acc + rows[home][oracles[home].pairs.index((source, token, slot))].float().numpy()
        out.append(torch.from_numpy(acc).bfloat16())
    return stack(out, torch.empty((0, HIDDEN), dtype=torch.bfloat16))


@pytest.mark.parametrize("seed", range(3))
def test_combine_of_any_number_of_ranks_is_reduce_fused(seed: int) -> None:
    """Without multiple reduction the bits are those of one rank with all experts."""
    generator = torch.Generator().manual_seed(seed)
    routing = Routing(8, 20, 4, [choose(generator, count, 5, 8) for count in (20, 7)])
    *_, handles = dispatched(routing, do_expand=True)
    rows = [wide(generator, handle.num_expanded_tokens) for handle in handles]
    out, _ = reference.combine(rows, handles, allow_multiple_reduction=False)
    mapping = tk_moe.get_fused_mapping(torch.cat(routing.topk_idx), 8, 0, 4)
    assert_equal(torch.cat(out), tk_moe.reduce_fused(torch.cat(rows), None, mapping[3]))
