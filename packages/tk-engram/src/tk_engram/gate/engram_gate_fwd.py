"""engram_gate_fwd: v, looked up for a token, added to each of its streams, times a gate.

    rstd_x[t, s] = rsqrt(mean_i(x²) + eps),  rstd_k likewise;  dot[t, s] = Σ_i x · weight · k
    d            = dot · rstd_x · rstd_k · H^-½
    gate[t, s]   = sigmoid(sign(d) · √max(|d|, clamp_value))
    out[t, s, i] = bf16(x + gate · v[t, i]), or bf16(gate · v) without the residual

in float32. sign(0) = 0, so that rows of padding, which are zeros, have a gate of ½. Source: DeepSeek's Engram and its
TileKernels.

A thread block takes one stream of one token and reads everything once: x, k and v stay in registers while the three
sums are taken. The blocks of the token's other streams run beside it, so that their v comes from L2:

    channels    [ thread 0 | thread 1 | … ] [ thread 0 | thread 1 | … ] …       each field 8 channels, 16 bytes
    sums        each thread's own → shuffles within a warp → the warps', through shared memory
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tk_core import check
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import launching, new, op
from tk_core.tiles import DIRECT_COPIES, VECTOR
from tk_engram.lib.gate import check_inputs, check_streams, with_aligned_rows


@dataclass(frozen=True)
class EngramGateFwdConfig:
    """Launch knobs. The order of the sums over channels depends on `threads`."""

    threads: int
    """Whole warps, which share a token's channels."""
    min_blocks: int
    """Thread blocks that must fit on an SM, which bounds the registers of a thread."""

    @staticmethod
    def best(hidden: int) -> "EngramGateFwdConfig":
        """Up to seven vectors of 16 bytes a thread, as few idle lanes as possible, and all blocks that registers allow.

        H 7168: three blocks of 128 threads have 129 KB of x, k and v in flight, where an SM's share of the memory
        bandwidth needs 20 to 30. Several tokens a thread block, with the weight loaded once, are slower: m 4, H 7168,
        8192 tokens on an H200 351 µs with one, 378 with four, 382 with eight; with 224 threads 348, 407 with four.
        """
        vectors = hidden // VECTOR
        few = [threads for threads in (128, 160, 96, 224, 192, 256, 64, 32) if vectors <= 7 * threads]
        threads = min(few or (320,), key=lambda threads: align(vectors, threads))
        rounds = ceil_div(vectors, threads)
        # A thread keeps x, k and v of its channels in 16 bits, and the weight in 32.
        registers = 36 + 18 * rounds
        # An SM has four partitions of 512 registers for each lane of a warp.
        warps = 4 * (512 // registers)
        return EngramGateFwdConfig(threads, min_blocks=min(32, max(1, warps // (threads // 32))))


@kernel(pass_configs=DIRECT_COPIES)
def _engram_gate_fwd_kernel(
    mhc_mult: int,
    hidden: int,
    add_residual: bool,
    has_mask: bool,
    save_for_backward: bool,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    from tk_engram.lib.gate_tiles import channels_of_threads, sum_over_threads

    config = EngramGateFwdConfig.best(hidden)
    threads = config.threads
    tile = VECTOR * threads
    rounds = ceil_div(hidden, tile)
    num_tokens = T.dynamic("num_tokens")
    # In elements; 64 bits, for a tensor may have more than 2³¹ of them.
    k_token_stride, k_stream_stride = T.dynamic("k_token_stride", "int64"), T.dynamic("k_stream_stride", "int64")
    v_stride = T.dynamic("v_stride", "int64")

    @T.prim_func
    def engram_gate_fwd(
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        k: T.StridedTensor((num_tokens, mhc_mult, hidden), (k_token_stride, k_stream_stride, 1), "bfloat16"),
        v: T.StridedTensor((num_tokens, hidden), (v_stride, 1), "bfloat16"),
        weight: T.Tensor((mhc_mult, hidden), "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        dot: T.Tensor((num_tokens, mhc_mult), "float32"),
        gate_score: T.Tensor((num_tokens, mhc_mult), "float32"),
        rstd_x: T.Tensor((num_tokens, mhc_mult), "float32"),
        rstd_k: T.Tensor((num_tokens, mhc_mult), "float32"),
        eps: T.float32,
        clamp_value: T.float32,
    ) -> None:
        # Streams of the same tokens are neighbours in the grid: they run at the same time.
        with T.Kernel(num_tokens * mhc_mult, threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.min_blocks)
            # Ensured by the op; TileLang needs to know it for 16-byte loads.
            T.assume(k_token_stride % VECTOR == 0)
            T.assume(k_stream_stride % VECTOR == 0)
            T.assume(v_stride % VECTOR == 0)
            token, s = block // mhc_mult, block % mhc_mult
            weights = T.alloc_fragment((rounds, tile), "float32")
            xs, ks, vs = (T.alloc_fragment((rounds, tile), "bfloat16") for _ in range(3))
            outs = T.alloc_fragment((tile,), "bfloat16")
            dot_parts, x_parts, k_parts = (T.alloc_fragment((threads,), "float32") for _ in range(3))
            sums = T.alloc_local((3,), "float32")
            gate = T.alloc_local((1,), "float32")
            T.annotate_layout({each: channels_of_threads(each.shape) for each in (weights, xs, ks, vs, outs)})

            for r in T.unroll(rounds):
                T.copy(weight[s, r * tile : (r + 1) * tile], weights[r, :])
            # Channels beyond hidden are zeros, and add nothing to a sum.
            for r in T.unroll(rounds):
                T.copy(x[token, s, r * tile : (r + 1) * tile], xs[r, :])
                T.copy(k[token, s, r * tile : (r + 1) * tile], ks[r, :])
            for r in T.unroll(rounds):
                T.copy(v[token, r * tile : (r + 1) * tile], vs[r, :])
            for each in (dot_parts, x_parts, k_parts):
                T.clear(each)
            for r in T.unroll(rounds):
                for t in T.Parallel(threads):
                    for j in T.unroll(VECTOR):
                        c = t * VECTOR + j
                        x_float, k_float = T.cast(xs[r, c], "float32"), T.cast(ks[r, c], "float32")
                        dot_parts[t] = T.fma(x_float * weights[r, c], k_float, dot_parts[t])
                        x_parts[t] = T.fma(x_float, x_float, x_parts[t])
                        k_parts[t] = T.fma(k_float, k_float, k_parts[t])
            sum_over_threads((dot_parts, x_parts, k_parts), sums)

            sums[1] = T.rsqrt(sums[1] / T.float32(hidden) + eps)
            sums[2] = T.rsqrt(sums[2] / T.float32(hidden) + eps)
            gate[0] = sums[0] * sums[1] * sums[2] * T.float32(hidden**-0.5)
            # Neither for 0, whose gate is ½, nor for NaN.
            if T.abs(gate[0]) > T.float32(0):
                root = T.sqrt(T.max(T.abs(gate[0]), clamp_value))
                gate[0] = T.if_then_else(gate[0] > T.float32(0), root, -root)
            gate[0] = T.float32(1) / (T.float32(1) + T.exp(-gate[0]))
            if has_mask:
                for i in T.unroll(3):
                    sums[i] = T.if_then_else(image_token_mask[token], T.float32(0), sums[i])
                gate[0] = T.if_then_else(image_token_mask[token], T.float32(0), gate[0])

            for r in T.unroll(rounds):
                for i in T.Parallel(tile):
                    kept = T.cast(xs[r, i], "float32") if add_residual else T.float32(0)
                    result = T.fma(gate[0], T.cast(vs[r, i], "float32"), kept)
                    # Also where v is not finite.
                    outs[i] = T.if_then_else(image_token_mask[token], kept, result) if has_mask else result
                T.copy(outs, out[token, s, r * tile : (r + 1) * tile])
            if save_for_backward:
                for _ in T.Parallel(1):
                    dot[token, s] = sums[0]
                    gate_score[token, s] = gate[0]
                    rstd_x[token, s] = sums[1]
                    rstd_k[token, s] = sums[2]

    return engram_gate_fwd


@op(
    writes=("hidden_states_",),
    aligned=("hidden_states", "hidden_states_", "weight_fused"),
    reference="gate.engram_gate_fwd.engram_gate_fwd_into",
)
def _engram_gate_fwd(
    hidden_states: Tensor | None,
    hidden_states_: Tensor | None,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool,
    *,
    image_token_mask: Tensor | None,
    add_residual: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The streams are hidden_states, or hidden_states_, into which the result is written then."""
    streams = hidden_states_ if hidden_states is None else hidden_states
    num_tokens, mhc_mult, hidden = shape = check_streams("hidden_states", streams)
    check_inputs(k, v, weight_fused, image_token_mask, shape, streams.device)
    check.number("eps", eps, at_least=0)
    check.number("clamp_value", clamp_value, at_least=0)
    out = streams if hidden_states is None else new(streams.new_empty, shape)
    saved: tuple[Tensor | None, ...] = (None,) * 4
    if save_for_backward:
        saved = tuple(new(weight_fused.new_empty, (num_tokens, mhc_mult)) for _ in range(4))
    if launching(out):
        options = (add_residual, image_token_mask is not None, save_for_backward)
        forward = _engram_gate_fwd_kernel(mhc_mult, hidden, *options, get_arch(out.device))
        inputs = (streams, with_aligned_rows(k), with_aligned_rows(v), weight_fused, image_token_mask)
        forward(*inputs, out, *saved, float(eps), float(clamp_value))
    return (out, *saved)


def engram_gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    *,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    add_residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Add v to each stream of its token, times a gate: out = x + sigmoid(sign(d) · √max(|d|, clamp_value)) · v.

    d = dot · rstd_x · rstd_k · H^-½, with dot = Σ x · weight_fused · k and rstd = rsqrt(mean(²) + eps) of x and of k,
    all over a stream's channels, in float32; d = 0 gives a gate of ½. Source: DeepSeek's TileKernels. A token's result
    does not depend on the other tokens, nor `out` on what is saved.

    Args:
        hidden_states: x, the streams, bfloat16 (T, m, H), contiguous; m is 1 to 8, H a multiple of 64, up to 16384.
        k: bfloat16 (T, m, H), any strides of tokens and streams, such as kv[:, :m] of one tensor (T, m + 1, H).
        v: bfloat16 (T, H), any stride of tokens, such as kv[:, m].
        weight_fused: float32 (m, H), contiguous, as `fused_weight` gives it.
        eps: at least 0.
        clamp_value: at least 0.
        save_for_backward: whether to return what `engram_gate_bwd` needs.
        image_token_mask: bool (T), contiguous: tokens that keep their streams; of these 0 is saved. None for none.
        inplace: write the result into hidden_states; only without save_for_backward.
        add_residual: False for gate · v alone (0 for masked tokens).

    Returns:
        (out, dot, gate_score, rstd_x, rstd_k): bfloat16 (T, m, H), `hidden_states` itself if in place, and four float32
        (T, m), each None without save_for_backward.

    Raises:
        TypeError: an argument is not of its type, or no tensor of its dtype.
        ValueError: a shape, stride, device or number does not fit, or inplace together with save_for_backward.
    """
    flags = {"save_for_backward": save_for_backward, "inplace": inplace, "add_residual": add_residual}
    for name, flag in flags.items():
        check.flag(name, flag)
    check.require(not (inplace and save_for_backward), "inplace", "False with save_for_backward", inplace)
    streams = (None, hidden_states) if inplace else (hidden_states, None)
    inputs = (*streams, k, v, weight_fused, eps, clamp_value, save_for_backward)
    return _engram_gate_fwd(*inputs, image_token_mask=image_token_mask, add_residual=add_residual)
