"""swiglu_forward: SwiGLU of each row, times its weight where there are weights, in bfloat16 or float32.

A thread takes two pieces of a row, each 16 bytes of the output, and the same channels of both halves of x:

    x, left     [ lane 0 | lane 1 | … | lane 0 | lane 1 | … ]      each field 8 channels of bfloat16
    x, right    [ lane 0 | lane 1 | … | lane 0 | lane 1 | … ]
    out         [ lane 0 | lane 1 | … | lane 0 | lane 1 | … ]

Both are loaded before the first is computed. Registers are capped, as a thread waits for its row's index and then for
64 bytes of x. Rows of padding are not read, and with psum_num_tokens_per_expert not written. The steps are those of
forward_and_per_token_cast.py. Thread level takes 8 % less time than tiles, 41 % where elements are counted
(docs/tuning/swiglu.md of the repository).
"""

import math
from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import ceil_div
from tk_core.op import launching, new, op
from tk_quant.cast.config import CastInput
from tk_quant.swiglu.arguments import (
    Rows,
    SwigluOptions,
    check_clamp_value,
    check_clamped_count,
    check_gating,
    check_swiglu_arguments,
)
from tk_quant.swiglu.tile_kernels import forward_called_as_in_2_1, may_be_called

_PIECES = 2


