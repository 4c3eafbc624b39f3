"""swiglu_forward: SwiGLU of each row, times its weight where there are weights, in bfloat16 or float32.

For each position p and channel j, with l = x[p, j] and r = x[p, hidden + j], in float32, left to right:

    out[p, j] = l / (1 + exp(-l)) · r · topk_weights.flat[pos_to_token_topk[p]]      (the weight where there are any)

rounded once to the output's dtype. x (num_positions, 2 · hidden), out (num_positions, hidden).

A thread block takes a position and a stretch of its channels, a thread eight neighbouring channels of both halves:

    x, left     [ thread 0 | thread 1 | … ]      each field 8 channels, one 16-byte load of bfloat16
    x, right    [ thread 0 | thread 1 | … ]
    out         [ thread 0 | thread 1 | … ]

Rows of padding are not read.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tk_core import check, env
from tk_core.arch import Arch, get_arch
from tk_core.kernel import kernel
from tk_core.math import align
from tk_core.op import op
from tk_core.replay import replayable
from tk_core.tiles import DIRECT_COPIES, VECTOR, channel_tile
from tk_core.views import aligned

DTYPES = (torch.bfloat16, torch.float32)
OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LEAST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class SwigluForwardConfig:
    """Launch knobs."""

    block_channels: int
    """Channels of a thread block; what goes beyond hidden is left out."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block_channels // VECTOR

    @staticmethod
    def best(hidden: int, counts: bool, arch: Arch) -> "SwigluForwardConfig":
        """As few idle threads as possible. Not measured yet.

        Counts are added up over all threads of a block, for which T.reduce_sum wants a power of two.
        """
        if counts:
            return SwigluForwardConfig(min((2048, 1024, 512, 256), key=lambda channels: align(hidden, channels)))
        return SwigluForwardConfig(channel_tile(hidden, max_threads=256))


@kernel(pass_configs=DIRECT_COPIES)
def _swiglu_forward_kernel(
    hidden: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    has_weights: bool,
    has_experts: bool,
    counts: bool,
    config: SwigluForwardConfig,
    arch: Arch,
) -> Any:
    """`counts`: there is clamped_count."""
    import tilelang.language as T

    from tk_quant.swiglu_tiles import clamp_gate, clamp_value, is_real_row

    block_channels = config.block_channels
    num_positions, num_pairs = T.dynamic("num_positions"), T.dynamic("num_pairs")

    @T.prim_func
    def swiglu_forward(
        x: T.Tensor((num_positions, 2, hidden), dtype),
        pos_to_token_topk: T.Tensor((num_positions,), "int32"),
        topk_weights: T.Tensor((num_pairs,), "float32"),
        pos_to_expert: T.Tensor((num_positions,), "int32"),
        limit: T.float32,
        out: T.Tensor((num_positions, hidden), out_dtype),
        clamped_count: T.Tensor((3,), "int64"),
    ) -> None:
        with T.Kernel(num_positions, T.ceildiv(hidden, block_channels), threads=config.threads) as (position, block):
            channel = block * block_channels
            gates = T.alloc_fragment((block_channels,), dtype)
            values = T.alloc_fragment((block_channels,), dtype)
            activated = T.alloc_fragment((block_channels,), "float32")
            beyond = T.alloc_fragment((3, block_channels), "int32")
            counted = T.alloc_fragment((3,), "int32")
            weight = T.alloc_var("float32")
            if is_real_row(position, pos_to_token_topk, pos_to_expert, num_pairs, has_weights, has_experts):
                T.copy(x[position, 0, channel : channel + block_channels], gates)
                T.copy(x[position, 1, channel : channel + block_channels], values)
                if has_weights:
                    weight = topk_weights[pos_to_token_topk[position]]
                for i in T.Parallel(block_channels):
                    gate = clamp_gate(T.cast(gates[i], "float32"), limit)
                    value = clamp_value(T.cast(values[i], "float32"), limit)
                    a = gate / (T.float32(1) + T.exp(-gate)) * value
                    activated[i] = a * weight if has_weights else a
                if counts:
                    for k, i in T.Parallel(3, block_channels):
                        gate, value = T.cast(gates[i], "float32"), T.cast(values[i], "float32")
                        is_above = T.if_then_else(k == 0, gate > limit, value > limit)
                        is_beyond = T.if_then_else(k == 2, value < -limit, is_above)
                        beyond[k, i] = T.cast(is_beyond and channel + i < hidden, "int32")
                    T.reduce_sum(beyond, counted, dim=1, batch=3)
                    for k in T.Parallel(3):
                        if counted[k] > 0:
                            T.atomic_add(clamped_count[k], T.cast(counted[k], "int64"))
            else:
                T.clear(activated)
            T.copy(activated, out[position, channel : channel + block_channels])

    return swiglu_forward


def _reference(
    x: Tensor,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    out: Tensor,
    clamped_count: Tensor | None,
    swiglu_clamp_value: float | None,
) -> None:
    from tk_quant.reference.swiglu_forward import swiglu_forward

    out.copy_(
        swiglu_forward(
            *(x, swiglu_clamp_value),
            fmt="fp32" if out.dtype is torch.float32 else "bf16",
            pos_to_token_topk=pos_to_token_topk,
            topk_weights=topk_weights,
            pos_to_expert=pos_to_expert,
            clamped_count=clamped_count,
        )
    )


