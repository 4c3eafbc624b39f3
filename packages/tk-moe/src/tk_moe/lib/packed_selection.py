"""Top-k for gates without groups, for at most 256 experts and small num_topk: a key contains its expert's index.

    experts   0 … V-1    V … 2V-1    …   31V … 32V-1   32V … 33V-1   …      (vectors of V, assigned to lanes in turn)
    lane          0          1       …        31            0        …
    key       int32: the upper 24 bits of the rank's `sort_key`; the lower 8 are 255 minus the expert

All keys of a token differ, and of equal ranks the smaller index has the larger key. Each lane sorts the best four of
its keys. A round is one warp-wide maximum, whose lower bits name the winning expert; the lane that held it moves on to
its next key. After the rounds, lane k takes the winner of round k.

This is approximate in two cases: keys do not order ranks that differ only in the lower 8 bits, and a lane that has
won four times has no fifth key sorted. If either occurs among the best num_topk + 1 experts (in 3 of 1000 tokens with
normal scores), neighbouring slots are exchanged where their full sort keys are out of order. The choice is right if all
slots are then in order and exactly num_topk - 1 experts are ahead of the last slot. If not (in 1 of 100000 tokens,
unless many ranks are close), the choice is made again with full keys.
"""

import tilelang.language as T

from tk_core.device.bits import byte_perm
from tk_core.math import align
from tk_moe.device.gates import take_best
from tk_moe.lib.selection import NO_KEY, expert_of, sort_key

_NONE = -(2**31)  # below the key of any expert