@cache
def _threads_of(hidden: int, vec: int) -> tuple[int, int]:
    """(lanes, rows) of a thread block: threads side by side along a row, and rows."""
    num_lanes = hidden // (vec * _PIECES)
    lanes = ceil_div(num_lanes, ceil_div(num_lanes, 256))
    if lanes % 32 or lanes <= 64:
        lanes = gcd(num_lanes, 32)
    return lanes, max(128 // lanes, 1)


def _threads_per_sm(dtype: torch.dtype, options: SwigluOptions) -> int:
    """Threads that have to fit on an SM: with 40, 48 or 64 registers each."""
    if dtype is torch.float32:
        return 1024
    return 1280 if options.clamp or options.interleaved else 1536


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _swiglu_forward_kernel(
    hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, options: SwigluOptions, arch: Arch
) -> Any:
    import tilelang.language as T

    from tk_quant.swiglu import forward_steps as steps
    from tk_quant.swiglu.activation import Scalars

    vec, source = 16 // out_dtype.itemsize, CastInput(dtype, 16)
    lanes, rows = _threads_of(hidden, vec)
    piece_words, col_tiles = vec * dtype.itemsize // 4, ceil_div(hidden, lanes * vec * _PIECES)
    unclamped, num_counts = replace(options, clamp=False, clamp_after=False), options.count or 3
    num_positions = T.dynamic("num_positions")
    weights_shape = (T.dynamic("num_tokens"), T.dynamic("num_topk")) if options.pairs else (num_positions,)

    # Where an argument is not options, the caller passes a 0, which costs the host less than a tensor.
    @T.prim_func
    def swiglu_forward(
        x: T.Tensor((num_positions, options.width * hidden), dtype),
        pos_to_token_topk: T.Tensor((num_positions,), "int32") if options.pairs else T.int32,
        topk_weights: T.Tensor(weights_shape, "float32") if options.weights else T.int32,
        pos_to_expert: T.Tensor((num_positions,), "int32") if options.experts else T.int32,
        limit: T.float32,
        out: T.Tensor((num_positions, hidden), out_dtype),
        clamped_count: T.Tensor((options.count,), "int64") if options.count else T.int32,
        expert_ends: T.Tensor((options.segments[0],), "int32") if options.has_segments else 0,
        routed_scaling_factor: T.float32 if options.scaled else 1.0,
        alpha: T.float32 if options.has_alpha else 1.0,
    ) -> None:
        with T.Kernel(T.ceildiv(num_positions, rows) * col_tiles, threads=lanes * rows) as block:
            T.annotate_min_blocks_per_sm(_threads_per_sm(dtype, options) // (lanes * rows))
            thread = T.get_thread_binding()
            gate = T.alloc_local((_PIECES, piece_words * (2 if options.interleaved else 1)), "uint32")
            value = gate if options.interleaved else T.alloc_local((_PIECES, piece_words), "uint32")
            values = T.alloc_local((_PIECES, vec), "float32")
            real, weight = T.alloc_local((1,), "bool"), T.alloc_local((1,), "float32")
            total = T.alloc_shared((num_counts,), "int32")
            if options.count:
                if thread < options.count:
                    total[thread] = 0
                T.sync_threads()
            # Variables: inside an address these divisions would be computed in 64 bits.
            row, col = T.alloc_var("int32"), T.alloc_var("int32")
            row = block // col_tiles * rows + thread // lanes
            col = (block % col_tiles * lanes * _PIECES + thread % lanes) * vec
            scalars = Scalars(limit, alpha)
            maps = steps.RowMaps(pos_to_token_topk, topk_weights, pos_to_expert, expert_ends, routed_scaling_factor)
            steps.look_up(maps, num_positions, row, col < hidden, real, weight, options)
            for i in T.unroll(_PIECES):
                channel = col + i * lanes * vec
                steps.load_piece(x, gate, value, i, row, channel, real[0] and channel < hidden, source, options)
            for i in T.unroll(_PIECES):
                steps.activate_and_count(gate, value, values, i, weight[0], scalars, total, source, options, unclamped)
                channel = col + i * lanes * vec
                is_written = real[0] if options.has_segments else row < num_positions
                if is_written and channel < hidden:
                    steps.store_values(values, out, i, row, channel)
            if options.count:
                if options.count == 4:
                    is_first = real[0] and col == 0
                    if is_first:
                        T.atomic_add(total[3], hidden)
                T.sync_threads()
                if thread < options.count and total[thread] > 0:
                    T.atomic_add(clamped_count[thread], T.cast(total[thread], "int64"))

    return swiglu_forward


@may_be_called(forward_called_as_in_2_1)
@op(writes=("clamped_count",), aligned=("x",))
def swiglu_forward(
    x: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    clamped_count: Tensor | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    token_alignment: int = 128,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    activation: str = "silu",
    alpha: float | None = None,
    interleaved: bool = False,
    gated: bool = True,
    clamp_after: bool = False,
) -> Tensor:
    """SwiGLU of each row, times its weight where there are weights, rounded once to bfloat16 or float32.

    With l and r the left and right half of a row, every operation in float32 to nearest with ties to even, from left to
    right: out = l / (1 + exp(-l)) * r * weight. With another activation

        silu with alpha    out = l / (1 + exp(-(alpha * l))) * r * weight
        swiglu_oai         out = l / (1 + exp(-(alpha * l))) * (r + 1) * weight
        gelu_tanh          out = l / (1 + exp(-(c * (k1 + k2 * (c * c))))) * r * weight, c = l cut to [-16, 16]
        relu2              out = q * q * r * weight, q = max(l, 0)

    where k1 = 2 * sqrt(2 / pi) and k2 = 0.044715 * k1 are the float32 with bits 0x3FCC422A and 0x3D922279: tanh's form
    of GELU. Without r there is no factor of it. Every bit equals the reference's. The positional arguments of
    TileKernels 2.1.0 are taken too: (x, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
    clamp_value, clamped_count).

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, contiguous, the gate l in the left half; hidden a multiple
            of 64.
        swiglu_clamp_value: c, 2**-126 to infinity: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.
        fmt: "bf16" or "fp32", the output's type.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32, contiguous: (num_tokens, num_topk) beside pos_to_token_topk, else (num_positions,).
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. Rows of padding come out as zeros,
            whatever x holds there.
        clamped_count: int64 (3,) or (4,), to which the numbers of l > c, r > c and r < -c in rows that are not padding
            are added in place, and to the fourth the number of elements of these rows of the output. Needs
            a clamp value. With clamp_after it is silu(l) > c.
        psum_num_tokens_per_expert: int32 (num_experts,), the position where each expert's rows end. They begin where
            those of the expert before end, rounded up to a multiple of token_alignment. All other rows are padding, and
            rows of padding are then left unwritten.
        token_alignment: 1 to 65536.
        routed_scaling_factor: weights are multiplied by it first, rounded to float32.
        clamp_value: The same as swiglu_clamp_value.
        activation: "silu", "swiglu_oai" (gpt-oss), "gelu_tanh" or "relu2".
        alpha: of silu and swiglu_oai only, at least 2**-126; 1.702 for swiglu_oai if None.
        interleaved: l in the even channels of x, r in the odd ones.
        gated: False for x (num_positions, hidden), which has l alone; not for swiglu_oai.
        clamp_after: silu(l) is clamped instead of l, to at most c; of silu only. Without a clamp it changes nothing.

    Returns:
        (num_positions, hidden).

    Raises:
        TypeError: An argument is not a tensor or a number as described, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    maps = pos_to_token_topk, topk_weights, pos_to_expert
    rows = Rows(*maps, psum_num_tokens_per_expert, token_alignment, routed_scaling_factor)
    gating = check_gating(activation, alpha, interleaved, gated, clamp_after)
    dtype, clamp = check_swiglu_arguments(x, fmt, rows, gating), check_clamp_value(swiglu_clamp_value, clamp_value)
    check_clamped_count(x, clamped_count, clamp)
    num_positions, hidden = x.shape[0], x.shape[1] // gating.width
    out = new(x.new_empty, (num_positions, hidden), dtype=dtype)
    if launching(out):
        limit = math.inf if clamp is None else float(clamp)
        options = rows.options(gating, clamp, clamped_count)
        tensors = (0 if each is None else each for each in (*maps, limit, out, clamped_count))
        _swiglu_forward_kernel(hidden, x.dtype, dtype, options, get_arch(x.device))(
            x, *tensors, *rows.last_operands, *gating.last_operands
        )
    return out