@op("tk_quant::swiglu_forward_out", mutates=("out", "clamped_count"), reference=_reference)
def _swiglu_forward_out(
    x: Tensor,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
    out: Tensor,
    clamped_count: Tensor | None,
    swiglu_clamp_value: float | None,
) -> None:
    num_positions, hidden = out.shape
    if num_positions == 0:
        return
    arch = get_arch(x.device)
    counts = clamped_count is not None
    forward = _swiglu_forward_kernel(
        *(hidden, x.dtype, out.dtype, topk_weights is not None, pos_to_expert is not None),
        *(counts, SwigluForwardConfig.best(hidden, counts, arch), arch),
    )
    limit = math.inf if swiglu_clamp_value is None else swiglu_clamp_value
    weights = None if topk_weights is None else topk_weights.view(-1)
    forward(
        *(aligned(x).view(num_positions, 2, hidden), pos_to_token_topk, weights, pos_to_expert),
        *(limit, out, clamped_count),
    )


def check_swiglu_arguments(
    x: Tensor,
    swiglu_clamp_value: Any,
    fmt: Any,
    pos_to_token_topk: Tensor | None,
    topk_weights: Tensor | None,
    pos_to_expert: Tensor | None,
) -> torch.dtype:
    """Check what the forward and the backward have in common; the output's dtype."""
    num_positions, width = check.tensor("x", x, DTYPES, ("num_positions", "2 * hidden"))
    check.require(width > 0 and width % 128 == 0, "x", "a positive multiple of 128 columns", width)
    check.one_of("fmt", fmt, OUT_DTYPES)
    if pos_to_token_topk is not None:
        check.tensor("pos_to_token_topk", pos_to_token_topk, (torch.int32,), (num_positions,), device=x.device)
        check.tensor("topk_weights", topk_weights, (torch.float32,), ("num_tokens", "num_topk"), device=x.device)
        if not torch.compiler.is_compiling() and env.debug() and num_positions and not x.is_meta:
            highest, size = int(pos_to_token_topk.max()), topk_weights.numel()
            check.require(highest < size, "pos_to_token_topk", f"indices into topk_weights, below {size}", highest)
    elif topk_weights is not None:
        check.require(False, "pos_to_token_topk", "a tensor beside topk_weights", None)
    if pos_to_expert is not None:
        check.tensor("pos_to_expert", pos_to_expert, (torch.int32,), (num_positions,), device=x.device)
    if swiglu_clamp_value is not None:
        is_number = isinstance(swiglu_clamp_value, int | float) and not isinstance(swiglu_clamp_value, bool)
        check.require_type(is_number, "swiglu_clamp_value", "a number", swiglu_clamp_value)
        least = f"a number of at least {_LEAST_NORMAL}"
        check.require(swiglu_clamp_value >= _LEAST_NORMAL, "swiglu_clamp_value", least, swiglu_clamp_value)
    return OUT_DTYPES[fmt]


@replayable
def swiglu_forward(
    x: Tensor,
    swiglu_clamp_value: float | None = None,
    *,
    fmt: str = "fp32",
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    clamped_count: Tensor | None = None,
) -> Tensor:
    """SwiGLU of each row, times its weight where there are weights, rounded once to bfloat16 or float32.

    With l and r the left and right half of a row, every operation in float32 to nearest with ties to even, from left to
    right: out = l / (1 + exp(-l)) * r * weight. Every bit equals the reference's.

    Args:
        x: (num_positions, 2 * hidden) bfloat16 or float32, contiguous, the gate l in the left half; hidden a multiple
            of 64.
        swiglu_clamp_value: c > 0: l is clamped to at most c first, r to [-c, c]. NaN stays NaN.
        fmt: "bf16" or "fp32", the output's type.
        pos_to_token_topk: int32 (num_positions,), index of each row's weight in topk_weights, flat; a row where it is
            negative or past the end (`TK_DEBUG=1` raises ValueError for that) is padding.
        topk_weights: float32 (num_tokens, num_topk), contiguous; with pos_to_token_topk only, and the other way round.
        pos_to_expert: int32 (num_positions,); a row where it is negative is padding. Rows of padding come out as zeros,
            whatever x holds there.
        clamped_count: int64 (3,), changed in place: the numbers of l > c, r > c and r < -c in rows that are no padding
            are added. Needs swiglu_clamp_value.

    Returns:
        (num_positions, hidden).

    Raises:
        TypeError: A tensor or a number is none, or has another dtype.
        ValueError: Any other argument is not as described, or is on another device.
    """
    dtype = check_swiglu_arguments(x, swiglu_clamp_value, fmt, pos_to_token_topk, topk_weights, pos_to_expert)
    if clamped_count is not None:
        check.require(swiglu_clamp_value is not None, "swiglu_clamp_value", "a number beside clamped_count", None)
        check.tensor("clamped_count", clamped_count, (torch.int64,), (3,), device=x.device)
    out = x.new_empty((x.shape[0], x.shape[1] // 2), dtype=dtype)
    clamp_value = None if swiglu_clamp_value is None else float(swiglu_clamp_value)
    _swiglu_forward_out(x, pos_to_token_topk, topk_weights, pos_to_expert, out, clamped_count, clamp_value)
    return out
