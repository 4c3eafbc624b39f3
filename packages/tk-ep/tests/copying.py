"""Cases of the calls that move tensors without routing: all_gather, pp_send and pp_recv, engram_fetch."""

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tk_core.testing import assert_equal
from tk_ep import ElasticBuffer, EPTimeoutError

from .ranks import Here, capturing, raises

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.bool)


def make(here: Here, num_bytes: int) -> ElasticBuffer:
    """A buffer of so many bytes."""
    limits = {"num_cpu_timeout_secs": 60, "num_gpu_timeout_secs": 60}
    return ElasticBuffer(here.world, num_bytes=num_bytes, backend=here.backend, **limits)


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits that are numbers of the dtype."""
    values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def gathers(here: Here) -> None:
    """Sessions of several gathers: tensors in place or not, views and parts of them, without elements; late ranks."""
    shapes = [(3, 5), (), (0, 7), (129,)]
    sizes = [ElasticBuffer.get_agrs_num_max_session_bytes(here.world, shapes, dtype) for dtype in DTYPES]
    assert sizes[0] == sum(-(-here.num_ranks * count * 2 // 128) * 128 for count in (15, 1, 0, 129))
    assert ElasticBuffer.get_agrs_num_max_session_bytes(here.world, (3, 5), torch.float32) == 128 * -(
        -60 * here.num_ranks // 128
    )
    hint = ElasticBuffer.get_agrs_buffer_size_hint(here.world, sum(sizes))
    assert hint % (2 << 20) == 0
    assert hint >= sum(sizes) + (64 << 10)
    buffer = make(here, hint)
    buffer.agrs_set_config(sum(sizes), len(DTYPES))
    for seed in range(3):
        with buffer.agrs_new_session():
            kept = []
            for number, dtype in enumerate(DTYPES):
                time.sleep(0.02 if (seed + number + here.rank) % 4 == 0 else 0)
                of_ranks = [
                    [numbers(97 * seed + 7 * rank + number, shape, dtype).to(here.device) for shape in shapes]
                    for rank in range(here.num_ranks)
                ]
                own = of_ranks[here.rank]
                if (seed + number) % 2:
                    in_place = buffer.agrs_get_inplace_tensor(shapes, dtype)
                    for to, each in zip(in_place, own):
                        to.copy_(each)
                    own = (in_place[0].view(5, 3).view(3, 5), *in_place[1:])
                *gathered, wait = buffer.all_gather(own)
                wait()
                wait()
                kept.append((gathered, [torch.stack(each) for each in zip(*of_ranks)]))
            # All are valid until the session ends.
            for gathered, wanted in kept:
                assert_equal(gathered, wanted)
            with raises(ValueError, "num_max_all_gathers_per_session: expected at least 6, got 5"):
                buffer.all_gather(own)
    with buffer.agrs_new_session(enabled=False), raises(RuntimeError, "all_gather: expected a session"):
        buffer.all_gather(own)

    # A part of an in-place tensor is gathered elsewhere. A session waits for what nobody has waited for.
    buffer.create_agrs_session()
    whole = buffer.agrs_get_inplace_tensor((4, 3), torch.float32).fill_(here.rank)
    gathered, wait = buffer.all_gather(whole[:2])
    assert gathered.shape == (here.num_ranks, 2, 3)
    buffer.destroy_agrs_session()
    assert gathered[:, 1, 2].tolist() == list(range(here.num_ranks))
    assert_equal(whole, torch.full_like(whole, here.rank))
    wait()
    buffer.destroy()


def sends(here: Here) -> None:
    """Both ways round the ring: more tensors than slots, sizes that change, all ranks sending before they receive."""
    dtypes, num_slots = (torch.bfloat16, torch.float8_e4m3fn, torch.int64), 4
    sizes = [(1 << 18,), (3, 5), (0,), ()]
    most = 8 << 18
    hint = ElasticBuffer.get_pp_buffer_size_hint(most, num_slots)
    assert hint == (2 * num_slots * most) + (2 << 20)
    buffer = make(here, hint)
    buffer.pp_set_config(most, num_slots)
    after, before = ((here.rank + step) % here.num_ranks for step in (1, -1))

    def tensor(source: int, forward: bool, number: int) -> Tensor:
        shape, dtype = sizes[number % len(sizes)], dtypes[number % len(dtypes)]
        return numbers(1000 * source + 500 * forward + number, shape, dtype).to(here.device)

    # Of two ranks each is the other's neighbour on both sides.
    for first in range(0, 24, 2):
        time.sleep(0.02 if (first // 2 + here.rank) % 4 == 0 else 0)
        batch = range(first, first + num_slots // 2)
        for number in batch:
            for forward in (True, False):
                sent = tensor(here.rank, forward, number)
                buffer.pp_send(sent, after if forward else before)
                sent.fill_(1)
        for number in batch:
            for forward in (True, False):
                wanted = tensor(before if forward else after, forward, number)
                got = torch.empty_like(wanted)
                buffer.pp_recv(got, before if forward else after)
                assert_equal(got, wanted)
    # A sender with all slots in flight waits for its receiver.
    buffer.barrier(with_cpu_sync=True)
    x = torch.zeros(most, dtype=torch.uint8, device=here.device)
    for number in range(2 * num_slots) if here.rank < 2 else ():
        if here.rank == 0:
            buffer.pp_send(x.fill_(number), 1)
            continue
        time.sleep(0.1 if number == 0 else 0)
        buffer.pp_recv(x, 0)
        assert_equal(x, torch.full_like(x, number))
    if here.num_ranks > 2:
        with raises(ValueError, "dst_rank_idx: expected a neighbour in the ring of ranks, of ["):
            buffer.pp_send(x, (here.rank + 2) % here.num_ranks)
    buffer.destroy()


def fetches(here: Here) -> None:
    """Entries of all ranks, once and again, of different numbers of tokens; no tokens, and indices of no entry."""
    num_rows, hidden = 9, 48
    for number, dtype in enumerate((torch.bfloat16, torch.float8_e4m3fn)):
        hint, on_host = ElasticBuffer.get_engram_storage_size_hint(num_rows, hidden, 7, dtype)
        assert (hint, on_host) == (2 << 20, 0)
        buffer = make(here, hint)
        num_entries = here.num_ranks * num_rows
        for write in range(2):
            table = numbers(10 * write + number, (num_entries, hidden), dtype).to(here.device)
            sf = numbers(50 + write, (num_entries, 3), torch.float32).to(here.device) if number else None
            own = table[here.rank * num_rows :][:num_rows].clone()
            buffer.engram_write(own, sf)
            own.fill_(1)
            for num_tokens in (here.rank * 3, 6 - here.rank, 0):
                indices = numbers(here.rank + write, (num_tokens, 4), torch.int64) * 37 % (num_entries + 2) - 1
                by_column = num_tokens % 2 == 0
                indices = indices.int().to(here.device)
                hook = buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=by_column)
                rows, factors = hook()
                is_entry = (indices >= 0) & (indices < num_entries)
                wanted = table.view(torch.uint8)[indices.clamp(0, num_entries - 1).long()] * is_entry[..., None]
                assert rows.shape == (num_tokens, 4 * hidden)
                assert_equal(rows, wanted.flatten(1).view(dtype))
                if sf is None:
                    assert factors is None
                    continue
                strides = (1, -(-num_tokens // 4) * 4) if by_column else (12, 1)
                wanted = sf[indices.clamp(0, num_entries - 1).long()] * is_entry[..., None]
                assert_equal(factors, sf.new_empty_strided((num_tokens, 12), strides).copy_(wanted.flatten(1)))
        buffer.destroy()


def faults_of_set_up(here: Here) -> None:
    """All ranks raise what one has found, and that ranks differ; the buffer goes on."""
    buffer, wrong = make(here, 2 << 20), here.rank == 1
    for set_up, good, bad, match in (
        (buffer.agrs_set_config, (4096, 2), (2 << 20, 2), "num_bytes: expected a buffer of 2162688 bytes"),
        (buffer.agrs_set_config, (4096, 2), (4096, 0), "num_max_all_gathers_per_session: expected 1 to"),
    ):
        with raises(ValueError, "" if wrong else "on rank 1: ", match):
            set_up(*(bad if wrong else good))
    with raises(ValueError, "num_max_session_bytes: expected the same on all ranks, got 4096 on rank 0, 256 on rank 1"):
        buffer.agrs_set_config(256 if wrong else 4096, 2)
    buffer.agrs_set_config(4096, 2)
    with raises(RuntimeError, "this buffer serves all_gather"):
        buffer.pp_set_config(64, 1)
    buffer.destroy()
    buffer = make(here, 2 << 20)
    with raises(TypeError, "" if wrong else "on rank 1: ", "num_max_inflight_tensors: expected an int"):
        buffer.pp_set_config(64, 1.0 if wrong else 1)
    buffer.pp_set_config(64, 1)
    buffer.destroy()
    buffer, storage = make(here, 2 << 20), torch.zeros((3, 16), device=here.device)
    for bad, match in (
        ((storage[:, :3].contiguous(), None), "storage: expected rows of a positive multiple of 16 bytes, got 12"),
        ((storage, storage), f"sf: expected shape ({3 * here.num_ranks}, num_factors), got (3, 16)"),
        ((torch.zeros((1 << 15, 16), device=here.device), None), "num_bytes: expected a buffer of 2162688 bytes"),
    ):
        with raises(ValueError, "" if wrong else "on rank 1: ", match):
            buffer.engram_write(*(bad if wrong else (storage, None)))
    with raises(ValueError, "rows of storage: expected the same on all ranks, got 3 on rank 0, 2 on rank 1"):
        buffer.engram_write(storage[:2] if wrong else storage)
    buffer.engram_write(storage.requires_grad_())
    assert buffer.engram_fetch(torch.zeros((2, 3), dtype=torch.int32, device=here.device))()[0].shape == (2, 48)
    buffer.destroy()


def graphs_of_copies(here: Here) -> None:
    """Replays on other tensors, in turn with eager calls on the same buffers, ranks late now and then."""
    gathering, sending, fetching = (make(here, 4 << 20) for _ in range(3))
    gathering.agrs_set_config(1 << 20, 2)
    sending.pp_set_config(4096, 3)
    table = numbers(0, (9 * here.num_ranks, 64), torch.float32).to(here.device)
    fetching.engram_write(table[9 * here.rank :][:9].clone())
    after, before = ((here.rank + step) % here.num_ranks for step in (1, -1))
    x, idx = torch.zeros(1000, device=here.device), torch.zeros((5, 3), dtype=torch.int32, device=here.device)

    def call() -> list[Tensor]:
        with gathering.agrs_new_session():
            in_place = gathering.agrs_get_inplace_tensor((1000,), torch.float32).copy_(x)
            one, wait = gathering.all_gather(in_place)
            two, both, wait_for_two = gathering.all_gather((x + 1, x[:3]))
            wait_for_two()
            wait()
            results = [each.clone() for each in (one, two, both)]
        for number in range(2 if here.num_ranks > 1 else 0):
            sending.pp_send(x + number, after)
        for _ in range(2 if here.num_ranks > 1 else 0):
            results.append(torch.empty_like(x))
            sending.pp_recv(results[-1], before)
        return [*results, fetching.engram_fetch(idx)()[0]]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        captured = call()
    for number in range(12):
        x.fill_(100 * number + here.rank)
        idx.copy_(numbers(number, (5, 3), torch.int32) % len(table))
        time.sleep(0.02 if (number + here.rank) % 4 == 0 else 0)
        results = captured
        if number % 3 == 2:
            results = call()
        else:
            graph.replay()
        of_ranks = 100 * number + torch.arange(here.num_ranks, device=here.device)[:, None].expand(-1, 1000).float()
        received = [of_ranks[before] + each for each in range(2 if here.num_ranks > 1 else 0)]
        assert_equal(
            results, [of_ranks, of_ranks + 1, of_ranks[:, :3].contiguous(), *received, table[idx.long()].flatten(1)]
        )

    for call_in, match in (
        (lambda: gathering.agrs_set_config(1 << 20, 2), "CUDA graphs cannot capture it"),
        (lambda: gathering.all_gather(x), "expected the session to begin and end in one CUDA graph"),
    ):
        in_session = gathering.agrs_new_session(enabled="session" in match)
        with in_session, raises(RuntimeError, match), capturing(torch.cuda.CUDAGraph()):
            call_in()
    for buffer in (gathering, sending, fetching):
        buffer.destroy()


def copies_with_rank_1_killed(here: Here) -> None:
    """Calls that wait for a rank that is gone without a word end within the limit, and the buffers are failed."""
    x = torch.zeros((1, 4), device=here.device)
    indices = torch.ones((1, 1), dtype=torch.int32, device=here.device)  # Rank 1's entry.
    # Kernels are made before the limit is short.
    other = make(here, 2 << 20)
    other.engram_write(x)
    other.engram_fetch(indices)()
    other.destroy()
    limits = {"num_gpu_timeout_secs": 1.0, "num_cpu_timeout_secs": 3.0, "backend": here.backend}
    gathering, sending, fetching = (ElasticBuffer(here.world, num_bytes=2 << 20, **limits) for _ in range(3))
    gathering.agrs_set_config(1024, 1)
    gathering.create_agrs_session()
    sending.pp_set_config(64, 1)
    fetching.engram_write(x)
    if here.rank == 1:
        os._exit(9)
    begin = time.monotonic()

    def ends(buffer: ElasticBuffer, op: str, call: Callable[[], object]) -> None:
        with raises(EPTimeoutError, f"{op}: rank {here.rank} "):
            call()
            torch.cuda.synchronize()  # Where the GPU has waited, the host has not.
            buffer.check()
        with raises(EPTimeoutError, f"{op}: rank {here.rank} "):
            buffer.destroy()

    ends(gathering, "all_gather", lambda: gathering.all_gather(x)[-1]())
    if abs(here.rank - 1) == 1:
        ends(sending, "pp_recv", lambda: sending.pp_recv(x, 1))
    if here.backend == "symmetric":
        # What rank 1 has stored stays: nobody waits for it.
        assert_equal(fetching.engram_fetch(indices)()[0], x)
    else:
        ends(fetching, "engram_fetch", lambda: fetching.engram_fetch(indices)())
    assert time.monotonic() - begin < 12


COPYING = (gathers, sends, fetches, faults_of_set_up)
