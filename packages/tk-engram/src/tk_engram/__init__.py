"""Engram, a memory looked up by n-grams: hash, lookup, gate and convolution as GPU kernels. Names load on first use."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_engram.conv.short_conv import short_conv as short_conv
    from tk_engram.conv.short_conv_bwd import short_conv_bwd as short_conv_bwd
    from tk_engram.gate.engram_gate_bwd import engram_gate_bwd as engram_gate_bwd
    from tk_engram.gate.engram_gate_fwd import engram_gate_fwd as engram_gate_fwd
    from tk_engram.gate.fused_weight import fused_weight as fused_weight
    from tk_engram.gate.grad_w_reduce import grad_w_reduce as grad_w_reduce
    from tk_engram.hash.engram_hash import engram_hash as engram_hash
    from tk_engram.hash.ngram_windows import ngram_windows as ngram_windows
    from tk_engram.lookup.engram_lookup import engram_lookup as engram_lookup
    from tk_engram.lookup.engram_lookup_bwd import engram_lookup_bwd as engram_lookup_bwd
    from tk_engram.optimizer.engram_sinkhorn_finalize import engram_sinkhorn_finalize as engram_sinkhorn_finalize
    from tk_engram.optimizer.engram_sinkhorn_momentum_update import (
        engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update,
    )
    from tk_engram.optimizer.engram_sinkhorn_step import engram_sinkhorn_step as engram_sinkhorn_step
    from tk_engram.optimizer.engram_sinkhorn_step_reduce import (
        engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce,
    )

__version__: str

__all__ = [
    "engram_gate_bwd",
    "engram_gate_fwd",
    "engram_hash",
    "engram_lookup",
    "engram_lookup_bwd",
    "engram_sinkhorn_finalize",
    "engram_sinkhorn_momentum_update",
    "engram_sinkhorn_step",
    "engram_sinkhorn_step_reduce",
    "fused_weight",
    "grad_w_reduce",
    "ngram_windows",
    "short_conv",
    "short_conv_bwd",
]

export(
    __name__,
    {
        "engram_gate_bwd": "gate.engram_gate_bwd",
        "engram_gate_fwd": "gate.engram_gate_fwd",
        "engram_hash": "hash.engram_hash",
        "engram_lookup": "lookup.engram_lookup",
        "engram_lookup_bwd": "lookup.engram_lookup_bwd",
        "engram_sinkhorn_finalize": "optimizer.engram_sinkhorn_finalize",
        "engram_sinkhorn_momentum_update": "optimizer.engram_sinkhorn_momentum_update",
        "engram_sinkhorn_step": "optimizer.engram_sinkhorn_step",
        "engram_sinkhorn_step_reduce": "optimizer.engram_sinkhorn_step_reduce",
        "fused_weight": "gate.fused_weight",
        "grad_w_reduce": "gate.grad_w_reduce",
        "ngram_windows": "hash.ngram_windows",
        "short_conv": "conv.short_conv",
        "short_conv_bwd": "conv.short_conv_bwd",
    },
)
