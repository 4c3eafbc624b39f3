"""Plain PyTorch references: same names and signatures as the ops, on any device."""

from typing import TYPE_CHECKING

from tk_core.lazy import export

if TYPE_CHECKING:
    from tk_engram.reference.conv.short_conv import short_conv as short_conv
    from tk_engram.reference.conv.short_conv_bwd import short_conv_bwd as short_conv_bwd
    from tk_engram.reference.gate.engram_gate_bwd import engram_gate_bwd as engram_gate_bwd
    from tk_engram.reference.gate.engram_gate_fwd import engram_gate_fwd as engram_gate_fwd
    from tk_engram.reference.gate.fused_weight import fused_weight as fused_weight
    from tk_engram.reference.gate.grad_w_reduce import grad_w_reduce as grad_w_reduce
    from tk_engram.reference.hash.engram_hash import engram_hash as engram_hash
    from tk_engram.reference.hash.make_offsets import make_offsets as make_offsets
    from tk_engram.reference.hash.ngram_windows import ngram_windows as ngram_windows
    from tk_engram.reference.lookup.engram_lookup import engram_lookup as engram_lookup
    from tk_engram.reference.lookup.engram_lookup_bwd import engram_lookup_bwd as engram_lookup_bwd
    from tk_engram.reference.optimizer.engram_sinkhorn_finalize import (
        engram_sinkhorn_finalize as engram_sinkhorn_finalize,
    )
    from tk_engram.reference.optimizer.engram_sinkhorn_momentum_update import (
        engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update,
    )
    from tk_engram.reference.optimizer.engram_sinkhorn_step import engram_sinkhorn_step as engram_sinkhorn_step
    from tk_engram.reference.optimizer.engram_sinkhorn_step_reduce import (
        engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce,
    )

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
        "make_offsets": "hash.make_offsets",
        "ngram_windows": "hash.ngram_windows",
        "short_conv": "conv.short_conv",
        "short_conv_bwd": "conv.short_conv_bwd",
    },
)
