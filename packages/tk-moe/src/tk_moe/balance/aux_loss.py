"""aux_loss: the auxiliary loss that evens out experts' load, from scores and `aux_fi`; aux_loss_bwd: its gradient.

    share[t, e] = scores[t, e] / (1e-20 + Σ_e scores[t, e])
    loss = alpha · Σ_e fi[e] · P[e],  P[e] = (1 / num_tokens) · Σ_t share[t, e]
         = (alpha / num_tokens) · Σ_t part[t],  part[t] = Σ_e fi[e] · scores[t, e] / (1e-20 + Σ_e scores[t, e])

    grad_scores[t, e] = grad_loss · (alpha / num_tokens) · (fi[e] - part[t]) / (1e-20 + Σ_e scores[t, e])

scores float32 (num_tokens, num_experts), fi float32 (num_experts), loss and grad_loss float32 (). fi counts, so nothing
flows back through it.

A warp takes a token at a time, lane l the experts e with e // 4 mod 32 = l. Everything is added in one order, whatever
the number of blocks and the alignment of the tensors:

    1. Within a token a lane adds its experts, ascending; then the lanes are added in a tree (lane l and l xor 16, then
       8, 4, 2, 1).
    2. Tokens t, t + 256, t + 512, … make up strand t mod 256, and are added ascending.
    3. 32 strands each are added in such a tree, then those 8 sums ascending.

The loss is one launch of one cluster, of which each warp takes one strand or several; the gradient has a warp for each
token.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.num_sms import get_num_sms
from tk_core.op import op
from tk_core.replay import replayable
from tk_moe.device.async_copy import load_from_cluster
from tk_moe.lib.cluster import largest_cluster

MAX_EXPERTS = 1024
MAX_TOKENS = 2**30  # so that no index on the way overflows an int32

_NUM_STRANDS = 256
_GROUP = 4  # consecutive experts of a lane


@dataclass(frozen=True)
class AuxLossConfig:
    """How the strands are dealt out to blocks."""

    cluster_size: int
    """Blocks of the one cluster that does it all."""

    warps = 16
    floats_in_flight = 32
    """Scores that a lane asks for before it uses the first."""

    @staticmethod
    @cache
    def best(num_sms: int, arch: Arch) -> "AuxLossConfig":
        """The largest cluster that `num_sms` SMs take; one block without clusters."""
        return AuxLossConfig(largest_cluster(num_sms, arch))


@dataclass(frozen=True)
class AuxLossBwdConfig:
    """Launch knobs."""

    warps: int
    """Tokens that a block takes, a warp each."""

    @staticmethod
    @cache
    def best(arch: Arch) -> "AuxLossBwdConfig":
        """2 to 8 warps take the same time on an H200."""
        return AuxLossBwdConfig(warps=4)


def _per_lane(num_experts: int) -> int:
    """Scores of a token that a lane has."""
    return ceil_div(num_experts, 32 * _GROUP) * _GROUP


def _macros(num_experts: int, alignment: int) -> tuple[Any, Any]:
    """What both kernels do with tokens in registers: load a lane's scores, and add over all lanes."""
    import tilelang.language as T

    vector = alignment // 4
    per_lane = _per_lane(num_experts)

    def expert_of(j: int, lane: Any) -> Any:
        return (j // _GROUP * 32 + lane) * _GROUP + j % _GROUP

    @T.macro
    def load_fi(fi: T.Buffer, lane: T.int32, factors: T.Buffer) -> None:
        for j in T.unroll(per_lane // vector):
            for v in T.vectorized(vector):
                factors[j * vector + v] = T.float32(0)
            if expert_of(j * vector, lane) < num_experts:
                for v in T.vectorized(vector):
                    factors[j * vector + v] = fi[expert_of(j * vector, lane) + v]

    @T.macro
    def load_scores(
        scores: T.Buffer, token: T.int32, lane: T.int32, is_token: T.bool, values: T.Buffer, u: T.int32
    ) -> None:
        """A token's scores of this lane into values[u]; zeros behind the last expert, and for no token."""
        for j in T.unroll(per_lane // vector):
            for v in T.vectorized(vector):
                values[u, j * vector + v] = T.float32(0)
            if is_token and expert_of(j * vector, lane) < num_experts:
                for v in T.vectorized(vector):
                    values[u, j * vector + v] = scores[token, expert_of(j * vector, lane) + v]

    @T.macro
    def add(values: T.Buffer, u: T.int32, factors: T.Buffer, sums: T.Buffer) -> None:
        """1e-20 plus the sum of a token's scores; that of their products with fi over it."""
        sums[0] = T.float32(0)
        sums[1] = T.float32(0)
        for j in T.unroll(per_lane):
            sums[0] = sums[0] + values[u, j]
            sums[1] = sums[1] + values[u, j] * factors[j]
        sums[0] = T.float32(1e-20) + T.warp_reduce_sum(sums[0])
        sums[1] = T.warp_reduce_sum(sums[1]) / sums[0]

    return load_fi, load_scores, add


# The order of shared memory is kept by the barriers that are written out here.
@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,
        "tl.disable_thread_storage_sync": True,
        "tl.disable_shared_memory_reuse": True,
    }
)
def _aux_loss_kernel(num_experts: int, alignment: int, config: AuxLossConfig, arch: Arch) -> Any:
    """`alignment`: what the address of each row of scores, and that of fi, is a multiple of, in bytes."""
    import tilelang.language as T

    warps, cluster_size = config.warps, config.cluster_size
    per_lane = _per_lane(num_experts)
    in_flight = max(1, config.floats_in_flight // per_lane)
    strands_per_warp = _NUM_STRANDS // (warps * cluster_size)
    load_fi, load_scores, add = _macros(num_experts, alignment)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def aux_loss(
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        fi: T.Tensor((num_experts,), "float32"),
        alpha: T.float32,
        loss: T.Tensor((1,), "float32"),
    ) -> None:
        with T.Kernel(cluster_size, threads=warps * 32, cluster_dims=cluster_size) as block:
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            strand_sums = T.alloc_shared((strands_per_warp * warps,), "int32")  # the bits of float32
            warp_sums = T.alloc_shared((_NUM_STRANDS // 32,), "float32")
            values = T.alloc_local((in_flight, per_lane), "float32")
            factors = T.alloc_local((per_lane,), "float32")
            sums = T.alloc_local((2,), "float32")
            total = T.alloc_var("float32")
            load_fi(fi, lane, factors)
            for s in T.serial(strands_per_warp):
                strand = (s * cluster_size + block) * warps + warp
                total = T.float32(0)
                for batch in T.serial(T.ceildiv(num_tokens, _NUM_STRANDS * in_flight)):
                    for u in T.unroll(in_flight):
                        load_scores(
                            scores,
                            (batch * in_flight + u) * _NUM_STRANDS + strand,
                            lane,
                            (batch * in_flight + u) * _NUM_STRANDS + strand < num_tokens,
                            values,
                            u,
                        )
                    for u in T.unroll(in_flight):
                        add(values, u, factors, sums)  # 0 behind the last token
                        total = total + sums[1]
                if lane == 0:
                    strand_sums[s * warps + warp] = T.reinterpret(total, "int32")
            if cluster_size > 1:
                T.sync_warp()  # all its lanes have to come to a cluster's barrier together
                T.cluster_sync()
            else:
                T.sync_threads()
            if block == 0:
                if thread < _NUM_STRANDS:  # the same for a whole warp
                    slot = thread // (warps * cluster_size) * warps + thread % warps
                    if cluster_size > 1:
                        total = T.reinterpret(
                            load_from_cluster(T.access_ptr(strand_sums[slot], "r"), thread // warps % cluster_size),
                            "float32",
                        )
                    else:
                        total = T.reinterpret(strand_sums[slot], "float32")
                    total = T.warp_reduce_sum(total)
                    if lane == 0:
                        warp_sums[warp] = total
                T.sync_threads()
                if thread == 0:
                    total = warp_sums[0]
                    for i in T.unroll(1, _NUM_STRANDS // 32):
                        total = total + warp_sums[i]
                    loss[0] = total / T.cast(num_tokens, "float32") * alpha
            if cluster_size > 1:
                # No block goes before the first has read its sums: what that stores above depends on them.
                T.sync_warp()
                T.cluster_arrive_relaxed()
                T.cluster_wait()

    return aux_loss


# Every access stands under a guard of its own.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _aux_loss_bwd_kernel(num_experts: int, alignment: int, config: AuxLossBwdConfig, arch: Arch) -> Any:
    """`alignment`: what the address of each row of scores and their gradient, and of fi, is a multiple of, in bytes."""
    import tilelang.language as T

    vector = alignment // 4
    warps = config.warps
    per_lane = _per_lane(num_experts)
    load_fi, load_scores, add = _macros(num_experts, alignment)
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def aux_loss_bwd(
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        fi: T.Tensor((num_experts,), "float32"),
        grad_loss: T.Tensor((1,), "float32"),
        alpha: T.float32,
        grad_scores: T.Tensor((num_tokens, num_experts), "float32"),
    ) -> None:
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * 32) as block:
            thread = T.get_thread_binding()
            lane = thread % 32
            token = block * warps + thread // 32
            values = T.alloc_local((1, per_lane), "float32")
            factors = T.alloc_local((per_lane,), "float32")
            sums = T.alloc_local((2,), "float32")
            scale = T.alloc_var("float32")
            if token < num_tokens:  # the same for a whole warp
                load_scores(scores, token, lane, True, values, 0)
                load_fi(fi, lane, factors)
                scale = grad_loss[0] * (alpha / T.cast(num_tokens, "float32"))
                add(values, 0, factors, sums)
                for j in T.unroll(per_lane):
                    values[0, j] = (factors[j] - sums[1]) / sums[0] * scale
                for j in T.unroll(per_lane // vector):
                    expert = (j * vector // _GROUP * 32 + lane) * _GROUP + j * vector % _GROUP
                    if expert < num_experts:
                        for v in T.vectorized(vector):
                            grad_scores[token, expert + v] = values[0, j * vector + v]

    return aux_loss_bwd


def _aux_loss_reference(scores: torch.Tensor, fi: torch.Tensor, alpha: float, loss: torch.Tensor) -> None:
    from tk_moe.reference.balance.aux_loss import aux_loss

    loss.copy_(aux_loss(scores, fi, alpha))


@op("tk_moe::aux_loss_out", mutates=("loss",), reference=_aux_loss_reference)
def _aux_loss_out(scores: torch.Tensor, fi: torch.Tensor, alpha: float, loss: torch.Tensor) -> None:
    """Launch."""
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        loss.zero_()
        return
    arch = get_arch(scores.device)
    config = AuxLossConfig.best(get_num_sms(scores.device), arch)
    alignment = min(check.row_alignment(scores), check.row_alignment(fi))
    _aux_loss_kernel(num_experts, alignment, config, arch)(scores, fi, alpha, loss.view(1))


def _aux_loss_bwd_reference(
    scores: torch.Tensor, fi: torch.Tensor, grad_loss: torch.Tensor, alpha: float, grad_scores: torch.Tensor
) -> None:
    from tk_moe.reference.balance.aux_loss import aux_loss_bwd

    grad_scores.copy_(aux_loss_bwd(grad_loss, scores, fi, alpha))


@op("tk_moe::aux_loss_bwd_out", mutates=("grad_scores",), reference=_aux_loss_bwd_reference)
def _aux_loss_bwd_out(
    scores: torch.Tensor, fi: torch.Tensor, grad_loss: torch.Tensor, alpha: float, grad_scores: torch.Tensor
) -> None:
    """Launch."""
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return
    arch = get_arch(scores.device)
    alignment = min(check.row_alignment(x) for x in (scores, fi, grad_scores))
    backward = _aux_loss_bwd_kernel(num_experts, alignment, AuxLossBwdConfig.best(arch), arch)
    backward(scores, fi, grad_loss.view(1), alpha, grad_scores)


def _check_arguments(scores: torch.Tensor, fi: torch.Tensor, alpha: float) -> None:
    num_tokens, num_experts = check.tensor("scores", scores, (torch.float32,), ("num_tokens", "num_experts"))
    check.in_range("num_experts (columns of scores)", num_experts, 1, MAX_EXPERTS)
    check.in_range("num_tokens (rows of scores)", num_tokens, 0, MAX_TOKENS)
    check.tensor("fi", fi, (torch.float32,), (num_experts,), device=scores.device)
    check.number("alpha", alpha)


@replayable
def aux_loss(scores: torch.Tensor, fi: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Auxiliary loss that evens out the experts' load: alpha · Σ_e fi[e] · P[e].

    P[e] is the mean over tokens of scores[t, e] / (1e-20 + Σ_e scores[t, e]). With fi = aux_fi(topk_idx, num_experts,
    num_topk) of one sequence this is the sequence-wise balance loss of DeepSeek-V3 (section 2.1.2 of its technical
    report).

    Args:
        scores: float32 (num_tokens, num_experts), contiguous: the scores of all experts, not negative; num_experts
            from 1 to 1024, num_tokens to 2³⁰. A token whose scores are all 0 adds nothing.
        fi: float32 (num_experts), as `aux_fi` gives it.
        alpha: Weight of the loss.

    Returns:
        float32 (); 0 without tokens. The order of all sums is fixed, so that its bits are the same on every device and
        for any `num_sms`; within rtol 1e-5 of the exact value.

    Raises:
        TypeError: a tensor is not float32, or alpha is not a number.
        ValueError: a shape or device does not fit, a tensor is not contiguous, or a size is out of range.
    """
    _check_arguments(scores, fi, alpha)
    loss = scores.new_empty(())
    _aux_loss_out(scores, fi, float(alpha), loss)
    return loss


@replayable
def aux_loss_bwd(grad_loss: torch.Tensor, scores: torch.Tensor, fi: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Gradient of `aux_loss` by scores; fi counts as a constant.

    grad_scores[t, e] = grad_loss · (alpha / num_tokens) · (fi[e] - part[t]) / (1e-20 + Σ_e scores[t, e]), where
    part[t] = Σ_e fi[e] · scores[t, e] / (1e-20 + Σ_e scores[t, e]).

    Args:
        grad_loss: float32 ().
        scores, fi, alpha: What `aux_loss` was given.

    Returns:
        float32 (num_tokens, num_experts).

    Raises:
        TypeError: a tensor is not float32, or alpha is not a number.
        ValueError: a shape or device does not fit, a tensor is not contiguous, or a size is out of range.
    """
    _check_arguments(scores, fi, alpha)
    check.tensor("grad_loss", grad_loss, (torch.float32,), (), device=scores.device)
    grad_scores = torch.empty_like(scores)
    _aux_loss_bwd_out(scores, fi, grad_loss, float(alpha), grad_scores)
    return grad_scores
