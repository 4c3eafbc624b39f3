"""Top-k by a warp, shared by the gates' kernels: the best experts of a token.

    lane         0               1           …         31
    experts  0 … V-1         V … 2V-1        …    31V … 32V-1         (V experts per lane; `first` is the lane's first)
    keys     int32 (V,) in each lane's registers; they compare like the ranks of its experts

Each lane owns consecutive experts (with gaps where groups of experts have lanes of their own), so among equal keys the
lowest lane has the smallest index. Each lane keeps its best three keys, without their experts. A round is one warp-wide
maximum and one ballot, after which only the winning lane moves on to its next key; a lane whose three are used up
searches its registers. After the rounds, lane k finds the expert of round k's winning key, for all slots in parallel.

`choose` is called by all 32 lanes of a warp (a guard such as `token < num_tokens` must be uniform). Then chosen[0] of
lane k < num_topk is the expert with the k-th best rank, and the gate works on all slots of a token in parallel: lane k
stores its index, and computes the unbiased score of its expert again from `logits[token, chosen[0]]` (in L1 by now),
which is cheaper than carrying scores through the selection.

Groups of experts get `group_lanes(num_groups)` lanes each; `group_key` computes a key from the best one or two ranks.
"""

from typing import Any

import tilelang.language as T

from tk_core.device.bits import count_leading_zeros
from tk_core.math import align, ceil_div

NO_KEY = -0x7F800002
"""The key where there is no expert: one below the key of -∞, which is the least key of a rank."""
LEAST_KEY = -0x7F800001
"""The key of -∞."""
TOP_KEY = 0x7FFFFFFF
"""The key of NaN."""
_UNKNOWN = -0x7F800003  # the lane has to search its registers


def sort_key(rank: Any) -> Any:
    """The int32 that sorts like the float32 `rank`: any NaN on top, -0 equal to +0. An expression."""
    return sort_key_of_sum(rank, T.float32(0))


def sort_key_of_sum(a: Any, b: Any) -> Any:
    """The `sort_key` of the float32 a + b, which must not be -0: that is, a and b are not both -0. An expression."""
    # A sum turns any NaN into the one with all bits but the sign set, whose key is TOP_KEY; and -0 + 0 is +0.
    bits = T.reinterpret(T.ieee_add(a, b), "int32")
    return bits ^ ((bits >> 31) & T.int32(0x7FFFFFFF))


def rank_of(key: Any) -> Any:
    """The float32 whose `sort_key` is `key`. An expression."""
    return T.reinterpret(key ^ ((key >> 31) & T.int32(0x7FFFFFFF)), "float32")


