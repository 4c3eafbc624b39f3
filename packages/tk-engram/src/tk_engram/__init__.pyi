from . import layout as layout
from . import reference as reference
from .conv.short_conv import short_conv as short_conv
from .conv.short_conv_bwd import short_conv_bwd as short_conv_bwd
from .gate.engram_gate_bwd import engram_gate_bwd as engram_gate_bwd
from .gate.engram_gate_fwd import engram_gate_fwd as engram_gate_fwd
from .gate.fused_weight import fused_weight as fused_weight
from .gate.fused_weight import grad_w_reduce as grad_w_reduce
from .hash.engram_hash import engram_hash as engram_hash
from .hash.ngram_windows import ngram_windows as ngram_windows
from .lookup.engram_lookup import engram_lookup as engram_lookup
from .lookup.engram_lookup_bwd import engram_lookup_bwd as engram_lookup_bwd
from .optimizer.engram_sinkhorn import engram_sinkhorn_finalize as engram_sinkhorn_finalize
from .optimizer.engram_sinkhorn import engram_sinkhorn_step as engram_sinkhorn_step
from .optimizer.engram_sinkhorn import engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce
from .optimizer.engram_sinkhorn_momentum_update import (
    engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update,
)

__version__: str
