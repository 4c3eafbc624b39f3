"""swiglu_backward_and_per_token_cast: backward of SwiGLU from a quantized input, its result quantized, in one pass.

For each position p and channel j, with l and r the dequantized x[p, j] and x[p, hidden + j], g = grad_out[p, j] and
w = weight.flat[pos_to_token_topk[p]], in float32, products from left to right:

    d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
    out = a * w;  dl = gs * r * fma(l, 1 - s, 1);  dr = gs * l;  weight_grad.flat[pos_to_token_topk[p]] = sum of g * a

x_grad = [dl | dr] comes out in bfloat16 and, quantized from float32 by groups of num_per_channels channels, in e4m3.

A thread takes `vec` neighbouring channels of both halves of a row; the lanes that hold a group agree on its two amax by
shuffles. A block has `rows` rows, and sums g * a up over each in shared memory, in an order that only hidden decides:

              left half of x, of x_grad      right half                      grad_out, out
            ┌─────────┬─────────┬─  ─┐     ┌─────────┬─────────┬─  ─┐     ┌─────────┬─────────┬─  ─┐
     rows   │ l0 … l7 │ l8… l15 │ …  │     │ l0 … l7 │ l8… l15 │ …  │     │ l0 … l7 │ l8… l15 │ …  │
            └─────────┴─────────┴─  ─┘     └─────────┴─────────┴─  ─┘     └─────────┴─────────┴─  ─┘

Threads then look for pairs of a token and an expert that have no row, and write their zeros. Rows of padding are not
read. Instructions are short beside bandwidth: see divisions.py for what is saved on each.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align, ceil_div
from tk_core.op import op
from tk_core.replay import replayable
from tk_quant.conversions import NARROW_LOADS
from tk_quant.divisions import DIVISIONS_SOURCE, NEAR_SF
from tk_quant.quantize import (
    LIMITS,
    MAGNITUDES,
    element,
    encode_macro,
    float_bits,
    load_codes_macro,
    load_macro,
    store_codes_macro,
)

_GROUPS = (32, 128)
_MAX_THREADS = 512
# Channels that a thread works on at once: more take more registers.
_CHUNK = 4
# The last block's threads count a little further.
_MAX_PAIRS = 2**31 - 2**10
_LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True, eq=False)
class SwigluBackwardConfig:
    """Launch knobs: how a block's threads lie over rows and channels."""

    vec: int
    """Neighbouring channels, of each half, which one thread takes at once."""
    pieces: int
    """How often a thread does so, one after the other, in its row."""
    lanes: int
    """Threads side by side along a row."""
    rows: int
    """Rows of a block."""
    blocks_per_sm: int
    """Blocks that a multiprocessor should have room for: the compiler keeps registers down to that."""

    @staticmethod
    @cache
    def best(hidden: int, num_per_channels: int, clamps: bool, arch: Arch) -> "SwigluBackwardConfig":
        """The configuration for a width, a group, and with or without a clamp."""
        vec = 8
        num_lanes = hidden // vec
        pieces = ceil_div(num_lanes, _MAX_THREADS)
        lanes = align(ceil_div(num_lanes, pieces), num_per_channels // vec)
        rows = max(128 // lanes, 1)
        # As many as leave the registers that it takes.
        threads_per_sm = 1024 if clamps or rows > 1 else 1280
        return SwigluBackwardConfig(vec, pieces, lanes, rows, max(threads_per_sm // align(lanes * rows, 32), 1))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return align(self.lanes * self.rows, 32)

    def num_blocks(self, num_positions: int, num_pairs: int) -> int:
        """Blocks that there are rows or pairs for."""
        return max(ceil_div(num_positions, self.rows), ceil_div(num_pairs, self.threads))


# Every access below has a guard of its own, so TileLang's bounds checks would only repeat them.
@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def _swiglu_backward_kernel(
    ndim: int,
    x_alignment: int,
    grad_alignment: int,
    hidden: int,
    num_per_channels: int,
    round_sf: bool,
    clamps: bool,
    config: SwigluBackwardConfig,
    arch: Arch,
) -> Any:
    import tilelang.language as T

    vec, pieces, lanes, rows = config.vec, config.pieces, config.lanes, config.rows
    group_lanes = num_per_channels // vec
    threads = config.threads
    num_warps = threads // 32
    code_words, bf16_words = vec // 4, vec // 2
    sf_cols = 2 * hidden // num_per_channels
    least_amax = float_bits(LIMITS["e4m3"][1])
    scale_of = f"tk_scale_of_amax<{str(round_sf).lower()}>"
    encode = encode_macro("e4m3", vec)
    load_codes = load_codes_macro("float8_e4m3fn", 2, vec, min(x_alignment, vec))
    load_grad, store_codes = load_macro(bf16_words, 2, grad_alignment), store_codes_macro(code_words)
    assert 32 % group_lanes == 0
    assert lanes % group_lanes == 0
    assert lanes * pieces * vec >= hidden

    leading = tuple(T.dynamic(f"num_positions_{i}") for i in range(ndim - 1))
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")
    num_positions = leading[0] if ndim == 2 else leading[0] * leading[1]
    map_size = T.dynamic("map_size")

    def fma(a: Any, b: Any, c: Any) -> Any:
        return T.call_extern("float32", "__fmaf_rn", a, b, c)

    def clamped(x: Any, clamp: Any, below: bool) -> Any:
        """x, no more than the clamp and, if `below`, no less than its negative; NaN stays."""
        if not clamps:
            return x
        low = T.if_then_else(x < -clamp, -clamp, x) if below else x
        return T.if_then_else(x > clamp, clamp, low)

    @T.macro
    def load_piece(
        x: T.Buffer,
        x_sf: T.Buffer,
        grad_out: T.Buffer,
        codes: T.Buffer,
        x_scale: T.Buffer,
        grad: T.Buffer,
        row: T.int64,
        col: T.int32,
        valid: T.bool,
    ) -> None:
        for half in T.unroll(2):
            load_codes(x, codes, half, row, half * hidden + col, valid)
        load_grad(grad_out, grad, 0, row, col, valid)
        for half in T.unroll(2):
            x_scale[half] = T.reinterpret(
                T.ldg32(x_sf[row, (half * hidden + col) // num_per_channels], pred=valid), "float32"
            )

    @T.macro
    def differentiate(
        codes: T.Buffer,
        x_scale: T.Buffer,
        grad: T.Buffer,
        weight: T.float32,
        clamp: T.float32,
        values: T.Buffer,
        row_sum: T.Ref,
    ) -> None:
        """out, dl and dr of a piece to values; its part of the weight's gradient is added to row_sum."""
        x_values = T.alloc_local((2, _CHUNK), "float32")
        sigmoid, silu = T.alloc_local((_CHUNK,), "float32"), T.alloc_local((_CHUNK,), "float32")
        left, right, scaled = T.alloc_var("float32"), T.alloc_var("float32"), T.alloc_var("float32")
        elements = T.view(codes, (2, vec), "float8_e4m3fn")
        for chunk in T.unroll(vec // _CHUNK):
            first = chunk * _CHUNK
            for j in T.vectorized(_CHUNK):
                x_values[0, j] = T.cast(elements[0, first + j], "float32")
            for j in T.unroll(_CHUNK):
                x_values[0, j] = x_values[0, j] * x_scale[0]
            if T.abs(x_scale[0]) <= T.float32(NEAR_SF):
                for j in T.unroll(_CHUNK):
                    left = clamped(x_values[0, j], clamp, False)
                    T.call_extern("void", "tk_sigmoid_near", left, T.address_of(sigmoid[j]), T.address_of(silu[j]))
            else:
                for j in T.unroll(_CHUNK):
                    left = clamped(x_values[0, j], clamp, False)
                    T.call_extern("void", "tk_sigmoid", left, T.address_of(sigmoid[j]), T.address_of(silu[j]))
            for j in T.vectorized(_CHUNK):
                x_values[1, j] = T.cast(elements[1, first + j], "float32")
            for j in T.unroll(_CHUNK):
                x_values[1, j] = x_values[1, j] * x_scale[1]
                left, right = clamped(x_values[0, j], clamp, False), clamped(x_values[1, j], clamp, True)
                values[0, first + j] = silu[j] * right
                row_sum = fma(element(grad, 0, first + j, True), values[0, first + j], row_sum)
                values[0, first + j] = values[0, first + j] * weight
                scaled = element(grad, 0, first + j, True) * weight * sigmoid[j]
                values[1, first + j] = scaled * right * fma(left, T.float32(1) - sigmoid[j], T.float32(1))
                values[2, first + j] = scaled * left
                if clamps:
                    values[1, first + j] = T.if_then_else(x_values[0, j] > clamp, T.float32(0), values[1, first + j])
                    values[2, first + j] = T.if_then_else(
                        T.abs(x_values[1, j]) > clamp, T.float32(0), values[2, first + j]
                    )

    @T.macro
    def store_bf16(out: T.Buffer, values: T.Buffer, which: int, row: T.int64, col: T.int32) -> None:
        rounded = T.alloc_local((vec,), "bfloat16")
        for j in T.vectorized(vec):
            rounded[j] = T.cast(values[which, j], "bfloat16")
        words = T.view(rounded, (bf16_words,), "uint32")
        for j in T.unroll(bf16_words // 4):
            T.stg128(out[row, col + 8 * j], words[4 * j : 4 * j + 4])

    @T.macro
    def quantize(values: T.Buffer, data: T.Buffer, sf: T.Buffer, row: T.int64, col: T.int32, valid: T.bool) -> None:
        """dl and dr of a piece to e4m3; of the lanes of a group, even ones see to dl's scale, odd ones to dr's."""
        amax, scale = T.alloc_local((2,), "int32"), T.alloc_local((2,), "uint32")
        factor = T.alloc_local((2,), "uint32")
        scaled, codes = T.alloc_local((vec,), "float32"), T.alloc_local((code_words,), "uint32")
        largest, mine = T.alloc_var("uint32"), T.alloc_var("int32")
        thread = T.get_thread_binding()
        is_odd = thread % 2 == 1
        for half in T.unroll(2):
            largest = T.uint32(0)
            for j in T.unroll(vec):
                largest = T.call_extern(
                    "uint32", "tk_larger_magnitude_f32", largest, T.reinterpret(values[1 + half, j], "uint32")
                )
            amax[half] = T.reinterpret(largest, "int32")
        mine = T.max(T.if_then_else(is_odd, amax[1], amax[0]), least_amax)
        mine = T.max(mine, T.shfl_xor(T.if_then_else(is_odd, amax[0], amax[1]), 1))
        for j in T.unroll(1, group_lanes.bit_length() - 1):
            mine = T.max(mine, T.shfl_xor(mine, 1 << j))
        T.call_extern("void", scale_of, mine, T.address_of(scale[0]), T.address_of(scale[1]))
        if valid and thread % lanes % group_lanes < 2:
            sf[row, (thread % 2 * hidden + col) // num_per_channels] = T.reinterpret(scale[0], "float32")
        factor[0] = T.shfl_xor(scale[1], 1)
        factor[1] = T.if_then_else(is_odd, scale[1], factor[0])
        factor[0] = T.if_then_else(is_odd, factor[0], scale[1])
        for half in T.unroll(2):
            for j in T.unroll(vec):
                scaled[j] = values[1 + half, j] * T.reinterpret(factor[half], "float32")
            encode(scaled, codes)
            if valid:
                store_codes(data, codes, row, half * hidden + col)

    @T.prim_func
    def swiglu_backward_and_per_token_cast(
        x: T.Tensor((*leading, 2 * hidden), "float8_e4m3fn"),
        x_sf: T.Tensor((*leading, sf_cols), "float32"),
        grad_out: T.Tensor((*leading, hidden), "bfloat16"),
        weight: T.Tensor((num_tokens, num_topk), "float32"),
        pos_to_token_topk: T.Tensor((map_size,), "int32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        out: T.Tensor((*leading, hidden), "bfloat16"),
        x_grad_data: T.Tensor((*leading, 2 * hidden), "float8_e4m3fn"),
        x_grad_sf: T.Tensor((*leading, sf_cols), "float32"),
        x_grad: T.Tensor((*leading, 2 * hidden), "bfloat16"),
        weight_grad: T.Tensor((num_tokens, num_topk), "float32"),
        clamp: T.float32,
        num_pairs: T.int32,
        num_blocks: T.int32,
    ) -> None:
        with T.Kernel(num_blocks, threads=threads) as block:
            T.import_source(DIVISIONS_SOURCE + MAGNITUDES + NARROW_LOADS)
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            x_rows, x_sf_rows = T.view(x, (num_positions, 2 * hidden)), T.view(x_sf, (num_positions, sf_cols))
            grad_rows, out_rows = T.view(grad_out, (num_positions, hidden)), T.view(out, (num_positions, hidden))
            data_rows, sf_rows = (
                T.view(x_grad_data, (num_positions, 2 * hidden)),
                T.view(x_grad_sf, (num_positions, sf_cols)),
            )
            x_grad_rows = T.view(x_grad, (num_positions, 2 * hidden))
            thread = T.get_thread_binding()
            lane = thread % lanes
            row = block * rows + thread // lanes
            wide_row = T.cast(row, "int64")
            codes = T.alloc_local((2, code_words), "uint32")
            x_scale = T.alloc_local((2,), "float32")
            grad = T.alloc_local((1, bf16_words), "uint32")
            values = T.alloc_local((3, vec), "float32")
            row_sum, row_weight = T.alloc_var("float32"), T.alloc_var("float32")
            index, pair_row = T.alloc_var("int32"), T.alloc_var("int32")
            inside, real = T.alloc_var("bool"), T.alloc_var("bool")
            row_sums = T.alloc_shared((threads,), "float32")
            targets = T.alloc_shared((rows,), "int32")

            inside = thread < lanes * rows and row < num_positions
            index = T.reinterpret(T.ldg32(pos_to_token_topk[row], pred=inside), "int32")
            real = inside and index >= 0 and index < num_pairs
            row_weight = T.reinterpret(T.ldg32(weight[0, index], pred=real), "float32")
            pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, index], pred=real and lane == 0), "int32")
            row_sum = T.float32(0)
            for i in T.serial(pieces):
                col = (i * lanes + lane) * vec
                in_row = inside and col < hidden
                load_piece(x_rows, x_sf_rows, grad_rows, codes, x_scale, grad, wide_row, col, real and col < hidden)
                if real and col < hidden:
                    differentiate(codes, x_scale, grad, row_weight, clamp, values, row_sum)
                else:
                    for j in T.unroll(vec):
                        values[0, j] = T.float32(0)
                        values[1, j] = T.float32(0)
                        values[2, j] = T.float32(0)
                if in_row:
                    store_bf16(out_rows, values, 0, wide_row, col)
                    store_bf16(x_grad_rows, values, 1, wide_row, col)
                    store_bf16(x_grad_rows, values, 2, wide_row, hidden + col)
                quantize(values, data_rows, sf_rows, wide_row, col, in_row)

            row_sums[thread] = row_sum
            if lane == 0 and thread < lanes * rows:
                targets[thread // lanes] = T.if_then_else(real and pair_row == row, index, -1)
            T.sync_threads()
            for turn in T.unroll(ceil_div(rows, num_warps)):
                summed = thread // 32 + turn * num_warps
                if summed < rows:
                    row_sum = T.float32(0)
                    for k in T.unroll(ceil_div(lanes, 32)):
                        if k * 32 + thread % 32 < lanes:
                            row_sum = row_sum + row_sums[summed * lanes + k * 32 + thread % 32]
                    for j in T.unroll(5):
                        row_sum = row_sum + T.shfl_xor(row_sum, 1 << j)
                    if thread % 32 == 0 and targets[summed] >= 0:
                        weight_grad[0, targets[summed]] = row_sum

            if block < T.ceildiv(num_pairs, threads):
                pair = block * threads + thread
                pair_row = T.reinterpret(T.ldg32(token_topk_to_pos[0, pair], pred=pair < num_pairs), "int32")
                index = -1
                if pair_row >= 0 and pair_row < num_positions:
                    index = pos_to_token_topk[pair_row]
                if pair < num_pairs and index != pair:
                    weight_grad[0, pair] = T.float32(0)

    return swiglu_backward_and_per_token_cast


def _reference(
    data: torch.Tensor,
    sf: torch.Tensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    out: torch.Tensor,
    x_grad_data: torch.Tensor,
    x_grad_sf: torch.Tensor,
    x_grad: torch.Tensor,
    weight_grad: torch.Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
) -> None:
    from tk_quant.reference.swiglu_backward_and_per_token_cast import swiglu_backward_and_per_token_cast as whole

    new_out, (new_data, new_sf), new_x_grad, new_weight_grad = whole(
        (data, sf),
        *(grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels, round_sf, swiglu_clamp_value),
    )
    out.copy_(new_out)
    x_grad_data.copy_(new_data)
    x_grad_sf.copy_(new_sf)
    x_grad.copy_(new_x_grad)
    weight_grad.copy_(new_weight_grad)


@op(
    "tk_quant::swiglu_backward_and_per_token_cast_out",
    mutates=("out", "x_grad_data", "x_grad_sf", "x_grad", "weight_grad"),
    reference=_reference,
)
def _swiglu_backward_and_per_token_cast_out(
    data: torch.Tensor,
    sf: torch.Tensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    out: torch.Tensor,
    x_grad_data: torch.Tensor,
    x_grad_sf: torch.Tensor,
    x_grad: torch.Tensor,
    weight_grad: torch.Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
) -> None:
    hidden, num_pairs, num_positions = grad_out.shape[-1], weight.numel(), pos_to_token_topk.numel()
    if num_positions == 0:
        weight_grad.zero_()
        return
    arch = get_arch(data.device)
    config = SwigluBackwardConfig.best(hidden, num_per_channels, swiglu_clamp_value is not None, arch)
    _swiglu_backward_kernel(
        *(data.ndim, check.row_alignment(data), check.row_alignment(grad_out), hidden, num_per_channels, round_sf),
        *(swiglu_clamp_value is not None, config, arch),
    )(
        *(data, sf, grad_out, weight, pos_to_token_topk, token_topk_to_pos),
        *(out, x_grad_data, x_grad_sf, x_grad, weight_grad),
        0.0 if swiglu_clamp_value is None else swiglu_clamp_value,
        num_pairs,
        config.num_blocks(num_positions, num_pairs),
    )


def _check_indices(pos_to_token_topk: torch.Tensor, token_topk_to_pos: torch.Tensor) -> None:
    """Whether the two maps stay inside each other and agree; waits for the device."""
    pairs, positions = token_topk_to_pos.flatten(), pos_to_token_topk.flatten()
    for name, indices, size in (
        ("pos_to_token_topk", positions, pairs.numel()),
        ("token_topk_to_pos", pairs, positions.numel()),
    ):
        highest = int(indices.max()) if indices.numel() else -1
        check.require(highest < size, name, f"indices below {size}", highest)
    with_row = (pairs >= 0).nonzero().flatten()
    back = positions[pairs[with_row].to(torch.int64)]
    strays = with_row[back != with_row]
    if strays.numel():
        pair = int(strays[0])
        got = int(positions[pairs[pair]])
        check.require(False, "pos_to_token_topk", f"{pair} at position {int(pairs[pair])} of that pair", got)


@replayable
def _swiglu_backward_and_per_token_cast(
    x: tuple[torch.Tensor, torch.Tensor],
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    round_sf: bool,
    swiglu_clamp_value: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The public function, its results in a flat tuple."""
    check.require_type(isinstance(x, (tuple, list)), "x", "a pair (data, sf)", type(x).__name__)
    check.require(len(x) == 2, "x", "a pair (data, sf)", f"{len(x)} items")
    data, sf = x
    batched = isinstance(data, torch.Tensor) and data.ndim == 3
    names = ("num_experts", "num_rows") if batched else ("num_positions",)
    *leading, width = check.tensor("x[0]", data, (torch.float8_e4m3fn,), (*names, "2 * hidden"))
    device = data.device
    check.integer("num_per_channels", num_per_channels)
    check.one_of("num_per_channels", num_per_channels, _GROUPS)
    channels = 2 * num_per_channels
    check.require(width > 0 and width % channels == 0, "x[0]", f"a positive multiple of {channels} columns", width)
    hidden, sf_shape = width // 2, (*leading, width // num_per_channels)
    check.tensor("x[1]", sf, (torch.float32,), sf_shape, device=device)
    check.tensor("grad_out", grad_out, (torch.bfloat16,), (*leading, hidden), device=device)
    pairs = check.tensor("weight", weight, (torch.float32,), ("num_tokens", "num_topk"), device=device)
    check.require(weight.numel() <= _MAX_PAIRS, "weight", f"at most {_MAX_PAIRS} elements", weight.numel())
    check.tensor("token_topk_to_pos", token_topk_to_pos, (torch.int32,), tuple(pairs), device=device)
    flat = not (batched and isinstance(pos_to_token_topk, torch.Tensor) and pos_to_token_topk.ndim == 2)
    positions = (math.prod(leading),) if flat else tuple(leading)
    check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), positions, device=device)
    check.require_type(isinstance(round_sf, bool), "round_sf", "a bool", round_sf)
    if swiglu_clamp_value is not None:
        is_number = isinstance(swiglu_clamp_value, int | float) and not isinstance(swiglu_clamp_value, bool)
        check.require_type(is_number, "swiglu_clamp_value", "a number", swiglu_clamp_value)
        least = f"a number of at least {_LEAST_NORMAL}"
        check.require(swiglu_clamp_value >= _LEAST_NORMAL, "swiglu_clamp_value", least, swiglu_clamp_value)
    if not torch.compiler.is_compiling() and env.debug() and not data.is_meta:
        _check_indices(pos_to_token_topk, token_topk_to_pos)

    x_grad_data, x_grad_sf = torch.empty_like(data), torch.empty_like(sf)
    out, x_grad = torch.empty_like(grad_out), grad_out.new_empty((*leading, width))
    weight_grad = torch.empty_like(weight)
    _swiglu_backward_and_per_token_cast_out(
        *(data, sf, grad_out, weight, pos_to_token_topk if flat else pos_to_token_topk.view(-1), token_topk_to_pos),
        *(out, x_grad_data, x_grad_sf, x_grad, weight_grad),
        *(num_per_channels, round_sf, swiglu_clamp_value),
    )
    return out, x_grad_data, x_grad_sf, x_grad, weight_grad


def swiglu_backward_and_per_token_cast(
    x: tuple[torch.Tensor, torch.Tensor],
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Backward of SwiGLU times a weight for each row, from a quantized input; the forward is computed again.

    With l and r the left and right half of a row of x = data * sf, rounded to float32, g = grad_out, and w the row's
    weight; every operation in float32 to nearest with ties to even, products from left to right, fma rounded once:

        d = 1 + exp(-l);  s = 1 / d;  a = l / d * r;  gs = g * w * s
        out = a * w;  x_grad = [gs * r * fma(l, 1 - s, 1) | gs * l];  weight_grad = sum of g * a over the row

    and for each group of num_per_channels channels of x_grad, before it is rounded to bfloat16,

        amax = max(max |x_grad|, 1e-4);  sf = amax / 448;  data = round(x_grad * (448 / amax))
        with round_sf: sf = least power of two >= amax / 448;  data = round(x_grad / sf)

    data saturates and keeps the sign of zero. A group with NaN or infinity in it has NaN or infinity for its sf. All is
    exact but weight_grad, which is summed up in float32, in an order that depends on hidden alone. Names and formulas
    are those of DeepSeek's TileKernels 1.0.0.

    Args:
        x: `(data, sf)`: float8_e4m3fn (num_positions, 2 * hidden), the gate l in the left half, hidden a multiple of
            num_per_channels, and float32 (num_positions, 2 * hidden / num_per_channels), both contiguous. Both may
            have experts and their rows, (num_experts, num_rows, ...), for positions: num_positions is the product
            then, position p row p % num_rows of expert p // num_rows.
        grad_out: bfloat16 (num_positions, hidden), or (num_experts, num_rows, hidden) as x; contiguous.
        weight: float32 (num_tokens, num_topk), contiguous.
        pos_to_token_topk: int32 (num_positions,), or (num_experts, num_rows) as x: index of each row's weight, flat. A
            row where it is negative or past the end is padding: it is not read, out and x_grad are 0 there, and sf is
            that of a group of zeros.
        token_topk_to_pos: int32 (num_tokens, num_topk), the position of each pair of a token and an expert; negative
            where it has none. weight_grad is 0 for these, and for any whose position is not inside x or has another
            pair in pos_to_token_topk. `TK_DEBUG=1` raises ValueError for indices past the end and for maps that
            disagree.
        num_per_channels: Channels of a group, of x and of x_grad: 32 or 128.
        round_sf: Round sf up to a power of two.
        swiglu_clamp_value: c > 0: l is clamped to at most c first, r to [-c, c]; x_grad is 0 where they were. NaN stays
            NaN.

    Returns:
        `(out, (data, sf), x_grad, weight_grad)`: out bfloat16, as grad_out; data float8_e4m3fn and sf float32, as x;
        x_grad bfloat16, with the shape of data; weight_grad float32 (num_tokens, num_topk).

    Raises:
        TypeError: A tensor, number or flag is none, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    out, x_grad_data, x_grad_sf, x_grad, weight_grad = _swiglu_backward_and_per_token_cast(
        *(x, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels, round_sf, swiglu_clamp_value)
    )
    return out, (x_grad_data, x_grad_sf), x_grad, weight_grad
