"""The element-wise steps between matrix products as GPU kernels: casts, SwiGLU, RMSNorm, RoPE, transposes.

Names load on first use.
"""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