def group_lanes(num_groups: int) -> int:
    """Lanes for each of 1 to 32 groups: a power of two, so that butterfly shuffles stay within a group."""
    return 1 << ((32 // num_groups).bit_length() - 1)


def lane_vector(num_experts: int, lanes: int, most: int) -> int:
    """Elements per vectorized load when `lanes` lanes load num_experts elements: a power of two, at most `most`.

    It is the widest that divides num_experts and gives no lane more than a third beyond its even share.
    """
    share = ceil_div(num_experts, lanes)
    vector = most
    while vector > 1 and (num_experts % vector or 3 * align(share, vector) > 4 * share):
        vector //= 2
    return vector


def expert_of(j: Any, lane: Any, run_length: int) -> Any:
    """The j-th expert of a lane whose experts come in runs of `run_length`, an expression; ascending in j."""
    return j // run_length * (32 * run_length) + lane * run_length + j % run_length


@T.macro
def best_three(keys: T.Buffer, best: T.Buffer) -> None:
    """Write a lane's three largest keys to best int32 (3,), largest first; NO_KEY where there are fewer."""
    per_lane = int(keys.shape[0])
    high, low = T.alloc_local((2,), "int32"), T.alloc_local((2,), "int32")
    a, b, c, d = (T.alloc_var("int32") for _ in range(4))
    for i in T.unroll(3):
        best[i] = T.int32(NO_KEY)
    # Four keys at a time: the best three of two sorted pairs, merged into the best three so far.
    for j in T.unroll(per_lane // 4):
        for i in T.unroll(2):
            high[i] = T.max(keys[4 * j + 2 * i], keys[4 * j + 2 * i + 1])
            low[i] = T.min(keys[4 * j + 2 * i], keys[4 * j + 2 * i + 1])
        a = T.max(high[0], high[1])
        b = T.max(T.min(high[0], high[1]), T.max(low[0], low[1]))
        c = T.min(T.min(high[0], high[1]), T.max(low[0], low[1]))
        if j == 0:
            best[0] = a
            best[1] = b
            best[2] = c
        else:
            d = T.min(best[0], a)
            best[0] = T.max(best[0], a)
            b = T.max(best[1], b)
            best[1] = T.max(b, d)
            best[2] = T.max(T.min(b, d), T.max(best[2], c))
    for j in T.unroll(per_lane % 4):
        a = keys[per_lane // 4 * 4 + j]
        b = T.min(best[0], a)
        best[0] = T.max(best[0], a)
        c = T.min(best[1], b)
        best[1] = T.max(best[1], b)
        best[2] = T.max(best[2], c)


@T.macro
def choose(keys: T.Buffer, num_topk: int, lane: T.int32, first: T.int32, chosen: T.Buffer) -> None:
    """Set chosen[0] of lane k < num_topk to the expert with the k-th best key, of the other lanes to -1.

    keys: NO_KEY where the lane has no expert. first: the expert of keys[0], ascending with the lane. chosen int32 (1,).
    num_topk is at most 32 and at most the number of experts.
    """
    best = T.alloc_local((3,), "int32")
    best_three(keys, best)
    choose_from(keys, best, TOP_KEY, num_topk, lane, first, chosen)


@T.macro
def _record_best(
    keys: T.Buffer,
    best: T.Buffer,
    wins: T.Buffer,
    lane: T.int32,
    k: T.int32,
    winners: Any,
    takes_next: bool,
    searches: bool,
) -> None:
    """Round k: lane k records the best key and its holders.

    With `takes_next` the winning lane takes its next key, and with `searches` it may search its registers for that.
    """
    slot, holders = winners
    top = T.alloc_var("int32")
    held, this_lane = T.alloc_var("uint32"), T.alloc_var("uint32")
    not_less = T.alloc_var("int32")
    top = T.warp_reduce_max(best[0])
    held = T.cast(T.ballot_sync(best[0] == top), "uint32")
    if lane == k:
        slot[0] = top
        holders[0] = held
    if takes_next:
        # The lowest lane that holds the maximum wins.
        this_lane = T.uint32(1) << T.cast(lane, "uint32")
        if held & (this_lane * T.uint32(2) - T.uint32(1)) == this_lane:
            best[0] = best[1]
            best[1] = best[2]
            best[2] = T.int32(_UNKNOWN)
        # From its third win on, the winning lane searches its registers for the next key.
        if searches and best[0] == T.int32(_UNKNOWN):
            wins[0] = wins[0] + 1
            not_less = 0
            best[0] = T.int32(NO_KEY)
            for j in T.unroll(int(keys.shape[0])):
                if keys[j] < top:
                    best[0] = T.max(best[0], keys[j])
                else:
                    not_less = not_less + 1
            if not_less > wins[0]:
                best[0] = top


@T.macro
def choose_from(
    keys: T.Buffer, best: T.Buffer, most: T.int32, num_topk: int, lane: T.int32, first: T.int32, chosen: T.Buffer
) -> None:
    """`choose`, given each lane's `best_three` as `best`, which is overwritten.

    `most` is an upper bound on the keys of a lane: TOP_KEY, or LEAST_KEY where its experts are ruled out. The caller
    has applied it to `best`.
    """
    per_lane, before_search = int(keys.shape[0]), min(2, num_topk - 1)  # rounds in which no lane has to search
    wins = T.alloc_local((1,), "int32")
    # The winning key of round `lane`, and the lanes that held it.
    slot = T.alloc_local((1,), "int32")
    holders = T.alloc_local((1,), "uint32")
    winner, above_key, above_winner = (T.alloc_var("int32") for _ in range(3))
    repeats = T.alloc_var("uint32")
    earlier, found = T.alloc_var("int32"), T.alloc_var("int32")
    winners = slot, holders
    wins[0] = 2  # the wins of a lane before it first searches
    slot[0] = T.int32(NO_KEY)
    holders[0] = T.uint32(1)
    for k in T.unroll(before_search):
        _record_best(keys, best, wins, lane, k, winners, True, False)
    for k in T.serial(before_search, num_topk - 1):
        _record_best(keys, best, wins, lane, k, winners, True, True)
    _record_best(keys, best, wins, lane, num_topk - 1, winners, False, False)

    winner = T.__ffs(T.reinterpret(holders[0], "int32")) - 1
    found = 0
    for j in T.unroll(per_lane):
        if T.shfl_sync(keys[per_lane - 1 - j], winner) == slot[0]:
            found = per_lane - 1 - j
    if per_lane > 1:
        # Where a lane has won repeatedly with equal keys, the slots take its experts in order.
        above_key = T.shfl_up(slot[0], 1)
        above_winner = T.shfl_up(winner, 1)
        repeats = T.cast(
            T.ballot_sync(lane > 0 and lane < num_topk and above_key == slot[0] and above_winner == winner), "uint32"
        )
        if T.any_sync(repeats != T.uint32(0) or slot[0] == T.int32(LEAST_KEY)):
            # The number of consecutive repeats up to this lane.
            earlier = count_leading_zeros(~(repeats << T.cast(31 - lane, "uint32")))
            for j in T.unroll(per_lane):
                if T.shfl_sync(T.min(keys[j], most), winner) == slot[0]:
                    if earlier == 0:
                        found = j
                    earlier = earlier - 1
    found = T.shfl_sync(first, winner) + found
    chosen[0] = T.if_then_else(lane < num_topk, found, -1)


@T.macro
def group_key(best: T.Buffer, lanes: int, num_topk_sum: int, key: T.Buffer) -> None:
    """Set key[0] of each lane to the key of the sum of its group's best one or two ranks, given `best_three` as `best`.

    The key of a group with too few experts is meaningless.
    """
    first, second, other = (T.alloc_var("int32") for _ in range(3))
    first = best[0]
    second = best[1]
    for step in T.unroll(lanes.bit_length() - 1):
        other = T.shfl_xor(first, 1 << step)
        if num_topk_sum == 2:
            second = T.max(T.min(first, other), T.max(second, T.shfl_xor(second, 1 << step)))
        first = T.max(first, other)
    key[0] = first
    if num_topk_sum == 2:
        key[0] = sort_key(rank_of(first) + rank_of(second))


@T.macro
def group_position(key: T.Buffer, num_groups: int, lane: T.int32, position: T.Buffer) -> None:
    """Set position[0] of each lane to the number of groups ahead of its own: of larger key, or equal and earlier."""
    lanes = group_lanes(num_groups)
    other, least = T.alloc_var("int32"), T.alloc_var("int32")
    position[0] = 0
    # The comparisons are divided among a group's lanes.
    for i in T.unroll(ceil_div(num_groups, lanes)):
        group = lane % lanes * ceil_div(num_groups, lanes) + i
        other = T.shfl_sync(key[0], group * lanes % 32)
        # One less for an earlier group: it is ahead with an equal key too. No key is the least int32: no overflow.
        least = key[0] - T.cast(group < lane // lanes, "int32")
        position[0] = position[0] + T.cast(group < num_groups and other > least, "int32")
    for step in T.unroll(lanes.bit_length() - 1):
        position[0] = position[0] + T.shfl_xor(position[0], 1 << step)


@T.macro
def choose_in_groups(
    keys: T.Buffer, groups: tuple[int, int, int], num_topk: int, lane: T.int32, first: T.int32, chosen: T.Buffer
) -> None:
    """`choose` from the best groups; groups: how many are kept, of how many, by the sum of how many of their best."""
    num_kept, num_groups, num_topk_sum = groups
    best = T.alloc_local((3,), "int32")
    best_three(keys, best)
    if num_groups == 1:
        choose_from(keys, best, TOP_KEY, num_topk, lane, first, chosen)
    else:
        key, position = T.alloc_local((1,), "int32"), T.alloc_local((1,), "int32")
        most = T.alloc_var("int32")
        group_key(best, group_lanes(num_groups), num_topk_sum, key)
        group_position(key, num_groups, lane, position)
        most = T.if_then_else(position[0] < num_kept, T.int32(TOP_KEY), T.int32(LEAST_KEY))
        for i in T.unroll(3):
            best[i] = T.min(best[i], most)
        choose_from(keys, best, most, num_topk, lane, first, chosen)
