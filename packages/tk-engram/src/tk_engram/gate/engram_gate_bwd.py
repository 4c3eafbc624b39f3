"""engram_gate_bwd: gradients of `engram_gate_fwd` by streams, k, v and the fused weight.

With d = dot · rstd_x · rstd_k · H^-½ and g the gate of a token's stream, all from the forward:

    d_d       = g · (1 - g) / (2 · √|d|) · Σ_i grad_out · v       0 where |d| < clamp_value and where d = 0
    a         = d_d · rstd_x · rstd_k · H^-½
    grad_x    = grad_out + a · weight · k - (d_d · d · rstd_x² / H) · x        without grad_out if out had no residual
    grad_k    = a · weight · x - (d_d · d · rstd_k² / H) · k
    grad_v    = Σ_s g · grad_out
    grad_w    = Σ_t a · x · k

in float32. Source: DeepSeek's Engram and its TileKernels.

`fused`, for shapes whose m · H sums fit the registers of a thread block: a block walks over the tokens of a range, a
stream at a time, and reads everything once. Inputs of the next streams are in flight to shared memory meanwhile:

    range b         tokens b, b + ranges, b + 2 · ranges, …
    stages          grad_out, x and k of a stream, each (channels)
    slots           of a token v and what the forward saved
    registers       of each thread's channels grad_w of all streams, and grad_v of the token if there is room

`split`, for the others: one kernel computes Σ_i grad_out · v and grad_v of each token, and a second one the rest, so
that grad_out is read twice (`lib/gate_split.py`).
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_engram.lib.gate import check_inputs, check_streams, with_aligned_rows
from tk_engram.lib.gate_split import channel_gradients_kernel, score_gradients_kernel
from tk_engram.sizes import num_token_ranges


@dataclass(frozen=True)
class EngramGateBwdConfig:
    """Launch knobs of `fused`. The order of the sums over channels depends on `threads`."""

    threads: int
    """Whole warps, which share a token's channels."""
    num_stages: int
    """Streams that shared memory has room for: the one that is worked on, and those in flight."""
    shared_weights: int
    """Streams whose weight is in shared memory; that of the others comes from the caches for every token."""
    shares_v_grads: bool
    """Whether grad_v of a token is summed in shared memory; else in registers."""
    min_blocks: int
    """Thread blocks that must fit on an SM, which bounds the registers of a thread."""

    def padded(self, hidden: int) -> int:
        """Channels with those beyond hidden that fill up the last round of the threads."""
        return align(hidden, VECTOR * self.threads)

    def token_slots(self, mhc_mult: int) -> int:
        """Tokens whose v and saved values are held: the one that is worked on, and those in flight."""
        return 1 + ceil_div(self.num_stages - 1, mhc_mult)

    def shared_bytes(self, mhc_mult: int, hidden: int) -> int:
        """Shared memory of a thread block, with a little for sums and what was saved."""
        rows = 2 * (3 * self.num_stages + self.token_slots(mhc_mult))
        rows += 4 * (self.shared_weights + self.shares_v_grads)
        return rows * self.padded(hidden) + 2048

    @staticmethod
    def best(mhc_mult: int, hidden: int, has_mask: bool, arch: Arch) -> "EngramGateBwdConfig | None":
        """As much of the weight in shared memory, and then up to three stages, as fit; None for the split kernels.

        m 4, 8192 tokens on an H200, stages 2, 3 and 4: H 7168 639 µs, 695 and 789 (with less of the weight in shared
        memory), H 4096 413, 368 and 374, H 2048 202, 184 and 198; split 797, 463 and 234.

        m 4, H 7168: 448 threads with 16 channels each, 43 KB in flight; an SM's share of the memory bandwidth needs 20
        to 30. With a mask a thread needs some more registers, and grad_v moves to shared memory for them. For sm_100
        nvcc spills a few registers, however many there are, with a mask or where a thread has more than 32 sums, and at
        times (it depends on the paths of files) where 96 are left beside the sums.
        """
        if has_mask and arch.sm >= 100:
            return None
        vectors = hidden // VECTOR
        min_blocks = num_token_ranges(mhc_mult, hidden) // 132
        max_sums = 32 if arch.sm >= 100 else 255
        for rounds, shares_v_grads in product(range(1, 9), (False, True)):
            threads = align(ceil_div(vectors, rounds), 32)
            # An SM has four partitions of 512 registers for each lane of a warp.
            registers = min(255, 512 // ceil_div(threads * min_blocks, 128))
            others = 100 if arch.sm >= 100 else 64 if has_mask else 48 if registers >= 128 else 56
            sums = VECTOR * rounds * (mhc_mult + (not shares_v_grads))
            if threads > 1024 or sums > max_sums or sums + others > registers:
                continue
            for shared_weights, num_stages in product(range(mhc_mult, -1, -1), (3, 2)):
                config = EngramGateBwdConfig(threads, num_stages, shared_weights, shares_v_grads, min_blocks)
                if config.shared_bytes(mhc_mult, hidden) <= arch.shared_memory_each(min_blocks):
                    return config
        return None


@kernel(pass_configs=DIRECT_COPIES)
def _fused_kernel(
    mhc_mult: int,
    hidden: int,
    add_residual: bool,
    has_mask: bool,
    packed: bool,
    config: EngramGateBwdConfig,
    arch: Arch,
) -> Any:
    """`packed`: grad_k is (T, m + 1, H), and the last row of each token is grad_v."""
    import tilelang.language as T

    from tk_engram.lib import gate_tiles
    from tk_engram.lib.gate_tiles import channels_of_threads, gate_factors, stream_gradients, sum_over_threads

    threads, num_stages, padded = config.threads, config.num_stages, config.padded(hidden)
    tile, slots, num_ranges = VECTOR * threads, config.token_slots(mhc_mult), num_token_ranges(mhc_mult, hidden)
    rounds, all_channels, num_tokens = padded // tile, slice(0, padded), T.dynamic("num_tokens")
    k_token_stride, k_stream_stride = T.dynamic("k_token_stride", "int64"), T.dynamic("k_stream_stride", "int64")
    v_stride, saved_shape = T.dynamic("v_stride", "int64"), (num_tokens, mhc_mult)

    @T.macro
    def fetch(inputs: tuple, shared: tuple, token_range: Any, n: Any, s: Any) -> None:
        """Start the copies of stream s of the range's n-th token; beyond the last token they give zeros."""
        streams, v, saved = inputs
        stages, v_slots, saved_slots = shared
        token = token_range + n * num_ranges
        # By index: a buffer takes the name of a loop's variable, and TileLang 0.1.15 mixes up arguments of one name.
        for i in (0, 1, 2):
            T.async_copy(streams[i][token, s, all_channels], stages[(n * mhc_mult + s) % num_stages, i, :])
        if s == 0:
            T.async_copy(v[token, all_channels], v_slots[n % slots, :])
            for i in (0, 1, 2, 3):
                T.async_copy(saved[i][token, 0:mhc_mult], saved_slots[n % slots, i, :])

    @T.prim_func
    def engram_gate_bwd(
        grad_out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        k: T.StridedTensor((num_tokens, mhc_mult, hidden), (k_token_stride, k_stream_stride, 1), "bfloat16"),
        v: T.StridedTensor((num_tokens, hidden), (v_stride, 1), "bfloat16"),
        weight: T.Tensor((mhc_mult, hidden), "float32"),
        dot: T.Tensor(saved_shape, "float32"),
        gate_score: T.Tensor(saved_shape, "float32"),
        rstd_x: T.Tensor(saved_shape, "float32"),
        rstd_k: T.Tensor(saved_shape, "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        grad_x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        grad_k: T.Tensor((num_tokens, mhc_mult + packed, hidden), "bfloat16"),
        grad_v: T.Tensor((num_tokens, hidden), "bfloat16"),
        grad_w_partial: T.Tensor((num_ranges, mhc_mult, hidden), "float32"),
        clamp_value: T.float32,
    ) -> None:
        with T.Kernel(num_ranges, threads=threads) as token_range:
            T.annotate_min_blocks_per_sm(config.min_blocks)
            # Ensured by the op; TileLang needs to know it for 16-byte loads.
            T.assume(k_token_stride % VECTOR == 0)
            T.assume(k_stream_stride % VECTOR == 0)
            T.assume(v_stride % VECTOR == 0)
            stages = T.alloc_shared((num_stages, 3, padded), "bfloat16")
            v_slots = T.alloc_shared((slots, padded), "bfloat16")
            saved_slots = T.alloc_shared((slots, 4, mhc_mult), "float32")
            weights = T.alloc_shared((max(1, config.shared_weights), padded), "float32")
            grads, vs, xs, ks = (T.alloc_fragment((tile,), "bfloat16") for _ in range(4))
            ws, x_grads, k_grads = (T.alloc_fragment((tile,), "float32") for _ in range(3))
            rounded = T.alloc_fragment((tile,), "bfloat16")
            v_grads = T.alloc_fragment((1 if config.shares_v_grads else rounds, tile), "float32")
            v_sums = T.alloc_shared((padded,), "float32")
            w_grads = T.alloc_fragment((mhc_mult, rounds, tile), "float32")
            parts = T.alloc_fragment((threads,), "float32")
            sums = T.alloc_local((1,), "float32")
            factors = T.alloc_local((4,), "float32")
            tiles = (grads, vs, xs, ks, ws, x_grads, k_grads, rounded, v_grads, w_grads)
            T.annotate_layout({each: channels_of_threads(each.shape) for each in tiles})

            inputs = ((grad_out, x, k), v, (dot, gate_score, rstd_x, rstd_k))
            shared = (stages, v_slots, saved_slots)
            stream = gate_tiles.Inputs(grads, xs, ks, ws)
            gradients = gate_tiles.Gradients(x_grads, k_grads, w_grads)

            for s in T.unroll(config.shared_weights):
                T.copy(weight[s, all_channels], weights[s, :])
            T.clear(w_grads)
            for ahead in T.unroll(num_stages - 1):
                fetch(inputs, shared, token_range, ahead // mhc_mult, ahead % mhc_mult)

            # Not to be unrolled by nvcc: that takes more registers.
            for n in T.unroll(T.ceildiv(num_tokens - token_range, num_ranges), unroll_factor=1):
                token = token_range + n * num_ranges
                is_image = image_token_mask[token] if has_mask else None
                T.clear(v_sums if config.shares_v_grads else v_grads)
                for s in T.unroll(mhc_mult):
                    stage = (n * mhc_mult + s) % num_stages
                    # Each copy is a group, and each stream that may still be in flight has at least three.
                    T.ptx_wait_group(3 * (num_stages - 2))
                    ahead = s + num_stages - 1
                    fetch(inputs, shared, token_range, n + ahead // mhc_mult, ahead % mhc_mult)
                    T.clear(parts)
                    for r in T.unroll(rounds):
                        T.copy(stages[stage, 0, r * tile : (r + 1) * tile], grads)
                        T.copy(v_slots[n % slots, r * tile : (r + 1) * tile], vs)
                        for t in T.Parallel(threads):
                            for j in T.unroll(VECTOR):
                                c = t * VECTOR + j
                                parts[t] = T.fma(T.cast(grads[c], "float32"), T.cast(vs[c], "float32"), parts[t])
                    sum_over_threads((parts,), sums)
                    saved = gate_tiles.Saved(*[saved_slots[n % slots, i, s] for i in range(4)])
                    gate_factors(sums[0], saved, clamp_value, hidden, factors)
                    for r in T.unroll(rounds):
                        # Loaded again: to keep it would take more registers.
                        T.copy(stages[stage, 0, r * tile : (r + 1) * tile], grads)
                        T.copy(stages[stage, 1, r * tile : (r + 1) * tile], xs)
                        T.copy(stages[stage, 2, r * tile : (r + 1) * tile], ks)
                        if s < config.shared_weights:
                            T.copy(weights[s, r * tile : (r + 1) * tile], ws)
                        else:
                            T.copy(weight[s, r * tile : (r + 1) * tile], ws)
                        row = 0 if config.shares_v_grads else r
                        if config.shares_v_grads:
                            T.copy(v_sums[r * tile : (r + 1) * tile], v_grads[0, :])
                        for t in T.Parallel(threads):
                            for j in T.unroll(VECTOR):
                                c = t * VECTOR + j
                                total = T.fma(factors[0], T.cast(grads[c], "float32"), v_grads[row, c])
                                v_grads[row, c] = T.Select(is_image, v_grads[row, c], total) if has_mask else total
                        if config.shares_v_grads:
                            T.copy(v_grads[0, :], v_sums[r * tile : (r + 1) * tile])
                        stream_gradients(stream, factors, is_image, add_residual, gradients, s, r)
                        T.copy(x_grads, rounded)
                        T.copy(rounded, grad_x[token, s, r * tile : (r + 1) * tile])
                        T.copy(k_grads, rounded)
                        T.copy(rounded, grad_k[token, s, r * tile : (r + 1) * tile])
                for r in T.unroll(rounds):
                    if config.shares_v_grads:
                        T.copy(v_sums[r * tile : (r + 1) * tile], rounded)
                    else:
                        T.copy(v_grads[r, :], rounded)
                    if packed:
                        T.copy(rounded, grad_k[token, mhc_mult, r * tile : (r + 1) * tile])
                    else:
                        T.copy(rounded, grad_v[token, r * tile : (r + 1) * tile])
            for s in T.unroll(mhc_mult):
                for r in T.unroll(rounds):
                    T.copy(w_grads[s, r, :], grad_w_partial[token_range, s, r * tile : (r + 1) * tile])

    return engram_gate_bwd


@op(
    writes=("grad_kv",),
    aligned=("grad_out", "hidden_states", "weight_fused", "grad_kv"),
    reference="gate.engram_gate_bwd.engram_gate_bwd_into",
)
def _engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    *,
    image_token_mask: Tensor | None,
    add_residual: bool,
    grad_kv: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Where grad_kv is given, it is returned in the place of grad_k, and None in that of grad_v."""
    shape = check_streams("hidden_states", hidden_states)
    num_tokens, mhc_mult, hidden = shape
    device, bfloat16 = hidden_states.device, (torch.bfloat16,)
    check.tensor("grad_out", grad_out, bfloat16, shape, device=device)
    check_inputs(k, v, weight_fused, image_token_mask, shape, device)
    saved = (dot, gate_score, rstd_x, rstd_k)
    for name, each in zip(("dot", "gate_score", "rstd_x", "rstd_k"), saved):
        check.tensor(name, each, (torch.float32,), (num_tokens, mhc_mult), device=device)
    check.number("clamp_value", clamp_value, at_least=0)
    check.flag("add_residual", add_residual)
    if grad_kv is not None:
        check.tensor("grad_kv", grad_kv, bfloat16, (num_tokens, mhc_mult + 1, hidden), device=device)
    has_mask, packed = image_token_mask is not None, grad_kv is not None
    grad_x = new(hidden_states.new_empty, shape)
    grad_k = new(hidden_states.new_empty, shape) if grad_kv is None else grad_kv
    grad_v = new(hidden_states.new_empty, (num_tokens, hidden)) if grad_kv is None else None
    grad_w_partial = new(weight_fused.new_empty, (num_token_ranges(mhc_mult, hidden), mhc_mult, hidden))
    gradients = grad_x, grad_k, grad_v, grad_w_partial
    if not launching(*gradients):
        return gradients
    if num_tokens == 0:
        grad_w_partial.zero_()
        return gradients
    arch, clamp_value = get_arch(device), float(clamp_value)
    config = EngramGateBwdConfig.best(mhc_mult, hidden, has_mask, arch)
    k, v = with_aligned_rows(k), with_aligned_rows(v)
    inputs = (weight_fused, *saved, image_token_mask)
    if config is not None:
        fused = _fused_kernel(mhc_mult, hidden, add_residual, has_mask, packed, config, arch)
        fused(grad_out, hidden_states, k, v, *inputs, *gradients, clamp_value)
    else:
        score_grads = dot.new_empty((num_tokens, mhc_mult))
        score_gradients = score_gradients_kernel(mhc_mult, hidden, has_mask, packed, arch)
        score_gradients(grad_out, v, gate_score, image_token_mask, grad_k, grad_v, score_grads)
        channel_gradients = channel_gradients_kernel(mhc_mult, hidden, add_residual, has_mask, packed, arch)
        streams = (grad_out, hidden_states, k)
        channel_gradients(*streams, *inputs, score_grads, grad_x, grad_k, grad_w_partial, clamp_value)
    return gradients


def engram_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    *,
    image_token_mask: Tensor | None = None,
    add_residual: bool = True,
    grad_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `engram_gate_fwd` by the streams, by k and v, and by the fused weight in parts to be summed.

    In float32. Nothing comes through the root where |d| < clamp_value, nor where d = 0. Source: DeepSeek's TileKernels.
    No gradient of a token depends on the other tokens, and no bit on the number of SMs.

    Args:
        grad_out: gradient by the forward's first result, bfloat16 (T, m, H), contiguous.
        hidden_states: the streams as the forward took them, bfloat16 (T, m, H), contiguous; m is 1 to 8, H a multiple
            of 64, up to 16384.
        k: bfloat16 (T, m, H), any strides of tokens and streams, such as kv[:, :m] of one tensor (T, m + 1, H).
        v: bfloat16 (T, H), any stride of tokens, such as kv[:, m].
        weight_fused: float32 (m, H), contiguous.
        dot, gate_score, rstd_x, rstd_k: float32 (T, m), contiguous, as the forward saved them.
        clamp_value: the forward's.
        image_token_mask: the forward's, bool (T), contiguous: of these tokens grad_x is grad_out, or 0 without
            the residual, and the rest 0.
        add_residual: the forward's. False: grad_x is without grad_out.
        grad_kv: bfloat16 (T, m + 1, H), contiguous, to be written: grad_k and grad_v are its views. It shares memory
            with no other argument.

    Returns:
        grad_x: bfloat16 (T, m, H).
        grad_k: bfloat16 (T, m, H), a new tensor or grad_kv[:, :m].
        grad_v: bfloat16 (T, H), a new tensor or grad_kv[:, m].
        grad_w_partial: float32 (blocks, m, H), for `grad_w_reduce`: block b is the sum over tokens b, b + blocks, …;
            their number depends on m and H alone. Zeros if there is no token.

    Raises:
        TypeError: an argument is not of its type, or no tensor of its dtype.
        ValueError: a shape, stride, device or number does not fit.
    """
    inputs = (grad_out, hidden_states, k, v, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value)
    options = {"image_token_mask": image_token_mask, "add_residual": add_residual, "grad_kv": grad_kv}
    grad_x, grad_k, grad_v, grad_w_partial = _engram_gate_bwd(*inputs, **options)
    if grad_v is None:
        return grad_x, grad_k[:, :-1], grad_k[:, -1], grad_w_partial
    return grad_x, grad_k, grad_v, grad_w_partial