@T.macro
def choose_packed(
    ranks: T.Buffer, num_experts: int, vector: int, num_topk: int, lane: T.int32, chosen: T.Buffer
) -> None:
    """Lane k < num_topk gets the expert with the k-th best rank.

    ranks: float32 (per_lane,), any value where the lane has no expert. chosen: int32 (1,). At most 256 experts.
    """
    per_lane = int(ranks.shape[0])
    padded = align(per_lane, 4)
    # Lane k selects the winner of round k by the bits of k.
    bits = (num_topk - 1).bit_length()
    # The lower bytes of lane 0's keys 0 to 3. Keys 4 to 7 are of experts 128 further on.
    bytes_of_lane_0 = sum(255 - expert_of(j, 0, vector) << 8 * j for j in range(4))
    index_bytes = T.alloc_local((2,), "uint32")
    keys = T.alloc_local((padded,), "int32")
    best = T.alloc_local((4,), "int32")
    tops = T.alloc_local((1 << bits,), "int32")
    right = T.alloc_local((1,), "bool")
    last, above = T.alloc_var("int32"), T.alloc_var("int32")
    is_doubtful = T.alloc_var("bool")
    index_bytes[0] = T.uint32(bytes_of_lane_0) - T.cast(lane, "uint32") * T.uint32(0x01010101 * vector)
    index_bytes[1] = index_bytes[0] - T.uint32(0x80808080)
    for j in T.unroll(padded):
        if j < per_lane:
            keys[j] = T.reinterpret(T.ieee_add(ranks[j], T.float32(0)), "int32")
            keys[j] = byte_perm(keys[j], index_bytes[j // 4], 0x3214 + j % 4, "int32")
            keys[j] = keys[j] ^ ((keys[j] >> 31) & T.int32(0x7FFFFF00))
            if expert_of(j, 31, vector) >= num_experts:
                keys[j] = T.if_then_else(expert_of(j, lane, vector) < num_experts, keys[j], T.int32(_NONE))
        else:
            keys[j] = T.int32(_NONE)
    _best_four(keys, best)
    for k in T.unroll(num_topk):
        tops[k] = T.warp_reduce_max(best[0])
        take_best(T.address_of(best[0]), tops[k])
    last = tops[num_topk - 1]
    for b in T.unroll(bits):
        for i in T.unroll(1 << (bits - b - 1)):
            if (2 * i + 1) << b < num_topk:
                tops[i] = T.if_then_else(lane & (1 << b) != 0, tops[2 * i + 1], tops[2 * i])
            else:
                tops[i] = tops[2 * i]
    chosen[0] = (tops[0] & 255) ^ 255

    is_doubtful = T.cast(last ^ best[0], "uint32") < T.uint32(256)
    if per_lane > 4:
        is_doubtful = is_doubtful or best[0] < T.int32(_NONE + 32 * vector)
    if num_topk > 1:
        above = T.shfl_sync(tops[0], lane - 1)
        is_tied = T.cast(tops[0] ^ above, "uint32") < T.uint32(256)
        # A power of two needs no guard: all lanes have slots, and lane 0 compares with the last slot, in lane 31.
        is_doubtful = is_doubtful or (is_tied and (num_topk == 1 << bits or (lane > 0 and lane < num_topk)))
    if T.any_sync(is_doubtful) != 0:
        for j in T.unroll(per_lane):
            keys[j] = T.if_then_else(expert_of(j, lane, vector) < num_experts, sort_key(ranks[j]), T.int32(NO_KEY))
        _is_right(keys, vector, num_topk, lane, chosen, right)
        if not right[0]:
            _choose_again(keys, vector, num_topk, lane, chosen)


@T.macro
def _sort_four(keys: T.Buffer, start: T.int32, four: T.Buffer) -> None:
    """Sort keys[start : start + 4] into `four`, largest first."""
    high, low = T.alloc_local((2,), "int32"), T.alloc_local((2,), "int32")
    for i in T.unroll(2):
        high[i] = T.max(keys[start + 2 * i], keys[start + 2 * i + 1])
        low[i] = T.min(keys[start + 2 * i], keys[start + 2 * i + 1])
    four[0] = T.max(high[0], high[1])
    four[1] = T.max(T.min(high[0], high[1]), T.max(low[0], low[1]))
    four[2] = T.min(T.min(high[0], high[1]), T.max(low[0], low[1]))
    four[3] = T.min(low[0], low[1])


@T.macro
def _best_four(keys: T.Buffer, best: T.Buffer) -> None:
    """Write the four largest of a lane's keys to `best`, largest first; the number of keys is a multiple of 4."""
    four, best_of_two = T.alloc_local((4,), "int32"), T.alloc_local((4,), "int32")
    _sort_four(keys, 0, best)
    for group in T.unroll(1, int(keys.shape[0]) // 4):
        _sort_four(keys, 4 * group, four)
        # Bitonic merge: the maxima of opposite keys are the best four, a bitonic sequence; two steps then sort it.
        for i in T.unroll(4):
            best_of_two[i] = T.max(best[i], four[3 - i])
        for i in T.unroll(2):
            four[i] = T.max(best_of_two[i], best_of_two[i + 2])
            four[i + 2] = T.min(best_of_two[i], best_of_two[i + 2])
        for i in T.unroll(2):
            best[2 * i] = T.max(four[2 * i], four[2 * i + 1])
            best[2 * i + 1] = T.min(four[2 * i], four[2 * i + 1])


@T.macro
def _exchange(num_topk: int, lane: T.int32, partner: T.int32, key: T.Buffer, chosen: T.Buffer) -> None:
    """Exchange the slots, key and expert, of this lane and its partner if they are out of order."""
    other_key, other = T.alloc_var("int32"), T.alloc_var("int32")
    is_behind = T.alloc_var("bool")
    other_key = T.shfl_sync(key[0], partner)
    other = T.shfl_sync(chosen[0], partner)
    # An equal key is ahead if its expert's index is smaller.
    is_behind = other_key > key[0] - T.cast(other < chosen[0], "int32")
    if partner >= 0 and T.max(lane, partner) < num_topk and is_behind == (lane < partner):
        key[0] = other_key
        chosen[0] = other


@T.macro
def _is_right(keys: T.Buffer, vector: int, num_topk: int, lane: T.int32, chosen: T.Buffer, right: T.Buffer) -> None:
    """Exchange neighbouring slots that are out of order by full sort keys; right[0] says if the choice is now right."""
    per_lane = int(keys.shape[0])
    key = T.alloc_local((1,), "int32")
    winner, register, other_key, other, ahead = (T.alloc_var("int32") for _ in range(5))
    is_wrong = T.alloc_var("bool")
    winner = chosen[0] // vector % 32
    register = chosen[0] // (32 * vector) * vector + chosen[0] % vector
    key[0] = 0
    for j in T.unroll(per_lane):
        other_key = T.shfl_sync(keys[j], winner)
        if register == j:
            key[0] = other_key
    _exchange(num_topk, lane, lane ^ 1, key, chosen)
    _exchange(num_topk, lane, ((lane + 1) ^ 1) - 1, key, chosen)
    other_key = T.shfl_up(key[0], 1)
    other = T.shfl_up(chosen[0], 1)
    is_wrong = lane > 0 and lane < num_topk and other_key <= key[0] - T.cast(other < chosen[0], "int32")
    other_key = T.shfl_sync(key[0], num_topk - 1)
    other = T.shfl_sync(chosen[0], num_topk - 1)
    ahead = 0
    for j in T.unroll(per_lane):
        ahead = ahead + T.cast(keys[j] > other_key - T.cast(expert_of(j, lane, vector) < other, "int32"), "int32")
    ahead = T.warp_reduce_sum(ahead)
    right[0] = T.any_sync(is_wrong) == 0 and ahead == num_topk - 1


@T.macro
def _choose_again(keys: T.Buffer, vector: int, num_topk: int, lane: T.int32, chosen: T.Buffer) -> None:
    """Choose by full sort keys, with two warp reductions per round."""
    per_lane = int(keys.shape[0])
    taken = T.alloc_var("uint32")  # one bit for each key that has won a round
    best, register, expert, top, winner = (T.alloc_var("int32") for _ in range(5))
    taken = T.uint32(0)
    for k in T.serial(num_topk):
        best = T.int32(_NONE)
        register = 0
        for j in T.unroll(per_lane):
            i = per_lane - 1 - j
            if (taken >> T.uint32(i)) & T.uint32(1) == T.uint32(0) and keys[i] >= best:
                best = keys[i]
                register = i
        expert = expert_of(register, lane, vector)
        top = T.warp_reduce_max(best)
        winner = T.warp_reduce_min(T.if_then_else(best == top, expert, 32 * per_lane))
        if winner == expert:
            taken = taken | T.uint32(1) << T.cast(register, "uint32")
        if lane == k:
            chosen[0] = winner
