"""Macros that choose random experts for a token, by Philox4x32-10: lane k has slot k.

counter = (random_offset, token · 32 + slot), 64 bits each, key = (ep_rank, 0). The first word of the result becomes a
weight in (0, 1], the second modulo num_choices - slot the slot's choice among those that are left.
"""

from typing import Any

import tilelang.language as T


@T.macro
def count_choices(logical_count: T.Buffer, num_copies: int, lane: T.int32, num_choices: T.Buffer) -> None:
    """Set num_choices[0] to the number of all experts' copies."""
    num_mapped = int(logical_count.shape[0])
    num_choices[0] = 0
    for i in T.serial(T.ceildiv(num_mapped, 32)):
        if i * 32 + lane < num_mapped:
            num_choices[0] = num_choices[0] + T.max(T.min(logical_count[i * 32 + lane], num_copies), 1)
    num_choices[0] = T.warp_reduce_sum(num_choices[0])


@T.macro
def _draw(offset: Any, token: T.int32, lane: T.int32, ep_rank: T.int32, words: T.Buffer) -> None:
    """Write the four words of Philox4x32-10 to words uint32 (4,)."""
    keys = T.alloc_local((2,), "uint32")
    product, other, subsequence = (T.alloc_var("uint64") for _ in range(3))
    subsequence = T.cast(token, "uint64") * T.uint64(32) + T.cast(lane, "uint64")
    words[0] = T.cast(offset, "uint32")
    words[1] = T.cast(T.cast(offset, "uint64") >> T.uint64(32), "uint32")
    words[2] = T.cast(subsequence, "uint32")
    words[3] = T.cast(subsequence >> T.uint64(32), "uint32")
    keys[0] = T.cast(ep_rank, "uint32")
    keys[1] = T.uint32(0)
    for _ in T.unroll(10):
        product = T.cast(words[0], "uint64") * T.uint64(0xD2511F53)
        other = T.cast(words[2], "uint64") * T.uint64(0xCD9E8D57)
        words[0] = T.cast(other >> T.uint64(32), "uint32") ^ words[1] ^ keys[0]
        words[1] = T.cast(other, "uint32")
        words[2] = T.cast(product >> T.uint64(32), "uint32") ^ words[3] ^ keys[1]
        words[3] = T.cast(product, "uint32")
        keys[0] = keys[0] + T.uint32(0x9E3779B9)
        keys[1] = keys[1] + T.uint32(0xBB67AE85)


@T.macro
def choose_at_random(
    offset: Any,
    token: T.int32,
    lane: T.int32,
    ep_rank: T.int32,
    num_choices: T.int32,
    num_slots: int,
    chosen: T.Buffer,
    value: T.Buffer,
) -> None:
    """Set chosen[0] and value[0] of lane k < num_slots to slot k's expert and weight; experts are distinct.

    The smallest choice is final, that of the smaller slot if several are; every later slot whose choice is not smaller
    moves on by one; then the next smallest, and so on.
    """
    words = T.alloc_local((4,), "uint32")
    pick, key, least = (T.alloc_var("int32") for _ in range(3))
    is_final = T.alloc_var("bool")
    _draw(offset, token, lane, ep_rank, words)
    value[0] = T.cast(words[0], "float32") * T.float32(2.0**-32) + T.float32(2.0**-33)
    pick = T.cast(T.truncmod(words[1], T.cast(T.max(num_choices - lane, 1), "uint32")), "int32")
    is_final = lane >= num_slots
    for _ in T.serial(num_slots):
        key = T.if_then_else(is_final, T.int32(2**31 - 1), pick * 32 + lane)
        least = T.warp_reduce_min(key)
        if key == least:
            is_final = True
        elif not is_final and lane > (least & 31) and pick >= (least >> 5):
            pick = pick + 1
    chosen[0] = pick
