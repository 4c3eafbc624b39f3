"""A macro for the slots of a token, each in a lane of a warp."""

import tilelang.language as T


@T.macro
def add_up(grad: T.Buffer, expert: T.int32, num_topk: int, lane: T.int32) -> None:
    """Let all slots with the same expert have the sum of their grad[0], added in the order of the slots.

    expert: negative in lanes without a slot, and in slots without an expert.
    """
    peers = T.alloc_var("uint32")
    term, total = T.alloc_var("float32"), T.alloc_var("float32")
    peers = T.match_any_sync(expert)  # occupies the whole SM for 2 cycles per distinct value
    if T.any_sync(T.And(expert >= 0, peers != T.uint32(1) << T.cast(lane, "uint32"))) != 0:
        total = T.float32(0)
        for k in T.serial(num_topk):
            term = T.shfl_sync(grad[0], k)
            if (peers >> T.cast(k, "uint32")) & T.uint32(1) != T.uint32(0):
                total = total + term
        grad[0] = total
