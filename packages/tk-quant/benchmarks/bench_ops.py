"""Speed of tk-quant's ops, beside Liger's norms and rotary embedding where it is installed."""

import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tk_core.testing import load_specs
from tk_core.testing.bench import benchmarks
from tk_core.testing.specs import Call, Peer


def _norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, **_: Any) -> Call:
    """Liger rounds before the weight, which changes no bytes."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if residual is None:
        return partial(LigerRMSNormFunction.apply, x, weight, eps)
    return partial(LigerFusedAddRMSNormFunction.apply, x, residual, weight, eps)


def _norm_backward(out_grad: Tensor, x: Tensor, weight: Tensor, residual_out_grad: Tensor | None, **_: Any) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    if residual_out_grad is not None:
        raise NotImplementedError("a residual's gradient is added by another kernel there")
    x, weight = (each.detach().requires_grad_() for each in (x, weight))
    out = LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)
    return partial(torch.autograd.grad, out, (x, weight), out_grad, retain_graph=True)


def _rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    *,
    interleaved: bool = False,
    **_: Any,
) -> Call:
    """Heads of one sequence, all channels of which turn. Liger wants keys: one head where there are none."""
    from liger_kernel.ops.rope import LigerRopeFunction

    if interleaved or query.shape[-1] != cos_sin_cache.shape[-1]:
        raise NotImplementedError("pairs of neighbours, and heads of which a part turns")
    key = query.new_zeros(len(query), 1, query.shape[-1]) if key is None else key
    angles = cos_sin_cache[: len(query)] if positions is None else cos_sin_cache[positions]
    cos, sin = (torch.cat((half, half), -1)[None] for half in angles.chunk(2, -1))
    return partial(LigerRopeFunction.apply, *(x.transpose(0, 1)[None] for x in (query, key)), cos, sin)


PEERS: dict[str, dict[str, Peer]] = {}
if importlib.util.find_spec("liger_kernel"):
    PEERS["tk_quant.norm_forward"] = {"liger": _norm}
    PEERS["tk_quant.norm_backward"] = {"liger": _norm_backward}
    PEERS["tk_quant.apply_rotary"] = {"liger": _rotary}

test_bench = benchmarks(load_specs("tk_quant"), PEERS)
