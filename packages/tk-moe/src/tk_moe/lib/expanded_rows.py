"""Macros that copy a token's row to its positions in the experts' segments, and zero the rows of padding.

Padding comes in runs, at the end of each expert's segment and after the last one. Of G thread blocks, block b zeroes
the padding among the rows b, b + G, b + 2G, …, so that neighbouring rows of a run are zeroed by different blocks.
"""

from typing import Any

import tilelang.language as T


def vectors_of_threads(shape: tuple[int, ...], vector: int, threads: int) -> Any:
    """Layout of a fragment (channels) or (rows, channels): consecutive threads hold consecutive vectors."""
    channels = shape[-1] // threads

    def thread_and_register(*indices: Any) -> tuple[Any, Any]:
        vectors = indices[-1] // vector
        row = indices[0] * channels if len(shape) > 1 else 0
        return vectors % threads, row + vectors // threads * vector + indices[-1] % vector

    return T.Fragment(shape, forward_fn=thread_and_register)


@T.macro
def load_positions(token_topk_to_pos: T.Buffer, token: Any, num_expanded_tokens: Any, pos: T.Buffer) -> None:
    """Load a token's positions into the local buffer `pos`; a position past the last row becomes -1."""
    for k in T.unroll(pos.shape[0]):
        pos[k] = token_topk_to_pos[token, k]
    for k in T.unroll(pos.shape[0]):
        pos[k] = T.if_then_else(pos[k] < num_expanded_tokens, pos[k], -1)


@T.macro
def copy_row(x: T.Buffer, token: Any, pos: T.Buffer, channels: T.Buffer, out: T.Buffer) -> None:
    """Copy row `token` of x to the rows pos[k] >= 0 of out, through a fragment that holds some channels at a time."""
    for part in T.serial(T.ceildiv(x.shape[1], channels.shape[0])):
        first = part * channels.shape[0]
        T.copy(x[token, first : first + channels.shape[0]], channels)
        for k in T.unroll(pos.shape[0]):
            if pos[k] >= 0:
                T.copy(channels, out[pos[k], first : first + channels.shape[0]])


@T.macro
def load_experts(pos_to_expert: T.Buffer, block: Any, num_blocks: Any, experts: T.Buffer) -> None:
    """Load the experts of the rows block + i · num_blocks, which the block checks for padding; 0 past the last row.

    They go to a fragment, early in the kernel: the block waits for the loads only when it copies them to shared memory.
    """
    for i in T.Parallel(experts.shape[0]):
        row = block + i * num_blocks
        experts[i] = T.if_then_else(row < pos_to_expert.shape[0], pos_to_expert[row], 0)


@T.macro
def zero_padding(experts: T.Buffer, block: Any, num_blocks: Any, channels: T.Buffer, out: T.Buffer) -> None:
    """Zero row block + i · num_blocks of out where experts[i], in shared memory, is negative; clears `channels`."""
    T.clear(channels)
    for i in T.serial(experts.shape[0]):
        if experts[i] < 0:
            for part in T.serial(T.ceildiv(out.shape[1], channels.shape[0])):
                first = part * channels.shape[0]
                T.copy(channels, out[block + i * num_blocks, first : first + channels.shape[0]])
