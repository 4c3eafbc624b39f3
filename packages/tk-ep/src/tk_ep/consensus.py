"""What all ranks of a group have to agree on, gathered as tensors: facts in integers, and the text of an error."""

import hashlib
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tk_ep.errors import EPTimeoutError
from tk_ep.handle import Place

_MAX_FACTS = 24
_MAX_TEXT = 800
_KINDS = (ValueError, TypeError, RuntimeError)


@contextmanager
def waiting_for_peers(op: str, rank: int, limit: timedelta) -> Iterator[None]:
    """Makes an EPTimeoutError of what a collective raises if a peer is lost, or past its limit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        reason = f"heard nothing from a peer, with a limit of {limit.total_seconds():g} s: {first_line}"
        raise EPTimeoutError(op, rank, reason) from error


def host_id() -> int:
    """A number that processes on one host share, of 62 bits."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 2


def gather(place: Place, op: str, values: Tensor, limit: timedelta) -> Tensor:
    """A tensor of each rank, of equal shapes and dtypes, stacked on the CPU."""
    values = values.to(place.device)
    out = [torch.empty_like(values) for _ in range(place.num_ranks)]
    with waiting_for_peers(op, place.rank, limit):
        dist.all_gather(out, values, group=place.group, async_op=True).wait(limit)
    return torch.stack(out).cpu()


def agree(
    place: Place,
    op: str,
    facts: Mapping[str, int],
    error: Exception | None,
    limit: timedelta,
    own_facts: tuple[int, ...] = (),
) -> Tensor:
    """Raise on all ranks the error that one of them has found, or ValueError where ranks differ in one of the facts.

    Facts are at most 24 integers with those that each rank has of its own, which are returned, int64 (R, facts). A rank
    with an error gives no facts.
    """
    numbers = torch.zeros(2 + _MAX_FACTS, dtype=torch.int64)
    numbers[1] = int.from_bytes(hashlib.sha256(op.encode()).digest()[:7], "little")
    text = torch.zeros(_MAX_TEXT, dtype=torch.uint8)
    if error is None:
        values = (*facts.values(), *own_facts)
        numbers[2 : 2 + len(values)] = torch.tensor(values, dtype=torch.int64)
    else:
        numbers[0] = 1 + next(index for index, kind in enumerate(_KINDS) if isinstance(error, kind))
        encoded = str(error).encode()[:_MAX_TEXT]
        text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    message = torch.cat((numbers.view(torch.uint8), text))
    messages = gather(place, op, message, limit)
    if error is not None:
        raise error
    numbers = messages[:, : numbers.numel() * 8].contiguous().view(torch.int64)
    failed = numbers[:, 0].nonzero()
    if len(failed):
        rank = int(failed[0])
        text = bytes(messages[rank, -_MAX_TEXT:].tolist()).rstrip(b"\0").decode(errors="replace")
        raise _KINDS[int(numbers[rank, 0]) - 1](f"on rank {rank}: {text}")
    for index, name in enumerate(("op", *facts)):
        column = numbers[:, 1 + index]
        others = (column != column[0]).nonzero()
        if len(others):
            rank = int(others[0])
            got = f"got {int(column[0])} on rank 0, {int(column[rank])} on rank {rank}"
            got = f"rank 0 and rank {rank} make different calls" if name == "op" else got
            raise ValueError(f"{name}: expected the same on all ranks, {got}")
    return numbers[:, 2 + len(facts) :][:, : len(own_facts)]
