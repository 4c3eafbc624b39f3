"""topk_gate: the num_topk best experts of each token, in the order of a stable descending sort of its scores.

    out[t] = argsort(scores[t], descending, stable)[:num_topk]

scores float32 (num_tokens, num_experts), out int64 (num_tokens, num_topk).

A warp takes a token and chooses as in packed_selection.py, or where that does not apply as in selection.py.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.lib.packed_selection import can_pack, choose_packed_macro, expert_of
from tk_moe.lib.selection import NO_KEY, choose_macro, lane_vector, sort_key

MAX_EXPERTS = 1024
MAX_TOPK = 32


@dataclass(frozen=True)
class TopkGateConfig:
    """Launch configuration."""

    warps: int
    """Tokens of a thread block, one per warp."""

    @staticmethod
    @cache
    def best(arch: Arch, is_packed: bool = False) -> "TopkGateConfig":
        """Tuned on an H200 for few tokens and for many; `is_packed`: for `topk_gate` with packed keys.

        With four warps each has a scheduler of its own; 8 and 16 are up to 5 % slower. Thread blocks of 6 do not divide
        an SM's warps evenly, so that the last ones go to SMs that are done sooner: 2 % faster where the selection is
        short.
        """
        return TopkGateConfig(warps=6 if is_packed else 4)


# Every access has a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _topk_gate_kernel(num_experts: int, num_topk: int, alignment: int, config: TopkGateConfig, arch: Arch) -> Any:
    """`alignment` of the rows of scores is in bytes."""
    import tilelang.language as T

    vector = lane_vector(num_experts, 32, alignment // 4)
    per_lane = align(ceil_div(num_experts, 32), vector)
    warps = config.warps
    num_tokens = T.dynamic("num_tokens")
    is_packed = can_pack(num_experts, num_topk)
    # Consecutive experts of a lane: its vectors are 32 vectors apart, or all neighbours.
    run_length = vector if is_packed else per_lane
    choose = choose_macro(per_lane, num_topk)
    choose_packed = choose_packed_macro(num_experts, per_lane, vector, num_topk) if is_packed else None

    @T.prim_func
    def topk_gate(
        scores: T.Tensor((num_tokens, num_experts), "float32"), out: T.Tensor((num_tokens, num_topk), "int64")
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * warps + thread // 32
            if token < num_tokens:  # uniform in a warp
                values = T.alloc_local((per_lane,), "float32")
                keys = T.alloc_local((per_lane,), "int32")
                chosen = T.alloc_local((1,), "int32")
                for c in T.unroll(per_lane // vector):
                    if expert_of(c * vector, lane, run_length) < num_experts:
                        for v in T.vectorized(vector):
                            values[c * vector + v] = scores[token, expert_of(c * vector, lane, run_length) + v]
                if is_packed:
                    choose_packed(values, lane, chosen)
                else:
                    for j in T.unroll(per_lane):
                        keys[j] = T.if_then_else(
                            expert_of(j, lane, run_length) < num_experts, sort_key(values[j]), T.int32(NO_KEY)
                        )
                    choose(keys, lane, expert_of(0, lane, run_length), chosen)
                if lane < num_topk:
                    out[token, lane] = T.cast(T.cast(chosen[0], "uint32"), "int64")

    return topk_gate


@op("tk_moe::topk_gate_out", mutates=("out",), reference="topk_gate")
def _topk_gate_out(scores: Tensor, num_topk: int, out: Tensor) -> None:
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return
    arch = get_arch(scores.device)
    config = TopkGateConfig.best(arch, can_pack(num_experts, num_topk))
    _topk_gate_kernel(num_experts, num_topk, check.row_alignment(scores), config, arch)(scores, out)


@replayable
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """Choose the `num_topk` experts with the highest scores for each token, best first.

    The order is that of a stable descending sort: NaN above +∞, -0 equal to +0, among equals the smaller index first.

    Args:
        scores: float32 (num_tokens, num_experts), contiguous; num_experts from 1 to 1024.
        num_topk: Experts per token, from 1 to num_experts and at most 32.

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
