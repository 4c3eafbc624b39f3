"""Shared by the convolution and its gradient: checks, the tile of a thread block, rstds and sequences of all rows.

Tokens of one residue class modulo the dilation meet in the convolution, and no others do. So a thread block walks over
tokens that are a dilation apart, and holds the three rows before the current one, whatever the dilation is:

    dilation 3      token  0  1  2  3  4  5  6  7  8  …
    walk 0                 x        x        x
    walk 1                    x        x        x
    walk 2                       x        x        x
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_engram.sizes import HIDDEN_MULTIPLE, MAX_HIDDEN, MAX_STREAMS, WEIGHT_DTYPES

NUM_TAPS = 4
"""Width of the convolution."""
MAX_DILATION = 65536
"""More than any n-gram is long; products of it and a walk's length stay within int32."""
LEAST_EPS = torch.finfo(torch.float32).tiny
"""The rstd of a row of zeros has to be finite."""


@dataclass(frozen=True)
class ChannelTile:
    """Channels of a thread block, eight a thread, so that every load and store of a row takes 16 bytes."""

    channels: int
    """Those of the last tile beyond hidden count as zeros."""
    num_tiles: int

    @property
    def threads(self) -> int:
        """Threads of a thread block: whole warps."""
        return self.channels // VECTOR

    @property
    def warps(self) -> int:
        """Warps of a thread block."""
        return self.threads // 32

    @staticmethod
    def best(hidden: int) -> "ChannelTile":
        """At most 128 threads, because of the registers that the filter takes: 32 a thread."""
        channels = channel_tile(hidden, max_threads=128)
        return ChannelTile(channels, ceil_div(hidden, channels))


@dataclass(frozen=True)
class RowThreads:
    """Threads that share a whole row. The sum over its channels is ordered by them, so by hidden alone."""

    threads: int
    """Whole warps."""
    rounds: int
    """Runs of eight neighbouring channels that a thread has."""

    @property
    def channels(self) -> int:
        """Channels of all threads; those beyond hidden count as zeros."""
        return VECTOR * self.threads * self.rounds

    @staticmethod
    def best(hidden: int) -> "RowThreads":
        """Two vectors a thread, or four in rows of more than 8192 channels; one where that leaves fewer idle."""
        vectors = hidden // VECTOR
        if vectors > 1024:
            return RowThreads(align(ceil_div(vectors, 4), 32), 4)
        two, one = (RowThreads(align(ceil_div(vectors, rounds), 32), rounds) for rounds in (2, 1))
        return one if one.channels < two.channels else two


@kernel(pass_configs=DIRECT_COPIES)
def _rstd_kernel(mhc_mult: int, hidden: int, is_packed: bool, has_state: bool, arch: Arch) -> Any:
    """A thread block takes one row, of u or of the state; those of stream 0 also find the token's sequence."""
    import tilelang.language as T

    from tk_engram.lib.conv_tile import add_squares, find_sequence
    from tk_engram.lib.gate_tiles import channels_of_threads, sum_over_threads

    row = RowThreads.best(hidden)
    tile = VECTOR * row.threads
    num_tokens, num_offsets, num_state_rows = (T.dynamic(f"num_{n}") for n in ("tokens", "offsets", "state_rows"))

    @T.prim_func
    def rstd(
        u: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        cu_seqlens: T.Tensor((num_offsets,), "int32"),
        state: T.Tensor((num_state_rows, mhc_mult, hidden), "bfloat16"),
        token_rstd: T.Tensor((num_tokens, mhc_mult), "float32"),
        state_rstd: T.Tensor((num_state_rows, mhc_mult), "float32"),
        sequences: T.Tensor((2, num_tokens), "int32"),
        eps: T.float32,
    ) -> None:
        num_rows = num_tokens + (num_state_rows if has_state else 0)
        with T.Kernel(num_rows * mhc_mult, threads=row.threads) as block:
            vectors = T.alloc_fragment((row.rounds, tile), "bfloat16")
            parts = T.alloc_fragment((row.threads,), "float32")
            sums = T.alloc_local((1,), "float32")
            T.annotate_layout({vectors: channels_of_threads(vectors.shape)})
            token, stream = block // mhc_mult, block % mhc_mult

            if token < num_tokens:
                for r in T.unroll(row.rounds):
                    T.copy(u[token, stream, r * tile : (r + 1) * tile], vectors[r, :])
            elif has_state:
                for r in T.unroll(row.rounds):
                    T.copy(state[token - num_tokens, stream, r * tile : (r + 1) * tile], vectors[r, :])
            T.clear(parts)
            for r in T.unroll(row.rounds):
                add_squares(vectors, r, parts)
            sum_over_threads((parts,), sums)
            for _ in T.Parallel(1):
                if token < num_tokens:
                    token_rstd[token, stream] = T.rsqrt(sums[0] * T.float32(1 / hidden) + eps)
                elif has_state:
                    state_rstd[token - num_tokens, stream] = T.rsqrt(sums[0] * T.float32(1 / hidden) + eps)
            if is_packed and token < num_tokens and stream == 0:
                find_sequence(cu_seqlens, token, sequences)

    return rstd


