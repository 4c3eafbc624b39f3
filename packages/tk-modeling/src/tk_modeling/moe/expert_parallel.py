"""ep_dispatch and ep_combine: the calls of tk_ep that send tokens to their experts' ranks and back, with gradients.

    rows = dispatch(x)     d_x = combine(d_rows)     d_topk_weights = the weights that combine brings back
    y = combine(rows)      d_rows = dispatch(d_y), with the routing of the first dispatch

All four are calls of all ranks. So all have graphs that are alike, and a rank without tokens runs its backward, too.
"""

from typing import Any

import torch
from torch import Tensor

from tk_core import check
from tk_ep import ElasticBuffer, EPHandle
from tk_modeling.function import Context, Function, Gradients


def ep_dispatch(
    buffer: ElasticBuffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    num_sms: int = 0,
    do_cpu_sync: bool = True,
) -> tuple[Tensor, Tensor | None, EPHandle]:
    """`buffer.dispatch` with a row for each expert of a token, differentiable by x and topk_weights.

    Rows of padding within experts' segments are zeros. Rows past the last segment, which there are only without
    do_cpu_sync, are unspecified, and their gradients have no part in others. torch.compile breaks its graph here.

    Args:
        buffer: of the ranks that have the experts; all of them make this call, and run its backward.
        x: bfloat16 (num_tokens, hidden), this rank's tokens; hidden is a multiple of 64.
        topk_idx: int64 or int32 (num_tokens, num_topk), experts of all ranks; negative for none.
        topk_weights: float32 (num_tokens, num_topk), or None.
        num_experts: of all ranks together.
        expert_alignment: each expert's segment begins at a multiple of it.
        num_sms: the most SMs that sending may take, forward and backward; 0 leaves it to the buffer.
        do_cpu_sync: whether the host waits for the number of rows; without, there are as many as any routing needs.

    Returns:
        rows bfloat16 (num_rows, hidden), the experts' segments one after the other; row_weights float32 (num_rows,), 0
        in rows without a token, or None; the handle, whose `pos_to_expert` and `psum_num_recv_tokens_per_expert` tell
        the segments, for `ep_combine`.

    Raises:
        TypeError, ValueError: a bad argument, before anything is sent. tk_ep.EPTimeoutError: a rank is late or lost.
    """
    _check_buffer(buffer)
    check.require_type(isinstance(x, Tensor), "x", "a torch.Tensor", x)
    options = {"expert_alignment": expert_alignment, "num_sms": num_sms, "do_cpu_sync": do_cpu_sync}
    return _Dispatch.call(x, topk_weights, topk_idx, buffer, num_experts, options)


def ep_combine(buffer: ElasticBuffer, rows: Tensor, handle: EPHandle) -> Tensor:
    """`buffer.combine`: the sum of each token's rows, differentiable by rows. No weight is multiplied.

    The gradient of rows is zero in the padding of segments. torch.compile breaks its graph here.

    Args:
        buffer: that of the dispatch; all its ranks make this call, and run its backward.
        rows: bfloat16 (num_rows, hidden), such as the experts made of those that `ep_dispatch` returned.
        handle: what `ep_dispatch` returned with them.

    Returns:
        bfloat16 (num_tokens, hidden), this rank's tokens.

    Raises:
        TypeError, ValueError: a bad argument, before anything is sent. tk_ep.EPTimeoutError: a rank is late or lost.
    """
    _check_buffer(buffer)
    return _Combine.call(rows, buffer, handle)


def _check_buffer(buffer: Any) -> None:
    check.require_type(isinstance(buffer, ElasticBuffer), "buffer", "a tk_ep.ElasticBuffer", buffer)


class _Dispatch(Function):
    outputs = ("rows", "row_weights", "handle")
    saves = ("buffer", "handle")

    @staticmethod
    def forward(
        x: Tensor,
        topk_weights: Tensor | None,
        topk_idx: Tensor,
        buffer: ElasticBuffer,
        num_experts: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, EPHandle]:
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, topk_idx, topk_weights, num_experts=num_experts, do_expand=True, do_zero_padding=True, **options
        )
        return rows, row_weights, handle

    @staticmethod
    def backward(ctx: Context, d_rows: Tensor | None, d_row_weights: Tensor | None) -> Gradients:
        buffer, handle = ctx.saved
        if d_rows is not None:
            return buffer.combine(d_rows, handle, d_row_weights)[:2]
        # The weights' gradient alone travels beside the narrowest rows.
        rows = torch.zeros((handle.num_expanded_tokens, 64), dtype=torch.bfloat16, device=handle.topk_idx.device)
        return None, buffer.combine(rows, handle, d_row_weights)[1]


class _Combine(Function):
    saves = ("buffer", "handle")

    @staticmethod
    def forward(rows: Tensor, buffer: ElasticBuffer, handle: EPHandle) -> Tensor:
        return buffer.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx: Context, d_y: Tensor) -> Tensor:
        buffer, handle = ctx.saved
        flags = {"do_expand": handle.do_expand, "do_zero_padding": handle.do_expand}
        return buffer.dispatch(d_y, handle=handle, num_sms=handle.num_sms, **flags)[0]
