"""ngram_windows: the id of each token and of the N - 1 before it, as far back as its sequence goes.

    out[t, k] = id of token t - k

until, at some k, that token lies before the sequence of t or its id is block_id; from there on pad_id. `history` has
the ids before each sequence, newest first, until one is negative. Source: Engram, arXiv 2601.07372.

A thread takes a token. It finds the sequence by bisection of cu_seqlens, then walks back. Windows are written through
shared memory, because those of neighbouring tokens are neighbours:

    token_ids   … | t - 2 | t - 1 | t | …
    thread t      [  k=2  |  k=1  | k=0 ]   →   out row t
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES

MAX_NGRAM = 16
"""Largest N that the kernel is built for."""

_NO_BLOCK_ID = 2**31
"""For the kernel: an id that no token has."""


_THREADS = 64
"""Threads of a block, which take a token each: few, because there is little to do but wait for memory. Untuned."""


@kernel(pass_configs=DIRECT_COPIES)
def _ngram_windows_kernel(max_ngram: int, has_sequences: bool, has_history: bool, arch: Arch) -> Any:
    import tilelang.language as T

    threads = _THREADS
    num_tokens, num_sequences, num_bounds = (T.dynamic(name) for name in ("num_tokens", "num_sequences", "num_bounds"))

    @T.prim_func
    def ngram_windows(
        token_ids: T.Tensor((num_tokens,), "int32"),
        cu_seqlens: T.Tensor((num_bounds,), "int32"),
        history: T.Tensor((num_sequences, max_ngram - 1), "int32"),
        halvings: T.int32,
        pad_id: T.int32,
        block_id: T.int64,
        out: T.Tensor((num_tokens, max_ngram), "int32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads
            distances = T.alloc_fragment((threads,), "int32")
            ids = T.alloc_fragment((threads,), "int64")
            is_open = T.alloc_fragment((threads,), "int32")
            windows = T.alloc_shared((threads, max_ngram), "int32")

            T.fill(is_open, 1)
            if has_sequences:
                sequences = T.alloc_fragment((threads,), "int32")
                T.clear(sequences)
                # The last sequence that begins at the token or before it, bit by bit from the highest.
                for halving in T.serial(halvings):
                    for i in T.Parallel(threads):
                        later = sequences[i] + (1 << (halvings - 1 - halving))
                        begin = T.if_then_else(later < num_bounds - 1, cu_seqlens[later], num_tokens)
                        sequences[i] = T.if_then_else(begin <= token + i, later, sequences[i])
                for i in T.Parallel(threads):
                    distances[i] = T.clamp(token + i - cu_seqlens[sequences[i]], 0, token + i)
            else:
                for i in T.Parallel(threads):
                    distances[i] = token + i
            for k in T.unroll(max_ngram):
                for i in T.Parallel(threads):
                    if k <= distances[i]:
                        ids[i] = T.cast(token_ids[token + i - k], "int64")
                    elif has_history:
                        earlier = history[sequences[i] if has_sequences else 0, k - distances[i] - 1]
                        ids[i] = T.if_then_else(earlier < 0, block_id, T.cast(earlier, "int64"))
                    else:
                        ids[i] = block_id
                for i in T.Parallel(threads):
                    is_open[i] = T.if_then_else(ids[i] == block_id, 0, is_open[i])
                for i in T.Parallel(threads):
                    windows[i, k] = T.if_then_else(is_open[i] == 1, T.cast(ids[i], "int32"), pad_id)
            T.copy(windows, out[token : token + threads, :])

    return ngram_windows


def _check_bounds(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens ascends from 0 to num_tokens. Reads its data: for TK_DEBUG only."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first or last != num_tokens:
        raise ValueError(f"cu_seqlens: expected offsets from 0 to {num_tokens} tokens, got {first} to {last}")
    check.require(bool((cu_seqlens.diff() >= 0).all()), "cu_seqlens", "no element below the one before", cu_seqlens)


@op(aligned=())
def ngram_windows(
    token_ids: Tensor,
    cu_seqlens: Tensor | None,
    N: int,  # noqa: N803
    pad_id: int,
    *,
    block_id: int | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """Give each token its own id and those of the N - 1 tokens before it: out[t, k] is the id of token t - k.

    From the first k on whose token lies before the sequence of t, or has the id `block_id` (t itself, too), all are
    `pad_id`. The result is what `engram_hash` takes. Exact. Source: Engram, arXiv 2601.07372.

    Args:
        token_ids: int32 (T), contiguous; the sequences one after the other.
        cu_seqlens: where each sequence begins, and T: int32 (B + 1), contiguous, ascending from 0; sequences may be
            empty (`TK_DEBUG=1` raises ValueError if that is not so; without, windows are then unspecified). None where
            all tokens are one sequence.
        N: ids of a window, 2 to 16.
        pad_id: what stands for no token; fits int32.
        block_id: an id that ends windows, such as that of images; fits int32.
        history: the ids before each sequence, newest first: int32 (B, N - 1), contiguous, of which the first negative
            one and all after it are none. For decoding, where a sequence is the tokens of one step.

    Returns:
        int32 (T, N).

    Raises:
        TypeError: an argument is of another type or dtype.
        ValueError: a shape, stride or device does not fit, or a number is out of range.
    """
    (num_tokens,) = check.tensor("token_ids", token_ids, (torch.int32,), ("num_tokens",))
    device = token_ids.device
    check.in_range("N", N, 2, MAX_NGRAM)
    check.in_range("pad_id", pad_id, -(2**31), 2**31 - 1)
    if block_id is not None:
        check.in_range("block_id", block_id, -(2**31), 2**31 - 1)
    num_sequences = 1
    if cu_seqlens is not None:
        (num_bounds,) = check.tensor("cu_seqlens", cu_seqlens, (torch.int32,), ("B + 1",), device=device)
        num_sequences = num_bounds - 1
        fewest = 1 if num_tokens else 0
        check.require(num_sequences >= fewest, "cu_seqlens", "at least {} elements", num_bounds, fewest + 1)
    if history is not None:
        check.tensor("history", history, (torch.int32,), (num_sequences, N - 1), device=device)
    if cu_seqlens is not None and check.reads_data(cu_seqlens):
        _check_bounds(cu_seqlens, num_tokens)
    out = new(token_ids.new_empty, (num_tokens, N))
    if launching(out):
        launch = _ngram_windows_kernel(N, cu_seqlens is not None, history is not None, get_arch(device))
        halvings = 0 if cu_seqlens is None else (num_sequences - 1).bit_length()
        launch(token_ids, cu_seqlens, history, halvings, pad_id, _NO_BLOCK_ID if block_id is None else block_id, out)
    return out