def launch_rstd(
    u: Tensor,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    eps: float,
    rstd: Tensor,
    state_rstd: Tensor | None,
    sequences: Tensor | None,
) -> None:
    """Write rstd (T, m), with a state the rstd of its rows, and with cu_seqlens what `launch_sequences` writes."""
    _, mhc_mult, hidden = u.shape
    kernel = _rstd_kernel(mhc_mult, hidden, cu_seqlens is not None, state is not None, get_arch(u.device))
    kernel(u, cu_seqlens, state, rstd, state_rstd, sequences, eps)


_SEARCH_THREADS = 128


@kernel(pass_configs=DIRECT_COPIES)
def _sequences_kernel(arch: Arch) -> Any:
    """A thread takes one token."""
    import tilelang.language as T

    num_tokens, num_offsets = T.dynamic("num_tokens"), T.dynamic("num_offsets")

    @T.prim_func
    def find_sequences(
        cu_seqlens: T.Tensor((num_offsets,), "int32"), sequences: T.Tensor((2, num_tokens), "int32"), halvings: T.int32
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, _SEARCH_THREADS), threads=_SEARCH_THREADS) as block:
            found = T.alloc_fragment((_SEARCH_THREADS,), "int32")
            T.clear(found)
            # The last sequence that begins at the token or before it, bit by bit from the highest.
            for halving in T.serial(halvings):
                for i in T.Parallel(_SEARCH_THREADS):
                    later = found[i] + (1 << (halvings - 1 - halving))
                    begin = T.if_then_else(later < num_offsets - 1, cu_seqlens[later], num_tokens)
                    found[i] = T.if_then_else(begin <= block * _SEARCH_THREADS + i, later, found[i])
            for i in T.Parallel(_SEARCH_THREADS):
                if block * _SEARCH_THREADS + i < num_tokens:
                    sequences[0, block * _SEARCH_THREADS + i] = cu_seqlens[found[i]]
                    sequences[1, block * _SEARCH_THREADS + i] = found[i]

    return find_sequences


def launch_sequences(cu_seqlens: Tensor, sequences: Tensor) -> None:
    """Write the start of each token's sequence, then the sequence's index: int32 (2, T)."""
    _sequences_kernel(get_arch(sequences.device))(cu_seqlens, sequences, (cu_seqlens.shape[0] - 2).bit_length())


def check_conv(
    u: Any, norm_weight: Any, conv_weight: Any, dilation: Any, cu_seqlens: Any, eps: Any
) -> tuple[int, int, int]:
    """Check the arguments that the convolution and its gradient share; returns T, m and H.

    Raises TypeError or ValueError that names the argument. With TK_DEBUG, at the cost of a synchronization, also where
    cu_seqlens does not ascend from 0 to T.
    """
    num_tokens, mhc_mult, hidden = check.tensor("u", u, (torch.bfloat16,), ("T", "m", "H"))
    check.in_range("m (streams of u)", mhc_mult, 1, MAX_STREAMS)
    check.in_range("H (channels of u)", hidden, HIDDEN_MULTIPLE, MAX_HIDDEN)
    check.multiple_of("H (channels of u)", hidden, HIDDEN_MULTIPLE)
    check.tensor("norm_weight", norm_weight, WEIGHT_DTYPES, (mhc_mult, hidden), device=u.device)
    check.tensor("conv_weight", conv_weight, WEIGHT_DTYPES, (mhc_mult, hidden, NUM_TAPS), device=u.device)
    check.in_range("dilation", dilation, 1, MAX_DILATION)
    check.number("eps", eps)
    check.require(eps >= LEAST_EPS, "eps", "a positive number that float32 holds", eps)
    if cu_seqlens is not None:
        (num_offsets,) = check.tensor("cu_seqlens", cu_seqlens, (torch.int32,), ("B + 1",), device=u.device)
        check.require(num_offsets >= 2, "cu_seqlens", "at least two offsets", num_offsets)
        if check.reads_data(cu_seqlens):
            offsets = cu_seqlens.tolist()
            ascend = all(a <= b for a, b in pairwise(offsets))
            fits = offsets[0] == 0 and offsets[-1] == num_tokens and ascend
            check.require(fits, "cu_seqlens", "offsets that ascend from 0 to {}", offsets, num_tokens)
    return num_tokens, mhc_mult, hidden
