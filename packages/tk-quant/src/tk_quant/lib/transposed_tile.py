"""A tile of bytes in shared memory through which a kernel transposes its output.

In a kernel that quantizes (num_tokens, hidden) to (hidden, num_tokens), each thread has a few tokens of a few channels.
The tile has a row of 128 bytes for each channel, in eight chunks of 16 bytes, swizzled: chunk k of channel c is at
k ^ (c / vec). So neither eight neighbouring lanes that write `vec` channels each, nor eight that read one channel, have
bank conflicts.
"""

from functools import cache
from typing import Any

TILE_TOKENS = 128
"""Tokens of a tile; a channel of it has as many bytes."""


@cache
def transposed_tile_macros(num_channels: int, threads: int, vec: int = 8) -> tuple[Any, Any]:
    """Macros `put(tile, codes, index, channel, word)` and `store(tile, out, first_channel, first_token, end)`.

    tile is uint32 (num_channels, 32) in shared memory. `put` writes codes[index] to it, 1, 2 or 4 words with four
    tokens of a channel each, from `word` on (a multiple of the number of words). After a barrier, all threads call
    `store`, which copies the channels before `end` to out, bytes (hidden, num_tokens) with num_tokens % 128 == 0.
    """
    import tilelang.language as T

    @T.macro
    def put(tile: T.Buffer, codes: T.Buffer, index: T.int32, channel: T.int32, word: T.int32) -> None:
        place = ((word // 4) ^ (channel // vec % 8)) * 4 + word % 4
        for k in T.vectorized(codes.shape[1]):
            tile[channel, place + k] = codes[index, k]

    @T.macro
    def store(tile: T.Buffer, out: T.Buffer, first_channel: T.int32, first_token: T.int32, end: T.int32) -> None:
        thread = T.get_thread_binding()
        words = T.alloc_local((4,), "uint32")
        for i in T.unroll(num_channels * 8 // threads):
            channel = i * (threads // 8) + thread // 8
            chunk = thread % 8
            if first_channel + channel < end:
                for k in T.vectorized(4):
                    words[k] = tile[channel, (chunk ^ (channel // vec % 8)) * 4 + k]
                T.stg128(out[first_channel + channel, first_token + chunk * 16], words[0:4])

    return put, store
