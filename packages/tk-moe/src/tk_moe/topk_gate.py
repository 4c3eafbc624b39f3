"""topk_gate: the num_topk best experts of each token, as a stable descending sort of its scores puts them.

    out[t] = argsort(scores[t], descending, stable)[:num_topk]

scores float32 (num_tokens, num_experts), out int64 (num_tokens, num_topk).

A warp takes a token and holds its scores in registers, as integers that sort as the scores do:

    lane         0                1          …         31
    experts  0 … V-1         V … 2V-1        …   31V … 32V-1         (V = ⌈num_experts / 32⌉ or a little more)

Lanes own consecutive experts, so among equal scores the lowest lane has the smallest index. Each lane knows its best
two; a round is one warp maximum and one ballot, and only the lane that wins moves on to its second best. A lane that
has spent both looks through its registers again.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable

MAX_EXPERTS = 1024
MAX_TOPK = 32

# One below the key of -∞, which is the least that a score has.
_LEAST = -0x7F800002


@dataclass(frozen=True, eq=False)
class TopkGateConfig:
    """Launch knobs."""

    warps: int
    """Tokens that a block takes, a warp each."""

    @staticmethod
    @cache
    def best(many_tokens: bool, arch: Arch) -> "TopkGateConfig":
        """Four warps have a scheduler each; eight halve the blocks to start where the device is full. Untuned."""
        return TopkGateConfig(warps=8 if many_tokens else 4)


# Every access stands under a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _topk_gate_kernel(num_experts: int, num_topk: int, alignment: int, config: TopkGateConfig, arch: Arch) -> Any:
    """`alignment`: what the address of each row of scores is a multiple of, in bytes."""
    import tilelang.language as T

    vector = alignment // 4
    per_lane = align(ceil_div(num_experts, 32), vector)
    warps = config.warps
    num_tokens = T.dynamic("num_tokens")

    @T.macro
    def load_keys(scores: T.Buffer, token: T.int32, lane: T.int32, keys: T.Buffer) -> None:
        values = T.alloc_local((per_lane,), "float32")
        for c in T.unroll(per_lane // vector):
            if lane * per_lane + c * vector < num_experts:
                for v in T.vectorized(vector):
                    values[c * vector + v] = scores[token, lane * per_lane + c * vector + v]
        for j in T.unroll(per_lane):
            # The sum turns -0 into +0 and any NaN into the one with all bits but the sign set, which is the top key.
            bits = T.reinterpret(T.ieee_add(values[j], T.float32(0.0)), "int32")
            keys[j] = T.if_then_else(
                lane * per_lane + j < num_experts, bits ^ ((bits >> 31) & T.int32(0x7FFFFFFF)), T.int32(_LEAST)
            )

    @T.macro
    def best_two(keys: T.Buffer, spent: T.Buffer, best: T.Buffer, index: T.Buffer) -> None:
        for i in T.unroll(2):
            best[i] = T.int32(_LEAST)
            index[i] = 0
        key = T.alloc_var("int32")
        for j in T.unroll(per_lane):
            key = T.if_then_else((spent[0] >> j) & 1 == 0, keys[j], T.int32(_LEAST))
            # Ascending j and strict comparisons: the first of equals stays ahead. Branches become predicated moves,
            # which are cheaper here than selects: the pipe that selects and compares is the busy one.
            if key > best[0]:
                best[1] = best[0]
                index[1] = index[0]
                best[0] = key
                index[0] = j
            else:
                if key > best[1]:
                    best[1] = key
                    index[1] = j

    @T.prim_func
    def topk_gate(
        scores: T.Tensor((num_tokens, num_experts), "float32"), out: T.Tensor((num_tokens, num_topk), "int64")
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * warps + thread // 32
            if token < num_tokens:  # the same for a whole warp
                keys = T.alloc_local((per_lane,), "int32")
                spent = T.alloc_local((1,), "int32")
                best = T.alloc_local((2,), "int32")
                index = T.alloc_local((2,), "int32")
                current = T.alloc_var("int32")  # index of the key in best[0]
                holders = T.alloc_var("uint32")
                this_lane = T.alloc_var("uint32")
                load_keys(scores, token, lane, keys)
                spent[0] = 0
                best_two(keys, spent, best, index)
                current = index[0]
                this_lane = T.uint32(1) << T.cast(lane, "uint32")
                for k in T.serial(num_topk):
                    holders = T.cast(T.ballot_sync(best[0] == T.warp_reduce_max(best[0])), "uint32")
                    # The lowest lane that holds the maximum wins.
                    if holders & (this_lane * T.uint32(2) - T.uint32(1)) == this_lane:
                        out[token, k] = T.cast(T.cast(lane * per_lane + current, "uint32"), "int64")
                        if current == index[1]:
                            spent[0] = spent[0] | (T.int32(1) << index[0]) | (T.int32(1) << index[1])
                            best_two(keys, spent, best, index)
                            current = index[0]
                        else:
                            best[0] = best[1]
                            current = index[1]

    return topk_gate


def _topk_gate_reference(scores: torch.Tensor, num_topk: int, out: torch.Tensor) -> None:
    from tk_moe.reference.topk_gate import topk_gate

    out.copy_(topk_gate(scores, num_topk))


@op("tk_moe::topk_gate_out", mutates=("out",), reference=_topk_gate_reference)
def _topk_gate_out(scores: torch.Tensor, num_topk: int, out: torch.Tensor) -> None:
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return
    arch = get_arch(scores.device)
    # Eight tokens a multiprocessor: two warps a scheduler.
    config = TopkGateConfig.best(num_tokens > 8 * arch.num_sms, arch)
    _topk_gate_kernel(num_experts, num_topk, check.row_alignment(scores), config, arch)(scores, out)


@replayable
def topk_gate(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Choose the `num_topk` experts with the highest scores for each token, best first.

    The order is that of a stable descending sort: NaN above +∞, -0 equal to +0, among equals the smaller index first.

    Args:
        scores: float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        num_topk: Experts a token, from 1 to num_experts and at most 32.

    Returns:
        int64 (num_tokens, num_topk): distinct indices of experts.

    Raises:
        TypeError: scores is not a float32 tensor, or num_topk is not an int.
        ValueError: scores has another shape or is not contiguous, or a size is out of range.
    """
    num_tokens, num_experts = check.tensor("scores", scores, (torch.float32,), ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of scores)", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_topk", num_topk, 1, min(num_experts, MAX_TOPK))
    out = scores.new_empty((num_tokens, num_topk), dtype=torch.int64)
    _topk_gate_out(scores, num_topk, out)
    return out
