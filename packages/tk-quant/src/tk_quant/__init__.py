"""FP8, FP4 and E5M6 casts, fused SwiGLU and transposes as GPU kernels. Names load on first use."""

from tk_core.lazy import export_stub

export_stub(__name__, __file__)
